"""Specs that break a rule of the data section: see `broken_specs.RULES`."""

from __future__ import annotations

from typing import Any

DATA_RULES: list[tuple[str, dict[str, Any], str, str, str | None]] = [
    (
        "documents without an end",
        {"data": {"documents": "apart"}},
        "data.end_of_document", "documents apart requires a token that ends each document", "<|endoftext|>",
    ),
    (
        "documents whose end is none",
        {"data": {"documents": "apart", "tokenizer": "bpe", "end_of_document": "none"}},
        "data.end_of_document", "documents apart requires a token that ends each document", "null",
    ),
    (
        "documents of jsonl without an end",
        {"data": {"source": "jsonl", "documents": "apart"}},
        "data.end_of_document", "documents apart requires a token that ends each document", "<|endoftext|>",
    ),
    (
        "texts without an end beside conversations",
        {
            "data": {
                "source": "chat", "template": "chatml",
                "validation": [{"name": "texts", "source": "text", "paths": ["a.txt"]}],
            },
            "train": {"validate_every": 5},
        },
        "data.end_of_document", "documents apart requires a token that ends each document", "<|endoftext|>",
    ),
    (
        "documents of tokens that nobody knows",
        {"data": {"source": "megatron", "documents": "apart"}, "model": {"vocabulary_size": 300}},
        "data.documents", "the file of the tokens' tokenizer", "together",
    ),
    (
        "a template of texts",
        {"data": {"template": "chatml"}},
        "data.template", "source text does not use a template; only source chat does",
        "null",
    ),
    (
        "answers in texts",
        {"data": {"loss": "answers"}},
        "data.loss", "source text has no answers; only source chat does", "all",
    ),
    (
        "conversations without a template",
        {"data": {"source": "chat"}},
        "data.template", "conversations need a chat template, and the bytes tokenizer has none", "chatml",
    ),
    (
        "a validation set of conversations without a template",
        {
            "data": {"validation": [{"name": "chats", "source": "chat", "paths": ["a.jsonl"]}]},
            "train": {"validate_every": 5},
        },
        "data.template", "conversations need a chat template, and the bytes tokenizer has none", "chatml",
    ),
    (
        "tokens of others are trained on",
        {"data": {"source": "megatron", "tokenizer": "bpe"}, "model": {"vocabulary_size": 10_000}},
        "data.tokenizer", "source megatron already has tokens", "bytes",
    ),
    (
        "too few tokens for the bytes",
        {"data": {"tokenizer": "bpe", "tokenizer_vocabulary": 256}},
        "data.tokenizer_vocabulary", "bpe needs at least 257 ids", "257",
    ),
    (
        "bytes of another number",
        {"data": {"tokenizer_vocabulary": 300}},
        "data.tokenizer_vocabulary", "the bytes tokenizer has 256 ids, not 300", "null",
    ),
    (
        "neither weights nor paths",
        {"data": {"source": "python-stdlib", "paths": [], "weights": []}},
        "data.weights", "no weights for no paths", "null",
    ),
    (
        "weights too far apart",
        {"data": {"paths": ["a.txt", "b.txt"], "weights": [1e-6, 1]}},
        "data.weights", "more than 100000 times the smallest", "[0.000010, 1.000000]",
    ),
    (
        "paths in an object store",
        {"data": {"paths": ["a", "s3://texts/a.txt"]}},
        "data.paths", "s3://texts/a.txt is a URL, but files are read from folders: mount the store",
        '["a", "/mnt/texts/a.txt"]',
    ),
    (
        "a tokenizer in an object store",
        {"data": {"tokenizer": "s3://models/llama"}},
        "data.tokenizer", "s3://models/llama is a URL", "bytes",
    ),
    (
        "a template in an object store",
        {"data": {"source": "chat", "template": "https://there/a.jinja"}},
        "data.template", "https://there/a.jinja is a URL", "chatml",
    ),
    ("zero byte", {"data": {"paths": ["a\0b"]}}, "data.paths", "cannot contain a zero byte", '["ab"]'),
    ("no path", {"data": {"paths": [""]}}, "data.paths", "cannot be blank", '["/data/corpus.txt"]'),
    ("a blank path", {"data": {"paths": [" \n", "a"]}}, "data.paths", "cannot be blank", '["a"]'),
    ("a blank tokenizer", {"data": {"tokenizer": " "}}, "data.tokenizer", "must be bytes, bpe, or the path", "bytes"),
    (
        "a blank template",
        {"data": {"source": "chat", "template": " "}},
        "data.template", "cannot be blank", "chatml",
    ),
    (
        "learning rates",
        {"train": {"optimizer": {"learning_rate": 1e-5}}},
        "train.optimizer.min_learning_rate", "must be at most learning_rate (1e-05)", "1e-05",
    ),
    (
        "warm-up",
        {"train": {"optimizer": {"warmup_steps": 31}}},
        "train.optimizer.warmup_steps", "warmup_steps (31) must be at most train.steps (30)", "30",
    ),
    (
        "an inverse square root from nothing",
        {"train": {"optimizer": {"schedule": "inverse-sqrt"}}},
        "train.optimizer.warmup_steps", "falls with the square root of warmup_steps / step", "1",
    ),
    (
        "a decay where there is none",
        {"train": {"optimizer": {"decay_steps": 5, "decay_shape": "cosine"}}},
        "train.optimizer.schedule", "cosine takes no decay_steps and no decay_shape, which are for wsd", "wsd",
    ),
    (
        "two lengths of a decay",
        {"train": {"optimizer": {"schedule": "wsd", "decay_steps": 5, "decay_fraction": 0.2}}},
        "train.optimizer.decay_fraction", "decay_steps already sets the length of the decay", "null",
    ),
    (
        "a decay beyond the warm-up",
        {"train": {"optimizer": {"schedule": "wsd", "decay_steps": 21, "warmup_steps": 10}}},
        "train.optimizer.decay_steps",
        "the decay (21 steps) and warmup_steps (10) take more than train.steps (30)", "20",
    ),
    (
        "a decay of too large a part",
        {"train": {"optimizer": {"schedule": "wsd", "decay_fraction": 1.0, "warmup_steps": 10}}},
        "train.optimizer.decay_fraction",
        "the decay (30 steps) and warmup_steps (10) take more than train.steps (30)", "0.66",
    ),
]  # fmt: skip
