"""A job whose checkpoints cannot be read waits for them instead of beginning anew."""

import shutil

from tests.e2e.manta import LASTING, LONG_HOLD_SECONDS, MIDDLE, PAIR


@LASTING
def test_job_is_held_while_its_checkpoints_are_unreachable_and_then_resumes(manta, kill, seconds):
    """The folder is moved away, and then all that holds a newer state is lost: trainers and shared memory."""
    spec = manta.spec(layout=PAIR, checkpoint={"every_steps": MIDDLE})  # the next one is far away
    job = manta.submit_held(spec, 0, seconds=LONG_HOLD_SECONDS)
    saved = manta.until("a complete checkpoint", lambda: complete_checkpoints(manta, job))
    folder = manta.paths.checkpoint_folder(job)
    away = folder.rename(folder.parent / "away")
    shutil.rmtree(manta.paths.snapshot_folder(job))
    for pid in manta.pids(job):
        kill(pid)
    (held,) = manta.until("the job being held", lambda: manta.events(job, "held"))
    manta.endure(seconds)
    assert f"the folder {folder} is not there" in held.message and f"manta cancel {job}" in held.message
    assert (manta.client.job(job).state, complete_checkpoints(manta, job)) == ("RECOVERING", saved)
    away.rename(folder)
    manta.until_state(job, "SUCCEEDED")
    resumed = manta.events(job, "generation_started")[-1].data
    assert resumed == {"resume_source": "checkpoint", "resume_step": max(saved)}
    assert not manta.events(job, "state_lost")
    assert len(manta.events(job, "held")) == 1


def complete_checkpoints(manta, job):
    """Steps of the job's complete durable checkpoints."""
    return [row.step for row in manta.client.checkpoints(job).items if row.state == "complete"]
