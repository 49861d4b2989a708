"""Specs that break a rule, with what is said of it, and some that just fit: tables, of small jobs' sections."""

from __future__ import annotations

from typing import Any

from broken_data import DATA_RULES
from broken_layout import LAYOUT_RULES
from broken_model import MODEL_RULES
from broken_train import TRAIN_RULES

RULES: list[tuple[str, dict[str, Any], str, str, str | None]] = [
    *MODEL_RULES, *TRAIN_RULES, *DATA_RULES, *LAYOUT_RULES
]  # fmt: skip
"""Name, sections, path of the field that is named, part of what is said, advice."""

NOT_BUILT: list[tuple[str, str, Any]] = [
    ("parallel", "context", 2),
    ("parallel", "zero", 3),
]
"""Section, key and value of what is to come."""

SETS: list[tuple[str, list[dict[str, Any]], str, str, str | None]] = [
    ("twice the same name", [{"name": "a", "paths": ["a"]}, {"name": "a", "paths": ["b"]}],
     "data.validation.1.name", "an earlier validation set has the name a", "a_2"),
    ("no paths", [{"name": "a"}], "data.validation.0.paths", "needs at least one file or directory", "[corpus.txt]"),
    ("a blank path", [{"name": "a", "paths": ["", "b"]}], "data.validation.0.paths", "cannot be blank", '["b"]'),
    ("paths of the library", [{"name": "a", "source": "python-stdlib", "paths": ["b"]}],
     "data.validation.0.paths", "source python-stdlib takes no paths", "[]"),
    ("no name", [{"paths": ["b"]}], "data.validation.0.name", "required, but missing", None),
    ("a name that is no part of a metric's", [{"name": "my text", "paths": ["b"]}],
     "data.validation.0.name",  "must be letters, digits and '_'", "my_text"),
    ("an unknown key", [{"name": "a", "path": ["b"]}], "data.validation.0.path", "unknown key", "paths"),
    ("no whole number", [{"name": "a", "paths": ["b"], "batches": "4"}],
     "data.validation.0.batches", "must be an integer", "4"),
]  # fmt: skip
"""As RULES, of validation sets."""


RAMP = {"start": 2, "increment": 3, "samples": 100}
LONG_RAMP = {"start": 1, "increment": 1, "samples": 100}


ALLOWED: list[tuple[str, dict[str, Any]]] = [
    ("the most increments", {"train": {"global_batch_size": 10_001, "batch_ramp": LONG_RAMP}}),
    ("spikes judged once", {"recovery": {"spike": {"policy": "skip", "window": 29}}}),
    ("as many replicas as samples", {"parallel": {"data": 8}, "elastic": {"min_data": 8, "max_data": 8}}),
    ("as many stages as layers", {"parallel": {"pipeline": 2, "schedule": "zb-v", "virtual_stages": 2}}),
    ("stages of one and three layers", {"parallel": {"pipeline": 2, "stage_layers": [1, 3]}}),
    ("all layers on one stage", {"parallel": {"stage_layers": [4]}}),
    ("a ramp from the whole batch", {"train": {"batch_ramp": {**RAMP, "start": 8}}, "parallel": {"data": 8}}),
    ("explicit attention with dropout", {"train": {"attention": "explicit"}, "model": {"dropout": 0.1}}),
    ("sequences kept whole", {"model": {"sequence_length": 9}, "parallel": {"tensor": 2, "sequence_parallel": False}}),
    ("a chunk for each row", {"parallel": {"tensor": 2, "forward_chunks": 4}}),
    ("chunks on one tensor rank", {"parallel": {"forward_chunks": 9}}),
    ("fewer key-value heads than tensor ranks", {"model": {"kv_heads": 2}, "parallel": {"tensor": 4}}),
    ("compiled blocks that are computed again", {"train": {"compile": True}, "parallel": {"recompute": "selective"}}),
    ("interleaved on one", {"parallel": {"schedule": "interleaved", "data": 2}, "train": {"global_batch_size": 7}}),
    ("graphs of one micro-batch of three", {"train": {"global_batch_size": 6, "cuda_graphs": True},
                                            "parallel": {"data": 2}}),
    ("graphs of one elastic sum of two", {"train": {"global_batch_size": 4, "cuda_graphs": True,
                                                    "deterministic": "elastic"}, "parallel": {"data": 2}}),
    ("one warm-up to the end", {"train": {"optimizer": {"warmup_steps": 30}}}),
    ("nothing but warm-up and decay", {"train": {"optimizer": {"schedule": "wsd", "decay_steps": 20,
                                                              "warmup_steps": 10}}}),
    ("nothing but decay", {"train": {"optimizer": {"schedule": "wsd", "decay_fraction": 1.0}}}),
    ("a constant rate below the default of the smallest", {"train": {"optimizer": {"schedule": "constant",
                                                                                  "learning_rate": 1e-5}}}),
    ("one learning rate throughout", {"train": {"optimizer": {"learning_rate": 1e-4}}}),
]  # fmt: skip
"""Name and sections of what breaks none."""
