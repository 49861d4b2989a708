"""Whoever looks at a series of which no bins were made has them made."""

import threading

from manta.api.routes import metrics as route
from manta.service.store import jobs, metric_bins


def test_series_from_an_older_release_gets_its_bins_on_first_read(service, monkeypatch):
    job, made, some = service.submit()["id"], threading.Event(), route._catch_up_batch

    def noted(session, job_id):
        more = some(session, job_id)
        if not more:
            made.set()
        return more

    monkeypatch.setattr(route, "_catch_up_batch", noted)
    monkeypatch.setattr(metric_bins, "BATCH_STEPS", 64)
    with monkeypatch.context() as patch:
        patch.setattr(metric_bins, "update", lambda *arguments: None)
        service.report(job, [{"step": step, "loss": float(step == 99)} for step in range(1, 200)])
    path = f"/v1/jobs/{job}/metrics?max_points=10&names=loss"
    before = service.http.get(path).json()
    assert made.wait(20)
    with service.store.read() as session:
        assert jobs.get(session, job).binned_until >= 200 - metric_bins.SMALLEST
    after = service.http.get(path).json()
    assert before == after and 99 in after["steps"]
