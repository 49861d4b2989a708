"""Specs that break a rule, with what is said of it, and some that just fit: tables, of small jobs' sections."""

from __future__ import annotations

from typing import Any

RULES: list[tuple[str, dict[str, Any], str, str, str | None]] = [
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
        "an epsilon that is 0 in fp32",
        {"train": {"optimizer": {"epsilon": 1e-50}}},
        "train.optimizer.epsilon", "must be at least 1e-30, not 1e-50", "1e-30",
    ),
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
        "documents apart in compiled blocks",
        {"data": {"documents": "apart", "end_of_document": "<|endoftext|>"}, "train": {"compile": True}},
        "train.compile", "with documents apart each micro-batch would be recompiled", "false",
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
        "conversations in compiled blocks",
        {"data": {"source": "chat", "template": "chatml"}, "train": {"compile": True}},
        "train.compile", "with documents apart each micro-batch would be recompiled", "false",
    ),
    (
        "layers without a window",
        {"model": {"full_attention_every": 2}},
        "model.full_attention_every",
        "has no effect without sliding_window: all layers attend to all preceding tokens", "null",
    ),
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
        "stages of zb-v",
        {"parallel": {"schedule": "zb-v", "virtual_stages": 2, "pipeline": 3}},
        "model.layers", "layers (4) must be at least parallel.pipeline x virtual_stages (3 x 2)", "6",
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
        "too many virtual stages",
        {"parallel": {"schedule": "interleaved", "virtual_stages": 5, "pipeline": 2}},
        "model.layers", "layers (4) must be at least parallel.pipeline x virtual_stages (2 x 5)", "10",
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
        "twice the same module",
        {"parallel": {"recompute": "selective", "recompute_modules": ["norm", "norm"]}},
        "parallel.recompute_modules", "a module is named twice", "[norm]",
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
    (
        "vocabulary of tokens of others",
        {"data": {"source": "megatron"}},
        "model.vocabulary_size", "the vocabulary of source megatron is not known", "50257",
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
"""Name, sections, path of the field that is named, part of what is said, advice."""


NOT_BUILT: list[tuple[str, str, Any]] = [
    ("model", "family", "moe"),
    ("model", "experts", 8),
    ("parallel", "context", 2),
    ("parallel", "zero", 3),
]
"""Section, key and value of what is to come."""


SETS: list[tuple[str, list[dict[str, Any]], str, str, str | None]] = [
    ("twice the same name", [{"name": "a", "paths": ["a"]}, {"name": "a", "paths": ["b"]}],
     "data.validation.1.name", "an earlier validation set has the name a", "a_2"),
    ("no paths", [{"name": "a"}], "data.validation.0.paths", "needs at least one file or directory", "[corpus.txt]"),
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
