"""Activation bytes by arithmetic are the papers': its table 2, its totals of a rank, its figures 1 and 7."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import papers
import pytest
from engine_specs import spec
from schedule_sizes import most_in_flight

from manta.workers.accounting.activation_bytes import (
    bytes_of_rank,
    chunk_bytes,
    deferred_bytes,
    layer_terms,
    saved_terms,
)
from manta.workers.config import JobSpec, ModelConfig
from manta.workers.schedules.action_lists import training_actions


def layer_bytes(job_spec: JobSpec, modules: Collection[str] = ()) -> int:
    """Bytes that a layer saves, if `modules` are recomputed."""
    return sum(layer_terms(job_spec, 0, modules).values())


TABLE_2 = {
    "no parallelism": {},
    "tensor parallel (baseline)": {"tensor": 8},
    "tensor + sequence parallel": {"tensor": 8, "sequence_parallel": True},
    "tensor parallel + selective recompute": {"tensor": 8, "recompute": "selective"},
    "tensor + sequence parallel + selective recompute": {
        "tensor": 8,
        "sequence_parallel": True,
        "recompute": "selective",
    },
    "full activation recomputation": {"tensor": 8, "recompute": "full"},
}
MODELS = ("22B", "175B", "530B", "1T")
GIB = 2**30


def shape(name: str) -> ModelConfig:
    """A model of table 3 of arXiv:2205.05198."""
    row = papers.MODELS[name]
    return ModelConfig(
        layers=row["layers"], hidden_size=row["hidden"], heads=row["heads"], sequence_length=2048, vocabulary_size=51200
    )


def evaluated(formula: str, model: ModelConfig, micro_batch: int, tensor: int) -> float:
    """A formula of the papers' tables."""
    names = {"s": model.sequence_length, "h": model.hidden_size, "a": model.heads, "b": micro_batch, "t": tensor}
    return eval(formula, {}, names)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("row", TABLE_2)
def test_activation_bytes_of_a_layer_match_the_papers_table_2(row, name):
    formula = papers.LAYER_BYTES[row]
    expected = evaluated(formula, shape(name), 4, 8 if TABLE_2[row] else 1)
    assert papers.table2_bytes(shape(name), 4, **TABLE_2[row]) == pytest.approx(expected, rel=1e-12)


def large(name: str, dropout: float = 0.1, **parallel: Any) -> JobSpec:
    """A model of table 3 with the layout and batch that it was measured with, unless told otherwise."""
    row = papers.MODELS[name]
    interleaves = row["interleave_m"] > 1
    model = {name: value for name, value in shape(name).model_dump().items() if value is not None}
    layout = {
        "tensor": row["tp"],
        "pipeline": row["pp"],
        "virtual_stages": row["interleave_m"],
        "schedule": "interleaved" if interleaves else "1f1b",
    }
    return spec(
        model=model | {"dropout": dropout},
        train={
            "precision": "bf16",
            "attention": "explicit",
            "micro_batch_size": row["micro_batch"],
            "global_batch_size": row["global_batch"],
        },
        parallel=layout | parallel,
    )


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recompute", ["none", "selective"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_activation_terms_of_the_engine_add_up_to_table_2(sequence_parallel, recompute, name):
    """Apart from the statistics of norms, 16 bytes a token, and the keys of dropout."""
    job_spec = large(name, sequence_parallel=sequence_parallel)
    size, split = job_spec.train.micro_batch_size, 8 if sequence_parallel else 1
    vectors = 16 * size * 2048 // split + 4 * size * job_spec.model.heads // 8
    expected = papers.table2_bytes(job_spec.model, size, 8, sequence_parallel, recompute)
    measured = layer_bytes(job_spec, ("core_attention",) if recompute == "selective" else ())
    assert measured == pytest.approx(expected + vectors, rel=1e-12)
    assert vectors < 5e-4 * expected


def test_modules_leave_out_their_own_tensors():
    """Of 34 s b h: 4 without the norms' outputs, 8 without the MLP's activation; of 5 a s^2 b: all."""
    job_spec = large("22B", tensor=1, sequence_parallel=None)
    sbh = 2048 * 4 * 6144
    everything = layer_bytes(job_spec)
    assert everything - layer_bytes(job_spec, ["norm"]) == 4 * sbh
    assert everything - layer_bytes(job_spec, ["mlp_activation"]) == 8 * sbh
    assert everything - layer_bytes(job_spec, ["core_attention"]) == 5 * 64 * 2048**2 * 4
    assert layer_bytes(job_spec, ["core_attention", "norm", "mlp_activation"]) == 22 * sbh + 16 * 2048 * 4 + 4 * 4 * 64
    assert (
        sum(saved_terms(job_spec, 0, "full").values())
        == papers.table2_bytes(job_spec.model, 4, recompute="full")
        == 2 * sbh
    )


def test_activation_bytes_of_fused_attention_do_not_grow_with_squared_length():
    unfused = large("22B", dropout=0.0)
    sdpa = unfused.model_copy(update={"train": unfused.train.model_copy(update={"attention": "sdpa"})})
    assert layer_terms(sdpa)["log_sums"] == 4 * 4 * 64 // 8 * 2048
    assert layer_bytes(unfused) - layer_bytes(sdpa) == 2 * 64 // 8 * 2048**2 * 4 - layer_terms(sdpa)["log_sums"]
    assert layer_bytes(sdpa) - layer_bytes(sdpa, ["core_attention"]) == layer_terms(sdpa)["log_sums"]


def _interleaving(stages: int, virtual_stages: int) -> float:
    """How much more the first stage holds."""
    return 1 + (stages - 1) / (stages * virtual_stages) if virtual_stages > 1 else 1.0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_the_first_stage_holds_the_papers_total(recompute, name):
    """arXiv:2205.05198, eq. 5 and section 4.3: p micro-batches of L/p layers, 1 + (p - 1)/(p m) times as much when
    interleaved; the embedding's dropout masks, s b h p / t, of which interleaving has 2 p - 1; without a pipeline also
    the output layer, whose logits the paper keeps in fp32, 4 s b v / t, and the engine in 16 bits."""
    job_spec = large(name, recompute=recompute, sequence_parallel=True)
    model, size, p, m = (
        job_spec.model,
        job_spec.train.micro_batch_size,
        job_spec.layout.pipeline,
        job_spec.layout.virtual_stages,
    )
    s, h, L, v, t = model.sequence_length, model.hidden_size, model.layers, model.vocabulary_size, 8
    sbh = s * size * h
    attention = 0 if recompute == "selective" else 5 * model.heads * s / h
    masks = 2 * p - 1 if m > 1 else p
    expected = sbh * L / t * (34 + attention) * _interleaving(p, m) + sbh * masks / t
    if p == 1:
        expected += sbh / t * 4 * (1 + v / h) - 2 * s * size * v / t
    held = [bytes_of_rank(job_spec, stage, job_spec.micro_batches) for stage in range(p)]
    assert held[0] == max(held) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("name", MODELS)
def test_memory_of_a_gpu_is_that_of_figure_1(name):
    """Weights and optimizer, 18 bytes a parameter of 12 L h^2; layers' activations of the first stage."""
    published = papers.MEMORY_GIB[name]
    row, model = papers.MODELS[name], shape(name)
    t, p, size = row["tp"], row["pp"], row["micro_batch"]
    parameters = 12 * model.layers * model.hidden_size**2 / (t * p)
    assert 18 * parameters / GIB == pytest.approx(published["par_opt"], rel=1e-9)
    for key, policy in (("none", (False, "none")), ("seqsel", (True, "selective"))):
        total = model.layers * _interleaving(p, row["interleave_m"]) * papers.table2_bytes(model, size, t, *policy)
        assert total / GIB == pytest.approx(published[key], rel=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_activation_shares_of_the_baseline_match_figure_7(name):
    """To the precision with which its bars could be read."""
    published = papers.MEMORY_PERCENT[name]
    policies = {"none": (False, "none"), "seq": (True, "none"), "sel": (False, "selective")}
    policies |= {"seqsel": (True, "selective"), "full": (False, "full")}
    baseline = papers.table2_bytes(shape(name), 1, 8)
    for key, (sequence_parallel, recompute) in policies.items():
        percent = 100 * papers.table2_bytes(shape(name), 1, 8, sequence_parallel, recompute) / baseline
        assert percent == pytest.approx(published[key], abs=0.15)


@pytest.mark.parametrize("name", ["GPT-3", "MT-NLG"])
def test_selective_recomputation_saves_the_published_share_of_activations(name):
    """arXiv:2205.05198, section 5: 5 a s / h of 34 + 5 a s / h."""
    published = papers.SELECTIVE_RECOMPUTATION[name]
    model = shape({"GPT-3": "175B", "MT-NLG": "530B"}[name])
    sbh = 2048 * model.hidden_size
    saved = papers.table2_bytes(model, 1) - papers.table2_bytes(model, 1, recompute="selective")
    assert saved / sbh == published["5as/h"]
    assert int(100 * saved / papers.table2_bytes(model, 1)) == published["saved_pct"]


@pytest.mark.parametrize("kind", ["gpipe", "1f1b"])
@pytest.mark.parametrize("keep", [0, 1, 2, 9])
def test_rank_keeps_all_activations_of_the_given_number_of_micro_batches(kind, keep):
    """arXiv:2205.05198, appendix C."""
    job_spec = spec(
        train={"global_batch_size": 6},
        parallel={"pipeline": 2, "schedule": kind, "recompute": "full", "recompute_keep": keep},
    )
    for rank, actions in enumerate(training_actions(kind, 2, 1, 6)):
        most = most_in_flight(actions)
        whole, part = (chunk_bytes(job_spec, rank, recompute) for recompute in (False, True))
        assert bytes_of_rank(job_spec, rank, 6) == min(most, keep) * whole + max(0, most - keep) * part


def test_activation_bytes_of_zb_h1_count_micro_batches_whose_weight_pass_waits():
    """The last stage under ZB-H1: the passes of two micro-batches, the first of which waits for its weights' half."""
    job_spec = spec(train={"global_batch_size": 6}, parallel={"pipeline": 2, "schedule": "zb-h1"})
    assert bytes_of_rank(job_spec, 1, 6) == chunk_bytes(job_spec, 1, False) + deferred_bytes(job_spec, 1)


def test_activations_of_a_chunk_follow_the_recompute_policy_only_if_it_applies():
    """Layers 2 and 3 of a middle stage."""

    def held(applies: bool, **policy: Any) -> int:
        return chunk_bytes(spec(model={"layers": 6}, parallel={"pipeline": 3, **policy}), 1, applies)

    job, everything = spec(model={"layers": 6}, parallel={"pipeline": 3}), held(True)
    assert everything == 2 * layer_bytes(job)
    every_third = {"recompute": "full", "recompute_every": 3}
    assert held(True, **every_third) == layer_bytes(job) + sum(saved_terms(job, 0, "full").values()), (
        "of layer 3 only the input"
    )
    assert held(False, **every_third) == everything
    norms = {"recompute": "selective", "recompute_modules": ["norm"]}
    assert held(True, **norms) == 2 * layer_bytes(job, ["norm"]) < everything
    assert held(False, **norms) == everything
