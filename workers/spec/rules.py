"""Rules across the fields of a JobSpec: unsupported features and inconsistent values.

Each rule is a function of the spec that yields problems; each problem names the nearest value that works.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from workers.config import LEAST_WINDOW, JobSpec
from workers.spec.chat_rules import CHAT_RULES
from workers.spec.data_rules import DATA_RULES
from workers.spec.divisors import divisors, nearest_divisor, nearest_multiple
from workers.spec.environment import environment_is_allowed
from workers.spec.families import FAMILIES
from workers.spec.fp8_rules import fp8_fits
from workers.spec.pipeline_rules import PIPELINE_RULES
from workers.spec.problems import Problem
from workers.spec.recipe_rules import RECIPE_RULES

# Far more increments than needed; each is kept in memory.
MOST_INCREMENTS = 10_000

Rule = Callable[[JobSpec], Iterator[Problem]]


def find_problems(spec: JobSpec) -> list[Problem]:
    """All broken rules. Unsupported values come first, since a layout that is still `auto` cannot be checked."""
    problems = [problem for rule in UNSUPPORTED for problem in rule(spec)]
    if not isinstance(spec.parallel, str):
        problems += [problem for rule in FITTING for problem in rule(spec)]
    return problems


def _not_built(path: str, value: object, *works: str) -> Problem:
    return Problem(path, f"{value} is not supported yet; supported: {' or '.join(works)}", works[0], unsupported=True)


def _unsupported_model(spec: JobSpec) -> Iterator[Problem]:
    if spec.model.family not in FAMILIES:
        yield _not_built("model.family", spec.model.family, *FAMILIES)
    if spec.model.experts is not None:
        yield _not_built("model.experts", spec.model.experts, "null")


def _unsupported_parallel(spec: JobSpec) -> Iterator[Problem]:
    layout = spec.parallel
    if isinstance(layout, str):
        smallest = "{tensor: 1, pipeline: 1, data: 1}"
        rule = "the engine needs an explicit layout; `manta plan FILE` finds one, as the service does at submission"
        yield Problem("parallel", rule, smallest, unsupported=True)
        return
    if layout.context != 1:
        yield _not_built("parallel.context", layout.context, "1")
    if layout.zero == 3:
        yield _not_built("parallel.zero", layout.zero, "1", "0")


def _heads_divide_hidden(spec: JobSpec) -> Iterator[Problem]:
    hidden, heads, tensor = spec.model.hidden_size, spec.model.heads, spec.layout.tensor
    if hidden % heads and spec.model.head_dim is None:
        # Prefer one that also fits the layout.
        unit = tensor if hidden % tensor == 0 else 1
        nearest = unit * nearest_divisor(hidden // unit, round(heads / unit))
        yield Problem("model.heads", f"heads ({heads}) must divide hidden_size ({hidden})", str(nearest))


def _positions_fit(spec: JobSpec) -> Iterator[Problem]:
    model, rope = spec.model, spec.model.rope
    if model.family not in FAMILIES:
        return
    if not model.parts.rotary:
        if rope is not None:
            yield Problem(
                "model.rope", f"{model.family} has learned positions; only llama and qwen have rotary ones", "null"
            )
        return
    if model.head_dim is None and model.hidden_size % model.heads:
        return  # reported by the rule about heads
    if model.head_size % 2:
        problem = f"rotary positions need an even head size, but it is {model.head_size}"
        yield Problem("model.head_dim", problem, str(model.head_size + 1))
    scaling = rope.scaling if rope is not None else None
    if scaling is None or scaling.type == "linear":
        return
    if scaling.original_length is None:
        problem = f"{scaling.type} needs the sequence length that the model was pretrained with"
        nearest = max(1, round(model.sequence_length / scaling.factor))
        yield Problem("model.rope.scaling.original_length", problem, str(nearest))
    if scaling.low_frequency_factor >= scaling.high_frequency_factor:
        problem = f"must be below high_frequency_factor ({scaling.high_frequency_factor})"
        path = "model.rope.scaling.low_frequency_factor"
        yield Problem(path, problem, str(scaling.high_frequency_factor / 4))
    if scaling.beta_slow >= scaling.beta_fast:
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
    if model.activation != "gelu" and model.family in FAMILIES and model.parts.gated_mlp:
        yield Problem("model.activation", f"{model.family} uses SwiGLU; only gpt has a choice of activation", "gelu")


def _windows_fit(spec: JobSpec) -> Iterator[Problem]:
    model = spec.model
    if model.full_attention_every is not None and model.sliding_window is None:
        problem = "has no effect without sliding_window: all layers attend to all preceding tokens"
        yield Problem("model.full_attention_every", problem, "null")


def _tensor_divides(spec: JobSpec) -> Iterator[Problem]:
    tensor, model = spec.layout.tensor, spec.model
    if model.head_dim is None and model.hidden_size % model.heads:
        return  # reported by the rule about heads
    if model.heads % tensor:
        # One that divides everything that is split, so that applying the suggestion is enough.
        split = math.gcd(model.heads, model.ffn_size)
        if spec.layout.sequence_parallel is not False:
            split = math.gcd(split, model.sequence_length)
        yield Problem(
            "parallel.tensor",
            f"tensor ({tensor}) must divide model.heads ({model.heads})",
            str(nearest_divisor(split, tensor)),
        )
    elif model.ffn_size % tensor:
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
    if spec.layout.sequence_parallel_on and length % tensor and spec.model.heads % tensor == 0:
        yield Problem(
            "model.sequence_length",
            f"sequence_length ({length}) must be a multiple of parallel.tensor ({tensor}) with sequence parallelism",
            str(nearest_multiple(tensor, length)),
        )


def _chunks_have_rows(spec: JobSpec) -> Iterator[Problem]:
    layout, length = spec.layout, spec.model.sequence_length
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


def _smallest_batch(spec: JobSpec) -> tuple[str, int]:
    """The path of the field that sets the smallest global batch of the job, and that batch size."""
    train = spec.train
    if train.batch_ramp is not None and train.batch_ramp.start < train.global_batch_size:
        return "train.batch_ramp.start", train.batch_ramp.start
    return "train.global_batch_size", train.global_batch_size


def _every_replica_has_samples(spec: JobSpec) -> Iterator[Problem]:
    data, (path, smallest) = spec.layout.data, _smallest_batch(spec)
    if smallest < data:
        yield Problem(
            path, f"a batch of {smallest} has no samples for some of parallel.data ({data}) replicas", str(data)
        )


def _every_replica_has_whole_micro_batches(spec: JobSpec) -> Iterator[Problem]:
    layout, size, (path, smallest) = spec.layout, spec.train.micro_batch_size, _smallest_batch(spec)
    if spec.train.deterministic != "elastic" or smallest < layout.data:
        return
    unit, what = layout.micro_batch_unit * size, "micro-batches"
    if unit > size:
        what = f"groups of {layout.micro_batch_unit} micro-batches (interleaving takes one per stage at a time)"
    most, rule = -(-smallest // unit), f"with train.deterministic elastic, {what} are not split between replicas"
    if most < layout.data:
        problem = f"a batch of {smallest} has only {most} for parallel.data ({layout.data}): {rule}"
        yield Problem(path, problem, str(unit * layout.data))
    elif (spec.elastic.max_data or 1) > most:
        problem = f"{spec.elastic.max_data} is more than the {most} of the smallest batch ({path}): {rule}"
        yield Problem("elastic.max_data", problem, str(most))


def _elastic_sums_are_not_compiled(spec: JobSpec) -> Iterator[Problem]:
    if spec.train.deterministic == "elastic" and spec.train.compile:
        yield Problem(
            "train.compile",
            "not supported with train.deterministic elastic: the code compiled for a micro-batch may "
            "depend on the sizes that the replica has processed before",
            "false",
        )


def _ramp_reaches_the_batch(spec: JobSpec) -> Iterator[Problem]:
    ramp, batch = spec.train.batch_ramp, spec.train.global_batch_size
    if ramp is None:
        return
    if ramp.start > batch:
        yield Problem(
            "train.batch_ramp.start",
            f"the ramp starts at {ramp.start}, above global_batch_size ({batch})",
            str(batch),
        )
    elif (batch - ramp.start) // ramp.increment > MOST_INCREMENTS:
        unit = _interleaving_unit(spec)
        least = -(-(batch - ramp.start) // (MOST_INCREMENTS * unit))
        fitting = min(d for d in divisors((batch - ramp.start) // unit) if d >= least)
        yield Problem(
            "train.batch_ramp.increment",
            f"an increment of {ramp.increment} takes more than {MOST_INCREMENTS} increments",
            str(fitting * unit),
        )
    elif (batch - ramp.start) % ramp.increment:
        yield Problem(
            "train.batch_ramp.increment",
            f"increments of {ramp.increment} from {ramp.start} do not reach global_batch_size ({batch}) exactly",
            str(_nearest_increment(spec)),
        )


def _interleaving_unit(spec: JobSpec) -> int:
    """Batches must be multiples of this: interleaving takes one micro-batch per stage at a time."""
    layout = spec.layout
    if layout.schedule != "interleaved" or layout.pipeline == 1:
        return 1
    # With elastic sums replicas may have different numbers of micro-batches.
    replicas = layout.data if spec.train.deterministic == "layout" else 1
    return replicas * layout.pipeline * spec.train.micro_batch_size


def _unit_in_words(spec: JobSpec) -> str:
    layout, size = spec.layout, spec.train.micro_batch_size
    if spec.train.deterministic == "elastic":
        return f"pipeline x micro_batch_size ({layout.pipeline} x {size})"
    return f"data x pipeline x micro_batch_size ({layout.data} x {layout.pipeline} x {size})"


def _nearest_increment(spec: JobSpec) -> int:
    """The increment nearest to the ramp's that reaches the full batch and whose batches fit the schedule."""
    ramp, unit = spec.train.batch_ramp, _interleaving_unit(spec)
    assert ramp is not None
    distance = (spec.train.global_batch_size - ramp.start) // unit
    if distance == 0:
        return nearest_multiple(unit, ramp.increment)
    return unit * nearest_divisor(distance, max(1, round(ramp.increment / unit)))


def _interleaving_fits_batches(spec: JobSpec) -> Iterator[Problem]:
    train, unit = spec.train, _interleaving_unit(spec)
    sizes = {"train.global_batch_size": (train.global_batch_size, nearest_multiple(unit, train.global_batch_size))}
    if train.batch_ramp is not None:
        ramp = train.batch_ramp
        sizes["train.batch_ramp.start"] = (ramp.start, nearest_multiple(unit, ramp.start))
        if ramp.start <= train.global_batch_size:
            sizes["train.batch_ramp.increment"] = (ramp.increment, _nearest_increment(spec))
    for path, (size, nearest) in sizes.items():
        if size % unit:
            yield Problem(
                path,
                f"{size} must be a multiple of {_unit_in_words(spec)}: interleaving takes one micro-batch per stage "
                "at a time",
                str(nearest),
            )


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
    if train.attention == "explicit" or spec.model.dropout > 0:
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


def _elastic_bounds_hold(spec: JobSpec) -> Iterator[Problem]:
    data = spec.layout.data
    if (spec.elastic.min_data or data) > data:
        yield Problem("elastic.min_data", f"must be at most parallel.data ({data})", str(data))
    if (spec.elastic.max_data or data) < data:
        yield Problem("elastic.max_data", f"must be at least parallel.data ({data})", str(data))
    for size in _sizes_that_may_not_fit(spec):
        larger = spec.model_copy(update={"parallel": spec.layout.model_copy(update={"data": size})})
        broken = [
            problem for rule in (_every_replica_has_samples, _interleaving_fits_batches) for problem in rule(larger)
        ]
        if broken:
            yield Problem("elastic.max_data", f"{size} replicas do not work: {broken[0].rule}", str(size - 1))
            return


def _sizes_that_may_not_fit(spec: JobSpec) -> range:
    """Numbers of replicas above `parallel.data` that must be checked to find the first one that breaks a rule. If
    batches must be multiples of the number, all are checked, of which an early one breaks a rule; otherwise only those
    above the smallest batch can."""
    first, last = spec.layout.data + 1, spec.elastic.max_data or spec.layout.data
    if spec.train.deterministic == "layout" and _interleaving_unit(spec) > 1:
        return range(first, last + 1)
    return range(max(first, min(last, _smallest_batch(spec)[1] + 1)), last + 1)


def _some_state_is_kept(spec: JobSpec) -> Iterator[Problem]:
    keeps = spec.checkpoint
    if keeps.snapshots == "off" and keeps.every_steps == 0:
        rule = "without snapshots a job can only continue from checkpoints, so every_steps must be above 0"
        yield Problem("checkpoint.every_steps", rule, "50")


def _spikes_can_be_seen(spec: JobSpec) -> Iterator[Problem]:
    spike, steps = spec.recovery.spike, spec.train.steps
    if spike.policy != "ignore" and spike.window >= steps:
        fits = steps > LEAST_WINDOW
        yield Problem(
            "recovery.spike.window" if fits else "recovery.spike.policy",
            f"window ({spike.window}) must be below train.steps ({steps}), or no step is ever checked",
            str(steps - 1) if fits else "ignore",
        )


UNSUPPORTED: tuple[Rule, ...] = (
    _unsupported_model,
    _unsupported_parallel,
)
FITTING: tuple[Rule, ...] = (
    _heads_divide_hidden,
    _positions_fit,
    _activation_fits,
    _windows_fit,
    _custom_models_are_named,
    _tensor_divides,
    _sequence_parallel_fits,
    _chunks_have_rows,
    _chunks_have_16_bits,
    _key_value_heads_fit,
    *PIPELINE_RULES,
    _every_replica_has_samples,
    _every_replica_has_whole_micro_batches,
    _interleaving_fits_batches,
    _ramp_reaches_the_batch,
    _attention_can_drop_out,
    _compiled_blocks_are_plain,
    fp8_fits,
    _elastic_sums_are_not_compiled,
    _recomputation_is_whole,
    *DATA_RULES,
    environment_is_allowed,
    *CHAT_RULES,
    *RECIPE_RULES,
    _elastic_bounds_hold,
    _some_state_is_kept,
    _spikes_can_be_seen,
)
