"""A cache of answers to repeated requests, limited in bytes."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

Question = TypeVar("Question", bound=Hashable)
Answer = TypeVar("Answer")


class KeptAnswers(Generic[Question, Answer]):
    """The most recently made answers. May be used by many threads."""

    def __init__(self, most_bytes: int):
        """`most_bytes`: maximum size; the oldest answers are removed first."""
        self._most_bytes = most_bytes
        self._kept: OrderedDict[Question, tuple[Answer, int]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, question: Question) -> Answer | None:
        """The answer, if it is kept."""
        with self._lock:
            kept = self._kept.get(question)
        return None if kept is None else kept[0]

    def keep(self, question: Question, answer: Answer, size: int) -> None:
        """Keep an answer of `size` bytes, replacing an earlier one."""
        with self._lock:
            _, replaced = self._kept.pop(question, (None, 0))
            self._kept[question] = answer, size
            self._bytes += size - replaced
            while self._bytes > self._most_bytes:
                _, (_, oldest) = self._kept.popitem(last=False)
                self._bytes -= oldest
