"""What a submitted JobSpec leaves to files, read once and stored in it, so that later readers know all without them:
the model's shape (`model: {from: FOLDER}`), and the number of token ids of the tokenizer. Pure Python."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from manta.workers.config import JobSpec, LoraConfig, ModelConfig
from manta.workers.config.train import MIN_LEARNING_RATE
from manta.workers.data.read_errors import at_submission
from manta.workers.data.roots import ANYWHERE, DataRoots
from manta.workers.data.sources import check_tokenizer
from manta.workers.data.tokenizer import file_tokenizer, tokenizer_path
from manta.workers.errors import DataError, DataUnreadable, WeightsError
from manta.workers.spec.layer_table import lora_targets
from manta.workers.spec.problems import Problem, SpecError
from manta.workers.spec.rules import find_problems
from manta.workers.weights.config import ADAPTER_CONFIG, CONFIG, Shape, read_config, shape_of
from manta.workers.weights.folder import ADAPTER
from manta.workers.weights.peft import adapter_of

_MACHINE_SPECIFIC_ERRORS = frozenset({errno.ENOENT, errno.ENOTDIR, errno.ELOOP, errno.EACCES, errno.EPERM})
"""Errors in reading a file that another machine, or another user, may not have."""


ADAPTER_FROM = "train.lora.from"
FINE_TUNING_RATE, ADAPTER_RATE = 1.0e-5, 2.0e-4
"""Defaults of `train.optimizer.learning_rate` for jobs that begin with weights: that train these, or only adapters."""


def names_weights(document: Any) -> bool:
    """Whether `document`, a JobSpec as submitted, names a folder of weights, or of an adapter, to begin with."""
    if not isinstance(document, dict):
        return False
    model, train = document.get("model"), document.get("train")
    lora = train.get("lora") if isinstance(train, dict) else None
    return any(isinstance(section, dict) and "from" in section for section in (model, lora))


def with_shape_of_weights(document: Any, roots: DataRoots = ANYWHERE) -> Any:
    """`document`, a JobSpec as submitted, with a complete section `model` and learning rates if it names a folder of
    weights; otherwise unchanged. Of weights only config.json is read, of an adapter that training begins with the
    configuration and the names and shapes of tensors; both have to be below the `roots`.

    Raises SpecError: a folder may not be read, or contains a model that cannot be trained or that differs from the
    other keys, or an adapter that does not fit.
    """
    completed = _with_shape(document, roots)
    _check_adapter(completed, roots)
    return completed


def _check_adapter(document: Any, roots: DataRoots) -> None:
    """Raise SpecError unless the adapter that a job begins with, if any, fits it; of sections that are not valid, which
    is reported later, nothing is known."""
    try:
        model = ModelConfig.model_validate(document["model"])
        lora = LoraConfig.model_validate(document["train"]["lora"])
    except (ValidationError, LookupError, TypeError):
        return
    if lora.from_ is None or not model.is_counted or set(lora.targets or ()) - set(lora_targets(model)):
        return
    files = (f"{lora.from_}/{name}" for name in (ADAPTER_CONFIG, ADAPTER))
    outside = [problem for file in files if (problem := roots.problem(ADAPTER_FROM, file)) is not None]
    if outside:
        raise SpecError(outside[:1])
    try:
        adapter_of(model, lora)
    except WeightsError as error:
        raise SpecError([Problem(ADAPTER_FROM, at_submission(error))]) from error


def _with_shape(document: Any, roots: DataRoots) -> Any:
    model = document.get("model") if isinstance(document, dict) else None
    folder = model.get("from") if isinstance(model, dict) else None
    if model is None or not isinstance(folder, str) or not folder:
        return document
    if "\0" in folder or not folder.strip():
        raise SpecError([Problem("model.from", "a folder's name cannot be blank or contain a null byte")])
    if "://" in folder:
        raise SpecError(
            [Problem("model.from", f"{folder} is not a folder of this machine; copy the weights here first")]
        )
    problem = roots.problem("model.from", folder) or roots.problem("model.from", f"{folder}/{CONFIG}")
    if problem is not None:
        raise SpecError([problem])
    try:
        config = read_config(Path(folder))
        shape = shape_of(config)
    except WeightsError as error:
        raise SpecError([Problem("model.from", at_submission(error))]) from error
    model, shape = _with_objects(model, shape)
    problems = list(_differences(model, shape, config.where))
    if problems:
        raise SpecError(problems)
    objects = {key: model[key] for key in _OBJECTS if model.get(key) is not None}
    completed = {**document, "model": {"sequence_length": shape.positions, **model, **shape.section, **objects}}
    return {**completed, "train": _with_rates_for_weights(document["train"])} if "train" in document else completed


_OF_TRAINING = ("balance", "router_z_loss")
"""Keys of `model.moe` that config.json does not have."""


def _with_objects(model: dict[str, Any], shape: Shape) -> tuple[dict[str, Any], Shape]:
    """Both with the keys of objects that the other one has and it has not: what weights do not tell, and what a job
    need not repeat."""
    model, section = dict(model), dict(shape.section)
    for key in _OBJECTS:
        given, theirs = model.get(key), section.get(key)
        if isinstance(given, dict) and theirs is not None:
            section[key] = {**theirs, **{each: given[each] for each in _OF_TRAINING if each in given}}
            model[key] = {**theirs, **given}
    return model, replace(shape, section=section)


def _with_rates_for_weights(train: Any) -> Any:
    """The section `train` of a job that begins with weights, with the learning rates that it leaves out: the plain
    defaults are for training from scratch, and would undo what the weights know."""
    optimizer = train.get("optimizer", {}) if isinstance(train, dict) else None
    if not isinstance(optimizer, dict):
        return train  # reported later
    default = FINE_TUNING_RATE if train.get("lora") is None else ADAPTER_RATE
    rates = {"learning_rate": optimizer.get("learning_rate", default)}
    if isinstance(rates["learning_rate"], float) and rates["learning_rate"] < MIN_LEARNING_RATE:
        rates["min_learning_rate"] = rates["learning_rate"] / 10
    return {**train, "optimizer": {**rates, **optimizer}}


_SHAPE = frozenset(ModelConfig.model_fields) - {"from_", "dropout", "sequence_length"}
"""Keys that identify the weights."""


_OBJECTS = ("moe", "latent_attention")
"""Keys of which each key is named by itself."""


def _differences(model: dict[str, Any], shape: Shape, where: str) -> Iterator[Problem]:
    """Keys next to `from` that differ from config.json."""
    length = model.get("sequence_length")
    if isinstance(length, int) and length > shape.positions:
        rule = f"{length} tokens exceed the model's maximum sequence length: {where} says {shape.positions_name} "
        yield Problem("model.sequence_length", f"{rule}{shape.positions}", str(shape.positions))
    known = _read(shape.section, shape.positions) or shape.section
    for key in _SHAPE & model.keys():
        given = model[key]
        if given is None and ModelConfig.model_fields[key].default is None:
            continue  # as if it were left out
        with_given = _read({**shape.section, key: given}, shape.positions)
        expected, read = known.get(key), given if with_given is None else with_given[key]
        if with_given is None and key in _OBJECTS and expected is not None:
            continue  # the spec has it, so what is wrong with it is reported later
        if isinstance(expected, dict) and isinstance(read, dict) and key in _OBJECTS:
            for inner in (each for each in expected if read.get(each) != expected[each]):
                rule = f"{_shown(read.get(inner))} differs from {where}, which says {_shown(expected[inner])}"
                yield Problem(f"model.{key}.{inner}", rule, _shown(expected[inner]))
        elif read != expected:
            name = shape.huggingface_names.get(key, "nothing")
            theirs = f"{name} {_shown(expected)}" if key in shape.section else f"a {shape.section['family']} without it"
            yield Problem(f"model.{key}", f"{_shown(given)} differs from {where}: {theirs}", _shown(expected))


def _read(section: dict[str, Any], positions: int) -> dict[str, Any] | None:
    """The section with all defaults, as JSON; None if it cannot be read."""
    try:
        return ModelConfig.model_validate({"sequence_length": positions, **section}).model_dump(mode="json")
    except ValidationError:
        return None


def _shown(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def with_vocabulary(spec: JobSpec) -> JobSpec:
    """`spec` with `data.tokenizer_vocabulary` from its tokenizer's file. Raises SpecError if that cannot be read and
    the spec itself does not say enough, or if they contradict each other."""
    file = spec.data.tokenizer_file
    if file is None:
        return spec
    try:
        tokenizer = file_tokenizer(spec.data, tokenizer_path(file))
    except DataError as error:
        if spec.data.tokenizer_vocabulary is not None and _may_be_readable_elsewhere(error):
            return spec  # where the job runs it is tried again
        raise SpecError([Problem("data.tokenizer", at_submission(error))]) from error
    declared, size = spec.data.tokenizer_vocabulary, tokenizer.vocabulary
    if declared not in (None, size):
        problem = f"tokenizer_vocabulary is {declared}, but {file} has {size} token ids"
        raise SpecError([Problem("data.tokenizer_vocabulary", problem, str(size))])
    resolved = spec.model_copy(update={"data": spec.data.model_copy(update={"tokenizer_vocabulary": size})})
    problems = find_problems(resolved)
    try:
        check_tokenizer(resolved, tokenizer, file)
    except DataError as error:
        problems = problems or [Problem("data.tokenizer", str(error))]
    if problems:
        raise SpecError(problems)
    return resolved


def _may_be_readable_elsewhere(error: DataError) -> bool:
    """Whether `error` says nothing about the tokenizer's content, nor about its name."""
    cause = error.__cause__
    return isinstance(error, DataUnreadable) or (isinstance(cause, OSError) and cause.errno in _MACHINE_SPECIFIC_ERRORS)
