"""Single values that take the place of those in a job's document, each at a dotted path such as `train.steps`. Pure
Python."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import yaml

from workers.spec.problems import Problem, SpecError
from workers.spec.yaml import read_yaml

EXAMPLE = "train.steps=100"


def with_changes(document: Any, changes: Mapping[str, Any]) -> Any:
    """`document` with the values of `changes` at their paths, one after the other; a section that is not there is made,
    and a number is a place in a list. What is no mapping stays as it is. Raises SpecError for a path that leads beyond
    a list. Whether there are such keys is for whoever checks the document."""
    for path, value in changes.items() if isinstance(document, dict) else ():
        document = _with(document, path.split("."), value, path)
    return document


def changes_in(texts: Iterable[str]) -> dict[str, Any]:
    """Changes that somebody writes as KEY=VALUE, with values as in YAML; of one that is there twice the last counts.
    Raises SpecError."""
    pairs = (split_change(text) for text in texts)
    return {path: value_in(path, value) for path, value in pairs}


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
