"""Jobs on GPUs through the whole service, on a machine without any: Ray is told that there are some, and trainers
compute on the CPU. All else, from the queue to what each process sees, is as on GPUs. Ranks communicate over process
groups (gloo, as GPUs use NCCL), on slots too: whatever is killed, stopped or cut, who survives keeps its process."""

import json

import pytest

from manta.api.cli.service import stop_service
from tests.e2e.manta import EVERY_STEP, Manta

GPUS, SLOTS = 3, 4
OVER_GROUPS = {"MANTA_PROCESS_GROUPS_FOR_TESTS": "1"}
"""Environment of nodes whose ranks on slots communicate so."""
ON_CPU = {"MANTA_COMPUTE_ON_CPU_FOR_TESTS": "1"}
"""Environment of nodes whose trainers are to compute there, whatever Ray was told."""
STEPS, HELD_AT, ENDLESS = 60, 5, 10**5
PAIR, ALONE = (2, 1, 1), (1, 1, 1)
CPU = {"accelerator": "cpu"}


def on_gpus(count, type=None):
    """Environment of a service whose own node seems to have so many GPUs, of a type that Ray knows or not."""
    typed = {} if type is None else {f"accelerator_type:{type}": 1}
    return {**ON_CPU, "RAY_OVERRIDE_RESOURCES": json.dumps({"GPU": count, **typed})}


@pytest.fixture(scope="module")
def manta(tmp_path_factory, corpus):
    """A service whose node has three GPUs, and slots beside them."""
    environment = on_gpus(GPUS, "A100") | OVER_GROUPS
    running = Manta(tmp_path_factory.mktemp("manta"), corpus, SLOTS, environment=environment)
    yield running
    stop_service(running.home)


@pytest.fixture(autouse=True)
def everything_is_given_back(manta):
    """Every GPU and slot, whatever happened to who had it."""
    yield
    manta.end_all_jobs()
    free = {"total": GPUS, "free": GPUS, "slots_total": SLOTS, "slots_free": SLOTS}
    manta.until("all GPUs and slots", lambda: manta.client.cluster().totals == free)


@pytest.fixture(scope="module")
def clean(manta):
    """The curve of a pair of ranks to which nothing happens."""
    job = manta.submit(manta.spec(STEPS, PAIR))
    manta.until_state(job, "SUCCEEDED")
    return manta.curve(job)


def running(manta, layout, **sections):
    """A job that runs on and on, and leaves the cores to others."""
    job = manta.submit(manta.spec(ENDLESS, layout, **sections))
    manta.leave_room(job)
    manta.until_step(job, 1)
    return job


def devices(manta, job):
    """Of each rank, as users are told."""
    return [rank.device for rank in manta.client.ranks(job).items]


def seen(manta, job):
    """By rank which GPU each of its processes saw, one after the other, as they said themselves."""
    by_rank = {rank: [] for rank in range(len(devices(manta, job)))}
    for line in manta.client.logs(job).items:
        _, said, gpu = line.text.partition("computes on the CPU, as if on ")
        if said:
            by_rank[line.rank].append(gpu)
    return by_rank


def test_each_rank_gets_a_gpu_of_its_own_and_cpu_jobs_run_beside_them(manta):
    pair, alone, on_slots = running(manta, PAIR), running(manta, ALONE), running(manta, PAIR, resources=CPU)
    assert sorted(devices(manta, pair) + devices(manta, alone)) == ["GPU 0", "GPU 1", "GPU 2"]
    for job in (pair, alone):
        expected = {rank: [device] for rank, device in enumerate(devices(manta, job))}
        manta.until("all of them having said so", lambda job=job, expected=expected: seen(manta, job) == expected)
    assert (devices(manta, on_slots), seen(manta, on_slots)) == (["cpu", "cpu"], {0: [], 1: []})
    held = {"total": GPUS, "free": 0, "slots_total": SLOTS, "slots_free": SLOTS - 2}
    manta.until("all being held", lambda: manta.client.cluster().totals == held)  # Ray's own view lags a little
    assert manta.client.job(pair).spec["resources"]["accelerator"] == "gpu", "what auto is, was decided"


def test_job_that_does_not_fit_says_what_it_waits_for_and_runs_in_turn(manta):
    """On slots, of which there are four."""
    large = manta.spec(steps=10_000, layout=(1, 1, 2), resources=CPU)
    first = manta.submit(large)
    manta.leave_room(first)
    manta.until_step(first, 1)
    second = manta.submit({**large, "parallel": {"data": 3}, "train": {"steps": 2, "global_batch_size": 12}})
    third = manta.submit(manta.spec(steps=2, layout=ALONE, resources=CPU))
    needs = {"unit": "slots", "needed": 3, "available": 2, "free": 2}
    waiting = manta.until(  # Ray's own view lags a little
        "the second job waiting", lambda: (seen := manta.client.job(second)).queue.waiting_for == needs and seen
    )
    assert (waiting.state, waiting.reason) == ("QUEUED", "insufficient_slots")
    assert manta.client.job(third).state == "QUEUED"
    manta.client.cancel(third)
    manta.client.cancel(first)
    manta.until_state(second, "SUCCEEDED")


@pytest.mark.soak  # what is decided: tests/service/scheduler/test_order.py; one that gets its turn: the test before
def test_gpu_job_without_a_free_gpu_says_so_and_blocks_no_cpu_job(manta):
    first = running(manta, PAIR)
    second, on_slots = manta.submit(manta.spec(STEPS, PAIR)), manta.submit(manta.spec(STEPS, PAIR, resources=CPU))
    manta.until_state(on_slots, "SUCCEEDED")
    waiting = manta.client.job(second)
    assert (waiting.state, waiting.reason) == ("QUEUED", "insufficient_gpus")
    assert waiting.message == "needs 2 GPUs in groups of 2 on one node; 0 of 2 are free"
    manta.client.cancel(first)
    manta.until_state(second, "SUCCEEDED")


def test_gpu_job_larger_than_the_cluster_waits_without_blocking_others(manta, clean):
    job = manta.submit(manta.spec(STEPS, (2, 2, 1)))
    why = (
        "needs 4 GPUs in groups of 2 on one node; the cluster has 2; "
        "with resources.accelerator: cpu it would run on CPU slots, of which there are enough"
    )
    manta.until("why it waits", lambda: manta.client.job(job).message == why)  # Ray's own view lags a little
    assert (manta.client.job(job).state, manta.client.job(job).reason) == ("QUEUED", "insufficient_gpus")
    behind = manta.submit(manta.spec(STEPS, PAIR))
    manta.succeeded(behind, clean)


def test_stages_on_typed_gpus_wait_until_such_nodes_exist(manta, clean):
    typed = {"stage_layers": [1, 1], "stage_accelerators": ["A100", "A100"]}
    job = manta.submit(manta.spec(STEPS, (1, 2, 1), parallel=typed))
    manta.until_state(job, "SUCCEEDED")
    waiting = manta.submit(manta.spec(STEPS, (1, 2, 1), parallel=typed | {"stage_accelerators": ["A100", "V100"]}))
    why = "needs 1 GPU on nodes with V100; the cluster has 0"
    manta.until("why it waits", lambda: manta.client.job(waiting).message == why)


def test_elastic_gpu_job_starts_on_the_gpus_that_are_free(manta):
    job = running(manta, (1, 1, 4), elastic={"min_data": 1, "max_data": 4})
    assert sorted(devices(manta, job)) == ["GPU 0", "GPU 1", "GPU 2"]


def test_killed_gpu_rank_restarts_on_its_gpu_while_its_peers_keep_theirs(manta, clean, kill):
    job = manta.submit_held(manta.spec(STEPS, PAIR, checkpoint=EVERY_STEP), 1, HELD_AT)
    before = devices(manta, job)
    (tried,) = manta.events(job, "repair_self_test")
    assert tried.data["passed"], "so the peers keep their processes"
    kill(manta.pids(job)[1])
    manta.until_state(job, "SUCCEEDED")
    assert (manta.curve(job), devices(manta, job)) == (clean, before)
    assert seen(manta, job) == {0: [before[0]], 1: [before[1], before[1]]}
    (recovered,) = manta.events(job, "recovered")
    assert recovered.data["steps_redone"] <= 1
    ledger = manta.client.ledger(job)
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.wall_seconds)
    assert min(ledger.seconds[name] for name in ("compute", "re_form", "restore")) > 0.0


def test_rank_with_a_lost_agent_gets_exactly_one_gpu_again(manta, clean):
    job = manta.submit_held(manta.spec(STEPS, PAIR, checkpoint=EVERY_STEP), 0, HELD_AT)
    manta.agent_of(job, 1).kill()
    manta.until("the recovery", lambda: manta.events(job, "recovered"))
    held = devices(manta, job)
    assert len(set(held)) == 2
    manta.until("two being held", lambda: manta.client.cluster().totals["free"] == GPUS - 2)
    newest = [[device] for device in held]
    manta.until("both having said so", lambda: [gpus[-1:] for gpus in seen(manta, job).values()] == newest)
    manta.release_job(job, 0)
    manta.succeeded(job, clean)


def test_resized_job_gives_gpus_back_and_takes_some_again_and_keeps_its_processes(manta):
    job = running(manta, (1, 1, 3), elastic={"min_data": 1, "max_data": 3}, train={"global_batch_size": 12})
    before = manta.pids(job)
    manta.client.resize(job, 1)
    manta.until("the smaller size", lambda: len(manta.events(job, "first_step")) == 2)
    assert manta.pids(job) == before[:1]
    manta.until("what was given back", lambda: manta.client.cluster().totals["free"] == 2)
    manta.client.resize(job, 2)
    manta.until("the larger size", lambda: len(manta.events(job, "first_step")) == 3)
    assert manta.pids(job)[0] == before[0] and len(set(devices(manta, job))) == 2
    assert (manta.events(job, "rank_lost"), manta.client.job(job).restarts) == ([], 0)


def test_killed_stopped_and_cut_ranks_cost_no_other_process_and_no_bit(manta):
    document = manta.spec(30, (2, 1, 2), checkpoint=EVERY_STEP, resources=CPU)
    clean = manta.submit(document)
    manta.until_state(clean, "SUCCEEDED")
    with manta.starting(document) as (job, inject):
        inject("kill", 3, at_step=5, phase="backward")
        inject("stop", 1, at_step=11, phase="forward")
        inject("partition", 2, at_step=17, phase="reduction", seconds=0.2)
        inject("kill", 0, at_step=23, phase="optimizer")
    manta.until_state(job, "SUCCEEDED")
    said = [line.text for line in manta.client.logs(clean).items]
    assert sum("communicates over process groups" in text for text in said) == 4
    assert survivors(manta, job) == [[0, 1, 2], [0, 2, 3], [0, 1, 2, 3], [1, 2, 3]], manta.story(job)
    assert [event.rank for event in manta.events(job, "rank_hung")] == [1]
    assert manta.curve(job) == manta.curve(clean)
    assert manta.leftovers(job) == []


def survivors(manta, job):
    """Of each recovery, who kept its process."""
    return [event.data["kept"] for event in manta.events(job, "ranks_replaced")]
