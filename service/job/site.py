"""What the owners of jobs share."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from service.cluster.gangs import Gangs
from service.store import Store


@dataclass
class Site:
    """The database, the cluster and the home folder of one control plane."""

    store: Store
    gangs: Gangs
    ray: Any
    home: Path
    peaks: dict[str, float] = field(default_factory=dict)
    """Peak FLOP/s of one rank's device by node id."""
