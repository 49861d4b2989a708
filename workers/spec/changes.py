"""Overriding single values of a job's document at dotted paths such as `train.steps`. Pure Python."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from manta.workers.spec.problems import Problem, SpecError
from manta.workers.spec.yaml import read_yaml

EXAMPLE = "train.steps=100"
MAX_COMBINATIONS = 100
"""Maximum for a sweep: more is a mistake, or should be submitted by a program."""


def with_changes(document: Any, changes: Mapping[str, Any]) -> Any:
    """`document` with the values of `changes` set at their paths, in order. Missing sections are created, and a number
    is an index into a list. A document that is not a mapping is returned unchanged. Raises SpecError for an index
    beyond a list. Whether the keys exist is checked when the document is validated."""
    for path, value in changes.items() if isinstance(document, dict) else ():
        document = _with(document, path.split("."), value, path)
    return document


def without(document: Any, path: str) -> Any:
    """`document` without the key at `path`; unchanged if there is none."""
    key, _, rest = path.partition(".")
    if not isinstance(document, dict) or key not in document:
        return document
    kept = {name: value for name, value in document.items() if name != key}
    return {**kept, key: without(document[key], rest)} if rest else kept


def changes_in(texts: Iterable[str]) -> dict[str, Any]:
    """Changes given as KEY=VALUE, with values in YAML; if a key is repeated, the last one counts. Raises SpecError."""
    pairs = (split_change(text) for text in texts)
    return {path: value_in(path, value) for path, value in pairs}


def combinations_in(texts: Iterable[str]) -> list[dict[str, Any]]:
    """All combinations of values given as KEY=VALUE,VALUE; the last key varies fastest. Raises SpecError, also for more
    than MAX_COMBINATIONS."""
    sweeps: dict[str, list[Any]] = {}
    for path, text in map(split_change, texts):
        if path in sweeps:
            raise SpecError([Problem(path, "is swept twice: list all of its values once", "1,2,3")])
        sweeps[path] = value_in(path, f"[{text}]")
        if not sweeps[path]:
            raise SpecError([Problem(path, "has no values to sweep over", "1,2")])
    if (count := math.prod(map(len, sweeps.values()))) > MAX_COMBINATIONS:
        raise SpecError([Problem("", f"{count} combinations; a sweep has at most {MAX_COMBINATIONS}")])
    return [dict(zip(sweeps, values, strict=True)) for values in itertools.product(*sweeps.values())]


def split_change(text: str) -> tuple[str, str]:
    """Path and value of a change. Raises SpecError if the text is not KEY=VALUE."""
    path, equals, value = text.partition("=")
    if not (equals and all(path.split("."))):
        raise SpecError([Problem("", f"{text!r} is not KEY=VALUE", EXAMPLE)])
    return path, value


def value_in(path: str, text: str) -> Any:
    """`text` parsed as YAML, as the value for `path`. Raises SpecError."""
    try:
        value = read_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: an invalid date
        why = getattr(error, "problem", None)  # of PyYAML
        rule = f"{text!r} is not a valid YAML value{f' ({why})' if why else ''}"
        raise SpecError([Problem(path, rule, "put it into quotes")]) from error
    if isinstance(value, dict) and any(each is None and ":" in str(key) for key, each in value.items()):
        meant = re.sub(r":(?=[^\s:])", ": ", text)
        raise SpecError([Problem(path, "YAML needs a space after the colon between a key and its value", meant)])
    return value


def _with(document: Any, parts: Sequence[str], value: Any, path: str) -> Any:
    if not parts:
        return value
    key, *rest = parts
    if isinstance(document, list):
        if not (key.isdecimal() and int(key) < len(document)):
            problem = f"{key} is not an index of a list of {len(document)} (they start at 0)"
            raise SpecError([Problem(path, problem, "the whole list, such as [a, b]")])
        return [_with(each, rest, value, path) if at == int(key) else each for at, each in enumerate(document)]
    section = document if isinstance(document, dict) else {}
    return {**section, key: _with(section.get(key), rest, value, path)}
