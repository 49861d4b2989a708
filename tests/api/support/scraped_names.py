"""All names under which anything can be scraped from a service."""

from __future__ import annotations

from manta.api.metrics import control_plane, jobs, requests
from manta.api.metrics.families import Family

FAMILIES: tuple[Family, ...] = (*jobs.FAMILIES, *control_plane.FAMILIES)


def sample_names() -> set[str]:
    """As they are in queries: those of the process, which Prometheus' own client adds, aside."""
    of_histogram = {f"{requests.NAME}_{part}" for part in ("bucket", "count", "sum")}
    return {family.name for family in FAMILIES} | of_histogram
