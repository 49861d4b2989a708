"""Programs of ranks whose optimizer's state comes to the device in slices so small that even tiny models have many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

from manta.workers.comm.comm import Comm
from manta.workers.parallel.data import offloaded

FEW = 192
"""Elements of a slice."""


def in_slices(comm: Comm, program: Callable[..., Any], *given: Any) -> Any:
    """The program, with such slices."""
    with mock.patch.object(offloaded, "SLICE_ELEMENTS", FEW):
        return program(comm, *given)
