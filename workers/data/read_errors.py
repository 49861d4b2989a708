"""Errors about a job's data: what an error of the system says about a file (that the file is not as it should be, or
only that its disk or mount does not work now), and how a process of its own answers with one."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manta.workers.errors import DataError, DataNotStored, DataUnreadable, WeightsError, WeightsUnreadable

OF_THE_STORAGE = frozenset(
    {
        errno.EIO, errno.EREMOTEIO, errno.ENXIO, errno.ENODEV, errno.ENOMEDIUM,
        errno.ESTALE, errno.ENOTCONN, errno.ESHUTDOWN, errno.ENOLINK, errno.ECOMM,
        errno.ETIMEDOUT, errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED,
        errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH, errno.ENETRESET,
    }
)  # fmt: skip
"""Errors of a device, or of the server behind a mount. They say nothing about what is stored there, unlike a name that
does not exist or a missing permission."""

_KINDS = {"unreadable": DataUnreadable, "not_stored": DataNotStored, "error": DataError}
"""By the key of an answer, subclasses first."""


def is_of_the_storage(error: OSError) -> bool:
    """Whether the same file may be readable once its disk or mount works again."""
    return error.errno in OF_THE_STORAGE


def read_error(path: str | os.PathLike[str], error: OSError, otherwise: str | None = None) -> DataError:
    """The error for an OSError in reading `path`: DataUnreadable if it is of the storage, otherwise DataError.

    `otherwise`: the message of the latter.
    """
    if is_of_the_storage(error):
        return DataUnreadable(_sentence(path, error))
    return DataError(otherwise or f"cannot be read: {os.fspath(path)} ({error.strerror or error})")


def weights_error(path: str | os.PathLike[str], error: OSError) -> WeightsError:
    """The error for an OSError in reading a file of weights, or their folder, at `path`: WeightsUnreadable if it is of
    the storage, otherwise WeightsError."""
    if is_of_the_storage(error):
        return WeightsUnreadable(_sentence(path, error))
    return WeightsError(f"{os.fspath(path)} cannot be read: {error.strerror}")


def is_there(path: Path) -> bool:
    """Whether `path` exists. Raises DataUnreadable or DataError if that cannot be found out."""
    try:
        return path.exists()
    except OSError as error:
        raise read_error(path, error) from error


def at_submission(error: Exception) -> str:
    """What to say to someone who submits a job about an error in reading one of its files."""
    return f"{error}; submit the job again then" if isinstance(error, DataUnreadable) else str(error)


def _sentence(path: str | os.PathLike[str], error: OSError) -> str:
    where = f"{os.fspath(path)} cannot be read on {socket.gethostname()} now"
    return f"{where} ({error.strerror or error}): its disk or mount has to work again there"


def answer_of(error: DataError) -> dict[str, str]:
    """The answer that stands for `error`."""
    key = next(key for key, kind in _KINDS.items() if isinstance(error, kind))
    return {key: str(error)}


def raise_answered(answer: Mapping[str, Any]) -> None:
    """Raise the DataError, DataNotStored or DataUnreadable that `answer` stands for, if it stands for one."""
    for key, kind in _KINDS.items():
        if key in answer:
            raise kind(answer[key])
