"""Ids of jobs and of API keys: `job_` or `key_`, and 12 characters that sort by time."""

from __future__ import annotations

import re

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
"""Crockford's base 32 in lower case: it sorts as text as it does as numbers, and has no letters that look alike."""

_DIGITS = 12
_EPOCH_SECONDS = 1_735_689_600  # 2025-01-01: 41 bits of milliseconds from here last until 2094
_RANDOM_BITS = 19
JOB_ID_PATTERN = rf"job_[{ALPHABET}]{{{_DIGITS}}}"
"""Regular expression of a job id."""
KEY_ID_PATTERN = rf"key_[{ALPHABET}]{{{_DIGITS}}}"
"""Regular expression of the id of an API key."""
NODE_ID_PATTERN = "^[0-9a-f]{4,64}$"
"""Regular expression of a node's id as Ray assigns it, or of its beginning."""
TARGET_PATTERN = "^[A-Za-z0-9_.-]{1,200}$"
"""Regular expression of what an entry of the audit log may be about: the id or name of a job, key, node or project."""

_PATTERN = re.compile(JOB_ID_PATTERN)
_KEY_PATTERN = re.compile(KEY_ID_PATTERN)


def is_job_id(text: str) -> bool:
    """Whether `text` has the form of a job id; only such text may become part of a path."""
    return _PATTERN.fullmatch(text) is not None


def is_key_id(text: str) -> bool:
    """Whether `text` has the form of the id of an API key."""
    return _KEY_PATTERN.fullmatch(text) is not None


def next_job_id(now: float, entropy: int, newest: str | None) -> str:
    """An id for a job submitted at `now` (Unix seconds), greater than `newest`, the greatest existing id. `entropy`
    fills the low bits, so that two control planes rarely choose the same id. Ids increase even within one millisecond
    and when the clock is set back."""
    return _next_id("job_", now, entropy, newest)


def next_key_id(now: float, entropy: int, newest: str | None) -> str:
    """An id for an API key created at `now` (Unix seconds), greater than `newest`; otherwise as `next_job_id`."""
    return _next_id("key_", now, entropy, newest)


def _next_id(prefix: str, now: float, entropy: int, newest: str | None) -> str:
    milliseconds = max(0, int((now - _EPOCH_SECONDS) * 1000))
    number = (milliseconds << _RANDOM_BITS) | (entropy & ((1 << _RANDOM_BITS) - 1))
    if newest is not None:
        number = max(number, _number_of(newest.removeprefix(prefix)) + 1)
    return f"{prefix}{_text_of(number)}"


def _number_of(digits: str) -> int:
    number = 0
    for character in digits:
        number = number * len(ALPHABET) + ALPHABET.index(character)
    return number


def _text_of(number: int) -> str:
    characters = []
    for _ in range(_DIGITS):
        number, digit = divmod(number, len(ALPHABET))
        characters.append(ALPHABET[digit])
    return "".join(reversed(characters))
