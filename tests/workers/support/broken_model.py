"""Specs that break a rule of the model section: see `broken_specs.RULES`."""

from __future__ import annotations

from typing import Any

MODEL_RULES: list[tuple[str, dict[str, Any], str, str, str | None]] = [
    ("heads", {"model": {"heads": 5}}, "model.heads", "heads (5) must divide hidden_size (32)", "4"),
    (
        "heads of a tensor group",
        {"model": {"heads": 3}, "parallel": {"tensor": 4}},
        "model.heads", "heads (3) must divide hidden_size (32)", "4",
    ),
    (
        "positions that are learned",
        {"model": {"rope": {"theta": 5e5}}},
        "model.rope", "gpt has learned positions; only llama and qwen have rotary ones", "null",
    ),
    (
        "an activation that is gpt's",
        {"model": {"family": "llama", "activation": "gelu_tanh"}},
        "model.activation", "llama uses SwiGLU; only gpt has a choice of activation", "gelu",
    ),
    (
        "pairs that turn",
        {"model": {"family": "llama", "head_dim": 7}},
        "model.head_dim", "rotary positions need an even head size, but it is 7", "8",
    ),
    (
        "length before it was stretched",
        {"model": {"family": "llama", "rope": {"scaling": {"type": "yarn", "factor": 4.0}}}},
        "model.rope.scaling.original_length",
        "yarn needs the sequence length that the model was pretrained with", "2",
    ),
    (
        "frequencies of llama 3",
        {
            "model": {
                "family": "llama",
                "rope": {
                    "scaling": {
                        "type": "llama3", "factor": 8.0, "original_length": 2, "low_frequency_factor": 4.0
                    }
                },
            }
        },
        "model.rope.scaling.low_frequency_factor", "must be below high_frequency_factor (4.0)", "1.0",
    ),
    (
        "frequencies of yarn",
        {
            "model": {
                "family": "qwen",
                "rope": {"scaling": {"type": "yarn", "factor": 8.0, "original_length": 2, "beta_fast": 0.5}},
            }
        },
        "model.rope.scaling.beta_slow", "must be below beta_fast (0.5)", "0.015625",
    ),
    (
        "a key of yarn for llama3",
        {
            "model": {
                "family": "llama",
                "rope": {"scaling": {"type": "llama3", "factor": 8.0, "original_length": 2, "beta_fast": 0.5}},
            }
        },
        "model.rope.scaling.beta_fast", "has no effect: only yarn uses it, and the type is llama3", "32.0",
    ),
    (
        "attention of yarn for linear",
        {
            "model": {
                "family": "llama",
                "rope": {"scaling": {"type": "linear", "factor": 8.0, "attention_factor": 1.0}},
            }
        },
        "model.rope.scaling.attention_factor", "has no effect: only yarn uses it, and the type is linear", "null",
    ),
    (
        "layers without a window",
        {"model": {"full_attention_every": 2}},
        "model.full_attention_every",
        "has no effect without sliding_window: all layers attend to all preceding tokens", "null",
    ),
    (
        "ffn",
        {"model": {"ffn_hidden_size": 71}, "parallel": {"tensor": 2}},
        "model.ffn_hidden_size", "ffn_hidden_size (71) must be a multiple of parallel.tensor (2)", "70",
    ),
    (
        "sequence",
        {"model": {"sequence_length": 9}, "parallel": {"tensor": 2}},
        "model.sequence_length", "must be a multiple of parallel.tensor (2) with sequence parallelism", "8",
    ),
    (
        "key-value heads",
        {"model": {"kv_heads": 3}},
        "model.kv_heads", "kv_heads (3) must divide heads (4)", "2",
    ),
    (
        "key-value heads of a tensor group",
        {"model": {"heads": 12, "hidden_size": 48, "kv_heads": 3}, "parallel": {"tensor": 2}},
        "model.kv_heads", "kv_heads (3) must be a multiple or a divisor of parallel.tensor (2)", "2",
    ),
    (
        "stages of zb-v",
        {"parallel": {"schedule": "zb-v", "virtual_stages": 2, "pipeline": 3}},
        "model.layers", "layers (4) must be at least parallel.pipeline x virtual_stages (3 x 2)", "6",
    ),
    (
        "too many virtual stages",
        {"parallel": {"schedule": "interleaved", "virtual_stages": 5, "pipeline": 2}},
        "model.layers", "layers (4) must be at least parallel.pipeline x virtual_stages (2 x 5)", "10",
    ),
    (
        "compiled attention",
        {"train": {"compile": True, "attention": "explicit"}},
        "train.compile", "compiled blocks support only sdpa attention without dropout", "false",
    ),
    (
        "compiled recomputation of activations",
        {
            "train": {"compile": True},
            "parallel": {"recompute": "selective", "recompute_modules": ["core_attention", "mlp_activation"]},
        },
        "parallel.recompute_modules", "the compiler chooses", "[core_attention]",
    ),
    (
        "compiled recomputation",
        {"train": {"compile": True}, "parallel": {"recompute": "selective", "recompute_modules": ["norm"]}},
        "parallel.recompute_modules", "the compiler chooses", "[core_attention]",
    ),
    (
        "nothing to recompute",
        {"parallel": {"recompute": "selective", "recompute_modules": []}},
        "parallel.recompute_modules", "needs at least one of core_attention", "[core_attention]",
    ),
    (
        "vocabulary of tokens of others",
        {"data": {"source": "megatron"}},
        "model.vocabulary_size", "the vocabulary of source megatron is not known", "50257",
    ),
    (
        "an end that bytes have not",
        {"data": {"end_of_document": "</s>"}},
        "data.end_of_document", "the bytes tokenizer supports <|endoftext|> (id 256) and none, not '</s>'",
        "<|endoftext|>",
    ),
    ("no tokenizer", {"data": {"tokenizer": ""}}, "data.tokenizer", "must be bytes, bpe, or the path", "bytes"),
    (
        "too many weights",
        {"data": {"paths": ["a.txt", "b.txt"], "weights": [1, 2, 3]}},
        "data.weights", "3 weights for 2 paths", "[1.0, 1.0]",
    ),
    (
        "weights without paths",
        {"data": {"source": "python-stdlib", "paths": [], "weights": [1]}},
        "data.weights", "1 weights for no paths", "null",
    ),
]  # fmt: skip
