"""Errors of the engine that say what to do next, and the kinds of failure by which a rank ends. Pure Python."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal


@dataclass(frozen=True)
class FailureKind:
    """What follows from a rank's end of one kind."""

    cause: Literal["machine", "user", "checkpoint"] = "machine"
    """What is to blame."""
    is_sentence: bool = False
    """Whether its message is a complete sentence, without the name of an exception."""
    is_hopeless: bool = False
    """Whether no restart can cure it: the job fails with the kind as its reason."""
    waits_until: str = ""
    """What the next generation waits for, since the system may later provide what it does not provide now; empty: it
    does not wait."""


FAILURE_KINDS: dict[str, FailureKind] = {
    # Reported by a trainer: an error of the user or of this program; a collective failed since another rank is gone, so
    # this rank is not the culprit; and typed errors.
    "exception": FailureKind("user"),
    "peer_lost": FailureKind(),
    "no_shared_memory": FailureKind(is_sentence=True, is_hopeless=True),
    "bad_data": FailureKind("user", is_sentence=True, is_hopeless=True),
    "unreadable_data": FailureKind(is_sentence=True, waits_until="its data can be read"),
    "bad_checkpoint": FailureKind("checkpoint", is_sentence=True),
    "unreadable_checkpoint": FailureKind("checkpoint", is_sentence=True, waits_until="it can be read"),
    "not_saved": FailureKind("checkpoint", is_sentence=True, waits_until="this is possible"),
    "bad_model": FailureKind("user", is_sentence=True, is_hopeless=True),
    "not_finite": FailureKind("user", is_sentence=True, is_hopeless=True),
    "spike": FailureKind("user", is_sentence=True, is_hopeless=True),
    "corrupt": FailureKind(),
    "device_lost": FailureKind(is_sentence=True),
    "node_exhausted": FailureKind(is_sentence=True, waits_until="a node has what its ranks need"),
    # Without a report: by a signal or an exit; killed by the agent since it stood still, was a straggler, did not come
    # to rest or its generation was over; the agent or its node is gone.
    "killed": FailureKind(),
    "hung": FailureKind(),
    "straggler": FailureKind(),
    "stopped": FailureKind(),
    "agent_lost": FailureKind(),
}
"""By name, as in reports, rows and events."""


def failure_kind(name: str) -> FailureKind:
    """The kind with that name; of one that this release does not know, the machine is to blame."""
    return FAILURE_KINDS.get(name, FailureKind())


class MantaError(Exception):
    """Base of all errors whose message is one clear sentence for the user."""

    failure_kind: ClassVar[str] = "exception"
    """The kind of failure by which a rank ends that raises it; a key of FAILURE_KINDS."""


class DataError(MantaError):
    """The corpus is missing, unreadable, empty or too short; the message names the path."""

    failure_kind = "bad_data"


class ModelError(MantaError):
    """A model cannot be computed; the message names the entry point of a custom model, or what no kernel supports."""

    failure_kind = "bad_model"


class DataNotStored(DataError):
    """What is made of the corpus cannot be stored now; the message names the folder. It may be possible later."""

    failure_kind = "not_saved"


class DataUnreadable(DataError):
    """The corpus, or what was made of it, cannot be read now, for its disk or mount does not work; the message names
    the path and the node. Nothing is known about its content, and it may be readable later."""

    failure_kind = "unreadable_data"


class WeightsError(DataError):
    """A folder of weights cannot be used; the message names the file, and the tensor or key."""


class WeightsUnreadable(WeightsError, DataUnreadable):
    """A folder of weights cannot be read now, for its disk or mount does not work."""


class SharedMemoryError(MantaError):
    """The node's shared memory has no room for the snapshots; the message says how much is missing."""

    failure_kind = "no_shared_memory"


class OpenFilesError(MantaError):
    """The process may not open as many files as its gang needs; the message says how many would be enough."""


class CheckpointError(MantaError):
    """A checkpoint or snapshot cannot be used; the message names the file."""

    failure_kind = "bad_checkpoint"


class CheckpointNotSaved(MantaError):
    """The state after the last step could not be saved: without it the whole job would be lost."""

    failure_kind = "not_saved"


class PeerLost(MantaError):
    """A collective failed because another rank is gone. This rank is not the cause."""

    failure_kind = "peer_lost"


class RestRequested(PeerLost):
    """All ranks leave the generation between two steps, since one of them was asked to. Nothing has failed: no rank is
    waiting for another, over any backend."""


class DeviceLost(MantaError):
    """This rank's device answers everything with an error: the process cannot be used any more, but its state can."""

    failure_kind = "device_lost"


class NodeExhausted(MantaError):
    """The node gives this rank no more threads, processes, open files or memory; it may later, or another node may."""

    failure_kind = "node_exhausted"


class NonFiniteError(MantaError):
    """A step's loss or gradient is not finite; the message names the step and its samples."""

    failure_kind = "not_finite"


class SpikeError(MantaError):
    """A step's loss or gradient norm is far above earlier ones; the message names the step and its samples."""

    failure_kind = "spike"


class ReplicaDiffers(MantaError):
    """This rank's parameters differ from those of its replicas: they were changed in memory or in transit."""

    failure_kind = "corrupt"


def first_line_of(error: BaseException) -> str:
    """The kind of an error of a library, and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
