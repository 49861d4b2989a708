"""A disk and a shared memory that are really full: small file systems of their own, mounted for the test."""

import contextlib

from tests.e2e.manta import PAIR
from tests.e2e.small_file_system import small_file_system


def test_full_disk_fails_intermediate_checkpoints_but_the_last_one_is_retried(manta, pair_undisturbed):
    with contextlib.ExitStack() as disk:
        with manta.starting(manta.spec(layout=PAIR, checkpoint={"every_steps": 20})) as (job, _):
            disk.enter_context(small_file_system(manta.paths.checkpoint_folder(job), 64))
        failed = manta.until("a failed checkpoint", lambda: manta.events(job, "checkpoint_failed"))
        manta.until("a second try of the last one", lambda: manta.events(job, "rank_lost"))
    ended = manta.until_state(job, "SUCCEEDED")
    assert "No space left on device" in failed[0].message
    assert manta.curve(job) == pair_undisturbed
    assert {event.data["kind"] for event in manta.events(job, "rank_lost")} == {"not_saved"}
    assert manta.client.checkpoints(job).items[0].step == ended.step


def test_job_that_finds_shared_memory_full_fails_with_advice(manta):
    full = manta.spec(model={"hidden_size": 64}, checkpoint={"snapshots": "shared_memory"})
    with small_file_system(manta.paths.snapshot_folder("x").parent, 256):
        job = manta.submit(full)
        ended = manta.until_state(job, "FAILED")
    assert ended.reason == "no_shared_memory"
    assert "checkpoint.snapshots to node_memory or off" in ended.message
    assert manta.leftovers(job) == []


def test_snapshots_move_to_daemon_memory_when_shared_memory_is_too_small(manta, kill):
    def ended(place):
        job = manta.submit_held(manta.spec(layout=PAIR, model={"hidden_size": 64}, checkpoint={"snapshots": place}), 1)
        kill(manta.pids(job)[1])
        manta.until_state(job, "SUCCEEDED")
        return job

    with small_file_system(manta.paths.snapshot_folder("x").parent, 256):
        outside = ended("auto")
    inside = ended("shared_memory")
    for job in (outside, inside):
        (recovered,) = manta.events(job, "recovered")
        assert "snapshot" in recovered.data["source"] and manta.leftovers(job) == []
    said = [event.data["ranks"] for event in manta.events(outside, "snapshots_in_node_memory")]
    assert said == [2, 2] and manta.events(inside, "snapshots_in_node_memory") == []
    assert manta.curve(outside) == manta.curve(inside)
