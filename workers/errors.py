"""Errors of the engine that say what to do next. Pure Python."""

from __future__ import annotations


class MantaError(Exception):
    """Base of all errors whose message is one clear sentence for the user."""


class DataError(MantaError):
    """The corpus is missing, unreadable, empty or too short; the message names the path."""


class ModelError(MantaError):
    """A model cannot be computed; the message names the entry point of a custom model, or what no kernel supports."""


class DataNotStored(DataError):
    """What is made of the corpus cannot be stored now; the message names the folder. It may be possible later."""


class DataUnreadable(DataError):
    """The corpus, or what was made of it, cannot be read now, for its disk or mount does not work; the message names
    the path and the node. Nothing is known about its content, and it may be readable later."""


class WeightsError(DataError):
    """A folder of weights cannot be used; the message names the file, and the tensor or key."""


class WeightsUnreadable(WeightsError, DataUnreadable):
    """A folder of weights cannot be read now, for its disk or mount does not work."""


class SharedMemoryError(MantaError):
    """The node's shared memory has no room for the snapshots; the message says how much is missing."""


class OpenFilesError(MantaError):
    """The process may not open as many files as its gang needs; the message says how many would be enough."""


class CheckpointError(MantaError):
    """A checkpoint or snapshot cannot be used; the message names the file."""


class CheckpointNotSaved(MantaError):
    """The state after the last step could not be saved: without it the whole job would be lost."""


class PeerLost(MantaError):
    """A collective failed because another rank is gone. This rank is not the cause."""


class RestRequested(PeerLost):
    """All ranks leave the generation between two steps, since one of them was asked to. Nothing has failed: no rank is
    waiting for another, over any backend."""


class DeviceLost(MantaError):
    """This rank's device answers everything with an error: the process cannot be used any more, but its state can."""


class NodeExhausted(MantaError):
    """The node gives this rank no more threads, processes, open files or memory; it may later, or another node may."""


class NonFiniteError(MantaError):
    """A step's loss or gradient is not finite; the message names the step and its samples."""


class SpikeError(MantaError):
    """A step's loss or gradient norm is far above earlier ones; the message names the step and its samples."""


class ReplicaDiffers(MantaError):
    """This rank's parameters differ from those of its replicas: they were changed in memory or in transit."""
