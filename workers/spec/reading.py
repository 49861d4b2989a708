"""The one door for JobSpecs: a document comes in, a checked JobSpec or a SpecError with every problem comes out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from workers.config import BUILT_IN_TOKENIZERS, CHATML, JobSpec
from workers.spec.problems import Problem, SpecError, kind_of, problems_of
from workers.spec.rules import find_problems
from workers.spec.yaml import read_yaml
from workers.weights.submitted import with_shape_of_weights


def parse_job_spec(document: Any) -> JobSpec:
    """Check `document` (a mapping as read from YAML or JSON) and return the JobSpec.

    Raises SpecError with every problem found: first shapes and types, and once those are right the rules
    across fields.
    """
    if not isinstance(document, dict):
        raise SpecError([Problem("", f"a job spec is a mapping of sections, not {kind_of(document)}", "model: {...}")])
    try:
        spec = JobSpec.model_validate(document)
    except ValidationError as error:
        raise SpecError(problems_of(error)) from error
    problems = find_problems(spec)
    if problems:
        raise SpecError(problems)
    return spec


def load_job_spec(path: Path) -> JobSpec:
    """Read and check the YAML file at `path`, with the shape of the weights that it begins with. Raises SpecError;
    OSError when it cannot be read."""
    return parse_job_spec(with_shape_of_weights(read_document(path)))


def read_document(path: Path) -> Any:
    """Parse the YAML file at `path`, with relative paths of data, tokenizer, template and weights resolved against the
    file's own folder.

    Raises SpecError where it is not YAML, OSError when it cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except ValueError as error:
        raise _not_yaml(str(path), error) from error
    return document_in(text, str(path), path.resolve().parent)


def document_in(text: str, name: str, folder: Path) -> Any:
    """Parse YAML that came from `name`, with relative paths of data, tokenizer, template and weights resolved against
    `folder`. Raises SpecError."""
    try:
        document = read_yaml(text)
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date that is none
        raise _not_yaml(name, error) from error
    model = document.get("model") if isinstance(document, dict) else None
    if isinstance(model, dict) and isinstance(model.get("from"), str):
        model["from"] = absolute_weights(model["from"], folder)
    data = document.get("data") if isinstance(document, dict) else None
    if isinstance(data, dict):
        sets = data.get("validation")
        for named in (data, *(sets if isinstance(sets, list) else ())):
            _resolve_paths(named, folder)
        if isinstance(data.get("tokenizer"), str):
            data["tokenizer"] = absolute_tokenizer(data["tokenizer"], folder)
        if isinstance(data.get("template"), str):
            data["template"] = absolute_template(data["template"], folder)
    return document


def _resolve_paths(section: Any, folder: Path) -> None:
    """Make the relative `paths` of a section ones below `folder`, as far as it has any."""
    if isinstance(section, dict) and isinstance(section.get("paths"), list):
        section["paths"] = [str(folder / entry) if isinstance(entry, str) else entry for entry in section["paths"]]


def absolute_tokenizer(tokenizer: str, folder: Path) -> str:
    """What `data.tokenizer` names, where a path is relative to `folder`."""
    return tokenizer if tokenizer in BUILT_IN_TOKENIZERS or not tokenizer else str(folder / tokenizer)


def absolute_template(template: str, folder: Path) -> str:
    """What `data.template` names, where a path is relative to `folder`."""
    return template if template == CHATML or not template else str(folder / template)


def absolute_weights(named: str, folder: Path) -> str:
    """What `model.from` names, where a path is relative to `folder`."""
    return named if not named or "://" in named else str(folder / named)


def _not_yaml(name: str, error: Exception) -> SpecError:
    return SpecError([Problem("", f"{name} is not valid YAML: {' '.join(str(error).split())}")])
