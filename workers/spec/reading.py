"""Reads and validates documents: every JobSpec is created here, or a SpecError lists all problems."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from manta.workers.config import BUILT_IN_TOKENIZERS, CHATML, JobSpec
from manta.workers.spec.changes import with_changes, without
from manta.workers.spec.problems import UNKNOWN_KEY, Problem, SpecError, kind_of, problems_of
from manta.workers.spec.rules import find_problems
from manta.workers.spec.submitted import with_shape_of_weights
from manta.workers.spec.yaml import read_yaml
from manta.workers.system.regular_files import read_regular

MAX_BYTES = 2**20
"""Maximum size of a job file: no body of a request may be longer, and parsing a longer text could take minutes."""


def parse_job_spec(document: Any) -> JobSpec:
    """Check `document` (a mapping as read from YAML or JSON) and return the JobSpec.

    Raises SpecError with all problems: first those of structure and types, then those of the rules across fields that
    have nothing to do with the former.
    """
    if not isinstance(document, dict):
        raise SpecError([Problem("", f"a job spec is a mapping of sections, not {kind_of(document)}", "model: {...}")])
    try:
        spec = JobSpec.model_validate(document)
    except ValidationError as error:
        problems = problems_of(error)
        raise SpecError([*problems, *_broken_rules(document, problems)]) from error
    problems = find_problems(spec)
    if problems:
        raise SpecError(problems)
    return spec


def _broken_rules(document: dict[Any, Any], problems: Sequence[Problem]) -> list[Problem]:
    """Rules across fields that `document` breaks in fields without `problems`, for which the suggested values stand
    in."""
    mended, touched = document, set()
    try:
        for problem in problems:
            meant = problem.suggestion or ""
            if problem.rule != UNKNOWN_KEY:
                mended = with_changes(mended, {problem.path: read_yaml(meant)})
                touched.add(problem.path.rpartition(".")[2])
                continue
            if without(document, meant) == document:  # and the key that was meant is missing
                touched.add(meant.rpartition(".")[2])
            mended = without(mended, problem.path)
        broken = find_problems(JobSpec.model_validate(mended))
    except (ValidationError, SpecError, yaml.YAMLError, ValueError):
        return []
    return [each for each in broken if touched.isdisjoint(re.findall(r"\w+", f"{each.path} {each.rule}"))]


def load_job_spec(path: Path) -> JobSpec:
    """Read and check the YAML file at `path`, with the shape of the weights that training starts from. Raises
    SpecError, or OSError if the file cannot be read."""
    return parse_job_spec(with_shape_of_weights(read_document(path)))


def read_document(path: str | Path) -> Any:
    """Parse the YAML file at `path`, with relative paths of data, tokenizer, template and weights resolved against the
    file's own folder.

    Raises SpecError if it is not YAML, OSError if it cannot be read.
    """
    path = Path(path)
    return document_of(read_regular(path, MAX_BYTES), str(path), path.resolve().parent)


def document_of(content: bytes, name: str, folder: Path) -> Any:
    """Parse the content of the YAML file `name`, with relative paths of data, tokenizer, template and weights resolved
    against `folder`. Raises SpecError, also if the content is longer than a job file may be."""
    if len(content) > MAX_BYTES:
        raise SpecError([Problem("", f"{name} is not a job file: it is larger than {MAX_BYTES} bytes")])
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        raise _not_yaml(name, error) from error
    return document_in(text, name, folder)


def document_in(text: str, name: str, folder: Path) -> Any:
    """Parse YAML text read from `name`, with relative paths of data, tokenizer, template and weights resolved against
    `folder`. Raises SpecError."""
    try:
        document = read_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: an invalid date
        raise _not_yaml(name, error) from error
    if document is None:
        raise SpecError([Problem("", f"{name} is empty: it must be a mapping of sections", "model: {...}")])
    return with_absolute_paths(document, folder)


def with_absolute_paths(document: Any, folder: Path) -> Any:
    """`document`, a JobSpec, with relative paths of data, tokenizer, template, weights and adapter resolved
    against `folder`."""
    if not isinstance(document, dict):
        return document
    model, data = document.get("model"), document.get("data")
    if isinstance(model, dict) and "from" in model:
        document = {**document, "model": {**model, "from": _absolute(model["from"], folder)}}
    train = document.get("train")
    if isinstance(train, dict) and isinstance(lora := train.get("lora"), dict) and "from" in lora:
        document = {**document, "train": {**train, "lora": {**lora, "from": _absolute(lora["from"], folder)}}}
    if isinstance(data, dict):
        data = _with_absolute_files(data, folder)
        if isinstance(data.get("validation"), list):
            data["validation"] = [_with_absolute_files(each, folder) for each in data["validation"]]
        document = {**document, "data": data}
    return document


def _with_absolute_files(section: Any, folder: Path) -> Any:
    """`section` with its relative paths resolved against `folder`."""
    if not isinstance(section, dict):
        return section
    named = dict(section)
    if isinstance(section.get("paths"), list | tuple):
        named["paths"] = [_absolute(path, folder) for path in section["paths"]]
    for key, words in (("tokenizer", BUILT_IN_TOKENIZERS), ("template", (CHATML,))):
        if key in section:
            named[key] = _absolute(section[key], folder, words)
    return named


def _absolute(named: Any, folder: Path, words: tuple[str, ...] = ()) -> Any:
    """`named` below `folder` if it is a relative path: not empty, not one of the `words`, and not a URL."""
    is_path = isinstance(named, str) and named and named not in words and "://" not in named
    return str(folder / named) if is_path else named


def _not_yaml(name: str, error: Exception) -> SpecError:
    if isinstance(error, UnicodeDecodeError):
        return SpecError([Problem("", f"{name} is not valid UTF-8 at byte {error.start + 1}")])
    return SpecError([Problem("", f"{name} is not valid YAML: {_why_not(error)}")])


def _why_not(error: Exception) -> str:
    """What is wrong with a text, and in which line, without PyYAML's picture of it."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem is None or error.problem_mark is None:
        return " ".join(str(error).split())
    why = error.problem.replace("'<stream end>'", "the end of the text")
    context, mark = error.context, error.context_mark
    begun = (
        f", {context} that begins {_place(mark)}" if context and mark and mark.line < error.problem_mark.line else ""
    )
    return f"{why} {_place(error.problem_mark)}{begun}"


def _place(mark: yaml.Mark) -> str:
    return f"at line {mark.line + 1}, column {mark.column + 1}"
