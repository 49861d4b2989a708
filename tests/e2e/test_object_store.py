"""Checkpoints in an object store: a job that lost all else goes on from there, once the store answers."""

import shutil

import pytest

from tests.e2e.manta import LONG_HOLD_SECONDS, MIDDLE, PAIR, STEPS
from tests.e2e.test_held import complete_checkpoints


@pytest.mark.soak  # tests/workers/checkpoint/test_object_store.py shows the bits
def test_job_resumes_with_the_same_bits_from_an_object_store_alone(on_postgres, object_store, kill):
    """The store does not answer either while the trainers and the shared memory are lost: nothing is begun anew."""
    manta = on_postgres
    spec = manta.spec(layout=PAIR, checkpoint={"every_steps": MIDDLE, "keep": 1})
    undisturbed = manta.submit(spec)
    manta.until_state(undisturbed, "SUCCEEDED")
    job = manta.submit_held(spec, 0, seconds=LONG_HOLD_SECONDS)
    saved = manta.until("a complete checkpoint", lambda: complete_checkpoints(manta, job))
    object_store.meddle = lambda head: "cut"
    try:
        shutil.rmtree(manta.paths.snapshot_folder(job))
        for pid in manta.pids(job):
            kill(pid)
        (held,) = manta.until("the job being held", lambda: manta.events(job, "held"))
    finally:
        object_store.meddle = lambda head: None
    assert f"the folder s3://checkpoints/manta/{job}/checkpoints cannot be listed" in held.message
    manta.until_state(job, "SUCCEEDED")
    resumed = manta.events(job, "generation_started")[-1].data
    assert resumed == {"resume_source": "checkpoint", "resume_step": max(saved)}
    assert manta.curve(job) == manta.curve(undisturbed)
    (newest,) = (row for row in manta.client.checkpoints(job).items if row.state == "complete")
    assert (newest.step, newest.path.startswith(f"s3://checkpoints/manta/{job}/checkpoints/step-")) == (STEPS, True)
    assert not manta.paths.checkpoint_folder(job).exists()
