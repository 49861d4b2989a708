"""Errors about a corpus that a process of its own meets: it answers with them, and the process that started it raises
them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workers.errors import DataError, DataNotStored, DataUnreadable

_KINDS = {"unreadable": DataUnreadable, "not_stored": DataNotStored, "error": DataError}
"""By the key of an answer, subclasses first."""


def answer_of(error: DataError) -> dict[str, str]:
    """The answer that stands for `error`."""
    key = next(key for key, kind in _KINDS.items() if isinstance(error, kind))
    return {key: str(error)}


def raise_answered(answer: Mapping[str, Any]) -> None:
    """Raise the DataError, DataNotStored or DataUnreadable that `answer` stands for, if it stands for one."""
    for key, kind in _KINDS.items():
        if key in answer:
            raise kind(answer[key])
