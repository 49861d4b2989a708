"""What befalls one small job: drawn from a seed, so that a schedule can be repeated by its number. Pure Python."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

STEPS = 80
CHECKPOINT_EVERY = 20
"""The last one is of the last step, so that it holds the final weights."""
FIRST_STRIKE, LAST_STRIKE = 3, 40
SLOW_SECONDS = 0.03
"""How much longer rank 0 takes for each step, so that a strike from outside still meets a running job."""
MAX_STRIKES = 3
MAX_RESTARTS = 40

Layout = tuple[int, int, int]
LAYOUTS: tuple[Layout, ...] = (
    (1, 1, 2),
    (2, 1, 1),
    (1, 2, 1),
    (1, 1, 3),
    (2, 1, 2),
    (1, 2, 2),
    (2, 2, 1),
    (1, 1, 4),
    (4, 1, 1),
    (2, 1, 3),
    (2, 2, 2),
)
"""(tensor, pipeline, data)."""
IN_STEP = ("data", "forward", "backward", "reduction", "optimizer", "snapshot", "checkpoint")
HANGS_IN = ("data", "forward", "backward", "reduction", "optimizer")
WAYS = {
    "kill": True,
    "kill_starting": True,
    "kill_recovering": True,
    "hang": True,
    "exception": True,
    "oom": True,
    "partition": True,
    "store": True,
    "node": True,
    "agent": True,
    "daemon": True,
    "zygote": True,
    "stop": True,
    "stop_and_go_on": False,
    "slow": False,
    "snapshot_flipped": True,
    "checkpoint_flipped": True,
    "checkpoint_cut": True,
    "control": False,
    "control_starting": False,
    "control_recovering": True,
}
"""What can befall a job, and whether it makes a recovery necessary."""
CONTROL = ("control", "control_starting", "control_recovering")
ERRORS = ("exception", "oom")
"""Ways that raise an error. The same error twice at the same step would be taken for the user's own, and rightly end
the job."""


@dataclass(frozen=True)
class Strike:
    """One thing that befalls the job."""

    way: str
    """One of WAYS."""
    step: int
    """Committed step from which it may happen."""
    rank: int
    other: int
    """Another rank, for ways that take two; the same one in a job of one replica is allowed."""
    phase: str = "data"
    seconds: float = 0.0
    """Of a pause, a cut, or into the phase."""
    salt: int = 0
    """Which bytes are changed."""

    @property
    def lethal(self) -> bool:
        """Whether it makes a recovery necessary."""
        return WAYS[self.way]


@dataclass(frozen=True)
class Schedule:
    """One job, and what befalls it."""

    number: int
    layout: Layout
    zero: int
    strikes: tuple[Strike, ...]

    @property
    def ranks(self) -> int:
        """Ranks of the job."""
        tensor, pipeline, data = self.layout
        return tensor * pipeline * data

    @property
    def sentence(self) -> str:
        """For people."""
        what = ", ".join(
            f"{strike.way} ({strike.phase}) of rank {strike.rank} at {strike.step}" for strike in self.strikes
        )
        return f"{'x'.join(str(size) for size in self.layout)} zero {self.zero}: {what}"

    def job(self, seed: int) -> dict[str, Any]:
        """The job's document, which the schedule's number does not change: clean runs can be shared."""
        tensor, pipeline, data = self.layout
        return {
            "name": f"chaos {'x'.join(str(size) for size in self.layout)} zero {self.zero}",
            "model": {"layers": 2, "hidden_size": 32, "heads": 4, "sequence_length": 32},
            "data": {"source": "python-stdlib", "tokenizer": "bytes"},
            "train": {"steps": STEPS, "global_batch_size": 12, "micro_batch_size": max(1, 6 // data), "seed": seed},
            "parallel": {
                "tensor": tensor,
                "pipeline": pipeline,
                "data": data,
                "zero": self.zero,
                "sequence_parallel": tensor > 1,
            },
            "checkpoint": {"every_steps": CHECKPOINT_EVERY, "keep": 3},
            "recovery": {"max_restarts": MAX_RESTARTS},
        }


def schedule(seed: int, number: int) -> Schedule:
    """The schedule number `number` of `seed`. Every way comes first in one of as many schedules in a row."""
    draw = random.Random(f"{seed} {number}")
    layout = draw.choice(LAYOUTS)
    ranks = layout[0] * layout[1] * layout[2]
    zero = draw.choice((0, 1)) if layout[2] > 1 else 0
    first = list(WAYS)[number % len(WAYS)]
    more = draw.choices([way for way in WAYS if way not in CONTROL], k=draw.randint(0, MAX_STRIKES - 1))
    # While the control plane comes back the job goes on, perhaps to its end: nothing else can be sure to befall it.
    ways = [first] if first == "control_starting" else [*more, first] if first in CONTROL else [first, *more]
    ways = ["kill" if way in ERRORS and way in ways[:at] else way for at, way in enumerate(ways)]
    steps = sorted(draw.randint(FIRST_STRIKE, LAST_STRIKE) for _ in ways)
    strikes = [_strike(way, step, ranks, draw) for way, step in zip(ways, steps, strict=True)]
    return Schedule(number, layout, zero, tuple(strikes))


def _strike(way: str, step: int, ranks: int, draw: random.Random) -> Strike:
    phase = draw.choice(HANGS_IN if way == "hang" else IN_STEP)
    seconds = {
        "stop_and_go_on": draw.uniform(0.05, 3.0),
        "partition": draw.uniform(0.0, 0.5),
        "slow": draw.uniform(0.01, 0.1),
        "control": draw.uniform(0.0, 1.0),
        "control_recovering": draw.uniform(0.0, 1.0),
        "kill": draw.choice((0.0, 0.0, 0.002)),
    }.get(way, 0.0)
    return Strike(way, step, draw.randrange(ranks), draw.randrange(ranks), phase, seconds, draw.randrange(2**31))


def short_form() -> list[Schedule]:
    """A few schedules of different kinds, for the test suite."""
    return [
        Schedule(0, (2, 1, 2), 1, (Strike("kill", 10, 3, 0, "backward"), Strike("kill_recovering", 30, 0, 2))),
        Schedule(1, (1, 2, 2), 1, (Strike("stop", 10, 2, 0), Strike("partition", 30, 1, 0, "reduction", 0.1))),
        Schedule(
            2,
            (2, 1, 2),
            1,
            (
                Strike("snapshot_flipped", 10, 1, 0, salt=5),
                Strike("checkpoint_flipped", 25, 1, 0, salt=9),
                Strike("agent", 35, 2, 0),
            ),
        ),
        Schedule(3, (1, 2, 2), 1, (Strike("exception", 10, 3, 0, "optimizer"), Strike("control_recovering", 30, 1, 0))),
        Schedule(5, (1, 2, 2), 1, (Strike("store", 10, 0, 3), Strike("node", 30, 1, 0, "forward"))),
    ]
