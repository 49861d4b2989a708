"""With how many threads a job computes is decided at its first start, and a repair changes no bit of it."""

from manta.workers.system.resources import usable_cores
from tests.e2e.manta import MIDDLE


def test_killed_rank_resumes_with_the_original_thread_count(manta):
    """Tensors are large enough to be cut among threads: torch does that above 32,768 elements."""
    model = {"hidden_size": 64, "sequence_length": 64, "dropout": 0.1}
    described = manta.spec(MIDDLE + 10, (1, 1, 1), model=model, train={"micro_batch_size": 8, "validate_every": 5})
    with manta.starting(described) as (job, inject):
        inject("kill", 0, at_step=MIDDLE, phase="backward")
    clean = manta.submit(described)
    assert manta.until_state(job, "SUCCEEDED").restarts == 1
    manta.until_state(clean, "SUCCEEDED")
    assert manta.curve(job) == manta.curve(clean)
    validation = [manta.client.metrics(each, ["validation_loss"]).series for each in (job, clean)]
    assert validation[0] == validation[1]
    assert {manta.client.job(each).spec["resources"]["threads"] for each in (job, clean)} == {usable_cores()}
