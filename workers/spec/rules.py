"""Rules across the fields of a JobSpec: unsupported features and inconsistent values.

Each rule is a function of the spec that yields problems; each problem names the nearest value that works.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator

from manta.workers.config import MIN_WINDOW, JobSpec, ModelConfig, RopeScaling
from manta.workers.schedules import SCHEDULES
from manta.workers.schedules.stages import even_counts
from manta.workers.spec.batch_rules import BATCH_RULES, elastic_bounds_hold
from manta.workers.spec.data_rules import CHAT_RULES, DATA_RULES
from manta.workers.spec.divisors import divisors, nearest_divisor, nearest_multiple
from manta.workers.spec.expert_rules import EXPERT_RULES, dense_widths, inner_widths
from manta.workers.spec.kernel_rules import cuda_graphs_fit, fp8_fits
from manta.workers.spec.problems import Problem
from manta.workers.spec.recipe_rules import RECIPE_RULES
from manta.workers.spec.sequence_runs import runs_per_rank, shortest_unit

Rule = Callable[[JobSpec], Iterator[Problem]]


def find_problems(spec: JobSpec) -> list[Problem]:
    """All broken rules. Unsupported values come first, since a layout that is still `auto` cannot be checked."""
    problems = [problem for rule in UNSUPPORTED for problem in rule(spec)]
    if not isinstance(spec.parallel, str):
        problems += [problem for rule in FITTING for problem in rule(spec)]
    return problems


def broken_keys(spec: JobSpec) -> set[str]:
    """Paths of the keys that break rules; of a job that is only planned those of its data may."""
    return {problem.path for problem in find_problems(spec)}


def _layout_is_explicit(spec: JobSpec) -> Iterator[Problem]:
    if isinstance(spec.parallel, str):
        smallest = "{tensor: 1, pipeline: 1, data: 1}"
        rule = "the engine needs an explicit layout; `manta plan FILE` finds one, as the service does at submission"
        yield Problem("parallel", rule, smallest, unsupported=True)


def _heads_divide_hidden(spec: JobSpec) -> Iterator[Problem]:
    hidden, heads, tensor = spec.model.hidden_size, spec.model.heads, spec.layout.tensor
    if not spec.model.has_head_size:
        # Prefer one that also fits the layout.
        unit = tensor if hidden % tensor == 0 else 1
        nearest = unit * nearest_divisor(hidden // unit, round(heads / unit))
        yield Problem("model.heads", f"heads ({heads}) must divide hidden_size ({hidden})", str(nearest))


def _positions_fit(spec: JobSpec) -> Iterator[Problem]:
    model, rope = spec.model, spec.model.rope
    if not model.parts.rotary:
        if rope is not None:
            yield Problem(
                "model.rope",
                f"{model.family} uses learned positions; only llama, qwen and deepseek use rotary ones",
                "null",
            )
        return
    if not model.has_head_size:
        return  # reported by the rule about heads
    if model.rotated_size % 2:
        key = "head_dim" if model.latent_attention is None else "latent_attention.rope_size"
        size = "head size" if key == "head_dim" else "rope_size"
        problem = f"rotary positions need an even {size}, but it is {model.rotated_size}"
        yield Problem(f"model.{key}", problem, str(model.rotated_size + 1))
    if rope is not None and rope.scaling is not None:
        yield from _scaling_fits(model, rope.scaling)


_SCALING_KEYS = {
    "llama3": ("low_frequency_factor", "high_frequency_factor"),
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale_all_dim"),
}
"""Keys of model.rope.scaling that only one type uses."""


def _scaling_fits(model: ModelConfig, scaling: RopeScaling) -> Iterator[Problem]:
    for owner, keys in _SCALING_KEYS.items():
        for key in keys if owner != scaling.type else ():
            default = RopeScaling.model_fields[key].default
            if getattr(scaling, key) != default:
                problem = f"has no effect: only {owner} uses it, and the type is {scaling.type}"
                yield Problem(f"model.rope.scaling.{key}", problem, "null" if default is None else str(default))
    if scaling.mscale_all_dim is not None and scaling.type == "yarn" and model.latent_attention is None:
        problem = f"only deepseek, with latent attention, uses it, not {model.family}; attention_factor scales heads"
        yield Problem("model.rope.scaling.mscale_all_dim", problem, "null")
    if scaling.type == "linear":
        return
    if scaling.original_length is None:
        problem = f"{scaling.type} needs the sequence length that the model was pretrained with"
        nearest = max(1, round(model.sequence_length / scaling.factor))
        yield Problem("model.rope.scaling.original_length", problem, str(nearest))
    if scaling.type == "llama3" and scaling.low_frequency_factor >= scaling.high_frequency_factor:
        problem = f"must be below high_frequency_factor ({scaling.high_frequency_factor})"
        path = "model.rope.scaling.low_frequency_factor"
        yield Problem(path, problem, str(scaling.high_frequency_factor / 4))
    if scaling.type == "yarn" and scaling.beta_slow >= scaling.beta_fast:
        problem = f"must be below beta_fast ({scaling.beta_fast})"
        yield Problem("model.rope.scaling.beta_slow", problem, str(scaling.beta_fast / 32))


def _custom_models_are_named(spec: JobSpec) -> Iterator[Problem]:
    model = spec.model
    if model.family == "custom" and model.entrypoint is None:
        yield Problem(
            "model.entrypoint", "family custom needs the model's package.module:function", "my_models.mine:build"
        )
    if model.family != "custom" and (model.entrypoint is not None or model.options):
        path = "model.entrypoint" if model.entrypoint is not None else "model.options"
        yield Problem(
            path,
            f"{model.family} is a built-in family; this is for family custom only",
            "null" if model.entrypoint else "{}",
        )


def _activation_fits(spec: JobSpec) -> Iterator[Problem]:
    model = spec.model
    if model.activation != "gelu" and model.parts.gated_mlp:
        yield Problem("model.activation", f"{model.family} uses SwiGLU; only gpt has a choice of activation", "gelu")


def _latent_attention_fits(spec: JobSpec) -> Iterator[Problem]:
    model = spec.model
    if model.family != "deepseek":
        if model.latent_attention is not None:
            yield Problem("model.latent_attention", f"only deepseek has it, not {model.family}", "null")
        return
    if model.latent_attention is None:
        problem = "deepseek needs the shape of its attention"
        shape = "{q_rank: 1536, kv_rank: 512, rope_size: 64, nope_size: 128, value_size: 128}"
        yield Problem("model.latent_attention", problem, shape)
        return
    if model.kv_heads not in (None, model.heads):
        problem = f"latent attention makes keys and values for each of the {model.heads} heads"
        yield Problem("model.kv_heads", problem, "null")
    if model.head_dim is not None:
        problem = "with latent attention heads have nope_size + rope_size and value_size elements"
        yield Problem("model.head_dim", problem, "null")
    if model.bias:
        yield Problem("model.bias", "deepseek has no biases", "false")


def _windows_fit(spec: JobSpec) -> Iterator[Problem]:
    model = spec.model
    if model.full_attention_every is not None and model.sliding_window is None:
        problem = "has no effect without sliding_window: all layers attend to all preceding tokens"
        yield Problem("model.full_attention_every", problem, "null")


def _tensor_divides(spec: JobSpec) -> Iterator[Problem]:
    tensor, model = spec.layout.tensor, spec.model
    if not model.has_head_size:
        return  # reported by the rule about heads
    if model.heads % tensor:
        # One that divides everything that is split, so that applying the suggestion is enough.
        split = math.gcd(model.heads, *inner_widths(spec))
        if spec.layout.sequence_parallel is not False:
            split = math.gcd(split, model.sequence_length // (runs_per_rank(spec.layout) * spec.layout.context))
        yield Problem(
            "parallel.tensor",
            f"tensor ({tensor}) must divide model.heads ({model.heads})",
            str(nearest_divisor(split, tensor)),
        )
    elif dense_widths(model) and model.ffn_size % tensor:
        yield Problem(
            "model.ffn_hidden_size",
            f"ffn_hidden_size ({model.ffn_size}) must be a multiple of parallel.tensor ({tensor})",
            str(nearest_multiple(tensor, model.ffn_size)),
        )


def _sequence_parallel_fits(spec: JobSpec) -> Iterator[Problem]:
    tensor, length = spec.layout.tensor, spec.model.sequence_length
    if spec.layout.sequence_parallel and tensor == 1:
        yield Problem(
            "parallel.sequence_parallel",
            "sequence parallelism splits over the tensor group, but parallel.tensor is 1",
            "false",
        )
    unit = tensor if spec.layout.sequence_parallel_on and spec.layout.context == 1 else 1
    if length % unit and spec.model.heads % tensor == 0:
        yield Problem(
            "model.sequence_length",
            f"sequence_length ({length}) must be a multiple of parallel.tensor ({tensor}) with sequence parallelism",
            str(nearest_multiple(tensor, length)),
        )


def _context_fits(spec: JobSpec) -> Iterator[Problem]:
    layout, size, length = spec.layout, spec.layout.context, spec.model.sequence_length
    if size == 1:
        for key in ("context_method", "context_order"):
            if getattr(layout, key) is not None:
                yield Problem(f"parallel.{key}", "has no effect: parallel.context is 1", "null")
        return
    unit, runs, tensor = shortest_unit(layout), runs_per_rank(layout), layout.tensor
    if length % unit and (not layout.sequence_parallel_on or spec.model.heads % tensor == 0):
        factors = " x ".join((*("2",) * (runs == 2), "context", *("tensor",) * layout.sequence_parallel_on))
        has = "has two runs of it" if runs == 2 else "has one run of it"
        problem = f"sequence_length ({length}) must be a multiple of {factors} ({unit}): each rank {has}"
        yield Problem("model.sequence_length", problem, str(nearest_multiple(unit, length)))
    if spec.model.family == "custom":
        rule = "not supported with custom models: only the attention of built-in families spans several ranks"
        yield Problem("parallel.context", rule, "1")
    elif layout.context_method == "all_to_all":
        yield from _heads_are_exchanged(spec)


def _heads_are_exchanged(spec: JobSpec) -> Iterator[Problem]:
    """Checks that every context rank gets whole heads, of queries and of keys and values."""
    tensor, size = spec.layout.tensor, spec.layout.context
    for key, heads in (("kv_heads", spec.model.key_value_heads), ("heads", spec.model.heads)):
        if heads % (tensor * size):
            problem = (
                f"all_to_all gives each rank whole heads: {key} / tensor ({heads} / {tensor}) is not a multiple of "
                f"context ({size}); all_gather and ring have no such limit"
            )
            yield Problem("parallel.context_method", problem, "all_gather")
            return


def _chunks_have_rows(spec: JobSpec) -> Iterator[Problem]:
    layout, length = spec.layout, spec.model.sequence_length // spec.layout.context
    rows = length // layout.tensor if layout.sequence_parallel_on else length
    if layout.tensor > 1 and layout.forward_chunks > max(1, rows):
        yield Problem(
            "parallel.forward_chunks",
            f"{layout.forward_chunks} chunks are more than the {rows} tokens of the sequence that a rank holds",
            str(max(1, rows)),
        )


def _chunks_have_16_bits(spec: JobSpec) -> Iterator[Problem]:
    if spec.layout.forward_chunks > 1 and spec.train.fp8 != "off":
        rule = "chunks are not supported with train.fp8: each chunk would be scaled separately"
        yield Problem("parallel.forward_chunks", rule, "1")


def _key_value_heads_fit(spec: JobSpec) -> Iterator[Problem]:
    model, tensor = spec.model, spec.layout.tensor
    groups = model.key_value_heads
    if model.heads % groups:
        unit = math.gcd(model.heads, tensor)
        nearest = unit * nearest_divisor(model.heads // unit, max(1, round(groups / unit)))
        yield Problem("model.kv_heads", f"kv_heads ({groups}) must divide heads ({model.heads})", str(nearest))
    elif groups % tensor and tensor % groups and model.heads % tensor == 0:
        fitting = [d for d in divisors(model.heads) if d % tensor == 0 or tensor % d == 0]
        nearest = min(fitting, key=lambda d: (abs(d - groups), d))
        yield Problem(
            "model.kv_heads",
            f"kv_heads ({groups}) must be a multiple or a divisor of parallel.tensor ({tensor})",
            str(nearest),
        )


def _elastic_sums_are_not_compiled(spec: JobSpec) -> Iterator[Problem]:
    if spec.train.deterministic == "elastic" and spec.train.compile:
        yield Problem(
            "train.compile",
            "not supported with train.deterministic elastic: the code compiled for a micro-batch may "
            "depend on the sizes that the replica has processed before",
            "false",
        )


def _schedule_fits_virtual_stages(spec: JobSpec) -> Iterator[Problem]:
    name, count = spec.layout.schedule, spec.layout.virtual_stages
    expected = SCHEDULES[name].virtual_stages
    if expected is None or count == expected:
        return
    if expected > 1:
        yield Problem("parallel.virtual_stages", f"{name} uses {expected} virtual stages, not {count}", str(expected))
    else:
        flexible = next(other for other, schedule in SCHEDULES.items() if schedule.virtual_stages is None)
        rule = f"{name} uses one virtual stage, not {count}; {flexible} supports any number"
        yield Problem("parallel.schedule", rule, flexible)


def _zero_fits(spec: JobSpec) -> Iterator[Problem]:
    """Stages 2 and 3 of ZeRO communicate within each micro-batch."""
    layout = spec.layout
    if layout.zero < 2:
        return
    does = "reduces gradients for each micro-batch"
    if layout.zero == 3:
        does = "gathers every layer's weights again for each micro-batch"
    if layout.pipeline > 1:
        rule = (
            f"zero: {layout.zero} {does}, which a pipeline of {layout.pipeline} stages has {layout.pipeline} of in "
            "flight; use zero: 1, or pipeline: 1 with tensor or context"
        )
        yield Problem("parallel.zero", rule, "1")
    elif layout.schedule != "1f1b":
        rule = (
            f"zero: {layout.zero} {does}, whose backward must follow its forward, as with 1f1b, not {layout.schedule}"
        )
        yield Problem("parallel.schedule", rule, "1f1b")
    if layout.zero == 3 and layout.gather == "beside_forward":
        yield Problem("parallel.gather", "zero: 3 gathers beside forward anyway", "after_update")


def _pipeline_has_layers(spec: JobSpec) -> Iterator[Problem]:
    layout, layers = spec.layout, spec.model.layers
    turns_back = SCHEDULES[layout.schedule].turns_back
    virtual_stages = 2 if turns_back else layout.virtual_stages
    if layers < layout.pipeline * virtual_stages:
        if virtual_stages > layers or turns_back or layout.pipeline == 1:
            yield Problem(
                "model.layers",
                f"layers ({layers}) must be at least parallel.pipeline x virtual_stages "
                f"({layout.pipeline} x {virtual_stages})",
                str(layout.pipeline * virtual_stages),
            )
        else:
            yield Problem(
                "parallel.pipeline",
                f"pipeline ({layout.pipeline}) x virtual_stages ({virtual_stages}) must be at most model.layers "
                f"({layers})",
                str(layers // virtual_stages),
            )


def _every_stage_has_accelerators(spec: JobSpec) -> Iterator[Problem]:
    layout = spec.layout
    types = layout.stage_accelerators
    if types is not None and spec.resources.accelerator == "cpu":
        rule = "sets the GPU types of stages, but resources.accelerator is cpu"
        yield Problem("parallel.stage_accelerators", rule, "null")
    elif types is not None and len(types) != layout.pipeline:
        rule = (
            f"lists types for {len(types)} stages, but parallel.pipeline is {layout.pipeline}: give one for each stage"
        )
        repeated = (types or ("A100",)) * layout.pipeline
        yield Problem("parallel.stage_accelerators", rule, f"[{', '.join(repeated[: layout.pipeline])}]")


def _stages_have_all_layers(spec: JobSpec) -> Iterator[Problem]:
    """Checks stage_layers; whether there are enough layers for all stages is checked by another rule."""
    layout, layers, counts = spec.layout, spec.model.layers, spec.layout.stage_layers
    stages = layout.pipeline * layout.virtual_stages
    if counts is None or layers < stages:
        return
    even = str(list(even_counts(layers, stages)))
    if len(counts) != stages:
        yield Problem(
            "parallel.stage_layers",
            f"{len(counts)} numbers of layers for {stages} virtual stages: there must be one for each "
            f"(parallel.pipeline {layout.pipeline} x virtual_stages {layout.virtual_stages})",
            even,
        )
    elif sum(counts) != layers:
        yield Problem("parallel.stage_layers", f"{sum(counts)} layers in total, not model.layers ({layers})", even)


def _attention_can_drop_out(spec: JobSpec) -> Iterator[Problem]:
    if spec.train.attention == "sdpa" and spec.model.dropout > 0:
        yield Problem(
            "train.attention",
            "the fused kernels' dropout depends on the layout; with dropout, attention must be explicit",
            "explicit",
        )


def _compiled_blocks_are_plain(spec: JobSpec) -> Iterator[Problem]:
    layout, train = spec.layout, spec.train
    if not train.compile:
        return
    drops_adapters = train.lora is not None and train.lora.dropout > 0
    if train.attention == "explicit" or spec.model.dropout > 0 or drops_adapters:
        yield Problem("train.compile", "compiled blocks support only sdpa attention without dropout", "false")
    elif layout.recompute == "selective" and set(layout.recompute_modules) & {"norm", "mlp_activation"}:
        yield Problem(
            "parallel.recompute_modules",
            "in compiled blocks the compiler chooses which norms and activations to recompute",
            "[core_attention]",
        )


def _recomputation_is_whole(spec: JobSpec) -> Iterator[Problem]:
    layout = spec.layout
    if layout.recompute == "selective" and not layout.recompute_modules:
        yield Problem(
            "parallel.recompute_modules",
            "selective recomputation needs at least one of core_attention, norm, mlp_activation",
            "[core_attention]",
        )
    if len(set(layout.recompute_modules)) < len(layout.recompute_modules):
        once = ", ".join(dict.fromkeys(layout.recompute_modules))
        yield Problem("parallel.recompute_modules", "a module is named twice", f"[{once}]")


def _some_state_is_kept(spec: JobSpec) -> Iterator[Problem]:
    keeps = spec.checkpoint
    if keeps.snapshots == "off" and keeps.every_steps == 0:
        rule = "without snapshots a job can only continue from checkpoints, so every_steps must be above 0"
        yield Problem("checkpoint.every_steps", rule, "50")


def _spikes_can_be_seen(spec: JobSpec) -> Iterator[Problem]:
    spike, steps = spec.recovery.spike, spec.train.steps
    if spike.policy != "ignore" and spike.window >= steps:
        fits = steps > MIN_WINDOW
        yield Problem(
            "recovery.spike.window" if fits else "recovery.spike.policy",
            f"window ({spike.window}) must be below train.steps ({steps}), or no step is ever checked",
            str(steps - 1) if fits else "ignore",
        )


_NCCL = (
    "ALGO", "ALLOC_P2P_NET_LL_BUFFERS", "BUFFSIZE", "CGA_CLUSTER_SIZE", "COLLNET_ENABLE", "CROSS_NIC",
    "CUMEM_ENABLE", "DEBUG", "DEBUG_SUBSYS", "DMABUF_ENABLE", "GRAPH_MIXING_SUPPORT", "GRAPH_REGISTER",
    "IB_ADAPTIVE_ROUTING", "IB_AR_THRESHOLD", "IB_DISABLE", "IB_FIFO_TC", "IB_GID_INDEX", "IB_HCA",
    "IB_MERGE_NICS", "IB_PCI_RELAXED_ORDERING", "IB_QPS_PER_CONNECTION", "IB_RETRY_CNT", "IB_SL",
    "IB_SPLIT_DATA_ON_QPS", "IB_TC", "IB_TIMEOUT", "IGNORE_CPU_AFFINITY", "LOCAL_REGISTER", "MAX_CTAS",
    "MAX_NCHANNELS", "MAX_P2P_NCHANNELS", "MIN_CTAS", "MIN_NCHANNELS", "MIN_P2P_NCHANNELS", "MNNVL_ENABLE",
    "NCHANNELS_PER_NET_PEER", "NET_GDR_C2C", "NET_GDR_LEVEL", "NET_GDR_READ", "NSOCKS_PERTHREAD", "NTHREADS",
    "NVB_DISABLE", "NVLS_CHUNKSIZE", "NVLS_ENABLE", "OOB_NET_IFNAME", "P2P_DISABLE", "P2P_LEVEL",
    "P2P_NET_CHUNKSIZE", "PROTO", "PXN_DISABLE", "SHM_DISABLE", "SOCKET_FAMILY", "SOCKET_IFNAME",
    "SOCKET_NTHREADS", "SOCKET_RETRY_CNT", "WORK_FIFO_BYTES",
)  # fmt: skip
_OTHERS = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "GLOO_SOCKET_IFNAME",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
)
ALLOWED = frozenset({*(f"NCCL_{name}" for name in _NCCL), *_OTHERS})
"""Names that `resources.environment` may have."""
MAX_CHARACTERS = 1000
"""Maximum length of a value."""


def _environment_is_allowed(spec: JobSpec) -> Iterator[Problem]:
    """Checks that all names are in the list of safe ones, and that values are valid in a process's environment."""
    for name, value in spec.resources.environment.items():
        path = f"resources.environment.{name}"
        if name not in ALLOWED:
            near = difflib.get_close_matches(name.upper(), sorted(ALLOWED), 1)
            rule = (
                "not allowed; a job may set the variables of NCCL, gloo and the allocator listed in docs/parallelism.md"
            )
            yield Problem(path, rule, near[0] if near else None)
        elif len(value) > MAX_CHARACTERS or not value.isprintable():
            yield Problem(path, f"a value may have at most {MAX_CHARACTERS} characters, all printable")


UNSUPPORTED: tuple[Rule, ...] = (_layout_is_explicit,)
FITTING: tuple[Rule, ...] = (
    _heads_divide_hidden,
    _positions_fit,
    _activation_fits,
    _latent_attention_fits,
    _windows_fit,
    _custom_models_are_named,
    _tensor_divides,
    _sequence_parallel_fits,
    _context_fits,
    _chunks_have_rows,
    _chunks_have_16_bits,
    _key_value_heads_fit,
    *EXPERT_RULES,
    _schedule_fits_virtual_stages,
    _zero_fits,
    _pipeline_has_layers,
    _stages_have_all_layers,
    _every_stage_has_accelerators,
    *BATCH_RULES,
    _attention_can_drop_out,
    _compiled_blocks_are_plain,
    fp8_fits,
    cuda_graphs_fit,
    _elastic_sums_are_not_compiled,
    _recomputation_is_whole,
    *DATA_RULES,
    _environment_is_allowed,
    *CHAT_RULES,
    *RECIPE_RULES,
    elastic_bounds_hold,
    _some_state_is_kept,
    _spikes_can_be_seen,
)
