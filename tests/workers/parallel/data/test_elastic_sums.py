"""With `train.deterministic: elastic` the number of replicas changes no bit: not of losses, gradient norms and
validation losses, not of weights and moments, whatever the schedule, the precision and how batches divide.

Gradients are compared with a plain model's in test_gradients.py, the tree itself is tested in test_tree_sum.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engine_specs import axes, document
from made_tensors import MadeTensors
from plain_gpt import random_weights
from rank_programs import START, Trained, assemble, attempts, broken_off, micro_batches, run_steps, train_job

from manta.workers.accounting.flops import waiting_gradient_buffers
from manta.workers.checkpoint.catalog import complete_checkpoints
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid
from manta.workers.config import ParallelConfig
from manta.workers.engine import Engine
from manta.workers.parallel.data import elastic_sums
from manta.workers.parallel.data.elastic_sums import ElasticReduction, row_squares, sum_of_halves
from manta.workers.protocol.messages import Resume
from manta.workers.schedules import RUN_BY_ENGINE
from manta.workers.schedules.action_lists import training_actions
from manta.workers.spec.reading import parse_job_spec

STEPS = 3
ALL_MODULES = ["core_attention", "norm", "mlp_activation"]
SMALL = {"bucket_megabytes": 0.004}
EXPERTS = {"experts": 4, "per_token": 2, "ffn_hidden_size": 8, "balance": {"weight": 0.1, "bias_rate": 0.01}}

# (tensor, pipeline), schedule and recomputation; sections of the job.
Case = tuple[tuple[int, int], dict[str, Any], dict[str, Any]]
CASES: dict[str, Case] = {
    "alone": ((1, 1), {}, {}),
    "alone, bf16 with dropout": ((1, 1), SMALL, {"train": {"precision": "bf16"}, "model": {"dropout": 0.1}}),
    "alone, fp16": ((1, 1), {}, {"train": {"precision": "fp16"}}),
    "alone, two chunks, tied on one rank": (
        (1, 1), {"schedule": "interleaved", "virtual_stages": 2, **SMALL}, {"train": {"global_batch_size": 7}},
    ),
    "alone, batches that grow": (
        (1, 1), {}, {"train": {"micro_batch_size": 1, "batch_ramp": {"start": 5, "increment": 1, "samples": 16}}},
    ),
    "t2": ((2, 1), SMALL, {"model": {"kv_heads": 1}}),
    "t2 without sequence parallelism, bf16": (
        (2, 1), {"sequence_parallel": False}, {"train": {"precision": "bf16"}, "model": {"vocabulary_size": 257}},
    ),
    "p2 gpipe, untied": ((1, 2), {"schedule": "gpipe", **SMALL}, {"model": {"tie_embeddings": False}}),
    "p2 1f1b, one sequence less": ((1, 2), SMALL, {"train": {"global_batch_size": 15}}),
    "p2 1f1b, a window of recomputation": (
        (1, 2), {"recompute": "selective", "recompute_modules": ALL_MODULES, "recompute_keep": 1},
        {"model": {"dropout": 0.2}},
    ),
    "p2 interleaved": ((1, 2), {"schedule": "interleaved", "virtual_stages": 2}, {}),
    "p2 interleaved, groups that do not divide": (
        (1, 2), {"schedule": "interleaved", "virtual_stages": 2, **SMALL}, {"train": {"global_batch_size": 20}},
    ),
    "p2 zb-h1": ((1, 2), {"schedule": "zb-h1", **SMALL}, {}),
    "p2 zb-h1, bf16, every other layer recomputed": (
        (1, 2), {"schedule": "zb-h1", "recompute": "full", "recompute_every": 2, "recompute_keep": 1},
        {"train": {"precision": "bf16", "global_batch_size": 14}},
    ),
    "p2 zb-v, tied on one rank": ((1, 2), {"schedule": "zb-v", "virtual_stages": 2, **SMALL}, {}),
    "p2 zb-v, untied, one sequence less": (
        (1, 2), {"schedule": "zb-v", "virtual_stages": 2},
        {"model": {"tie_embeddings": False}, "train": {"global_batch_size": 13}},
    ),
    "p2, one layer and three": ((1, 2), {"stage_layers": [1, 3], **SMALL}, {}),
    "c2 ring with dropout": ((1, 1), {"context": 2, "context_method": "ring", **SMALL}, {"model": {"dropout": 0.1}}),
    "c2 all_to_all, bf16": (
        (1, 1), {"context": 2, "context_method": "all_to_all"}, {"train": {"precision": "bf16", "z_loss": 1e-3}},
    ),
    "c2 adapters with dropout": (
        (1, 1), {"context": 2}, {"train": {"lora": {"rank": 3, "dropout": 0.1}, "precision": "bf16"}},
    ),
    "t2 p2 zb-h1 with dropout": ((2, 2), {"schedule": "zb-h1"}, {"model": {"dropout": 0.1}}),
    "c2 experts": ((1, 1), {"context": 2, **SMALL}, {"model": {"family": "llama", "moe": EXPERTS}}),
    "t2 experts, bf16": (
        (2, 1), {"recompute": "full"}, {"model": {"family": "qwen", "moe": EXPERTS}, "train": {"precision": "bf16"}},
    ),
    "t2 p2 zb-v": ((2, 2), {"schedule": "zb-v", "virtual_stages": 2}, {"model": {"kv_heads": 1}}),
}  # fmt: skip


def job(corpus: str, case: Case, replicas: int, zero: int = 1, deterministic: str = "elastic") -> dict[str, Any]:
    """The job of a case with so many replicas. 16 sequences are 8 micro-batches, which 3 replicas cannot share
    evenly, and every step is clipped."""
    (tensor, pipeline), parallel, sections = case
    train = {
        "steps": STEPS,
        "global_batch_size": 16,
        "micro_batch_size": 2,
        "validate_every": 2,
        "validation_batches": 2,
        "deterministic": deterministic,
        "optimizer": {"learning_rate": 3e-3, "clip_norm": 0.5},
    }
    return document(
        model={"hidden_size": 16, "ffn_hidden_size": 40, **sections.get("model", {})},
        data={"paths": [corpus], "validation_fraction": 0.1},
        train={**train, **sections.get("train", {})},
        parallel={**axes((tensor, pipeline, replicas)), "zero": zero, **parallel},
    )


Outcome = tuple[list[Any], dict[str, torch.Tensor]]
"""Numbers of each step, and all weights that are trained and their moments in layout-free form."""


def outcome(trained: list[Trained], document: dict[str, Any]) -> Outcome:
    """What a run came to. All ranks must say the same, and hold the same where they hold the same element."""
    assert all(rank.statistics == trained[0].statistics for rank in trained)
    alone = parse_job_spec({**document, "parallel": {}})
    flat = Engine(alone, Comm(RankGrid(alone.layout), 0, torch.device("cpu"))).flat
    parameters = {slot.entry.name: slot.entry.parameter for slot in flat.slots}
    state = {}
    for kind in ("model", "exp_avg", "exp_avg_sq"):
        placed = [
            (name, where, values) for rank in trained for each, name, where, values in rank.rectangles if each == kind
        ]
        state |= {f"{kind}.{name}": values for name, values in assemble(parameters, placed).items()}
    validation = [row.get("validation_loss") for row in trained[0].rows]
    return [*trained[0].statistics, *validation], state


def train(ranks: Any, document: dict[str, Any], *arguments: Any) -> Outcome:
    """Train a job."""
    return outcome(ranks.run(parse_job_spec(document).layout, train_job, document, *arguments), document)


def same(a: Outcome, b: Outcome) -> bool:
    """Whether all bits are equal."""
    return a[0] == b[0] and all(torch.equal(values, b[1][name]) for name, values in a[1].items())


# Every number of replicas, each stage of ZeRO with an even and an uneven share.
REPLICAS_AND_ZERO = ((2, 0), (2, 1), (3, 0), (3, 1), (4, 1))
PARTS_OF_OTHERS = (
    "alone",
    "t2 without sequence parallelism, bf16",
    "p2 interleaved",
    "p2 zb-h1",
    "c2 ring with dropout",
    "c2 adapters with dropout",
    "t2 p2 zb-h1 with dropout",
)
FEW = [
    (name, (REPLICAS_AND_ZERO[at % 5],))
    for at, name in enumerate(name for name in CASES if name not in PARTS_OF_OTHERS)
]
"""One of them with each case that is no part of another, each of them with several cases."""


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *(pytest.param(name, sizes, id=name) for name, sizes in FEW),
        *(pytest.param(name, REPLICAS_AND_ZERO, id=f"{name}, all", marks=pytest.mark.soak) for name in CASES),
    ],
)
def test_the_number_of_replicas_changes_no_bit(ranks, corpus, name, sizes):
    case = CASES[name]
    (tensor, pipeline), _, _ = case
    until = (None, None, START, 2)  # the second is the first that begins with moments
    alone = train(ranks, job(corpus, case, 1), *until)
    assert alone[0][0] != alone[0][1], "the steps differ"
    few_ranks = min(8 // (tensor * pipeline), 4)
    for replicas, zero in dict.fromkeys((min(replicas, few_ranks), zero) for replicas, zero in sizes):
        assert same(train(ranks, job(corpus, case, replicas, zero), *until), alone), (replicas, zero)


ONE_STAGE = [name for name, ((_, stages), parallel, _) in CASES.items() if stages == 1 and "schedule" not in parallel]
SHARDED = ((2, 3), (3, 2), (3, 3), (4, 2))


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        *(pytest.param(name, (SHARDED[at % 4],), id=name) for at, name in enumerate(ONE_STAGE)),
        *(pytest.param(name, SHARDED, id=f"{name}, all", marks=pytest.mark.soak) for name in ONE_STAGE),
    ],
)
def test_gradients_and_weights_in_parts_change_no_elastic_bit(ranks, corpus, name, sizes):
    """Not of steps with several rounds of micro-batches, nor of one in which some replicas have none."""
    alone = train(ranks, job(corpus, CASES[name], 1))
    for replicas, zero in sizes:
        assert same(train(ranks, job(corpus, CASES[name], replicas, zero)), alone), (replicas, zero)


def test_layout_sums_change_bits_with_the_number_of_replicas(ranks, corpus):
    runs = [train(ranks, job(corpus, CASES["alone"], replicas, deterministic="layout")) for replicas in (1, 2, 3)]
    assert not same(runs[0], runs[1])
    assert not same(runs[1], runs[2])


@pytest.mark.parametrize(
    "name",
    [
        *("alone, fp16", "p2 interleaved", "c2 ring with dropout", "c2 adapters with dropout"),
        *(
            pytest.param(name, marks=pytest.mark.soak)
            for name in ("p2 zb-v, tied on one rank", "p2 1f1b, one sequence less", "t2")
        ),
    ],
)
def test_replicas_that_come_and_go_change_no_bit(ranks, corpus, tmp_path, name):
    case = CASES[name]
    (tensor, pipeline), _, _ = case
    most = 4 if tensor * pipeline < 4 else 2
    clean, numbers, resume = train(ranks, job(corpus, case, 1)), [], START
    for step, replicas in enumerate((most, most - 1, most), start=1):
        document = job(corpus, case, replicas, zero=step % 2 if pipeline > 1 else 3 - step % 3)
        document["checkpoint"] = {"every_steps": 1}
        curve, state = train(ranks, document, str(tmp_path), None, resume, step)
        numbers += curve[:1]
        resume = Resume("checkpoint", step, str(complete_checkpoints(tmp_path)[-1][0]))
    assert numbers == clean[0][:STEPS]
    assert same((numbers, state), (clean[0][:STEPS], clean[1]))


@pytest.mark.parametrize("replicas", [1, pytest.param(2, marks=pytest.mark.soak), 3])
def test_elastic_step_after_a_broken_off_one_has_the_same_bits(ranks, corpus, replicas):
    case = CASES["p2 zb-v, tied on one rank"]
    document = job(corpus, case, replicas)
    weights = random_weights(parse_job_spec(document), spread=0.03)
    windows = torch.randint(256, (16, 9), generator=torch.Generator().manual_seed(5))
    layout = parse_job_spec(document).layout
    clean = ranks.run(layout, run_steps, [document], [weights], [[windows]], torch.float32)
    broken = ranks.run(layout, broken_off, document, weights, windows)
    for rank, (expected,) in zip(broken, clean, strict=True):
        assert rank.losses == expected.losses
        assert rank.grad_norms == expected.grad_norms
        for (_, _, a), (_, _, b) in zip(rank.parameters, expected.parameters, strict=True):
            assert torch.equal(a, b)


def test_elastic_overflow_is_retried_alike_with_any_number_of_replicas(ranks, corpus):
    outcomes = []
    for replicas in (1, 3):
        document = job(corpus, CASES["alone, fp16"], replicas)
        weights = random_weights(parse_job_spec(document), spread=0.03)
        windows = torch.randint(256, (16, 9), generator=torch.Generator().manual_seed(5))
        layout = ParallelConfig(data=replicas)
        seen, statistics, _ = ranks.run(layout, attempts, document, weights, windows, 2.0**30)[0]
        assert len(seen) > 1, "the first scale overflows"
        outcomes.append(([scale for scale, _, _ in seen], statistics.loss, statistics.grad_norm))
    assert outcomes[0] == outcomes[1]


@pytest.mark.parametrize("kind", RUN_BY_ENGINE)
def test_schedules_finish_the_micro_batches_of_a_chunk_in_order(kind):
    virtual_stages = {"interleaved": 3, "zb-v": 2}.get(kind, 1)
    for stages in (1, 2, 3, 5):
        for count in range(stages, 6 * stages, stages):
            for actions in training_actions(kind, stages, virtual_stages, count):
                for half in ("backward", "backward_input", "backward_weight"):
                    for chunk in range(virtual_stages):
                        order = [a.micro_batch for a in actions if (a.kind, a.chunk) == (half, chunk)]
                        assert order in ([], list(range(count)))


@pytest.mark.parametrize("size", [2, 4, 14, 16, 30])
@pytest.mark.parametrize("parallel", [{}, {"data": 3}, {"schedule": "zb-v", "virtual_stages": 2}], ids=str)
def test_elastic_waiting_buffers_match_the_accounting(size, parallel):
    train = {"global_batch_size": max(size, 6), "micro_batch_size": 2, "deterministic": "elastic"}
    spec = parse_job_spec(document(train=train, parallel=parallel))
    windows, used = torch.randint(256, (max(size, 6), 9)), []
    for replica in range(spec.layout.data):
        engine = Engine(spec, Comm(RankGrid(spec.layout), replica, torch.device("cpu")))
        assert isinstance(engine.reduction, ElasticReduction)
        batch = micro_batches(spec, replica, windows)
        for _ in range(2):
            engine.reduction.begin(len(batch), len(windows))
            engine.pipeline.train(batch, 1.0)
        used.append(len(engine.reduction.waiting))
    assert waiting_gradient_buffers(spec) == max(used)


def test_elastic_gradient_buffers_are_absent_without_elastic_sums():
    assert waiting_gradient_buffers(parse_job_spec(document())) == 0


def test_row_squares_do_not_depend_on_neighbouring_rows():
    values = torch.randn(100 * 64, generator=torch.Generator().manual_seed(1))
    rows = row_squares(values)
    for first, last in ((0, 1), (3, 17), (99, 100)):
        assert torch.equal(row_squares(values[64 * first : 64 * last]), rows[first:last])
    exact = values.double().square().sum()
    assert sum_of_halves(rows.double()).item() == pytest.approx(exact.item(), rel=1e-6)


def test_row_squares_are_computed_a_few_rows_at_a_time(monkeypatch):
    values = torch.randn(100 * 64, generator=torch.Generator().manual_seed(1))
    whole = row_squares(values)
    monkeypatch.setattr(elastic_sums, "BLOCK_ROWS", 7)
    with MadeTensors() as made:
        by_blocks = row_squares(values)
    assert torch.equal(by_blocks, whole)
    assert made.most == 7 * 64


@pytest.mark.parametrize("length", [1, 2, 3, 7, 64, 1001])
def test_a_sum_of_halves_is_a_sum(length):
    values = torch.randn(length, dtype=torch.float64, generator=torch.Generator().manual_seed(length))
    assert sum_of_halves(values).item() == pytest.approx(values.sum().item(), rel=1e-12)
