"""What crosses process borders between control plane, agent, zygote and trainer. Pure Python.

A `LaunchOrder` goes down (control plane -> agent -> trainer; the first with the fork, later ones as a line on the
control socket, as are the word to come to rest and faults to be made), `Report`s come up. Both travel as JSON, one
object a line, and both carry the generation: a report of an older generation than the receiver's is refused.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

RESUME_START, RESUME_SNAPSHOT, RESUME_MEMORY, RESUME_CHECKPOINT = "start", "snapshot", "memory", "checkpoint"


@dataclass(frozen=True)
class Resume:
    """Where a gang's state comes from when its trainers start."""

    source: Literal["start", "snapshot", "memory", "checkpoint"] = "start"
    """start: fresh initialisation; snapshot: what the process still holds, else this rank's file in shared memory;
    memory: files in shared memory of another layout's ranks; checkpoint: a durable one."""
    step: int = 0
    """Committed step that the state belongs to; training goes on with step + 1."""
    path: str | None = None
    """Folder of the durable checkpoint."""
    paths: tuple[str, ...] = ()
    """For memory: the other layout's snapshot files on this rank's node, together all of the state."""


@dataclass(frozen=True)
class LaunchOrder:
    """Everything that one trainer process needs to know to be rank `rank` of generation `generation`."""

    job: str
    """Job id; names files and shared memory."""
    generation: int
    """Number of this start of the gang, from 1; higher ones fence lower ones."""
    rank: int
    """Global rank, 0 to world size - 1."""
    spec: dict[str, Any]
    """The checked JobSpec as JSON."""
    store_host: str | None = None
    """Host of the rendezvous store; None for a single process."""
    store_port: int | None = None
    """Port of the rendezvous store."""
    snapshot_folder: str | None = None
    """Folder in the node's shared memory for this job's snapshots; None turns snapshots off."""
    checkpoint_folder: str | None = None
    """Folder for the job's durable checkpoints; None turns them off."""
    resume: Resume = Resume()
    """Where state comes from."""
    device: str = "cpu"
    """Torch device of the rank: cpu, or cuda:0 (its one visible GPU)."""
    peak_flops: float | None = None
    """Peak FLOP/s of one rank's device, for MFU; None: measured at start."""
    faults: tuple[dict[str, Any], ...] = ()
    """Faults that were asked for and have not struck yet, each as `Fault.to_json`."""
    roll_backs: tuple[dict[str, Any], ...] = ()
    """The job's roll backs so far (`workers.numerics.bad_numbers.RollBack`): samples that they skipped stay skipped."""
    in_place: bool = False
    """Whether a trainer that loses a peer comes to rest and waits for the next order, instead of ending."""

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> LaunchOrder:
        """From a JSON object as `to_json` makes it. Raises TypeError on unknown or missing fields."""
        resume = {**document["resume"], "paths": tuple(document["resume"].get("paths", ()))}
        lists = {name: tuple(document.get(name, ())) for name in ("faults", "roll_backs")}
        return cls(**{**document, "resume": Resume(**resume), **lists})


@dataclass(frozen=True)
class Report:
    """One message of a trainer, or of its agent about it, to the control plane."""

    kind: Literal["started", "metrics", "event", "stalled", "resting", "finished", "exit"]
    """started: trainer is up; metrics: `data.rows`, one per committed step; event: something to tell (`data.type`,
    `data.message`, more); stalled: the trainer stands still for longer than it may, or moves on after it did (`data` as
    `Watch.describe`), added by the agent; resting: the trainer has lost a peer, or was told to rest, and waits for the
    next generation's order (`data.step`: the committed step that it holds or None, `data.message`: why); finished:
    last step committed; exit: the process is gone (`data.code` or `data.signal`; `data.failure`, where it said why: as
    `Failure`, and `at`; `data.condemned`, where its agent killed it for something: `kind` and `message`), added by the
    agent. The last of a generation is exit or resting."""
    generation: int
    rank: int
    time: float
    """Unix time at which it was made, in seconds."""
    sequence: int = 0
    """Number given by the agent, from 1 upwards over all generations of this agent."""
    data: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return dataclasses.asdict(self)


@dataclass(frozen=True)
class Failure:
    """Why a trainer ends before its last step, as it tells its agent."""

    kind: Literal[
        "exception",
        "peer_lost",
        "no_shared_memory",
        "bad_data",
        "bad_checkpoint",
        "not_saved",
        "not_finite",
        "spike",
        "corrupt",
    ]
    """exception: user or program error; peer_lost: a collective failed because another rank died, so this rank is
    not the culprit; the others are typed errors whose message is one clear sentence."""
    step: int
    """Step that was being computed (last committed + 1)."""
    exception: str
    """Class name."""
    message: str
    """One line."""
    traceback: str
    """Python traceback."""
