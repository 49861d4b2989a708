"""Drawn layouts are allowed, of every kind, and the same for the same seed."""

from __future__ import annotations

from benchmarks.support.drawn_layouts import MAX_RANKS, draw_jobs
from manta.workers.spec.reading import parse_job_spec


def test_drawn_jobs_are_the_same_for_the_same_seed():
    assert draw_jobs(1, 20) == draw_jobs(1, 20)
    assert draw_jobs(1, 20) != draw_jobs(2, 20)


def test_drawn_jobs_are_valid_distinct_and_cover_every_kind_of_layout():
    jobs = draw_jobs(1234, 60)
    specs = [parse_job_spec(job) for job in jobs]
    assert len({spec.model_copy(update={"name": "job"}) for spec in specs}) == 60
    assert max(spec.layout.world_size for spec in specs) == MAX_RANKS
    assert {spec.layout.schedule for spec in specs} == {"1f1b", "gpipe", "interleaved", "zb-h1", "zb-v"}
    assert {spec.layout.recompute for spec in specs} == {"none", "selective", "full"}
    for size in ("tensor", "pipeline", "data", "zero"):
        assert len({getattr(spec.layout, size) for spec in specs}) > 1
