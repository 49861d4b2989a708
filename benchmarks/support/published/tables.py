"""Reads the published tables, a JSON file each, and makes jobs of the models in them."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

from manta.workers.config import JobSpec
from manta.workers.errors import MantaError

VOCABULARY = 51200
"""Of GPT models in all of these tables, as padded."""


class Tables:
    """The tables in one folder. A missing one is a MantaError that names it."""

    def __init__(self, folder: Path):
        self.folder = folder

    def read(self, name: str) -> dict[str, Any]:
        """The document of table `name`."""
        path = self.folder / f"{name}.json"
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise MantaError(f"no published table at {path} (try: --tables FOLDER): {error.strerror}") from error
        except ValueError as error:
            raise MantaError(f"{path} is not JSON: {error}") from error
        if not isinstance(document, dict):
            raise MantaError(f"{path} holds no table: it must be a JSON object with `columns` and `rows`")
        return document

    def rows(self, name: str) -> list[dict[str, Any]]:
        """The rows of table `name`, each by column."""
        document = self.read(name)
        return [dict(zip(document["columns"], row, strict=True)) for row in document["rows"]]

    @cached_property
    def models_of_2205_05198(self) -> dict[str, dict[str, Any]]:
        """Table 3 of arXiv:2205.05198, by model."""
        return {row["model"]: row for row in self.rows("c_actrecomp_table3_configs")}


def gpt(
    layers: int,
    hidden: int,
    heads: int,
    batch: int = 1,
    micro_batch: int = 1,
    sequence: int = 2048,
    vocabulary: int = VOCABULARY,
    dropout: float = 0.1,
    **parallel: Any,
) -> JobSpec:
    """A GPT of the papers: 16-bit, dropout everywhere, attention written out. What a layout may be is not checked, as
    other engines have other rules."""
    return JobSpec.model_validate(
        {
            "model": {
                "layers": layers,
                "hidden_size": hidden,
                "heads": heads,
                "sequence_length": sequence,
                "vocabulary_size": vocabulary,
                "dropout": dropout,
            },
            "data": {"source": "megatron", "paths": ("corpus.bin",)},
            "train": {
                "steps": 1,
                "global_batch_size": batch,
                "micro_batch_size": micro_batch,
                "precision": "fp16",
            },
            "parallel": {"zero": 0} | parallel,
        }
    )
