"""Single values that take the place of those in a job's document, each at a dotted path such as `train.steps`. Pure
Python."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from workers.spec.problems import Problem, SpecError
from workers.spec.yaml import read_yaml

EXAMPLE = "train.steps=100"
MOST_COMBINATIONS = 100
"""Of a sweep: more are a slip of the hand, or want a program of their own."""


def with_changes(document: Any, changes: Mapping[str, Any]) -> Any:
    """`document` with the values of `changes` at their paths, one after the other; a section that is not there is made,
    and a number is a place in a list. What is no mapping stays as it is. Raises SpecError for a path that leads beyond
    a list. Whether there are such keys is for the check of the document."""
    for path, value in changes.items() if isinstance(document, dict) else ():
        document = _with(document, path.split("."), value, path)
    return document


def changes_in(texts: Iterable[str]) -> dict[str, Any]:
    """Changes that a user writes as KEY=VALUE, with values as in YAML; of one that is there twice the last counts.
    Raises SpecError."""
    pairs = (split_change(text) for text in texts)
    return {path: value_in(path, value) for path, value in pairs}


def combinations_in(texts: Iterable[str]) -> list[dict[str, Any]]:
    """Every combination of the values that a user writes as KEY=VALUE,VALUE; those of the last key vary fastest.
    Raises SpecError, also for more than MOST_COMBINATIONS."""
    sweeps: dict[str, list[Any]] = {}
    for path, text in map(split_change, texts):
        if path in sweeps:
            raise SpecError([Problem(path, "is swept twice: write all of its values after one another", "1,2,3")])
        sweeps[path] = value_in(path, f"[{text}]")
        if not sweeps[path]:
            raise SpecError([Problem(path, "is swept over no value", "1,2")])
    if (count := math.prod(map(len, sweeps.values()))) > MOST_COMBINATIONS:
        raise SpecError([Problem("", f"these are {count} combinations; a sweep has at most {MOST_COMBINATIONS}")])
    return [dict(zip(sweeps, values, strict=True)) for values in itertools.product(*sweeps.values())]


def split_change(text: str) -> tuple[str, str]:
    """Path and value of a change. Raises SpecError where it is none."""
    path, equals, value = text.partition("=")
    if not (equals and all(path.split("."))):
        raise SpecError([Problem("", f"{text!r} does not say which key gets which value", EXAMPLE)])
    return path, value


def value_in(path: str, text: str) -> Any:
    """What YAML makes of `text`, which is meant for `path`. Raises SpecError."""
    try:
        return read_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that is none
        raise SpecError([Problem(path, f"{text!r} is no value in YAML", "put it into quotes")]) from error


def _with(document: Any, parts: Sequence[str], value: Any, path: str) -> Any:
    if not parts:
        return value
    key, *rest = parts
    if isinstance(document, list):
        if not (key.isdecimal() and int(key) < len(document)):
            problem = f"leads into a list of {len(document)}, whose places are counted from 0; {key} is none of them"
            raise SpecError([Problem(path, problem, "the whole list, such as [a, b]")])
        return [_with(each, rest, value, path) if at == int(key) else each for at, each in enumerate(document)]
    section = document if isinstance(document, dict) else {}
    return {**section, key: _with(section.get(key), rest, value, path)}
