"""How long single operations take on one accelerator. Pure Python.

A matrix product is cut into tiles, and each multiprocessor works on one tile at a time: the last wave of tiles need not
fill them all (tile and wave quantization). An operation takes the larger of its arithmetic and its memory traffic. On
a core of a CPU products of all shapes have about the same rate, and come after what they read and write.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from service.planner.hardware import Machine

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (128, 64, 0.75), (64, 64, 0.55))
"""Rows and columns of a product's tile, and the rate of its inner loop relative to the largest: small tiles read more
for what they compute."""


RAMP = 32
"""Elements of the inner dimension whose time filling and draining a tile's pipeline takes: one slice of a tile."""


GRAIN_BYTES = 2 * 4 * 32768
"""What an element-wise kernel moves for each thread at least: torch cuts none into pieces of fewer than 32,768
elements."""


@lru_cache(maxsize=100_000)
def product_seconds(machine: Machine, m: int, n: int, k: int, batch: int = 1, width: int = 2) -> float:
    """Seconds of `batch` products [m, k] x [k, n] of elements of `width` bytes."""
    if (core := machine.core) is not None:
        arithmetic = 2.0 * m * n * k * batch / core.product_rate(width)
        return (arithmetic + batch * width * (m * k + k * n + m * n) / core.memory) / machine.threads
    device, constants = machine.accelerator, machine.constants
    peak = device.peak_16bit if width == 2 else device.peak_fp32
    rate = peak * constants.product / device.multiprocessors
    arithmetic = min(
        -(-(-(-m // rows) * -(-n // columns) * batch) // device.multiprocessors)
        * (2.0 * rows * columns * (k + RAMP) / (rate * relative))
        for rows, columns, relative in TILES
    )
    traffic = batch * width * (m * k + k * n + m * n)
    return max(arithmetic, traffic / (device.memory_bandwidth * constants.memory))


def memory_seconds(machine: Machine, moved: float) -> float:
    """Seconds of an element-wise kernel that moves so many bytes."""
    if machine.core is not None:
        return moved / machine.core.memory / min(machine.threads, max(1.0, moved / GRAIN_BYTES))
    return moved / (machine.accelerator.memory_bandwidth * machine.constants.memory)


@dataclass
class Budget:
    """Where the seconds of a pass go."""

    products: float = 0.0
    """Linear layers."""
    attention: float = 0.0
    """Core attention: its products, softmax and dropout."""
    elementwise: float = 0.0
    """Norms, activations, dropout, residuals."""
    accumulation: float = 0.0
    """Adding gradients of micro-batches."""
    recomputation: float = 0.0
    """What is computed again."""
    tensor: float = 0.0
    """Communication of the tensor group that nothing hides."""
    host: float = 0.0
    """Waiting for the host to launch the next operation."""
    operations: int = 0

    @property
    def seconds(self) -> float:
        """Of the whole pass."""
        return self.device_seconds + self.host

    @property
    def device_seconds(self) -> float:
        """Without waiting for the host."""
        return self.products + self.attention + self.elementwise + self.accumulation + self.recomputation + self.tensor

    def wait_for_host(self, machine: Machine) -> Budget:
        """The same, at least as long as the host takes for all operations; where it is the host that computes, longer
        by that."""
        host = self.operations * machine.constants.host_seconds
        self.host = host if machine.core is not None else max(0.0, host - self.device_seconds)
        return self

    def plus(self, other: Budget, times: int = 1) -> Budget:
        """The sum of this and `times` the other."""
        return Budget(*(getattr(self, name) + times * getattr(other, name) for name in Budget.__dataclass_fields__))
