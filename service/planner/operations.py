"""How long single operations take on one accelerator, and one micro-batch through each part of a model, as budgets.
Pure Python.

A matrix product is divided into tiles, and each multiprocessor works on one tile at a time: the last wave of tiles need
not fill them all (tile and wave quantization). An operation takes the larger of its arithmetic and its memory traffic.
On a CPU core, products of all shapes have about the same rate, and arithmetic and memory traffic add up. On a
calibrated GPU every kernel has a fixed cost, and products with few tiles may split their inner dimension too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from manta.service.planner.hardware import Machine

TILES = ((256, 128, 1.0), (128, 256, 1.0), (128, 128, 0.92), (128, 64, 0.75), (64, 64, 0.55))
"""Rows and columns of a product's tile, and the rate of its inner loop relative to the largest: small tiles read more
per result."""


RAMP = 32
"""Time to fill and drain a tile's pipeline, in elements of the inner dimension: one slice of a tile."""


WIDE = 4
"""Bytes of an fp32 element."""
SOFTMAX = 64
"""Cost of the softmax within fused attention, expressed as additional width of each head in its products: a
multiprocessor of Hopper does 16 exponentials or 4096 FLOP per clock."""
ATTENTION_BACKWARD = 0.74
"""Rate of the backward relative to the forward (arXiv:2407.08608: 550 and 740 TFLOP/s)."""
ROWS = 128
"""Queries for which a multiprocessor computes attention at a time; of the scores on the diagonal it computes all."""
SPLITS, MIN_SPLIT = (1, 2, 4, 8), 512
"""Numbers of parts that the inner dimension of a product may be split into, and the fewest elements of a part."""

ROW_BYTES = 16
"""Alignment in bytes of matrix rows with which tensor cores read at full rate."""
MISALIGNED = {8: 0.6, 4: 0.6, 2: 0.3}
"""Rate of 16-bit products whose rows are aligned to only this many bytes, relative to aligned ones: measured on A100s
for arXiv:2401.14489 (github.com/EleutherAI/cookbook, sizing/results of commit 27dff48): 51,138 columns of logits reach
0.55 of what 51,136 do, odd numbers of them 0.29; attention over heads of 130 to 510 elements 0.59 to 0.77."""

GRAIN_BYTES = 2 * 4 * 32768
"""Least bytes that an element-wise kernel moves per thread: torch does not split work into pieces of fewer than 32,768
elements."""


@lru_cache(maxsize=100_000)
def product_seconds(
    machine: Machine, m: int, n: int, k: int, batch: int = 1, width: int = 2, unit: int = ROW_BYTES
) -> float:
    """Seconds of `batch` products [m, k] x [k, n] of elements of `width` bytes; `unit`: elements that the rows of all
    three matrices, as they lie in memory, are multiples of."""
    if (core := machine.core) is not None:
        arithmetic = 2.0 * m * n * k * batch / core.product_rate(width)
        return (arithmetic + batch * width * (m * k + k * n + m * n) / core.memory) / machine.threads
    device, constants = machine.accelerator, machine.constants
    if machine.gpu is not None:
        return _measured_product(machine, m, n, k, batch, width, unit)
    rate = product_rate(machine, width) * _of_rows(unit, width) / device.multiprocessors
    arithmetic = min(
        -(-(-(-m // rows) * -(-n // columns) * batch) // device.multiprocessors)
        * (2.0 * rows * columns * (k + RAMP) / (rate * relative))
        for rows, columns, relative in TILES
    )
    traffic = batch * width * (m * k + k * n + m * n)
    return max(arithmetic, traffic / (device.memory_bandwidth * constants.memory))


def product_rate(machine: Machine, width: int) -> float:
    """FLOP/s of products of elements of `width` bytes that fill all multiprocessors of an accelerator. If it has none
    in 8 bits, it uses those in 16."""
    device = machine.accelerator
    peak = {1: device.peak_8bit or device.peak_16bit, 2: device.peak_16bit}.get(width, device.peak_fp32)
    return peak * machine.constants.product


def _of_rows(unit: int, width: int) -> float:
    """Rate of a product whose rows are multiples of `unit` elements, relative to one with aligned rows."""
    if width == WIDE:  # not by tensor cores
        return 1.0
    size = math.gcd(unit * width, ROW_BYTES)
    return MISALIGNED.get(size, 1.0)


def _measured_product(machine: Machine, m: int, n: int, k: int, batch: int, width: int, unit: int) -> float:
    """`product_seconds` on a calibrated GPU."""
    gpu, device = machine.gpu, machine.accelerator
    assert gpu is not None
    count, faster = device.multiprocessors, (device.peak_8bit or device.peak_16bit) / device.peak_16bit
    rate = {1: gpu.product_16bit * faster, 2: gpu.product_16bit}.get(width, gpu.product_fp32) / count
    rate *= _of_rows(unit, width)
    arithmetic = min(
        -(-(-(-m // rows) * -(-n // columns) * batch * splits) // count)
        * (2.0 * rows * columns * (k / splits + RAMP) / (rate * relative))
        + (2 * WIDE * splits * m * n * batch / gpu.memory if splits > 1 else 0.0)
        for rows, columns, relative in TILES
        for splits in SPLITS
        if splits == 1 or k >= splits * MIN_SPLIT
    )
    traffic = batch * width * (m * k + k * n + m * n)
    return max(arithmetic, traffic / gpu.memory) + gpu.kernel_seconds


@lru_cache(maxsize=10_000)
def attention_seconds(
    machine: Machine, heads: int, sequence: int, head_size: int, width: int = 2, masked: bool = False
) -> tuple[float, float]:
    """Seconds of fused causal attention on a calibrated GPU, forward and backward; `heads`: of all samples. Backward
    has five products where forward has two. `masked`: with a mask tensor, as for windows, so that all scores are
    computed, at the same rate (that of the kernel for masks was not measured)."""
    gpu, count = machine.gpu, machine.accelerator.multiprocessors
    assert gpu is not None
    each = 4.0 * (head_size + SOFTMAX)
    rows = min(ROWS, sequence)
    whole = each * heads * sequence * (sequence if masked else (sequence + rows) / 2)
    longest = each * sequence * rows * count  # the last rows attend to all before them
    slower = 1.0 if width == 2 else gpu.product_16bit / gpu.product_fp32
    work = max(whole, longest) * slower
    backward = 2.5 * work / (gpu.attention * ATTENTION_BACKWARD)
    return work / gpu.attention + gpu.kernel_seconds, backward + 3 * gpu.kernel_seconds


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
    """Recomputation in backward."""
    tensor: float = 0.0
    """Communication of the tensor group that nothing hides."""
    context: float = 0.0
    """Communication of the context group that nothing hides."""
    expert: float = 0.0
    """Communication of the expert group: tokens to the ranks of their experts, and results back."""
    host: float = 0.0
    """Waiting for the host to launch the next operation."""
    operations: float = 0
    copies: float = 0.0
    """Waiting for activations on their way to host memory and back."""
    stalls: float = 0.0
    """Waiting for the host to learn how many tokens each expert has."""

    @property
    def seconds(self) -> float:
        """Seconds of the whole pass."""
        return self.device_seconds + self.host

    @property
    def device_seconds(self) -> float:
        """Seconds without waiting for the host."""
        computes = self.products + self.attention + self.elementwise + self.accumulation + self.recomputation
        return computes + self.tensor + self.context + self.expert + self.copies + self.stalls

    def wait_for_host(self, machine: Machine) -> Budget:
        """Makes the pass at least as long as the host takes for all its operations, or longer by that time if the host
        is what computes. Returns itself."""
        host = self.operations * machine.constants.host_seconds
        self.host = host if machine.core is not None else max(0.0, host - self.device_seconds)
        return self

    def plus(self, other: Budget, times: float = 1) -> Budget:
        """The sum of this and `times` the other."""
        return Budget(*(getattr(self, name) + times * getattr(other, name) for name in Budget.__dataclass_fields__))


def host_wait(machine: Machine, *passes: Budget) -> float:
    """Seconds that a device waits for its host in these passes together, with more of them to follow: the host queues
    ahead as long as it is the faster one."""
    host = sum(pass_.operations for pass_ in passes) * machine.constants.host_seconds
    return max(0.0, host - sum(pass_.device_seconds for pass_ in passes))


@dataclass(frozen=True)
class Passes:
    """One micro-batch through each part of the model."""

    forward: Budget
    """Of one layer, like the next two."""
    backward_input: Budget
    backward_weight: Budget
    first_forward: Budget
    """What the first virtual stage has besides layers: the embedding."""
    first_backward: Budget
    last_forward: Budget
    """What the last virtual stage has besides layers: final norm, logits, loss."""
    last_backward: Budget
