"""The files that lie beside exported weights: config.json, generation_config.json and the tokenizer's. Pure Python."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from workers.config import JobSpec
from workers.errors import WeightsError
from workers.weights.byte_tokenizer import byte_tokenizer
from workers.weights.config_in import shape_of
from workers.weights.config_keys import CONFIG, Keys, read_config
from workers.weights.config_out import TOKENS, their_config

GENERATION = "generation_config.json"
TOKENIZER = "tokenizer.json"
_TOKENIZER_FILES = (
    TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt",
    "tokenizer.model", "chat_template.jinja", "chat_template.json",
)  # fmt: skip


def source_config(spec: JobSpec) -> Keys | None:
    """config.json of the weights that the job began with; None where there are none, or it cannot be read any more."""
    if spec.model.from_ is None:
        return None
    try:
        return read_config(Path(spec.model.from_))
    except WeightsError:
        return None


def files_beside(spec: JobSpec, dtype: str) -> dict[str, str]:
    """Names and texts of the JSON files. `dtype`: of the weights, as torch calls it. Raises WeightsError where
    transformers has no model that computes the same."""
    source = source_config(spec)
    positions, tokens = _of_source(source)
    config = their_config(spec, dtype, positions) | tokens
    generation: dict[str, Any] = {"_from_model_config": True, **tokens}
    texts = {CONFIG: _json(config), GENERATION: _json(generation)}
    if source is not None and spec.model.from_ is not None:
        # How text is drawn from the model is as good a guess as before.
        beside = Path(spec.model.from_) / GENERATION
        if beside.is_file():
            texts[GENERATION] = beside.read_text(encoding="utf-8")
    return texts


def _of_source(source: Keys | None) -> tuple[int | None, dict[str, Any]]:
    """Positions, and ids of special tokens, of the weights that the job began with."""
    if source is None:
        return None, {}
    try:
        positions = shape_of(source).positions
    except WeightsError:
        return None, {}
    return positions, {name: source.values[name] for name in TOKENS if name in source.values}


def add_tokenizer(spec: JobSpec, folder: Path) -> None:
    """Bring the tokenizer with which the job reads its text into `folder`, where it is one of files, or of bytes.
    Raises OSError."""
    tokenizer = spec.data.tokenizer
    if tokenizer == "bytes":
        (folder / TOKENIZER).write_text(_json(byte_tokenizer()), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(_json(_FAST), encoding="utf-8")
        return
    named = Path(tokenizer)
    if named.is_dir():
        for name in _TOKENIZER_FILES:
            if (named / name).is_file():
                shutil.copyfile(named / name, folder / name)
    elif named.is_file():
        shutil.copyfile(named, folder / TOKENIZER)
        for name in _TOKENIZER_FILES[1:]:
            if (named.parent / name).is_file():
                shutil.copyfile(named.parent / name, folder / name)
        if not (folder / "tokenizer_config.json").exists():
            (folder / "tokenizer_config.json").write_text(_json(_FAST), encoding="utf-8")


_FAST = {"tokenizer_class": "PreTrainedTokenizerFast"}


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=2) + "\n"
