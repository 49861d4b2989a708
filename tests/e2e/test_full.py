"""A disk and a shared memory that are really full: small file systems of their own, mounted for the test."""

from tests.e2e.conftest import PAIR
from tests.e2e.small_file_system import small_file_system


def test_full_disk_costs_checkpoints_but_never_the_last_one(manta, pair_undisturbed):
    job = manta.submit(manta.spec(layout=PAIR, checkpoint={"every_steps": 20}))
    folder = manta.paths.checkpoint_folder(job)
    with small_file_system(folder, 64):
        failed = manta.until("a failed checkpoint", lambda: manta.events(job, "checkpoint_failed"))
        manta.until("a second try of the last one", lambda: manta.events(job, "rank_lost"))
    ended = manta.until_state(job, "SUCCEEDED")
    assert "No space left on device" in failed[0].message
    assert manta.curve(job) == pair_undisturbed
    assert {event.data["kind"] for event in manta.events(job, "rank_lost")} == {"not_saved"}
    assert manta.client.checkpoints(job).items[0].step == ended.step


def test_full_shared_memory_is_one_clear_sentence(manta):
    full = manta.spec(model={"hidden_size": 64})
    with small_file_system(manta.paths.snapshot_folder("x").parent, 256):
        job = manta.submit(full)
        ended = manta.until_state(job, "FAILED")
    assert ended.reason == "no_shared_memory"
    assert manta.leftovers(job) == []
