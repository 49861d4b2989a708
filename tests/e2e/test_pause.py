"""A job that is paused keeps its state and nothing else, whatever happens meanwhile, and its curve does not show it."""

import shutil

from tests.e2e.manta import LONG_HOLD_SECONDS, MIDDLE, PAIR, suspended


def test_paused_job_resumes_after_losing_control_plane_and_memory(manta, pair_undisturbed):
    job = manta.submit_held(manta.spec(layout=PAIR), 1, seconds=LONG_HOLD_SECONDS)
    with suspended(manta.agents()):  # nobody hears of it yet
        assert manta.client.pause(job).state == "PAUSING"
        manta.kill_service()
        assert manta.trainers(), "nobody has given anything back yet"
    manta.start()
    paused = manta.until_state(job, "PAUSED")
    assert (paused.restarts, paused.generation) == (0, 1)
    assert MIDDLE < paused.step < len(pair_undisturbed)
    assert manta.keeps_only_snapshots(job)
    manta.until("the end of its agents' processes", lambda: not manta.agents())  # which Ray kills
    manta.until("free slots", lambda: (totals := manta.client.cluster().totals)["free"] == totals["total"])
    (saved,) = manta.client.checkpoints(job).items
    assert (saved.state, saved.step) == ("complete", paused.step)
    assert manta.events(job, "not_saved") == []
    shutil.rmtree(manta.paths.snapshot_folder(job))
    assert manta.client.resume(job).state in ("QUEUED", "STARTING")
    ended = manta.succeeded(job, pair_undisturbed)
    assert (ended.restarts, ended.generation) == (0, 2)
    resumed = manta.events(job, "generation_started")[-1].data
    assert resumed == {"resume_source": "checkpoint", "resume_step": paused.step}
    states = [event.data["to"] for event in manta.events(job, "state_changed")]
    assert states == ["STARTING", "RUNNING", "PAUSING", "PAUSED", "QUEUED", "STARTING", "RUNNING", "SUCCEEDED"]
    assert manta.client.ledger(job).seconds["redo"] == 0.0
    assert manta.leftovers(job) == []
