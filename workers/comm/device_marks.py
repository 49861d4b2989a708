"""Records events on a GPU where it waits for communication, to track its progress (`workers/liveness/device_trail.py`).
All CUDA events for this are created by `new_event`, which tests replace."""

from __future__ import annotations

from typing import Generic, TypeVar

import torch

from workers.comm.backend import Handle, Transfer
from workers.comm.grid import AXES, Axis
from workers.liveness.device_trail import DeviceEvent, DeviceTrail
from workers.liveness.progress import Progress
from workers.liveness.record_layout import NOBODY

H = TypeVar("H", bound=Handle)


def new_event() -> DeviceEvent:
    """An event of the current device, to be recorded on the current stream."""
    return torch.cuda.Event(enable_timing=True)


def trail_for(device: torch.device, progress: Progress) -> DeviceTrail | None:
    """Follows `device` and updates `progress`; None if the host does not run ahead of the device."""
    return DeviceTrail(new_event, progress) if device.type == "cuda" else None


class Marked(Generic[H]):
    """A communication whose wait is marked."""

    def __init__(self, work: H, trail: DeviceTrail, axis: Axis, number: int, peer: int = NOBODY, sending: bool = False):
        """`number` and the following: see `DeviceTrail.waits`."""
        self._work, self._trail, self._about = work, trail, (AXES.index(axis), number, peer, sending)

    def wait(self) -> None:
        self._trail.waits(*self._about)
        self._work.wait()
        self._trail.goes_on()


class MarkedTransfer(Marked[Transfer]):
    """A send under way."""

    @property
    def done(self) -> bool:
        return self._work.done
