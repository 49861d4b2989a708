"""Folders of low-rank adapters in the format of PEFT (https://github.com/huggingface/peft): `adapter_config.json` and
`adapter_model.safetensors`. Which of their tensors correspond to which adapters of ours, and what their files say,
according to the headers. Pure Python.

A linear layer of theirs may be several logical matrices of ours, as GPT-2's `c_attn` is. Theirs then has one adapter
for all of them, and ours one for each. Any adapter of theirs is one for each of ours, with the same A and rows of B.
Adapters of k matrices with rank r make one of theirs with rank k r: A has theirs one below the other, and B has each in
rows and columns of its own, zero elsewhere. `rank_pattern` and `alpha_pattern` then say what the one layer has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manta.workers.config import JobSpec, LoraConfig, LoraTarget, ModelConfig
from manta.workers.data.read_errors import weights_error
from manta.workers.errors import WeightsError
from manta.workers.spec.layer_table import ADAPTED, lora_targets
from manta.workers.weights.config import ADAPTER_CONFIG, Keys, json_object
from manta.workers.weights.folder import ADAPTER, BYTES, FileTensor, header_of
from manta.workers.weights.mapping import LinearModule, linear_modules

_PREFIX = "base_model.model."
_TARGETS: dict[str, LoraTarget] = {name: target for target, name in ADAPTED.items()}
_KNOWN = {
    "task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode",
    "r", "target_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out", "bias", "use_rslora", "init_lora_weights",
    "rank_pattern", "alpha_pattern", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "qalora_group_size", "exclude_modules", "runtime_config", "ensure_weight_tying",
}  # fmt: skip
"""Keys that are read, or that change nothing about an adapter that is there."""


@dataclass(frozen=True)
class PeftModule:
    """The adapter of one linear layer of theirs."""

    module: LinearModule
    a: FileTensor
    """[rank, columns]."""
    b: FileTensor
    """[rows, rank]."""
    rank: int
    scale: float
    """Factor of the product of B and A."""

    def rows_of(self, matrix: str) -> tuple[int, int]:
        """First row in B of one of our logical matrices, and the one after its last."""
        at = 0
        for name, rows in self.module.matrices.items():
            if name == matrix:
                return at, at + rows
            at += rows
        raise KeyError(matrix)


def target_of(matrix: str) -> LoraTarget:
    """The target of `train.lora` that a logical matrix, named within the whole model, is."""
    return _TARGETS[matrix.split(".", 2)[2]]


def read_peft(folder: Path, model: ModelConfig) -> list[PeftModule]:
    """The adapters in `folder`, which were made for a model of the shape of `model`. Raises WeightsError if they were
    not, or if they have something that is not computed here."""
    config, tensors = _config_in(folder), {tensor.name: tensor for tensor in _tensors_in(folder / ADAPTER)}
    found, has_root = [], config.flag("use_rslora", default=False)
    for module in linear_modules(model):
        ends = [f"{_PREFIX}{module.name}.lora_{end}.weight" for end in "AB"]
        a, b = (tensors.pop(name, None) for name in ends)
        if a is None and b is None:
            continue
        if a is None or b is None:
            raise WeightsError(f"{folder / ADAPTER} has no {ends[a is not None]}, only the other matrix")
        rank = _of_module(config, "rank_pattern", module.name, config.integer("r"))
        alpha = _of_module(config, "alpha_pattern", module.name, config.number("lora_alpha"))
        _check(a, (int(rank), module.columns), config)
        _check(b, (sum(module.matrices.values()), int(rank)), config)
        found.append(PeftModule(module, a, b, int(rank), alpha / (math.sqrt(rank) if has_root else rank)))
    if tensors:
        more = f", nor {len(tensors) - 3} more" if len(tensors) > 3 else ""
        names, what = ", nor ".join(sorted(tensors)[:3]), f"a {model.family} of {model.layers} layers"
        raise WeightsError(f"{folder / ADAPTER}: the model, {what}, has no adapter {names}{more}")
    if not found:
        raise WeightsError(f"{folder / ADAPTER} has no adapter of the model")
    return found


def _config_in(folder: Path) -> Keys:
    path = folder / ADAPTER_CONFIG
    try:
        config = json_object(path)
    except FileNotFoundError:
        raise WeightsError(f"{folder} has no {ADAPTER_CONFIG}: name the folder of an adapter of PEFT") from None
    except OSError as error:
        raise weights_error(path, error) from error
    values = config.values
    if values.get("peft_type") != "LORA":
        raise config.wrong("peft_type", "only LORA is supported")
    if config.get("bias", "none") != "none":
        raise config.wrong("bias", "only none is supported: biases are not trained")
    for key in sorted(values.keys() - _KNOWN):
        if values[key] not in (None, False, [], {}):
            raise config.wrong(key, "not supported, so what it changes is not computed")
    return config


def _of_module(config: Keys, key: str, module: str, otherwise: float) -> float:
    """What `key` says for that layer: patterns of the ends of names, the first that matches."""
    patterns = config.inner(key) or Keys({}, config.where)
    for pattern in patterns.values:
        try:
            matches = re.fullmatch(rf"(.*\.)?({pattern})", module)
        except re.error as error:
            raise patterns.wrong(pattern, f"its name is not a regular expression: {error}") from error
        if matches:
            return patterns.integer(pattern) if key == "rank_pattern" else patterns.number(pattern)
    return otherwise


def _tensors_in(file: Path) -> Iterator[FileTensor]:
    pickle = file.with_suffix(".bin")
    if pickle.exists() and not file.exists():
        raise WeightsError(f"{pickle} is a pickle, which Manta never loads: save the adapter as safetensors")
    return header_of(file)


def _check(tensor: FileTensor, shape: tuple[int, int], config: Keys) -> None:
    if tensor.dtype not in BYTES:
        raise WeightsError(f"{tensor.file}: {tensor.name} has dtype {tensor.dtype}: supported: {', '.join(BYTES)}")
    if tensor.shape != shape:
        what = f"the model and {config.where} require {list(shape)}"
        raise WeightsError(f"{tensor.file}: {tensor.name} has shape {list(tensor.shape)}, but {what}")


def check_adapter(spec: JobSpec) -> None:
    """Raise WeightsError unless the adapter that the job begins with, if any, fits it."""
    if spec.train.lora is not None and spec.train.lora.from_ is not None:
        adapter_of(spec.model, spec.train.lora)


def adapter_of(model: ModelConfig, lora: LoraConfig) -> dict[str, PeftModule]:
    """The adapter that a job begins with, by the names of our logical matrices. Raises WeightsError if it does not fit
    the section `train.lora`."""
    folder, targets = Path(lora.from_ or ""), set(lora.targets or lora_targets(model))
    modules = read_peft(folder, model)
    theirs = {target_of(name) for each in modules for name in each.module.matrices}
    by_matrix = {name: each for each in modules for name in each.module.matrices if target_of(name) in targets}
    where = folder / ADAPTER_CONFIG
    shared = {target_of(name) for each in modules if len(each.module.matrices) > 1 for name in each.module.matrices}
    if not targets <= theirs or theirs - targets - shared or len(by_matrix) != len(targets) * model.layers:
        raise WeightsError(
            f"{where}: has adapters of {_listed(theirs)} in some or all layers, but train.lora.targets are "
            f"{_listed(targets)}, in all {model.layers} layers"
        )
    scale = scale_of(lora)
    for each in modules:
        count = sum(target_of(name) in targets for name in each.module.matrices)
        if each.rank not in (lora.rank, count * lora.rank):
            raise WeightsError(f"{where}: {each.module.name} has rank {each.rank}, but train.lora.rank is {lora.rank}")
        if not math.isclose(each.scale, scale, rel_tol=1e-6):
            own = f"alpha {lora.alpha:g}, rank {lora.rank}, scaling {lora.scaling}"
            raise WeightsError(
                f"{where}: {each.module.name} has scale {each.scale:g}, but that of train.lora is {scale:g} ({own})"
            )
    return by_matrix


def scale_of(lora: LoraConfig) -> float:
    """Factor of the product of B and A."""
    return lora.alpha / (lora.rank if lora.scaling == "standard" else math.sqrt(lora.rank))


def _listed(targets: Iterable[LoraTarget]) -> str:
    return ", ".join(target for target in ADAPTED if target in set(targets))


@dataclass(frozen=True)
class NewModule:
    """An adapter of PEFT that is made of ours."""

    module: LinearModule
    adapted: tuple[str, ...]
    """Logical matrices of the weight that have an adapter of ours, in the order of their rows."""

    def name(self, end: str) -> str:
        """Name of matrix `end`, A or B."""
        return f"{_PREFIX}{self.module.name}.lora_{end}.weight"


def new_modules(model: ModelConfig, lora: LoraConfig) -> list[NewModule]:
    """The adapters of PEFT for those of a job, in the model's order."""
    targets = set(lora.targets or lora_targets(model))
    each = ((module, tuple(n for n in module.matrices if target_of(n) in targets)) for module in linear_modules(model))
    return [NewModule(module, adapted) for module, adapted in each if adapted]


def config_of(spec: JobSpec, lora: LoraConfig) -> dict[str, Any]:
    """The adapter_config.json of a job's adapters."""
    paths = {re.sub(r"^.*\.\d+\.", "", each.name) for each in linear_modules(spec.model)}
    last = [path.rpartition(".")[2] for path in paths]
    ends: dict[str, int] = {}
    for each in new_modules(spec.model, lora):
        path = re.sub(r"^.*\.\d+\.", "", each.module.name)
        name = path.rpartition(".")[2]
        ends[name if last.count(name) == 1 else path] = len(each.adapted)
    counts = set(ends.values())
    usual = 1 if len(counts) > 1 else min(counts)

    def alpha(count: int) -> float:  # all have one scale: alpha grows with the rank, or with its root
        return lora.alpha * (count if lora.scaling == "standard" else math.sqrt(count))

    others = {re.escape(end): count for end, count in ends.items() if count != usual}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": spec.model.from_,
        "inference_mode": True,
        "r": usual * lora.rank,
        "lora_alpha": alpha(usual),
        "lora_dropout": lora.dropout,
        "use_rslora": lora.scaling == "root",
        "target_modules": list(ends),
        "fan_in_fan_out": spec.model.family == "gpt",
        "bias": "none",
        "init_lora_weights": True,
        "rank_pattern": {end: count * lora.rank for end, count in others.items()},
        "alpha_pattern": {end: alpha(count) for end, count in others.items()},
    }
