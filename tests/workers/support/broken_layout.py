"""Specs that break a rule of the sections parallel, elastic, recovery and checkpoint: see `broken_specs.RULES`."""

from __future__ import annotations

from typing import Any

LAYOUT_RULES: list[tuple[str, dict[str, Any], str, str, str | None]] = [
    ("tensor", {"parallel": {"tensor": 3}}, "parallel.tensor", "tensor (3) must divide model.heads (4)", "2"),
    (
        "tensor that divides all that is split",
        {
            "model": {"heads": 12, "hidden_size": 48, "ffn_hidden_size": 32},
            "parallel": {"tensor": 9, "sequence_parallel": False},
        },
        "parallel.tensor", "tensor (9) must divide model.heads (12)", "4",
    ),
    (
        "tensor and the sequence",
        {"model": {"heads": 12, "hidden_size": 48}, "parallel": {"tensor": 8}},
        "parallel.tensor", "tensor (8) must divide model.heads (12)", "4",
    ),
    (
        "tensor without sequence parallelism",
        {"model": {"heads": 12, "hidden_size": 48}, "parallel": {"tensor": 8, "sequence_parallel": False}},
        "parallel.tensor", "tensor (8) must divide model.heads (12)", "6",
    ),
    (
        "more chunks than rows of a rank",
        {"parallel": {"tensor": 2, "forward_chunks": 5}},
        "parallel.forward_chunks", "5 chunks are more than the 4 tokens of the sequence that a rank holds", "4",
    ),
    (
        "more chunks than rows",
        {"parallel": {"tensor": 2, "sequence_parallel": False, "forward_chunks": 9}},
        "parallel.forward_chunks", "9 chunks are more than the 8 tokens", "8",
    ),
    (
        "chunks of 8 bits",
        {
            "model": {"hidden_size": 64, "sequence_length": 32},
            "train": {"fp8": "rowwise", "precision": "bf16"},
            "parallel": {"tensor": 2, "forward_chunks": 2},
        },
        "parallel.forward_chunks", "chunks are not supported with train.fp8", "1",
    ),
    (
        "sequence parallel alone",
        {"parallel": {"sequence_parallel": True}},
        "parallel.sequence_parallel", "but parallel.tensor is 1", "false",
    ),
    (
        "pipeline",
        {"parallel": {"pipeline": 5}},
        "parallel.pipeline", "pipeline (5) x virtual_stages (1) must be at most model.layers (4)", "4",
    ),
    (
        "GPUs of stages on cores",
        {"parallel": {"pipeline": 2, "stage_accelerators": ["A100", "A100"]}, "resources": {"accelerator": "cpu"}},
        "parallel.stage_accelerators", "sets the GPU types of stages, but resources.accelerator is cpu", "null",
    ),
    (
        "nodes of each stage",
        {"parallel": {"pipeline": 3, "stage_accelerators": ["A100", "V100"]}},
        "parallel.stage_accelerators",
        "has types for 2 stages, but parallel.pipeline is 3: give one for each stage", "[A100, V100, A100]",
    ),
    (
        "virtual stages of zb-v",
        {"parallel": {"schedule": "zb-v", "pipeline": 2}},
        "parallel.virtual_stages", "zb-v has 2 virtual stages, not 1", "2",
    ),
    (
        "virtual stages of 1f1b",
        {"parallel": {"virtual_stages": 2, "pipeline": 2}},
        "parallel.schedule", "1f1b has one virtual stage, not 2", "interleaved",
    ),
    (
        "stages without a number of layers",
        {"parallel": {"pipeline": 2, "schedule": "zb-v", "virtual_stages": 2, "stage_layers": [1, 3]}},
        "parallel.stage_layers",
        "2 numbers of layers for 4 virtual stages: there must be one for each (parallel.pipeline 2 x virtual_stages 2)",
        "[1, 1, 1, 1]",
    ),
    (
        "layers of another model",
        {"parallel": {"pipeline": 3, "stage_layers": [1, 1, 1]}},
        "parallel.stage_layers", "3 layers in total, not model.layers (4)", "[1, 2, 1]",
    ),
    (
        "ramp without whole micro-batches",
        {
            "train": {
                "deterministic": "elastic",
                "micro_batch_size": 2,
                "batch_ramp": {"start": 4, "increment": 2, "samples": 100},
            },
            "elastic": {"max_data": 3},
        },
        "elastic.max_data", "3 is more than the 2 of the smallest batch (train.batch_ramp.start)", "2",
    ),
    (
        "more replicas than micro-batches",
        {"train": {"deterministic": "elastic", "micro_batch_size": 2}, "elastic": {"max_data": 5}},
        "elastic.max_data", "5 is more than the 4 of the smallest batch (train.global_batch_size)", "4",
    ),
    (
        "one replica more than samples",
        {"elastic": {"max_data": 9}},
        "elastic.max_data", "9 replicas do not work: a batch of 8 has no samples for some of parallel.data (9)", "8",
    ),
    (
        "several replicas more than samples",
        {"elastic": {"max_data": 12}},
        "elastic.max_data", "9 replicas do not work: a batch of 8 has no samples for some of parallel.data (9)", "8",
    ),
    (
        "more replicas than interleaving takes",
        {"parallel": {"schedule": "interleaved", "pipeline": 2}, "elastic": {"max_data": 4}},
        "elastic.max_data", "3 replicas do not work: 8 must be a multiple of data x pipeline x micro_batch_size", "2",
    ),
    (
        "twice the same module",
        {"parallel": {"recompute": "selective", "recompute_modules": ["norm", "norm"]}},
        "parallel.recompute_modules", "a module is named twice", "[norm]",
    ),
    (
        "no paths of parquet",
        {"data": {"source": "parquet", "paths": []}},
        "data.paths", "source parquet needs at least one file or directory", "[corpus.parquet]",
    ),
    (
        "vocabulary of a trained tokenizer",
        {"model": {"vocabulary_size": 300}, "data": {"tokenizer": "bpe", "tokenizer_vocabulary": 512}},
        "model.vocabulary_size", "vocabulary_size (300) is smaller than the bpe tokenizer's (512)", "512",
    ),
    (
        "vocabulary of a file",
        {"model": {"vocabulary_size": 300}, "data": {"tokenizer": "t.json", "tokenizer_vocabulary": 512}},
        "model.vocabulary_size", "vocabulary_size (300) is smaller than the tokenizer's (512)", "512",
    ),
    (
        "vocabulary of bytes with an end",
        {"model": {"vocabulary_size": 256}, "data": {"end_of_document": "<|endoftext|>"}},
        "model.vocabulary_size", "(256) is smaller than the bytes tokenizer's (257)", "257",
    ),
]  # fmt: skip
