"""No job's process groups would hang over NCCL, or bring one operation's bytes to another: the programs of all ranks
are recorded and replayed under NCCL's rules (`tests/workers/support/nccl_rules.py`)."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
import torch
from group_programs import Start, Sum
from job_cover import FACTORS, LAYOUTS, SCHEDULES, Row, covering_all, covering_most, job_of, pairs_of
from nccl_rules import findings, least_kernels_at_once
from recorded_jobs import Programs, recorded_job
from spoiled_programs import OF_EXPERTS, OF_LARGE_MODELS, SPOILERS, spoiled

from manta.workers.config import JobSpec, MoeConfig
from manta.workers.parallel.experts import layer as experts

PLAIN: Row = {name: values[0] for name, values in FACTORS.items()}
STEPS = 2


def row(schedule: str, layout: tuple[int, int, int], **more: object) -> Row:
    """A plain job of a schedule in a layout."""
    return PLAIN | {"schedule": schedule, "layout": layout, "sequence_parallel": layout[0] > 1} | more


def assert_sound(programs: Programs) -> None:
    """Nothing is wrong, and two operations at the same time suffice: one along the pipeline, and one that computing
    waits for."""
    assert [str(each) for each in findings(programs)] == []
    assert least_kernels_at_once(programs) <= 2


@pytest.mark.parametrize("covering", [covering_most, pytest.param(covering_all, marks=pytest.mark.soak)])
def test_jobs_of_all_kinds_keep_to_the_rules_of_nccl(corpus, tmp_path, covering):
    """Every schedule, family, stage of ZeRO, with validation or without, ... with most or all others, all ranks, with
    snapshots, checkpoints and comparisons of replicas."""
    for number, (_, job) in enumerate(covering(corpus)):
        assert_sound(recorded_job(job, 1, tmp_path / str(number)))


def test_jobs_checked_for_nccl_order_cover_every_schedule_layout_and_option(corpus):
    rows = [row for row, _ in covering_most(corpus)]
    together = {(row["schedule"], row["layout"]) for row in rows}
    assert {(schedule, layout) for schedule in SCHEDULES for layout in LAYOUTS if layout[1] > 1} <= together
    for name, values in FACTORS.items():
        assert {row[name] for row in rows} == set(values), name
    pairs = set().union(*(pairs_of(row) for row, _ in covering_all(corpus)))
    assert len(pairs & set().union(*map(pairs_of, rows))) >= 0.9 * len(pairs)


def test_recorded_nccl_operations_match_the_passes_of_the_job(corpus):
    """Three micro-batches a replica, of which each goes up the pipeline once and its gradient comes down once."""
    programs = recorded_job(job_of(row("1f1b", (1, 2, 2)), corpus, train={"validate_every": 0}), 1)
    operations = [each.what for each in programs[0] if isinstance(each, Start)]
    messages = Counter((what[0].sends, what[0].label) for what in operations if not isinstance(what, Sum))
    probes = {(True, ""): 1, (False, ""): 1}
    assert messages == probes | {
        (sends, f"{direction} of micro-batch {number}"): 1
        for sends, direction in ((True, "forward"), (False, "backward"))
        for number in range(3)
    }
    scattered = [what for what in operations if isinstance(what, Sum) and what.kind == "reduce_scatter"]
    assert len(scattered) == 2  # the head's one bucket, and the tail


def test_recorded_nccl_operations_without_a_pipeline_have_no_messages(corpus):
    programs = recorded_job(job_of(row("1f1b", (1, 1, 4)), corpus), 1)
    assert all(isinstance(each.what, Sum) for program in programs for each in program if isinstance(each, Start))


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_steps_repeated_after_bad_numbers_obey_the_nccl_order_rules(corpus, tmp_path, precision):
    """In fp16 a step is tried again with a smaller scale; else the job rolls back."""
    kind = row("1f1b", (2, 2, 2), precision=precision, rolls_back=True)
    job = job_of(kind, corpus, model={"layers": 2}, train={"steps": STEPS})
    assert_sound(recorded_job(job, STEPS, tmp_path, bad_agreements=(1,)))


@pytest.mark.parametrize(
    "schedule", [each if each == "interleaved" else pytest.param(each, marks=pytest.mark.soak) for each in SCHEDULES]
)
def test_parameter_gathers_beside_the_next_forward_obey_the_nccl_order_rules(corpus, tmp_path, schedule):
    beside = {"gather": "beside_forward", "bucket_megabytes": 0.01}
    job = job_of(row(schedule, (2, 2, 2), precision="bf16"), corpus, train={"steps": 2}, parallel=beside)
    assert_sound(recorded_job(job, 2, tmp_path))


def test_a_loss_of_a_few_tokens_at_a_time_keeps_to_the_rules(corpus):
    job = job_of(row("zb-v", (2, 2, 2)), corpus, train={"head_tokens": 3, "z_loss": 1e-4})
    assert_sound(recorded_job(job, 1))


@pytest.mark.parametrize(
    ("schedule", "layout", "more"),
    [
        ("zb-v", (2, 2, 2), {"family": "llama"}),
        ("1f1b", (4, 2, 1), {"sequence_parallel": False, "recompute": "full"}),
        *(
            pytest.param(schedule, (2, 2, 2), {"family": "qwen", "recompute": "selective"}, marks=pytest.mark.soak)
            for schedule in SCHEDULES
        ),
    ],
)
def test_chunked_forward_obeys_the_nccl_order_rules(corpus, tmp_path, schedule, layout, more):
    # A rank of four has no more than two rows.
    chunks = {"forward_chunks": 3 if layout[0] == 2 else 2}
    job = job_of(row(schedule, layout, **more), corpus, parallel=chunks)
    assert_sound(recorded_job(job, 1, tmp_path))


def test_the_interval_of_snapshots_is_agreed_upon_in_one_order(corpus, tmp_path):
    """After sixteen steps."""
    train = {"steps": 17, "validate_every": 0, "time_parts_every": 0, "global_batch_size": 2}
    job = job_of(row("1f1b", (1, 1, 2)), corpus, model={"layers": 1}, train=train)
    programs = recorded_job(job, 17, tmp_path)
    assert_sound(programs)
    lines = {each.line.partition(":")[0] for each in programs[0] if isinstance(each, Start)}
    assert "workers/snapshot/interval.py" in lines


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_injected_order_mistake_is_found_with_its_lines(corpus, schedule):
    """Of about ninety in all."""
    a_layer_each = {"layers": 2 * SCHEDULES[schedule]}
    programs = recorded_job(job_of(row(schedule, (2, 2, 2), zero=0), corpus, model=a_layer_each), 1)
    assert findings(programs) == []
    names = set()
    for name, with_mistake in spoiled(programs, seed=1):
        names.add(name)
        mistakes = findings(with_mistake)
        assert mistakes, name
        for each in mistakes:
            assert len(each.lines) >= 2 and all(line.startswith("workers/") for line in each.lines), (name, each)
    # With two chunks a rank sends the next one on the same way meanwhile.
    assert set(SPOILERS) - names <= {"an answer is waited for before the question"}


def test_every_order_mistake_of_hops_and_of_units_is_found(corpus):
    """With adapters, a ring and ZeRO 3 together."""
    kind = row("1f1b", (1, 1, 2), adapters=True, zero=3, context_method="ring", family="llama", precision="bf16")
    programs = recorded_job(job_of(kind, corpus, model={"layers": 3}), 1)
    assert_sound(programs)
    made = dict(spoiled(programs, 1, OF_LARGE_MODELS))
    assert set(made) == set(OF_LARGE_MODELS)
    for name, with_mistake in made.items():
        assert findings(with_mistake), name


def of_experts(schedule: str, layout: tuple[int, int, int], dispatch: str, corpus: str, **more: object) -> JobSpec:
    """A job whose experts are spread over two ranks."""
    moe = {"experts": 4, "per_token": 2, "ffn_hidden_size": 8, "shared": 1, "first_dense": 1}
    spread = {key: more.pop(key) for key in WHOLE if key in more}
    parallel = {"expert": 2, "expert_dispatch": dispatch, "bucket_megabytes": 0.01} | spread
    return job_of(row(schedule, layout, family="llama", **more), corpus, model={"moe": moe}, parallel=parallel)


WHOLE = {"expert": 4, "expert_tensor": 1}
"""Whole experts on each of two tensor ranks."""


def alike(scores_ne: torch.Tensor, bias_e: torch.Tensor | None, moe: MoeConfig) -> torch.Tensor:
    """A choice that depends on the token's number alone, so that recorded ranks, which do not hear of each other, know
    how much comes from others: these have as many tokens."""
    first_n1 = torch.arange(len(scores_ne)).unsqueeze(1)
    return ((first_n1 + torch.arange(moe.per_token)) % moe.experts).sort(1).values.to(torch.int32)


@pytest.mark.parametrize("dispatch", ["all_gather", "all_to_all"])
@pytest.mark.parametrize(
    ("schedule", "layout", "more"),
    [
        ("1f1b", (1, 1, 4), {"recompute": "full", "zero": 0}),
        ("zb-v", (1, 2, 2), {}),
        ("1f1b", (2, 2, 2), {"precision": "bf16", "recompute": "full"}),
        ("1f1b", (2, 1, 2), WHOLE),
        ("1f1b", (1, 1, 2), {"context_method": "ring"}),
        *(pytest.param(each, (2, 2, 2), {"recompute": "full"}, marks=pytest.mark.soak) for each in SCHEDULES),
    ],
)
def test_exchanges_of_experts_obey_the_nccl_order_rules(
    corpus, tmp_path, monkeypatch, schedule, layout, more, dispatch
):
    monkeypatch.setattr(experts, "chosen_experts", alike)
    programs = recorded_job(of_experts(schedule, layout, dispatch, corpus, **more), 1, tmp_path)
    assert_sound(programs)
    groups = {each.on.group.partition(" ")[0] for each in programs[0] if isinstance(each, Start)}
    assert "expert" in groups and ("expert_holders" in groups) == (layout[2] > 2 or "context_method" in more)


@pytest.mark.parametrize("dispatch", ["all_gather", "all_to_all"])
def test_whole_experts_of_tensor_ranks_send_as_many_bytes_as_their_ranks_need(corpus, monkeypatch, dispatch):
    """Each of four ranks has one expert, so that half of all tokens go to the other rank of the same tensor index."""
    monkeypatch.setattr(experts, "chosen_experts", alike)
    job = of_experts("1f1b", (2, 1, 2), dispatch, corpus, validates=False, **WHOLE)
    starts = [each for each in recorded_job(job, 1)[0] if isinstance(each, Start)]
    of_experts_alone = [each.what for each in starts if each.on.group.startswith("expert ")]
    sent = sum(each.bytes for each in of_experts_alone if isinstance(each, Sum))
    sent += sum(part.bytes for each in of_experts_alone if isinstance(each, tuple) for part in each if part.sends)
    tokens, hidden = job.model.sequence_length, job.model.hidden_size
    if dispatch == "all_gather":  # rows and factors, twice there and once back again in backward; and choices
        each = 5 * tokens * hidden * 4 + 2 * tokens * (3 * 4 + 4)
    else:  # and, of each choice, which row it is of; and how many there are for two ranks with an expert each
        each = tokens // 2 * (5 * hidden * 4 + 3 * 4 + 8) + 8 * (2 + 2)
    assert sent == job.micro_batches * len(job.model.expert_layers) * each + 4, "which were sent to connect the group"


@pytest.mark.parametrize("dispatch", ["all_gather", "all_to_all"])
def test_every_order_mistake_in_exchanges_of_experts_is_found(corpus, monkeypatch, dispatch):
    monkeypatch.setattr(experts, "chosen_experts", alike)
    programs = recorded_job(of_experts("zb-h1", (1, 2, 2), dispatch, corpus), 1)
    assert_sound(programs)
    made = dict(spoiled(programs, 1, OF_EXPERTS[dispatch]))
    assert set(OF_EXPERTS[dispatch]) - set(made) <= {"rows' numbers is not waited for"}, "which the host alone reads"
    for name, with_mistake in made.items():
        assert findings(with_mistake), name


def _large_jobs() -> list[tuple[str, tuple[int, int, int], int, str]]:
    """Schedule, layout, stage of ZeRO and family: on 16 ranks each with each, on 64 families take turns."""
    kinds = list(itertools.product(SCHEDULES, (1, 0), FACTORS["family"]))
    jobs = [(schedule, (2, 4, 2), zero, family) for schedule, zero, family in kinds]
    for number, layout in enumerate([(4, 4, 4), (2, 8, 4), (1, 8, 8), (8, 2, 4)]):
        jobs += [(schedule, layout, zero, family) for schedule, zero, family in kinds[number % 3 :: 3]]
    return jobs


@pytest.mark.soak
@pytest.mark.parametrize(("schedule", "layout", "zero", "family"), _large_jobs(), ids=str)
def test_jobs_on_up_to_64_ranks_keep_to_the_rules(corpus, schedule, layout, zero, family):
    model = {"heads": 8, "layers": layout[1] * SCHEDULES[schedule]}
    job = job_of(row(schedule, layout, zero=zero, family=family), corpus, model=model, train={"steps": STEPS})
    assert_sound(recorded_job(job, STEPS))


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
def test_order_mistakes_at_random_places_are_found(corpus, seed, tmp_path: Path):
    schedule = list(SCHEDULES)[seed % len(SCHEDULES)]
    programs = recorded_job(job_of(row(schedule, LAYOUTS[seed % 3], recompute="full"), corpus), 1, tmp_path)
    for name, with_mistake in spoiled(programs, seed):
        # One stream is enough where everything goes up before anything comes down.
        assert findings(with_mistake) or name == "both directions share a communicator", name
