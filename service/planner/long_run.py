"""Runs of weeks on many GPUs, with failures: how much of the time is spent training, and what spares and checkpoints
are worth. Pure Python.

A run is simulated from failure to failure: times between failures are exponential, each failure costs what its kind
takes, and lost nodes come back later. Two systems are compared: one that keeps the state in memory on each rank's node
and on another node (this one), and one that restarts the whole gang from a checkpoint after every failure.
"""

from __future__ import annotations

import heapq
import math
import random
import statistics
from dataclasses import dataclass, replace
from typing import Literal

from manta.workers.errors import MantaError

SEEDS = 5
"""Simulated runs whose mean is an outcome."""
FEW_SPARES = 8
"""Numbers of spares that are tried in addition to none: up to this many each, and as many spread evenly above."""
MAX_FAILURES = 2000
"""Expected in a run that is simulated as it is; of a longer one a part with so many stands for the whole. One that has
ten times as many, and is not done, never will be."""
ROUNDING = 1e-9
"""Part of an interval between checkpoints by which sums may miss its end."""


class NeverFinishes(MantaError):
    """Failures come faster than steps are completed."""


@dataclass(frozen=True)
class Reliability:
    """How often something fails."""

    gpu_hours_a_process: float = 217_000.0
    """GPU hours between failures after which the node is still usable: software, timeouts, links."""
    gpu_hours_a_node: float = 66_000.0
    """GPU hours between failures that cost a node until it is repaired."""
    hours_of_all: float = 720.0
    """Hours between failures of everything at once, such as power or the core network: an assumption."""


LLAMA_3 = Reliability()
"""419 unexpected interruptions of 16,384 GPUs in 54 days (arXiv:2407.21783, section 3.3.4, table 5): 98 of them by
software, timeouts, dependencies and links between nodes, the others by hardware of a node."""


@dataclass(frozen=True)
class Recovery:
    """What failures and checkpoints cost, in seconds."""

    process: float
    """From a failure to the next step, if the node is still usable."""
    node: float
    """From a failure to the next step, if another node replaces the failed one."""
    all: float
    """From a failure to the next step, if everything restarts from a checkpoint."""
    checkpoint: float
    """How long training stands still for a checkpoint."""
    lost_steps: float
    """Mean number of steps that are repeated after a failure; without snapshots in memory, those since the last
    checkpoint in addition."""
    in_memory: bool = True


MANTA = Recovery(process=5.0, node=60.0, all=600.0, checkpoint=0.1, lost_steps=1.0)
"""This engine. A killed rank costs about a second on four ranks (docs/recovery.md). Nobody has measured it on
thousands, so five seconds are assumed, and a minute for a node whose state comes from its backups."""
RESTARTS = Recovery(process=600.0, node=600.0, all=600.0, checkpoint=10.0, lost_steps=0.0, in_memory=False)
"""A system that restarts from the last checkpoint in ten minutes."""


@dataclass(frozen=True)
class Run:
    """A training, and the cluster that it uses."""

    gpus: int
    gpus_per_node: int
    replicas: int
    step_seconds: float
    steps: int
    checkpoint_seconds: float
    """Seconds of training between two checkpoints."""
    spares: int = 0
    """Nodes that stand by to replace others."""
    repair_hours: float = 24.0
    """Hours until a lost node is usable again."""
    beside_seconds: float = 0.0
    """Seconds per step of the work outside steps (`beside_steps.py`)."""
    fewest: int = 1
    """Fewest replicas with which it continues if nodes are missing; with fewer it waits for nodes."""

    @property
    def seconds(self) -> float:
        """Seconds without failures and checkpoints."""
        return self.steps * (self.step_seconds + self.beside_seconds)

    @property
    def nodes(self) -> int:
        """Nodes that it uses."""
        return -(-self.gpus // self.gpus_per_node)


@dataclass(frozen=True)
class Outcome:
    """Result of a run, in seconds of wall time."""

    seconds: float
    training: float
    """Steps that counted, at full speed."""
    redone: float
    """Steps that were lost and repeated."""
    recovering: float
    checkpoints: float
    waiting: float
    """Waiting without enough nodes."""
    slower: float
    """Time lost by training with fewer replicas."""
    beside_steps: float
    """Validation, and updates that wait for snapshots."""
    failures: float
    gpu_hours: float
    """Including those of spares."""

    @property
    def goodput(self) -> float:
        """Part of the wall time that was spent training."""
        return self.training / self.seconds


def simulate(run: Run, recovery: Recovery, reliability: Reliability = LLAMA_3, seeds: int = SEEDS) -> Outcome:
    """The mean of `seeds` runs. Raises NeverFinishes."""
    part = _part(run, recovery, reliability)
    outcomes = [_simulated(part, recovery, reliability, random.Random(seed)) for seed in range(seeds)]
    times, fields = run.steps / part.steps, Outcome.__dataclass_fields__
    return Outcome(
        **{name: times * statistics.fmean(getattr(outcome, name) for outcome in outcomes) for name in fields}
    )


def _part(run: Run, recovery: Recovery, reliability: Reliability) -> Run:
    failures = run.seconds * sum(_Clock(run, recovery, reliability, random.Random(0)).rates())
    if failures <= MAX_FAILURES:
        return run
    return replace(run, steps=max(1, round(run.steps * (MAX_FAILURES / failures))))


_Kind = Literal["process", "node", "all"]
_KINDS: tuple[_Kind, ...] = ("process", "node", "all")


class _Clock:
    """A run in progress."""

    def __init__(self, run: Run, recovery: Recovery, reliability: Reliability, draw: random.Random):
        self.run, self.recovery, self.reliability, self.draw = run, recovery, reliability, draw
        self.now = self.done = self.redone = self.recovering = self.checkpoints = self.waiting = self.slower = 0.0
        self.failures = 0
        self.usable = run.nodes + run.spares
        self.repairs: list[float] = []
        """When lost nodes come back."""
        self.last_lost = -math.inf
        self.ready = self.resumed = 0.0
        """When training goes on after the last failure, and what was done by then."""

    def speed(self) -> float:
        """Part of the replicas that are training."""
        replicas = self.run.replicas
        left = min(replicas, math.floor(self.usable * replicas / self.run.nodes + 1e-9))
        return left / replicas if left >= self.run.fewest else 0.0

    def go_on_until(self, moment: float) -> None:
        """Recover from the last failure and train, up to `moment` of the clock or to the end; nodes come back
        meanwhile."""
        recovered = max(self.now, min(moment, self.ready))
        self.recovering += recovered - self.now
        self.now = recovered
        while self.now < moment and self.done < self.run.seconds:
            while self.repairs and self.repairs[0] <= self.now:
                heapq.heappop(self.repairs)
                self.usable += 1
            until = min(moment, self.repairs[0]) if self.repairs else moment
            speed = self.speed()
            if speed == 0.0:
                self.waiting += until - self.now
                self.now = until
                continue
            rate = speed / (1 + self.recovery.checkpoint / self.run.checkpoint_seconds)
            passed = min(until - self.now, (self.run.seconds - self.done) / rate)
            gained = passed * rate
            self.done += gained
            self.checkpoints += gained / speed * self.recovery.checkpoint / self.run.checkpoint_seconds
            self.slower += gained / speed - gained
            self.now += passed

    def fail(self) -> None:
        """Something fails now, also while the last failure is being recovered from; what would fail on a node that is
        lost already does not."""
        kind = self.draw.choices(_KINDS, self.rates())[0]
        if kind != "all" and self.draw.random() * self.run.nodes >= self.usable:
            return
        self.failures += 1
        from_checkpoint = kind == "all" or not self.recovery.in_memory
        if kind == "node":
            # A rank's state is on two nodes; both copies are lost if the second node fails before a new copy is made.
            recent = self.now - self.last_lost < self.recovery.node
            from_checkpoint |= recent and self.draw.random() < 1 / max(1, self.run.nodes - 1)
            self.last_lost = self.now
            self.usable -= 1
            heapq.heappush(self.repairs, self.now + 3600 * self.run.repair_hours)
        if from_checkpoint:
            every = self.run.checkpoint_seconds
            lost = max(0.0, self.done - every * math.floor(self.done / every + ROUNDING))
            seconds = self.recovery.all
        else:
            lost = min(self.done - self.resumed, self.recovery.lost_steps * self.run.step_seconds)
            seconds = self.recovery.node if kind == "node" else self.recovery.process
        self.done -= lost
        self.redone += lost
        self.resumed, self.ready = self.done, max(self.ready, self.now + seconds)

    def rates(self) -> tuple[float, float, float]:
        """Failures per second: of a process, of a node, of everything."""
        gpus, reliability = self.run.gpus, self.reliability
        return (
            gpus / reliability.gpu_hours_a_process / 3600,
            gpus / reliability.gpu_hours_a_node / 3600,
            1 / reliability.hours_of_all / 3600,
        )


def _simulated(run: Run, recovery: Recovery, reliability: Reliability, draw: random.Random) -> Outcome:
    clock = _Clock(run, recovery, reliability, draw)
    while True:
        clock.go_on_until(clock.now + draw.expovariate(sum(clock.rates())))
        if clock.done >= run.seconds:
            break
        if clock.failures == 10 * MAX_FAILURES:
            between = 1 / sum(clock.rates())
            pace = f"one of {run.gpus} GPUs fails every {between:.0f} s, and a step takes {run.step_seconds:.0f} s"
            raise NeverFinishes(f"it would never finish: {pace}")
        clock.fail()
    beside = run.steps * run.beside_seconds
    hours = clock.now / 3600 * (run.nodes + run.spares) * run.gpus_per_node
    return Outcome(
        clock.now, run.seconds - beside, clock.redone, clock.recovering, clock.checkpoints, clock.waiting,
        clock.slower, beside, clock.failures, hours,
    )  # fmt: skip


def daly(checkpoint: float, between: float) -> float:
    """Seconds of training between two checkpoints that cost `checkpoint` seconds each, if failures that need one come
    every `between` seconds (Daly, FGCS 22, 2006, equation 37)."""
    if checkpoint >= 2 * between:
        return between
    ratio = checkpoint / (2 * between)
    return math.sqrt(2 * checkpoint * between) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - checkpoint


def seconds_between_restores(run: Run, recovery: Recovery, reliability: Reliability = LLAMA_3) -> float:
    """Mean seconds between failures that need a checkpoint."""
    process, node, everything = _Clock(run, recovery, reliability, random.Random(0)).rates()
    if not recovery.in_memory:
        return 1 / (process + node + everything)
    both = node * (node * recovery.node) / max(1, run.nodes - 1)
    return 1 / (everything + both)


def best_spares(run: Run, recovery: Recovery, reliability: Reliability = LLAMA_3) -> int:
    """The number of spares with which the run takes the fewest GPU-hours; 0 where it never ends with any."""
    lost = run.gpus / reliability.gpu_hours_a_node * run.repair_hours  # nodes that are being repaired, in the mean
    most = max(FEW_SPARES, math.ceil(lost + 3 * math.sqrt(lost)))
    best, least = 0, math.inf
    for spares in (most * part // FEW_SPARES for part in range(FEW_SPARES, -1, -1)):
        try:
            hours = simulate(replace(run, spares=spares), recovery, reliability).gpu_hours
        except NeverFinishes:  # nor with fewer
            break
        if hours <= least:
            best, least = spares, hours
    return best


@dataclass(frozen=True)
class Advice:
    """A run with failures, and the best settings for it."""

    outcome: Outcome
    """The outcome with `spares`, and checkpoints every `checkpoint_seconds`."""
    restarted: Outcome
    """The outcome of the same run if every failure restarts everything from a checkpoint, with the best interval for
    that."""
    spares: int
    """Standby nodes with which the run takes the fewest GPU hours."""
    checkpoint_seconds: float


def advise(run: Run) -> Advice:
    """Choose spares and checkpoint interval of `run`, and simulate it. Raises NeverFinishes."""

    def chosen(recovery: Recovery) -> Run:
        return replace(run, checkpoint_seconds=daly(recovery.checkpoint, seconds_between_restores(run, recovery)))

    best = chosen(MANTA)
    best = replace(best, spares=best_spares(best, MANTA))
    restarted = simulate(replace(chosen(RESTARTS), spares=best.spares), RESTARTS)
    return Advice(simulate(best, MANTA), restarted, best.spares, best.checkpoint_seconds)
