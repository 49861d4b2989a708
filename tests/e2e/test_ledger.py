"""Every second of a real job is accounted for, those of a failure too."""

import pytest


def test_clean_job_is_accounted_for_to_the_thousandth(manta):
    job = manta.submit(manta.spec(checkpoint={"every_steps": 20}))
    ended = manta.until_state(job, "SUCCEEDED")
    ledger = manta.client.ledger(job)
    assert ledger.closed
    assert (ledger.began_at, ledger.until) == (ended.created_at, ended.finished_at)
    assert sum(ledger.seconds.values()) == pytest.approx(ledger.wall_seconds, rel=1e-3)
    assert ledger.seconds["redo"] == ledger.seconds["restore"] == ledger.seconds["pause"] == 0
    assert ledger.seconds["snapshot_stall"] > 0 and ledger.seconds["checkpoint_stall"] > 0
    assert ended.goodput == ledger.goodput
    told = manta.client.metrics(job, names=["step_seconds"], max_points=10_000).series["step_seconds"]
    stalls = sum(ledger.seconds[name] for name in ("compute", "data_wait", "snapshot_stall", "checkpoint_stall"))
    assert stalls >= 0.9 * sum(told)
    assert manta.client.recoveries(job).items == []
