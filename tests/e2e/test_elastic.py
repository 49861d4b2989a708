"""A job changes its size while it runs, and its curve does not show it."""

import pytest

from manta.api.client import ApiError, calls

STEPS = 100_000
"""More than are trained: tests end their jobs when they have seen enough."""


def spec_of(manta, data):
    """A job that may run with one to three replicas, and says the same whatever their number."""
    train = {"deterministic": "elastic", "micro_batch_size": 2}
    return manta.spec(STEPS, (1, 1, data), train=train, elastic={"min_data": 1, "max_data": 3})


def test_resized_job_continues_with_the_bits_of_an_undisturbed_one(manta):
    job = manta.submit(spec_of(manta, 2))
    manta.leave_room(job)  # each step made while the size changes is made twice, below
    manta.until_step(job, 10)
    before = manta.pids(job)
    assert manta.client.resize(job, 1).id == job
    manta.until("one replica", lambda: manta.client.job(job).parallel["data"] == 1)
    manta.until_step(job, manta.client.job(job).step + 10)
    assert manta.pids(job) == before[:1], "those who stay keep their processes"
    manta.client.resize(job, 3)
    manta.until("three replicas", lambda: manta.client.job(job).parallel["data"] == 3)
    manta.until_step(job, manta.client.job(job).step + 10)
    manta.client.cancel(job)
    ended = manta.until_state(job, "CANCELLED")
    assert ended.restarts == 0
    assert ended.parallel["world_size"] == 3
    sources = [event.data["resume_source"] for event in manta.events(job, "generation_started")]
    assert sources == ["start", "memory", "memory"]
    assert manta.events(job, "rank_lost") == []
    assert manta.leftovers(job) == []
    curve = manta.curve(job)
    clean = manta.submit(spec_of(manta, 1))
    manta.until_step(clean, len(curve))
    manta.cancel(clean)
    assert curve == manta.curve(clean)[: len(curve)]


@pytest.mark.soak
@pytest.mark.parametrize(("place", "source"), [("node_memory", "memory"), ("off", "checkpoint")])
def test_resized_job_resumes_from_snapshots_or_checkpoints(manta, place, source):
    job = manta.submit(spec_of(manta, 2) | {"checkpoint": {"every_steps": 20, "snapshots": place}})
    manta.leave_room(job)
    manta.until("a complete checkpoint", lambda: manta.events(job, "checkpoint_saved"))
    manta.client.resize(job, 1)
    manta.until("one replica", lambda: manta.client.job(job).parallel["data"] == 1)
    manta.until_step(job, manta.client.job(job).step + 10)
    manta.cancel(job)
    assert [event.data["resume_source"] for event in manta.events(job, "generation_started")] == ["start", source]
    curve = manta.curve(job)
    assert [step for step, _, _ in curve] == list(range(1, len(curve) + 1)) and manta.leftovers(job) == []
    clean = manta.submit(spec_of(manta, 1))
    manta.until_step(clean, len(curve))
    manta.cancel(clean)
    assert curve == manta.curve(clean)[: len(curve)]


def test_agent_lost_while_the_size_changes_is_one_recovery(manta):
    spec = manta.spec(100_000, (1, 1, 2), elastic={"min_data": 1, "max_data": 2})
    job = manta.submit_held(spec, 1, 10)  # a rank that leaves
    agent = manta.agent_of(job, 0)
    agent.suspend()  # the size does not change before its rank has come to rest
    manta.client.resize(job, 1)
    manta.until_state(job, "RESIZING")
    agent.kill()
    manta.until("one replica", lambda: manta.client.job(job).parallel["data"] == 1)
    manta.until("the recovery", lambda: manta.events(job, "recovered"))
    manta.client.cancel(job)
    ended = manta.until_state(job, "CANCELLED")
    assert ended.restarts == 1
    assert len(manta.events(job, "recovered")) == len(manta.client.recoveries(job).items) == 1
    steps = [step for step, _, _ in manta.curve(job)]
    assert steps == list(range(1, len(steps) + 1))
    assert manta.leftovers(job) == []


@pytest.mark.soak  # on GPUs: test_gpus.py; what is decided: tests/service/scheduler/test_order.py
def test_elastic_job_starts_with_as_many_replicas_as_fit(manta):
    job = manta.submit(manta.spec(10, (2, 2, 3), elastic={"min_data": 1, "max_data": 3}))
    ended = manta.until_state(job, "SUCCEEDED")
    assert (ended.parallel["data"], ended.restarts, ended.generation) == (2, 0, 1)


def test_resize_of_a_job_outside_its_bounds_is_refused(manta):
    job = manta.submit(manta.spec(STEPS, (1, 1, 2)))
    try:
        manta.client.resize(job, 4)
    except ApiError as error:
        assert (error.problem.status, error.problem.code) == (422, "size_out_of_bounds")
        assert "elastic.min_data..max_data is 2..2, so its size is fixed" in error.problem.detail
    else:
        raise AssertionError("it was not refused")
    manta.cancel(job)


def test_job_with_spread_experts_grows_and_shrinks_by_whole_expert_groups(manta):
    moe = {"experts": 4, "per_token": 2, "ffn_hidden_size": 16, "balance": {"bias_rate": 0.001}}
    document = manta.spec(STEPS, (1, 1, 2), model={"family": "llama", "moe": moe}, elastic={"max_data": 4})
    document["parallel"]["expert"] = 2
    job = manta.submit(document)
    manta.leave_room(job)
    manta.until_step(job, 5)
    with pytest.raises(ApiError, match=r"in steps of 2, whole groups of parallel\.expert"):
        manta.client.resize(job, 3)
    for data in (4, 2):
        manta.client.resize(job, data)
        manta.until(f"{data} replicas", lambda data=data: manta.client.job(job).parallel["data"] == data)
        manta.until_step(job, manta.client.job(job).step + 5)
    assert [rank.expert for rank in manta.client.ranks(job).items] == [0, 1]
    counted = manta.until(
        "tokens of experts", lambda: (found := manta.client.send(calls.expert_tokens(job))).step and found
    )
    assert [sum(tokens) for tokens in counted.tokens] == [8 * 32 * 2] * 2
    manta.cancel(job)
    curve = manta.curve(job)
    assert [step for step, *_ in curve] == list(range(1, len(curve) + 1)) and manta.leftovers(job) == []
