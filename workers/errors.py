"""Errors of the engine that say what to do next. Pure Python."""

from __future__ import annotations

import sys

EXIT_INTERRUPTED = 130
"""Exit status of a command that SIGINT has ended."""


def interrupted() -> int:
    """Say on stderr that the command was interrupted; its exit status."""
    print("interrupted", file=sys.stderr)
    return EXIT_INTERRUPTED


class MantaError(Exception):
    """Base of all errors whose message is one clear sentence for the user."""


class DataError(MantaError):
    """The corpus is missing, unreadable, empty or too short; the message names the path."""


class ModelError(MantaError):
    """A model cannot be computed: of the user's own, the message names the entry point; else what no kernel takes."""


class WeightsError(DataError):
    """A folder of weights cannot be used; the message names the file, and the tensor or key."""


class SharedMemoryError(MantaError):
    """The node's shared memory has no room for the snapshots; the message says how much is missing."""


class OpenFilesError(MantaError):
    """The process may not open as many files as its gang takes; the message says how many would do."""


class CheckpointError(MantaError):
    """A checkpoint or snapshot cannot be used; the message names the file."""


class CheckpointNotSaved(MantaError):
    """The state after the last step could not be saved: without it the whole job would have been for nothing."""


class PeerLost(MantaError):
    """A collective failed because another rank is gone. This rank is not the culprit."""


class AskedToRest(PeerLost):
    """All ranks leave the generation between two steps, since one of them was asked to. Nothing has failed: whatever
    they communicate with, no rank waits for another."""


class DeviceLost(MantaError):
    """This rank's device answers everything with an error: the process is of no use any more, its state is."""


class NonFiniteError(MantaError):
    """A step's loss or gradient is not finite; the message names the step and its samples."""


class SpikeError(MantaError):
    """A step's loss or gradient norm is far above those before; the message names the step and its samples."""


class ReplicaDiffers(MantaError):
    """This rank's parameters are not those of its replicas: something changed them in memory or on their way."""
