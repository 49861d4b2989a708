"""All names under which anything can be scraped from a service."""

from __future__ import annotations

from manta.api.metrics import Family, control_plane, jobs

FAMILIES: tuple[Family, ...] = (*jobs.FAMILIES, *control_plane.FAMILIES)


def sample_names() -> set[str]:
    """As they are in queries: those of the process, which Prometheus' own client adds, aside."""
    of_histogram = {f"{control_plane.REQUEST_SECONDS}_{part}" for part in ("bucket", "count", "sum")}
    return {family.name for family in FAMILIES} | of_histogram
