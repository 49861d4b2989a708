"""Parameters and FLOPs by arithmetic equal what torch counts on real models, and what the papers have published."""

from __future__ import annotations

import itertools
from typing import Any

import papers
import pytest
import torch
from engine_specs import spec
from one_layer import FlopCounter, lone_rank
from plain_gpt import PlainGPT
from rank_programs import micro_batches
from torch.utils.flop_counter import FlopCounterMode

from manta.workers.accounting.flops import (
    core_attention_forward,
    forward_flops,
    frozen_parameters_of_rank,
    parameter_count,
    parameter_counts,
    rank_parameters,
    recomputed_layer_passes,
    step_flops,
    trained_experts_of_rank,
    trained_parameter_count,
    trained_parameters,
    waiting_gradient_buffers,
)
from manta.workers.config import JobSpec, LoraConfig
from manta.workers.engine import Engine
from manta.workers.model.stage import ModelStage
from manta.workers.parallel.data.state import tensors_of

SHAPES = [
    pytest.param(*shape, marks=[] if sum(map(bool, shape)) % 2 else [pytest.mark.soak])
    for shape in itertools.product([True, False], [True, False], [None, 72], [None, 300], [None, 2])
]
"""Half of them have every combination of any four fields."""
FIELDS = ("tied", "bias", "ffn", "vocabulary", "groups")


def job(
    tied: bool = True,
    bias: bool = True,
    ffn: int | None = None,
    vocabulary: int | None = None,
    groups: int | None = None,
    **parallel,
) -> JobSpec:
    """A small model; batch of 6."""
    model = {"tie_embeddings": tied, "bias": bias, "ffn_hidden_size": ffn, "vocabulary_size": vocabulary}
    return spec(model=model | {"kv_heads": groups}, train={"global_batch_size": 6}, parallel=parallel)


@pytest.mark.parametrize(FIELDS, SHAPES)
def test_model_flops_match_torchs_count_with_full_attention(tied, bias, ffn, vocabulary, groups):
    """The plain model's attention is written out, so torch counts all s^2 pairs of it."""
    job_spec = job(tied, bias, ffn, vocabulary, groups)
    windows = torch.zeros(6, 9, dtype=torch.int64)
    with FlopCounter() as counter:
        PlainGPT(job_spec).loss(windows).backward()
    assert step_flops(job_spec).model_full == counter.flops


def test_flop_counter_of_the_tests_matches_torchs():
    job_spec = job()
    model, windows = PlainGPT(job_spec), torch.zeros(6, 9, dtype=torch.int64)
    with FlopCounter() as counter:
        model.loss(windows).backward()
    with FlopCounterMode(display=False) as theirs:
        model.loss(windows).backward()
    assert counter.flops == theirs.get_total_flops() > 0


def layouts() -> list[dict]:
    """Layouts of every kind: the ranks of each hold the whole model between them, and more."""
    return [
        {},
        {"tensor": 2},
        {"tensor": 4, "sequence_parallel": False},
        {"pipeline": 3},
        {"pipeline": 3, "virtual_stages": 2, "schedule": "interleaved"},
        {"pipeline": 2, "virtual_stages": 2, "schedule": "zb-v", "tensor": 4},
        {"pipeline": 2, "virtual_stages": 2, "schedule": "zb-v", "stage_layers": [3, 1, 2, 1]},
        {"pipeline": 3, "stage_layers": [4, 1, 2]},
    ]


def uneven(
    groups: int | None = None,
    tied: bool = True,
    bias: bool = True,
    family: str = "gpt",
    moe: dict | None = None,
    **parallel,
) -> JobSpec:
    """Seven layers and a vocabulary that no layout divides, written-out attention; a batch of 6, two at a time."""
    model = {"layers": 7, "vocabulary_size": 301, "tie_embeddings": tied, "kv_heads": groups, "bias": bias}
    if family != "gpt":
        model |= {"family": family, "head_dim": 12, "ffn_hidden_size": 40, "sliding_window": 5, "moe": moe}
    train = {"global_batch_size": 6, "micro_batch_size": 2, "attention": "explicit"}
    return spec(model=model, train=train, parallel=parallel)


@pytest.mark.parametrize("layout", layouts(), ids=str)
@pytest.mark.parametrize(
    ("groups", "tied", "bias", "family"),
    [(None, True, True, "gpt"), (1, False, True, "qwen")],
)
def test_parameters_of_each_rank_match_its_modules(groups, tied, bias, family, layout):
    job_spec = uneven(groups, tied, bias, family, **layout)
    held = []
    for stage in range(job_spec.layout.pipeline):
        model = ModelStage(job_spec, lone_rank(job_spec, stage * job_spec.layout.tensor))
        held.append(sum(parameter.numel() for parameter in model.parameters()))
    assert rank_parameters(job_spec) == tuple(held)
    if layout == {}:
        assert parameter_count(job_spec) == held[0]


FROZEN = (["embedding", "layers.0-2", "layers.5.mlp"], ["*.up", "*norm", "output", "layers.6"])


@pytest.mark.parametrize("layout", layouts(), ids=str)
@pytest.mark.parametrize(("groups", "family", "frozen"), [(None, "gpt", FROZEN[1]), (2, "qwen", FROZEN[0])], ids=str)
def test_frozen_parameters_of_each_rank_match_its_modules(groups, family, layout, frozen):
    tied = groups is None and "output" not in frozen
    whole = uneven(groups, tied, family == "gpt", family, **layout)
    job_spec = whole.model_copy(update={"train": whole.train.model_copy(update={"frozen": tuple(frozen)})})
    held = []
    for stage in range(job_spec.layout.pipeline):
        model = ModelStage(job_spec, lone_rank(job_spec, stage * job_spec.layout.tensor))
        held.append(sum(each.numel() for each in model.parameters() if not each.requires_grad))
    assert [frozen_parameters_of_rank(job_spec, rank) for rank in range(job_spec.layout.pipeline)] == held
    assert sum(held) > 0


def test_16_bit_training_state_takes_18_bytes_a_parameter():
    """What figure 1 of arXiv:2205.05198 counts: weight 2, gradient 4, master weight and moments 12."""
    job_spec = spec(train={"precision": "bf16"})
    engine = Engine(job_spec, lone_rank(job_spec))
    state = [engine.flat.parameters, engine.flat.gradients, *tensors_of(engine.optimizer.parts())]
    assert sum(tensor.nbytes for tensor in state) == 18 * engine.flat.size
    assert rank_parameters(job_spec)[0] <= engine.flat.size <= 1.02 * rank_parameters(job_spec)[0]


def counted(job_spec: JobSpec, sequences: int) -> int:
    """FLOPs of a step that torch counts on all ranks, of which those that differ run, one after the other."""
    layout, total = job_spec.layout, 0
    windows = torch.randint(256, (sequences, 9))
    for replica, stage in itertools.product(range(layout.data), range(layout.pipeline)):
        engine = Engine(job_spec, lone_rank(job_spec, (replica * layout.pipeline + stage) * layout.tensor))
        engine.flat.parameters.normal_(0.0, 0.02)
        batch = micro_batches(job_spec, replica, windows)
        with FlopCounter() as counter:
            engine.pipeline.train(batch, 1.0)
        total += counter.flops * layout.tensor
    return total


POLICIES = [
    {},
    {"recompute": "selective"},
    {"recompute": "selective", "recompute_modules": ("norm", "mlp_activation")},
    {"recompute": "selective", "recompute_modules": ("core_attention", "norm", "mlp_activation")},
    {"recompute": "full"},
    {"recompute": "full", "recompute_every": 3},
]


@pytest.mark.parametrize("policy", POLICIES, ids=str)
@pytest.mark.parametrize(("groups", "family"), [(None, "gpt"), (2, "gpt"), (2, "qwen")])
def test_hardware_flops_match_torchs_count_on_the_engine(groups, family, policy):
    job_spec = uneven(groups, family=family, **policy)
    assert step_flops(job_spec).hardware_full == counted(job_spec, 6)


@pytest.mark.parametrize(
    "policy", [{}, {"recompute": "full", "recompute_every": 3}, {"recompute": "selective"}], ids=str
)
@pytest.mark.parametrize(
    "frozen",
    [
        ["embedding", "layers.0-2", "layers.5.mlp"],
        ["embedding.token", "*.up"],
        ["embedding", "layers"],
        ["*.qkv", "layers.6"],
    ],
    ids=str,
)
def test_frozen_parameters_save_the_flops_that_torch_does_not_count(frozen, policy):
    """Under a pipeline, whose first stages may have no backward, and where nothing is recomputed without one too."""
    for layout in ({"pipeline": 3, "tensor": 2}, {})[: 1 if policy else 2]:
        whole = uneven(tied=False, **policy, **layout)
        job_spec = whole.model_copy(update={"train": whole.train.model_copy(update={"frozen": tuple(frozen)})})
        assert step_flops(job_spec).hardware_full == counted(job_spec, 6)
        assert step_flops(job_spec).model_full < step_flops(whole).model_full


def adapted(job_spec: JobSpec, **lora: Any) -> JobSpec:
    """With adapters."""
    return job_spec.model_copy(update={"train": job_spec.train.model_copy(update={"lora": LoraConfig(**lora)})})


@pytest.mark.parametrize("layout", layouts(), ids=str)
@pytest.mark.parametrize(
    ("lora", "policy"), [({"rank": 3}, POLICIES[0]), ({"rank": 2, "targets": ("k", "down")}, POLICIES[5])], ids=str
)
def test_hardware_flops_and_parameters_of_adapters_match_the_engine(lora, policy, layout):
    """Also those that each tensor rank computes as a whole, and what backward computes again."""
    job_spec = adapted(uneven(1, family="qwen", **policy, **layout), **lora)
    assert step_flops(job_spec).hardware_full == counted(job_spec, 6)
    for stage in range(job_spec.layout.pipeline):
        model = ModelStage(job_spec, lone_rank(job_spec, stage * job_spec.layout.tensor))
        sizes = [(each.numel(), each.requires_grad) for each in model.parameters()]
        assert rank_parameters(job_spec)[stage] == sum(size for size, _ in sizes)
        assert trained_parameters(job_spec)[stage] == sum(size for size, trained in sizes if trained)


EXPERTS = {"experts": 4, "per_token": 3, "ffn_hidden_size": 20, "shared": 1, "first_dense": 2, "every": 2}


@pytest.mark.parametrize("layout", layouts()[:6], ids=str)
@pytest.mark.parametrize(
    ("policy", "frozen"), [(POLICIES[0], ()), (POLICIES[5], ("embedding", "layers.0-1", "*.experts.*.up"))], ids=str
)
def test_hardware_flops_and_parameters_of_experts_match_the_engine(layout, policy, frozen):
    """Of layers with experts between others: all tokens' experts, and the router on each tensor rank."""
    whole = uneven(2, False, False, "qwen", EXPERTS, **policy, **layout)
    job_spec = whole.model_copy(update={"train": whole.train.model_copy(update={"frozen": frozen})})
    assert step_flops(job_spec).hardware_full == counted(job_spec, 6)
    for stage in range(job_spec.layout.pipeline):
        model = ModelStage(job_spec, lone_rank(job_spec, stage * job_spec.layout.tensor))
        sizes = [(each.numel(), each.requires_grad) for each in model.parameters()]
        assert trained_parameters(job_spec)[stage] == sum(size for size, trained in sizes if trained)
        experts = sum(each.numel() for name, each in model.named_parameters() if ".experts." in name)
        assert frozen or trained_experts_of_rank(job_spec, stage) == experts


def test_parameters_of_whole_experts_on_tensor_ranks_match_the_engine():
    """With as many FLOPs as experts in parts have."""
    split, whole = (
        uneven(2, False, False, "qwen", EXPERTS, tensor=2, pipeline=2, data=2, expert=expert, expert_tensor=whole)
        for expert, whole in ((None, None), (4, 1))
    )
    assert step_flops(whole) == step_flops(split)
    for stage in range(2):
        model = ModelStage(whole, lone_rank(whole, stage * 2))
        assert rank_parameters(whole)[stage] == sum(each.numel() for each in model.parameters())
        experts = [each for name, each in model.named_parameters() if ".experts." in name]
        assert trained_experts_of_rank(whole, stage) == sum(each.numel() for each in experts)
        assert {max(each.shape) for each in experts} <= {20, whole.model.hidden_size}, "none is split"


PUBLISHED = {
    "Mixtral 8x7B": (46.703, 12.880),
    "Qwen3 30B A3B": (30.532, 3.353),
    "Qwen3 235B A22B": (235.094, 22.191),
    "DeepSeek V3": (671.026, 37.552),
}
"""Billions of parameters, all and those of a token, both tables counted; published are 46.7 and 12.9, 30.5 and 3.3, 235
and 22, 671 and 37."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_models_with_experts_have_the_published_numbers_of_parameters(name):
    job_spec = spec(model=papers.MODELS_WITH_EXPERTS[name])
    whole, moe = parameter_count(job_spec), job_spec.model.moe
    of_experts = parameter_counts(job_spec.model, 1, job_spec.vocabulary_size).experts[-1]
    active = whole - of_experts // moe.experts * (moe.experts - moe.per_token)
    assert (round(whole / 1e9, 3), round(active / 1e9, 3)) == PUBLISHED[name]


def test_adapters_of_llama_3_1_8b_have_the_published_number_of_parameters():
    shape = {"family": "llama", "layers": 32, "hidden_size": 4096, "heads": 32, "kv_heads": 8}
    model = shape | {"ffn_hidden_size": 14336, "vocabulary_size": 128256, "sequence_length": 4096}
    job_spec = adapted(spec(model=model), rank=16)
    assert trained_parameter_count(job_spec) == 41_943_040
    assert parameter_count(job_spec) == 8_030_261_248 + 41_943_040
    layers = 6 * 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)
    assert step_flops(job_spec).model_full < step_flops(spec(model=model)).model_full - layers / 3 * 4096


@pytest.mark.parametrize("layout", layouts()[1:], ids=str)
@pytest.mark.parametrize("policy", [POLICIES[1], POLICIES[5]], ids=str)
def test_hardware_flops_count_duplicated_heads_and_padding_of_a_layout(policy, layout):
    """Copies of the only key-value head, and the padding of the vocabulary."""
    job_spec = uneven(1, **policy, **layout)
    assert step_flops(job_spec).hardware_full == counted(job_spec, 6)


@pytest.mark.parametrize("layout", [{}, {"tensor": 2}, {"tensor": 2, "sequence_parallel": False}], ids=str)
@pytest.mark.parametrize("sizes", [{"q_rank": 12, "value_size": 5}, {"value_size": 12}], ids=str)
def test_hardware_flops_count_the_zeros_and_whole_weights_of_latent_attention(layout, sizes):
    latent = {"kv_rank": 8, "rope_size": 4, "nope_size": 6, **sizes}
    train, model = {"global_batch_size": 6, "attention": "explicit"}, {"family": "deepseek", "latent_attention": latent}
    job_spec = spec(model=model, train=train, parallel=layout)
    flops = step_flops(job_spec)
    assert flops.hardware_full == counted(job_spec, 6)
    assert flops.model_full < flops.hardware_full
    scores = 2 * 8**2 * 4 * (10 + sizes["value_size"])
    assert core_attention_forward(job_spec.model) == scores


@pytest.mark.parametrize("keep", [1, pytest.param(2, marks=pytest.mark.soak)])
@pytest.mark.parametrize(
    "layout",
    [
        {"pipeline": 3, "recompute": "selective"},
        {"pipeline": 3, "schedule": "gpipe", "recompute": "full", "recompute_every": 2},
        {"pipeline": 3, "virtual_stages": 2, "schedule": "interleaved", "recompute": "full"},
        {"pipeline": 2, "virtual_stages": 2, "schedule": "zb-v", "recompute": "full", "recompute_every": 2},
        {"pipeline": 2, "schedule": "zb-h1", "data": 2, "recompute": "full"},
    ],
    ids=str,
)
def test_micro_batches_that_are_kept_are_not_computed_again(layout, keep):
    """Eleven sequences: replicas with different shares, and last micro-batches that are smaller."""
    sequences = 12 if layout.get("schedule") == "interleaved" else 11
    job_spec = uneven(**layout, recompute_keep=keep)
    everything = uneven(**layout)
    assert step_flops(job_spec, sequences).hardware_full == counted(job_spec, sequences)
    assert recomputed_layer_passes(job_spec, sequences) < recomputed_layer_passes(everything, sequences)
    assert step_flops(job_spec, sequences).model_full == step_flops(everything, sequences).model_full


def test_keeping_all_micro_batches_recomputes_nothing():
    job_spec = uneven(pipeline=3, recompute="full", recompute_keep=3)
    assert recomputed_layer_passes(job_spec, 6) == 0
    assert step_flops(job_spec).hardware_full == step_flops(uneven(pipeline=3)).hardware_full


def test_fused_attention_computes_one_more_product_than_hardware_flops_count():
    """Within backward they have q k^T again, whether they are recomputed or not; torch's counter knows."""
    for policy in ({}, {"recompute": "selective"}, {"recompute": "full"}):
        job_spec = job(**policy)
        inside = 6 * 4 * core_attention_forward(job_spec.model) // 2
        assert step_flops(job_spec).hardware_full + inside == counted(job_spec, 6)


def test_flops_match_the_papers_formulas():
    """arXiv:2205.05198, appendix A, and with whole layers recomputed arXiv:2104.04473, eq. 3."""
    B, L, s, h, v = 6, 4, 8, 32, 256
    model = 72 * B * L * s * h**2 * (1 + s / (6 * h) + v / (12 * h * L))
    assert step_flops(job()).model_full == pytest.approx(model, rel=1e-12)
    assert step_flops(job()).hardware_paper == pytest.approx(model, rel=1e-12)
    selective = 72 * B * L * s * h**2 * (1 + s / (3 * h) + v / (12 * h * L))
    assert step_flops(job(recompute="selective")).hardware_paper == pytest.approx(selective, rel=1e-12)
    full = 96 * B * L * s * h**2 * (1 + s / (6 * h) + v / (16 * L * h))
    flops = step_flops(job(recompute="full"))
    assert flops.hardware_paper == flops.hardware_full == pytest.approx(full, rel=1e-12)


def test_causal_flops_count_half_of_the_attention():
    fused, explicit = job(recompute="selective"), uneven(recompute="selective")
    for job_spec, again in ((fused, 1), (explicit, 1 / 2)):
        B, (_, attention), flops = job_spec.train.global_batch_size, forward_flops(job_spec), step_flops(job_spec)
        assert flops.model_full - flops.model_causal == 3 * B * attention / 2
        assert flops.hardware_full - flops.hardware_causal == (3 + again) * B * attention / 2
    assert core_attention_forward(job().model) == 4 * 8**2 * 32
    assert step_flops(job()).hardware_full == step_flops(job()).model_full == step_flops(fused).model_full
    assert step_flops(job()).hardware_causal == step_flops(job()).model_causal


def test_flops_do_not_depend_on_a_layout_that_divides_the_model():
    assert step_flops(job(tensor=2, pipeline=2, data=2)) == step_flops(job())
    assert step_flops(uneven(tensor=4)).model_full == step_flops(uneven()).model_full


def published(hidden: int, heads: int, layers: int, length: int = 2048, batch: int = 1, **parallel) -> JobSpec:
    """A model of the papers, whose vocabulary is 51200 throughout."""
    return spec(
        model={
            "hidden_size": hidden,
            "heads": heads,
            "layers": layers,
            "sequence_length": length,
            "vocabulary_size": 51200,
        },
        train={"global_batch_size": batch},
        parallel=parallel,
    )


def overlaps(low: float, high: float, value: float, decimals: int) -> bool:
    """Whether something between `low` and `high` rounds to `value`."""
    half = 0.5 * 10**-decimals
    return low <= value + half and value - half <= high


def test_parameter_count_matches_the_published_sizes():
    """The papers' count lacks the final norm's 2 h."""
    for row in papers.MEGATRON_SIZES:
        job_spec = published(row["hidden_size"], row["attention_heads"], row["num_layers"], 1024)
        assert round(parameter_count(job_spec) / 1e9, 1) == row["params_billion"]
    for h, a, L, billions in ((12288, 96, 96, 174.6), (20480, 128, 105, 529.6), (25600, 160, 128, 1008.0)):
        job_spec = published(h, a, L)
        formula = 12 * L * h**2 * (1 + 13 / (12 * h) + (51200 + 2048) / (12 * L * h))
        assert parameter_count(job_spec) - 2 * h == pytest.approx(formula, rel=1e-12)
        assert round(parameter_count(job_spec) / 1e9, 1) == billions


@pytest.mark.parametrize("name", ["22B", "175B", "530B", "1T"])
def test_flops_utilisation_matches_the_published_table(name):
    """arXiv:2205.05198, table 5, from its times, which are rounded to 10 ms, on A100s of 312 TFLOP/s. Its HFU takes
    `hardware_paper`; what is really computed again would give 0.4 to 1.4 points less."""
    shape, job_spec = papers.MODELS[name], papers.ITERATIONS[name]
    batch = shape["global_batch"]
    flops = step_flops(published(shape["hidden"], shape["heads"], shape["layers"], 2048, batch, recompute="selective"))

    def percent(count: int, seconds: float) -> float:
        return 100 * count / (seconds * shape["gpus"] * 312e12)

    slowest, fastest = job_spec["present_work_s"] + 0.005, job_spec["present_work_s"] - 0.005
    for count, column in ((flops.model_full, "mfu_pct"), (flops.hardware_paper, "hfu_pct")):
        assert overlaps(percent(count, slowest), percent(count, fastest), job_spec[column], 1)
    assert flops.model_full < flops.hardware_full < flops.hardware_paper
    before = job_spec["full_recompute_s"]
    gain = (before - 0.005) / slowest, (before + 0.005) / fastest
    assert overlaps(100 * (gain[0] - 1), 100 * (gain[1] - 1), job_spec["throughput_increase_pct"], 1)


def test_flops_utilisation_over_eight_replicas_matches_the_paper():
    """arXiv:2205.05198, section 6.3: the 530B model on 2240 GPUs."""
    extra = papers.ITERATION_OF_EIGHT_REPLICAS
    flops = step_flops(published(20480, 128, 105, 2048, extra["global_batch"], data=8)).model_full
    assert round(100 * flops / (extra["iter_s"] * 2240 * 312e12), 1) == extra["mfu_pct"]


def test_mt_nlg_throughput_matches_hardware_flops_with_recomputation():
    """arXiv:2201.11990, section 2.4: whole layers are recomputed. PaLM gives the model FLOPs' share, 30.2%
    (arXiv:2204.02311, table 3)."""
    for row in papers.MT_NLG_ITERATIONS:
        gpus, seconds, teraflops = row["gpus"], row["iter_time_s"], row["TFLOPs_per_gpu"]
        flops = step_flops(published(20480, 128, 105, 2048, papers.MT_NLG_BATCH, recompute="full"))
        assert flops.hardware_full / (seconds * gpus) / 1e12 == pytest.approx(teraflops, rel=0.005)
        if gpus == 2240:
            assert round(100 * flops.model_full / (seconds * gpus * 312e12), 1) == 30.2


@pytest.mark.parametrize(("name", "hidden", "heads", "layers"), [("GPT-3", 12288, 96, 96), ("MT-NLG", 20480, 128, 105)])
def test_published_recomputation_overhead_is_six_times_the_written_out_one(name, hidden, heads, layers):
    """arXiv:2205.05198, section 5, gives s / (6 h), 2.7% and 1.6% of the model FLOPs: the 12 B s^2 h that it charges.
    Written out, attention's recomputation is 2 B s^2 h: a sixth."""
    percent = papers.SELECTIVE_RECOMPUTATION[name]["flops_overhead_pct"]
    job_spec = published(hidden, heads, layers, recompute="selective")
    explicit = job_spec.model_copy(update={"train": job_spec.train.model_copy(update={"attention": "explicit"})})
    flops, written = step_flops(job_spec), step_flops(explicit)
    added = flops.hardware_paper - flops.model_full
    products = 72 * layers * 2048 * hidden**2
    assert int(1000 * added / products) / 10 == percent
    assert added == 3 * (flops.hardware_full - flops.model_full) == 6 * (written.hardware_full - written.model_full)


@pytest.mark.parametrize(("data", "buffers"), [(1, 4), (2, 3), (3, 3)])
def test_waiting_gradient_buffers_fit_the_neediest_replica_in_a_ramps_largest_batch(data, buffers):
    """From 4 to 16 sequences, of which the third of three replicas gets 11 to 15: 11, 12 + 13 and 14 wait for 15."""
    ramp = {"start": 4, "increment": 12, "samples": 20}
    train = {"global_batch_size": 16, "batch_ramp": ramp, "deterministic": "elastic"}
    assert waiting_gradient_buffers(spec(train=train, parallel={"data": data})) == buffers
    assert waiting_gradient_buffers(spec(train=train | {"deterministic": "layout"}, parallel={"data": data})) == 0


def test_smaller_batch_of_a_ramp_may_need_more_waiting_gradient_buffers():
    """Of 28 sequences the last of four replicas gets 21 to 27: 21, 22 + 23, 24 + 25 and 26 wait for 27. Of 32 it gets
    24 to 31."""
    ramp = {"start": 28, "increment": 4, "samples": 56}
    train = {"global_batch_size": 32, "deterministic": "elastic"}
    assert waiting_gradient_buffers(spec(train=train, parallel={"data": 4})) == 3
    assert waiting_gradient_buffers(spec(train=train | {"batch_ramp": ramp}, parallel={"data": 4})) == 4
