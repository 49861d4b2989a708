"""Steps with bad numbers: what each policy does, on several layouts and through restarts."""

import math

import pytest
from engine_specs import axes, document
from number_programs import train

from manta.workers.checkpoint.catalog import complete_checkpoints
from manta.workers.config import ParallelConfig
from manta.workers.protocol.messages import Resume

LAYOUTS = ((2, 1, 1), (1, 2, 1), (1, 1, 2))
BAD_STEP, STEPS, BATCH = 8, 12, 8
BAD_SAMPLE = BATCH * (BAD_STEP - 1) + 3
OFFENDING = [[BATCH * (BAD_STEP - 1), BATCH * BAD_STEP]]
ROLL_BACK = {"nonfinite": "roll_back", "roll_back_steps": 3}
NAN = {BAD_SAMPLE: math.nan}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text("to be or not to be, that is the question. " * 60, encoding="utf-8")
    return str(path)


def job(corpus, layout=(1, 1, 1), **recovery):
    checkpoint = {"every_steps": 0, "snapshot_every_steps": 1}
    train = {"steps": STEPS, "micro_batch_size": 4, "optimizer": {"learning_rate": 3e-3, "warmup_steps": 2}}
    return document(
        data={"paths": [corpus]}, train=train, parallel=axes(layout), recovery=recovery, checkpoint=checkpoint
    )


def run(ranks, spec, *arguments):
    return ranks.run(ParallelConfig(**spec["parallel"]), train, spec, *arguments)


@pytest.fixture(scope="module")
def whole(ranks, corpus):
    """A job of two replicas that rolls back and is never interrupted."""
    return run(ranks, job(corpus, (1, 1, 2), **ROLL_BACK), NAN)


def last_rows(rows):
    """By step, the row that came last, without what a clock says."""
    return {row["step"]: (row["loss"], row["grad_norm"], row["learning_rate"], row["tokens"]) for row in rows}


@pytest.mark.parametrize("layout", [pytest.param(LAYOUTS[0], marks=pytest.mark.soak), *LAYOUTS[1:]])
def test_rolled_back_job_has_the_bits_of_one_that_never_saw_those_samples(ranks, corpus, layout):
    spec = job(corpus, layout, **ROLL_BACK)
    by_rank = run(ranks, spec, NAN)
    (event,) = by_rank[0].events
    assert (event["type"], event["step"], event["back_to"]) == ("rolled_back", BAD_STEP, 3)
    assert event["samples"] == OFFENDING
    assert (event["first_sample"], event["last_sample"]) == (56, 63)
    assert by_rank[0].steps == [*range(1, BAD_STEP), 3, *range(4, STEPS + 1)]
    assert [row["step"] for row in by_rank[0].rows] == [*range(1, BAD_STEP), *range(4, STEPS + 1)]
    again = {row["step"]: row["loss"] for row in by_rank[0].rows[: BAD_STEP - 1]}
    done_again = {row["step"]: row["loss"] for row in by_rank[0].rows[BAD_STEP - 1 :]}
    assert [done_again[step] for step in range(4, BAD_STEP)] == [again[step] for step in range(4, BAD_STEP)]

    knowing = run(ranks, spec, None, None, Resume(), (event,))
    assert knowing[0].events == []
    for rank, other in zip(by_rank, knowing, strict=True):
        assert rank.statistics == other.statistics
        assert (rank.parameters == other.parameters).all()
    assert last_rows(by_rank[0].rows) == last_rows(knowing[0].rows)
    alone = run(ranks, job(corpus, **ROLL_BACK), NAN)[0]
    for step, (loss, _) in alone.statistics.items():
        assert by_rank[0].statistics[step][0] == pytest.approx(loss, rel=1e-5)


def test_passing_over_changes_the_curve_from_that_step_on_and_not_before(ranks, corpus):
    spec = job(corpus, **ROLL_BACK)
    clean, rolled = run(ranks, spec)[0], run(ranks, spec, NAN)[0]
    same = [step for step in range(1, STEPS + 1) if clean.statistics[step] == rolled.statistics[step]]
    assert same == list(range(1, BAD_STEP))


def test_roll_back_policies_change_no_bit_without_bad_numbers(ranks, corpus):
    spike = {"policy": "roll_back", "window": 5}
    careful = run(ranks, job(corpus, (1, 1, 2), nonfinite="roll_back", spike=spike))
    plain = run(ranks, job(corpus, (1, 1, 2)))
    assert careful[0].statistics == plain[0].statistics
    assert careful[0].events == plain[0].events == []


@pytest.mark.parametrize(
    ("layout", "policy"),
    [
        *(((1, 1, 2), "skip"), ((1, 2, 1), "roll_back"), ((1, 1, 2), "report")),
        *(
            pytest.param(layout, policy, marks=pytest.mark.soak)
            for layout, policy in (((1, 2, 1), "skip"), ((1, 1, 2), "roll_back"), ((1, 2, 1), "report"))
        ),
    ],
)
def test_spike_is_detected_before_the_update(ranks, corpus, layout, policy):
    spike = {"policy": policy, "window": 5}
    spec = job(corpus, layout, spike=spike, roll_back_steps=3)
    by_rank = run(ranks, spec, {BAD_SAMPLE: 1e7})
    kinds = [(event["type"], event["step"]) for event in by_rank[0].events]
    expected_kinds = {"skip": ["spike", "step_skipped"], "roll_back": ["spike", "rolled_back"], "report": ["spike"]}[
        policy
    ]
    assert kinds == [(kind, BAD_STEP) for kind in expected_kinds]
    assert all(event["samples"] == OFFENDING for event in by_rank[0].events)
    assert "a gradient norm above the" in by_rank[0].events[0]["message"]
    if policy == "roll_back":
        knowing = run(ranks, spec, None, None, Resume(), (by_rank[0].events[1],))
        assert by_rank[0].statistics == knowing[0].statistics
    else:
        updated = run(ranks, job(corpus, layout), {BAD_SAMPLE: 1e7})[0]
        assert by_rank[0].statistics[BAD_STEP] == updated.statistics[BAD_STEP]
        after = [step for step in range(1, STEPS + 1) if by_rank[0].statistics[step] != updated.statistics[step]]
        assert after == ([] if policy == "report" else list(range(BAD_STEP + 1, STEPS + 1)))


@pytest.mark.parametrize(("recovery", "harm", "error"), [
    ({"nonfinite": "fail"}, math.nan, "NonFiniteError: step 8 has loss .* (samples 56 to 63); nothing was updated"),
    ({"spike": {"policy": "fail", "window": 5}}, 1e7, "SpikeError: step 8 has loss .*recovery.spike.policy to skip"),
])  # fmt: skip
def test_fail_policy_names_the_samples(ranks, corpus, recovery, harm, error):
    from rank_processes import RankFailure

    kind = error.partition(":")[0]
    with pytest.raises(RankFailure, match=kind) as raised:
        run(ranks, job(corpus, (1, 1, 2), **recovery), {BAD_SAMPLE: harm})
    assert "(samples 56 to 63)" in str(raised.value) and "nothing was updated" in str(raised.value)


def test_job_that_rolls_back_too_often_fails(ranks, corpus):
    from rank_processes import RankFailure

    with pytest.raises(RankFailure, match=r"the job has rolled back 2 times \(recovery.max_roll_backs\)"):
        run(ranks, job(corpus, **ROLL_BACK, max_roll_backs=2), dict.fromkeys(range(BAD_SAMPLE, 200), math.nan))


def test_two_roll_backs_skip_two_batches(ranks, corpus):
    spec = job(corpus, (1, 1, 2), **ROLL_BACK)
    by_rank = run(ranks, spec, {**NAN, BAD_SAMPLE + BATCH: math.nan})
    assert [event["samples"] for event in by_rank[0].events] == [OFFENDING, [[64, 72]]]
    assert [event["step"] for event in by_rank[0].events] == [BAD_STEP, BAD_STEP]
    knowing = run(ranks, spec, None, None, Resume(), tuple(by_rank[0].events))
    assert by_rank[0].statistics == knowing[0].statistics


def test_ranks_share_a_snapshot_at_every_moment_of_a_roll_back(ranks, corpus, tmp_path):
    spec = job(corpus, (1, 1, 2), **ROLL_BACK)
    by_rank = run(ranks, spec, NAN, None, Resume(), (), str(tmp_path))
    assert by_rank[0].snapshots == by_rank[1].snapshots
    back = by_rank[0].steps.index(3, BAD_STEP - 1)
    assert by_rank[0].snapshots[back - 1] == [6, 7]
    assert by_rank[0].snapshots[back] == [3], "the steps that were undone are gone"
    assert by_rank[0].snapshots[back + 1] == [3, 4]
    assert by_rank[0].copies[back - 1] == [3, 6] and by_rank[0].copies[back] == [3]


@pytest.mark.parametrize("known", [True, False])
def test_restart_after_a_roll_back_continues_with_the_same_samples(ranks, corpus, whole, tmp_path, known):
    """`known`: whether the control plane has heard of it."""
    spec = job(corpus, (1, 1, 2), **ROLL_BACK)
    first = run(ranks, spec, NAN, BAD_STEP - 1, Resume(), (), str(tmp_path))  # then rolls back:
    assert first[0].events == []
    second = run(ranks, spec, NAN, BAD_STEP, Resume("snapshot", BAD_STEP - 1), (), str(tmp_path))
    (event,) = second[0].events
    assert event["back_to"] == BAD_STEP - 1, "new processes reach back no further"

    third = run(ranks, spec, NAN, BAD_STEP + 1, Resume("snapshot", BAD_STEP), (event,) if known else (), str(tmp_path))
    kinds_again = [each["type"] for each in third[0].events]
    assert kinds_again == ([] if known else ["rolled_back"]), "what was not heard is told again"
    merged = {**first[0].statistics, **second[0].statistics, **third[0].statistics}
    assert merged == {step: whole[0].statistics[step] for step in merged}


def test_restart_in_the_middle_of_redone_steps(ranks, corpus, whole, tmp_path):
    """Ranks that end while they redo steps go on from the newest of these, with the samples still skipped."""
    spec = job(corpus, (1, 1, 2), **ROLL_BACK)
    saved = {**spec, "checkpoint": {"every_steps": 5, "snapshot_every_steps": 1}}
    by_rank = run(ranks, saved, NAN, None, Resume(), (), str(tmp_path / "shared"), str(tmp_path / "durable"))
    kinds = [(event["type"], event["step"]) for event in by_rank[0].events if event["type"] != "checkpoint_saving"]
    assert ("rolled_back", BAD_STEP) in kinds
    assert ("checkpoint_deleted", 3) in kinds, "the checkpoint of step 5 was undone, and made again"
    assert [manifest.step for _, manifest in complete_checkpoints(tmp_path / "durable")] == [5, 10, 12]
    for path, manifest in complete_checkpoints(tmp_path / "durable"):
        resume = Resume("checkpoint", manifest.step, str(path))
        rest = run(ranks, saved, NAN, None, resume, (), str(tmp_path / "other"), str(tmp_path / "more"))
        assert rest[0].statistics == {s: whole[0].statistics[s] for s in range(manifest.step + 1, STEPS + 1)}
        assert [event["step"] for event in rest[0].events if event["type"] == "rolled_back"] == [BAD_STEP]


def test_snapshot_from_before_a_known_roll_back_resumes_without_the_skipped_samples(ranks, corpus, whole, tmp_path):
    """From a checkpoint of an undone step, or of one before: the samples are skipped without being seen again."""
    spec = job(corpus, (1, 1, 2), **ROLL_BACK)
    (event,) = whole[0].events
    run(ranks, spec, None, BAD_STEP - 2, Resume(), (), str(tmp_path))
    rest = run(ranks, spec, NAN, None, Resume("snapshot", BAD_STEP - 2), (event,), str(tmp_path))
    assert rest[0].events == []
    assert rest[0].statistics == {s: whole[0].statistics[s] for s in range(BAD_STEP - 1, STEPS + 1)}


def test_spike_history_survives_a_restart(ranks, corpus, tmp_path):
    """A spike right after a restart is judged as without it."""
    spec = job(corpus, (1, 1, 2), spike={"policy": "skip", "window": 5})
    whole = run(ranks, spec, {BAD_SAMPLE: 1e7})
    first = run(ranks, spec, {BAD_SAMPLE: 1e7}, BAD_STEP - 1, Resume(), (), str(tmp_path))
    rest = run(ranks, spec, {BAD_SAMPLE: 1e7}, None, Resume("snapshot", BAD_STEP - 1), (), str(tmp_path))
    assert {**first[0].statistics, **rest[0].statistics} == whole[0].statistics
    assert [event["type"] for event in rest[0].events] == ["spike", "step_skipped"]


def test_roll_back_cures_a_fault_that_happens_once(ranks, corpus):
    """Of a fault of the machine nothing stays behind but the samples that were skipped."""
    spec = job(corpus, (1, 1, 2), **ROLL_BACK)
    by_rank = run(ranks, spec, NAN, None, Resume(), (), None, None, True)
    knowing = run(ranks, spec, None, None, Resume(), tuple(by_rank[0].events))
    assert by_rank[0].statistics == knowing[0].statistics
