"""Specs that break a rule of the train section: see `broken_specs.RULES`."""

from __future__ import annotations

from typing import Any

TRAIN_RULES: list[tuple[str, dict[str, Any], str, str, str | None]] = [
    (
        "an epsilon that is 0 in fp32",
        {"train": {"optimizer": {"epsilon": 1e-50}}},
        "train.optimizer.epsilon", "must be at least 1e-30, not 1e-50", "1e-30",
    ),
    (
        "documents apart in compiled blocks",
        {"data": {"documents": "apart", "end_of_document": "<|endoftext|>"}, "train": {"compile": True}},
        "train.compile", "with documents apart each micro-batch would be recompiled", "false",
    ),
    (
        "conversations in compiled blocks",
        {"data": {"source": "chat", "template": "chatml"}, "train": {"compile": True}},
        "train.compile", "with documents apart each micro-batch would be recompiled", "false",
    ),
    (
        "replicas without samples",
        {"train": {"global_batch_size": 2}, "parallel": {"data": 3}},
        "train.global_batch_size", "a batch of 2 has no samples for some of parallel.data (3) replicas", "3",
    ),
    (
        "ramp without samples",
        {"train": {"batch_ramp": {"start": 2, "increment": 3, "samples": 100}}, "parallel": {"data": 5}},
        "train.batch_ramp.start", "a batch of 2 has no samples for some of parallel.data (5) replicas", "5",
    ),
    (
        "ramp from above",
        {"train": {"batch_ramp": {"start": 9, "increment": 1, "samples": 100}}},
        "train.batch_ramp.start", "the ramp starts at 9, above global_batch_size (8)", "8",
    ),
    (
        "ramp that misses",
        {"train": {"batch_ramp": {"start": 2, "increment": 4, "samples": 100}}},
        "train.batch_ramp.increment", "increments of 4 from 2 do not reach global_batch_size (8) exactly", "3",
    ),
    (
        "ramp of too many steps",
        {"train": {"global_batch_size": 40008, "batch_ramp": {"start": 8, "increment": 1, "samples": 10**9}}},
        "train.batch_ramp.increment", "an increment of 1 takes more than 10000 increments", "4",
    ),
    (
        "interleaving",
        {"parallel": {"schedule": "interleaved", "pipeline": 2}, "train": {"global_batch_size": 7}},
        "train.global_batch_size", "7 must be a multiple of data x pipeline x micro_batch_size (1 x 2 x 1)", "6",
    ),
    (
        "interleaving on the way up",
        {
            "parallel": {"schedule": "interleaved", "pipeline": 2},
            "train": {"batch_ramp": {"start": 2, "increment": 3, "samples": 100}},
        },
        "train.batch_ramp.increment", "3 must be a multiple of data x pipeline x micro_batch_size (1 x 2 x 1)", "2",
    ),
    (
        "replicas without whole micro-batches",
        {"train": {"deterministic": "elastic", "micro_batch_size": 3}, "parallel": {"data": 4}},
        "train.global_batch_size", "a batch of 8 has only 3 for parallel.data (4): with train.deterministic elastic, "
        "micro-batches are not split between replicas", "12",
    ),
    (
        "replicas without groups of micro-batches",
        {
            "train": {"deterministic": "elastic"},
            "parallel": {"data": 3, "pipeline": 4, "schedule": "interleaved"},
        },
        "train.global_batch_size", "has only 2 for parallel.data (3): with train.deterministic elastic, "
        "groups of 4 micro-batches", "12",
    ),
    (
        "elastic interleaving",
        {
            "parallel": {"schedule": "interleaved", "pipeline": 2, "data": 2},
            "train": {"global_batch_size": 7, "deterministic": "elastic"},
        },
        "train.global_batch_size", "7 must be a multiple of pipeline x micro_batch_size (2 x 1)", "6",
    ),
    (
        "elastic sums and the compiler",
        {"train": {"deterministic": "elastic", "compile": True}},
        "train.compile", "not supported with train.deterministic elastic", "false",
    ),
    *(
        (f"graphs and {name}", {"train": {"cuda_graphs": True}} | sections, "train.cuda_graphs", rule, "false")
        for name, sections, rule in (
            ("CPUs", {"resources": {"accelerator": "cpu"}}, "not supported with resources.accelerator cpu"),
            ("tensor ranks", {"parallel": {"tensor": 2}}, "not supported with parallel.tensor 2"),
            ("stages", {"parallel": {"pipeline": 2}}, "not supported with parallel.pipeline 2"),
            ("gpipe", {"parallel": {"schedule": "gpipe"}}, "not supported with parallel.schedule gpipe"),
            ("offloading", {"parallel": {"offload_layers": 1}}, "not supported with parallel.offload_layers"),
            (
                "documents",
                {"data": {"documents": "apart", "end_of_document": "<|endoftext|>"}},
                "not supported with data.documents apart",
            ),
            (
                "models of others",
                {"model": {"family": "custom", "entrypoint": "a.b:c"}},
                "not supported with custom models",
            ),
            (
                "two micro-batches",
                {"parallel": {"data": 4}},
                "a replica has 2 per step, and the first and the last one of a step are computed without a graph",
            ),
        )
    ),
    (
        "graphs and 8 bits",
        {
            "model": {"hidden_size": 64, "sequence_length": 32},
            "train": {"fp8": "rowwise", "precision": "bf16", "cuda_graphs": True},
        },
        "train.cuda_graphs", "not supported with train.fp8 rowwise", "false",
    ),
    (
        "graphs and one micro-batch",
        {"train": {"micro_batch_size": 8, "cuda_graphs": True}},
        "train.cuda_graphs", "a replica has 1 per step, and the first one of a step is computed", "false",
    ),
    (
        "8 bits of 32",
        {"train": {"fp8": "tensorwise"}, "model": {"sequence_length": 16, "head_dim": 16}},
        "train.precision",
        "train.fp8 needs precision bf16, from which it converts matrices to 8 bits, not fp32", "bf16",
    ),
    (
        "tokens of 8-bit products",
        {"train": {"fp8": "rowwise", "precision": "bf16"}, "parallel": {"tensor": 2}, "model": {"head_dim": 16}},
        "model.sequence_length", "with train.fp8 sequence_length (8) must be a multiple of 16", "16",
    ),
    (
        "width of 8-bit products",
        {
            "train": {"fp8": "rowwise", "precision": "bf16"},
            "model": {"sequence_length": 16, "hidden_size": 72, "heads": 3, "ffn_hidden_size": 64},
        },
        "model.hidden_size", "with train.fp8 hidden_size (72) must be a multiple of 16", "48",
    ),
    (
        "heads of 8-bit products",
        {
            "train": {"fp8": "rowwise", "precision": "bf16"},
            "model": {"sequence_length": 16, "heads": 8, "kv_heads": 2},
            "parallel": {"tensor": 2},
        },
        "model.head_dim", "4 of queries and 2 of keys and values, 4 each, are not", "8",
    ),
    (
        "MLP of 8-bit products",
        {
            "train": {"fp8": "tensorwise", "precision": "bf16"},
            "model": {"sequence_length": 16, "head_dim": 16, "ffn_hidden_size": 48},
            "parallel": {"tensor": 2},
        },
        "model.ffn_hidden_size",
        "with train.fp8 ffn_hidden_size (48) must be a multiple of 16 x parallel.tensor", "32",
    ),
    (
        "state that is kept nowhere",
        {"checkpoint": {"snapshots": "off", "every_steps": 0}},
        "checkpoint.every_steps", "without snapshots a job can only continue from checkpoints", "50",
    ),
    (
        "fused dropout",
        {"train": {"attention": "sdpa"}, "model": {"dropout": 0.1}},
        "train.attention", "with dropout, attention must be explicit", "explicit",
    ),
    (
        "compiled dropout",
        {"train": {"compile": True}, "model": {"dropout": 0.1}},
        "train.compile", "compiled blocks support only sdpa attention without dropout", "false",
    ),
    (
        "vocabulary",
        {"model": {"vocabulary_size": 100}},
        "model.vocabulary_size", "is smaller than the bytes tokenizer's (256)", "256",
    ),
    (
        "paths without use",
        {"data": {"source": "python-stdlib"}},
        "data.paths", "source python-stdlib takes no paths", "[]",
    ),
    ("no paths", {"data": {"paths": []}}, "data.paths", "needs at least one file or directory", "[corpus.txt]"),
    (
        "a decay after nothing but warm-up",
        {"train": {"optimizer": {"schedule": "wsd", "decay_steps": 5, "warmup_steps": 30}}},
        "train.optimizer.warmup_steps",
        "the decay (5 steps) and warmup_steps (30) take more than train.steps (30)", "25",
    ),
    (
        "a group of parameters twice",
        {"train": {"optimizer": {"weight_decay_groups": ["linear", "bias", "linear"]}}},
        "train.optimizer.weight_decay_groups", "a group is named twice", "[linear, bias]",
    ),
    (
        "validation",
        {"train": {"validate_every": 5}, "data": {"validation_fraction": 0.0}},
        "train.validate_every", "needs data.validation_fraction above 0, or sets in data.validation", "0",
    ),
    (
        "sets that are never measured",
        {"data": {"validation": [{"name": "code", "paths": ["a.txt"]}]}},
        "train.validate_every", "data.validation has sets", "3",
    ),
    ("fewest", {"elastic": {"min_data": 2}}, "elastic.min_data", "must be at most parallel.data (1)", "1"),
    (
        "most",
        {"elastic": {"max_data": 1}, "parallel": {"data": 2}},
        "elastic.max_data", "must be at least parallel.data (2)", "2",
    ),
    (
        "spikes that nobody sees",
        {"recovery": {"spike": {"policy": "skip", "window": 40}}},
        "recovery.spike.window", "window (40) must be below train.steps (30), or no step is ever checked", "29",
    ),
    (
        "spikes of a job just long enough",
        {"recovery": {"spike": {"policy": "report"}}, "train": {"steps": 6}},
        "recovery.spike.window", "window (50) must be below train.steps (6), or no step is ever checked", "5",
    ),
    (
        "spikes of a short job",
        {"recovery": {"spike": {"policy": "skip"}}, "train": {"steps": 5}},
        "recovery.spike.policy", "window (50) must be below train.steps (5), or no step is ever checked", "ignore",
    ),
]  # fmt: skip
