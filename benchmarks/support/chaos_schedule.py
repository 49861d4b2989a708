"""What befalls one small job: drawn from a seed, so that a schedule can be repeated by its number. Pure Python."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from typing import Any

STEPS = 80
CHECKPOINT_EVERY = 20
"""The last one is of the last step, so that it holds the final weights."""
FIRST_STRIKE, LAST_STRIKE = 3, 40
SLOW_SECONDS = 0.03
"""How much longer rank 0 takes for each step, so that a strike from outside still meets a running job."""
MAX_STRIKES = 3
MAX_RESTARTS = 40

Layout = tuple[int, int, int, int]
LAYOUTS: tuple[Layout, ...] = (
    (1, 1, 1, 2),
    (2, 1, 1, 1),
    (1, 2, 1, 1),
    (1, 1, 2, 1),
    (1, 1, 1, 3),
    (2, 1, 1, 2),
    (1, 2, 1, 2),
    (1, 1, 2, 2),
    (2, 2, 1, 1),
    (1, 1, 1, 4),
    (4, 1, 1, 1),
    (2, 1, 2, 1),
    (1, 2, 2, 1),
    (2, 1, 1, 3),
    (2, 2, 1, 2),
    (2, 1, 2, 2),
)
"""(tensor, pipeline, context, data)."""
MOE = {"experts": 12, "per_token": 2, "ffn_hidden_size": 16, "shared": 1, "balance": {"bias_rate": 0.01}}
METHODS = ("all_gather", "ring", "all_to_all")
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
class Job:
    """What trains."""

    layout: Layout
    zero: int = 1
    method: str | None = None
    """Of context parallelism."""
    adapters: bool = False
    """Whether only low-rank adapters are trained."""
    expert: int = 0
    """Ranks over which a layer's experts are spread; 0: the model has none."""

    @property
    def name(self) -> str:
        """For people."""
        sizes = "x".join(str(size) for size in self.layout)
        more = f" {self.method}" * (self.method is not None) + " lora" * self.adapters
        return f"{sizes} zero {self.zero}{more}" + f" experts {self.expert}" * (self.expert > 0)

    def document(self, seed: int) -> dict[str, Any]:
        """For submission."""
        tensor, pipeline, context, data = self.layout
        return {
            "name": f"chaos {self.name}",
            "model": {
                "layers": 2, "hidden_size": 32, "heads": 4, "sequence_length": 32,
                **({"family": "llama", "moe": MOE} if self.expert else {}),
            },
            "data": {"source": "python-stdlib", "tokenizer": "bytes"},
            "train": {
                "steps": STEPS,
                "global_batch_size": 12,
                "micro_batch_size": max(1, 6 // data),
                "seed": seed,
                "lora": {"rank": 4, "dropout": 0.1} if self.adapters else None,
            },
            "parallel": {
                "tensor": tensor,
                "pipeline": pipeline,
                "context": context,
                "context_method": self.method,
                "data": data,
                "expert": self.expert or None,
                "zero": self.zero,
                "sequence_parallel": tensor > 1,
            },
            "checkpoint": {"every_steps": CHECKPOINT_EVERY, "keep": 3},
            "recovery": {"max_restarts": MAX_RESTARTS},
        }  # fmt: skip


@dataclass(frozen=True)
class Schedule:
    """One job, and what befalls it."""

    number: int
    job: Job
    """The document of the job does not depend on the schedule's number: clean runs can be shared."""
    strikes: tuple[Strike, ...]

    @property
    def ranks(self) -> int:
        """Ranks of the job."""
        return math.prod(self.job.layout)

    @property
    def sentence(self) -> str:
        """For people."""
        what = ", ".join(
            f"{strike.way} ({strike.phase}) of rank {strike.rank} at {strike.step}" for strike in self.strikes
        )
        return f"{self.job.name}: {what}"


def schedule(seed: int, number: int) -> Schedule:
    """The schedule number `number` of `seed`. Every way comes first in one of as many schedules in a row."""
    draw = random.Random(f"{seed} {number}")
    job = _job(draw)
    first = list(WAYS)[number % len(WAYS)]
    more = draw.choices([way for way in WAYS if way not in CONTROL], k=draw.randint(0, MAX_STRIKES - 1))
    # While the control plane comes back the job goes on, perhaps to its end: nothing else can be sure to befall it.
    ways = [first] if first == "control_starting" else [*more, first] if first in CONTROL else [first, *more]
    ways = ["kill" if way in ERRORS and way in ways[:at] else way for at, way in enumerate(ways)]
    steps = sorted(draw.randint(FIRST_STRIKE, LAST_STRIKE) for _ in ways)
    ranks = math.prod(job.layout)
    strikes = [_strike(way, step, ranks, draw) for way, step in zip(ways, steps, strict=True)]
    return Schedule(number, job, tuple(strikes))


def _job(draw: random.Random) -> Job:
    layout = draw.choice(LAYOUTS)
    _, pipeline, context, data = layout
    stages = (0, 1) if pipeline > 1 else (0, 1, 2, 3)
    zero = draw.choice(stages) if context * data > 1 else 0
    job = Job(layout, zero, draw.choice(METHODS) if context > 1 else None, draw.random() < 0.3)
    if zero > 1 or job.adapters or draw.random() < 0.5:
        return job
    sizes = [size for size in range(2, 5) if context * data % size == 0]
    return replace(job, expert=draw.choice(sizes or [1]))


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
        Schedule(0, Job((2, 1, 1, 2)), (Strike("kill", 10, 3, 0, "backward"), Strike("kill_recovering", 30, 0, 2))),
        Schedule(1, Job((2, 1, 1, 2), 3), (Strike("stop", 10, 2, 0), Strike("partition", 30, 1, 0, "reduction", 0.1))),
        Schedule(
            2,
            Job((1, 1, 2, 2), 3, "ring", adapters=True),
            (
                Strike("snapshot_flipped", 10, 1, 0, salt=5),
                Strike("checkpoint_flipped", 25, 1, 0, salt=9),
                Strike("agent", 35, 2, 0),
            ),
        ),
        Schedule(
            3, Job((1, 2, 1, 2)), (Strike("exception", 10, 3, 0, "optimizer"), Strike("control_recovering", 30, 1, 0))
        ),
        Schedule(
            5, Job((1, 2, 2, 1), 1, "all_gather"), (Strike("store", 10, 0, 3), Strike("node", 30, 1, 0, "forward"))
        ),
    ]
