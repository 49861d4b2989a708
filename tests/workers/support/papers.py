"""Figures that papers have published, with their source: what the engine's arithmetic is compared with.

Columns bear the papers' names; times in ms where the name says so, else in seconds.
"""

from __future__ import annotations

from typing import Any

from manta.workers.config import ModelConfig


def _table(columns: tuple[str, ...], *rows: tuple[Any, ...]) -> dict[str, dict[str, Any]]:
    """Rows as dicts, by their first column."""
    return {row[0]: dict(zip(columns, row, strict=True)) for row in rows}


MEGATRON_SIZES = (
    {"hidden_size": 1536, "attention_heads": 16, "num_layers": 40, "params_billion": 1.2},
    {"hidden_size": 1920, "attention_heads": 20, "num_layers": 54, "params_billion": 2.5},
    {"hidden_size": 2304, "attention_heads": 24, "num_layers": 64, "params_billion": 4.2},
    {"hidden_size": 3072, "attention_heads": 32, "num_layers": 72, "params_billion": 8.3},
)
"""arXiv:1909.08053, table 1: s = 1024, vocabulary padded to 51,200."""

MODELS = _table(
    ("model", "heads", "hidden", "layers", "tp", "pp", "gpus", "global_batch", "micro_batch", "interleave_m"),
    ("22B", 64, 6144, 48, 8, 1, 8, 4, 4, 1),
    ("175B", 96, 12288, 96, 8, 8, 64, 64, 1, 3),
    ("530B", 128, 20480, 105, 8, 35, 280, 280, 1, 3),
    ("1T", 160, 25600, 128, 8, 64, 512, 512, 1, 1),
)
"""arXiv:2205.05198, table 3: s = 2048, v = 51,200, A100 GPUs, no data parallelism."""

ITERATIONS = _table(
    ("model", "full_recompute_s", "present_work_s", "throughput_increase_pct", "mfu_pct", "hfu_pct"),
    ("22B", 1.42, 1.1, 29.0, 41.5, 43.7),
    ("175B", 18.13, 13.75, 31.8, 51.4, 52.8),
    ("530B", 49.05, 37.83, 29.7, 56.0, 57.0),
    ("1T", 94.42, 71.49, 32.1, 56.3, 57.0),
)
"""arXiv:2205.05198, table 5; MFU and HFU with sequence parallelism and selective recomputation."""

ITERATION_OF_EIGHT_REPLICAS = {"iter_s": 39.15, "mfu_pct": 54.2, "global_batch": 2240}
"""arXiv:2205.05198, section 6.3: the 530B model on 2240 GPUs."""

LAYER_BYTES = {
    "no parallelism": "s*b*h*(34+5*a*s/h)",
    "tensor parallel (baseline)": "s*b*h*(10+24/t+5*a*s/(h*t))",
    "tensor + sequence parallel": "s*b*h*(34/t+5*a*s/(h*t))",
    "tensor parallel + selective recompute": "s*b*h*(10+24/t)",
    "tensor + sequence parallel + selective recompute": "s*b*h*(34/t)",
    "full activation recomputation": "s*b*h*2",
}
"""arXiv:2205.05198, table 2: bytes of activations a layer."""

SELECTIVE_RECOMPUTATION = {
    "GPT-3": {"flops_overhead_pct": 2.7},
    "MT-NLG": {"flops_overhead_pct": 1.6},
}
"""arXiv:2205.05198, section 5."""


MT_NLG_BATCH = 1920
MT_NLG_ITERATIONS = (
    {"gpus": 2240, "iter_time_s": 60.1, "TFLOPs_per_gpu": 126},
    {"gpus": 2800, "iter_time_s": 50.2, "TFLOPs_per_gpu": 121},
    {"gpus": 3360, "iter_time_s": 44.4, "TFLOPs_per_gpu": 113},
)
"""arXiv:2201.11990, section 2.4: 530B parameters, global batch of 1920, each layer recomputed."""

PASS_TIMES = (
    {"model": "1.5B", "p": 8, "m": 24, "TF_ms": 18.522, "TB_ms": 18.086, "TW_ms": 9.337, "Tcomm_ms": 0.601},
    {"model": "1.5B", "p": 8, "m": 32, "TF_ms": 18.513, "TB_ms": 18.086, "TW_ms": 9.331, "Tcomm_ms": 0.626},
    {"model": "1.5B", "p": 8, "m": 64, "TF_ms": 18.546, "TB_ms": 18.097, "TW_ms": 9.321, "Tcomm_ms": 0.762},
    {"model": "6.2B", "p": 8, "m": 24, "TF_ms": 29.718, "TB_ms": 29.444, "TW_ms": 19.927, "Tcomm_ms": 0.527},
    {"model": "6.2B", "p": 8, "m": 32, "TF_ms": 29.802, "TB_ms": 29.428, "TW_ms": 19.53, "Tcomm_ms": 0.577},
    {"model": "6.2B", "p": 8, "m": 64, "TF_ms": 29.935, "TB_ms": 29.621, "TW_ms": 19.388, "Tcomm_ms": 0.535},
    {"model": "14.6B", "p": 16, "m": 48, "TF_ms": 11.347, "TB_ms": 11.248, "TW_ms": 8.132, "Tcomm_ms": 0.377},
    {"model": "14.6B", "p": 16, "m": 64, "TF_ms": 11.307, "TB_ms": 11.254, "TW_ms": 8.101, "Tcomm_ms": 0.379},
    {"model": "14.6B", "p": 16, "m": 128, "TF_ms": 11.325, "TB_ms": 11.308, "TW_ms": 8.109, "Tcomm_ms": 0.378},
    {"model": "28.3B", "p": 32, "m": 96, "TF_ms": 10.419, "TB_ms": 10.207, "TW_ms": 7.715, "Tcomm_ms": 0.408},
    {"model": "28.3B", "p": 32, "m": 128, "TF_ms": 10.408, "TB_ms": 10.204, "TW_ms": 7.703, "Tcomm_ms": 0.408},
    {"model": "28.3B", "p": 32, "m": 256, "TF_ms": 10.402, "TB_ms": 10.248, "TW_ms": 7.698, "Tcomm_ms": 0.46},
)
"""arXiv:2401.10241, table 9: profiled times of a micro-batch."""

BUBBLE_RATES = (
    {"model": "1.5B", "p": 8, "m": 24, "1F1B": 0.2431, "ZB-H1": 0.1585, "ZB-H2": 0.1083},
    {"model": "1.5B", "p": 8, "m": 32, "1F1B": 0.1985, "ZB-H1": 0.1242, "ZB-H2": 0.0837},
    {"model": "1.5B", "p": 8, "m": 64, "1F1B": 0.124, "ZB-H1": 0.0674, "ZB-H2": 0.0444},
    {"model": "6.2B", "p": 8, "m": 24, "1F1B": 0.2347, "ZB-H1": 0.1323, "ZB-H2": 0.0698},
    {"model": "6.2B", "p": 8, "m": 32, "1F1B": 0.1898, "ZB-H1": 0.1045, "ZB-H2": 0.0559},
    {"model": "6.2B", "p": 8, "m": 64, "1F1B": 0.1091, "ZB-H1": 0.0554, "ZB-H2": 0.0294},
    {"model": "14.6B", "p": 16, "m": 48, "1F1B": 0.2552, "ZB-H1": 0.1397, "ZB-H2": 0.0672},
    {"model": "14.6B", "p": 16, "m": 64, "1F1B": 0.2082, "ZB-H1": 0.1088, "ZB-H2": 0.0516},
    {"model": "14.6B", "p": 16, "m": 128, "1F1B": 0.1251, "ZB-H1": 0.0576, "ZB-H2": 0.0266},
    {"model": "28.3B", "p": 32, "m": 96, "1F1B": 0.2646, "ZB-H1": 0.1421, "ZB-H2": 0.0641},
    {"model": "28.3B", "p": 32, "m": 128, "1F1B": 0.2168, "ZB-H1": 0.1106, "ZB-H2": 0.049},
    {"model": "28.3B", "p": 32, "m": 256, "1F1B": 0.1352, "ZB-H1": 0.0594, "ZB-H2": 0.0257},
)
"""arXiv:2401.10241, table 5: (cost - m (TF + TB + TW)) / cost."""


def table2_bytes(
    model: ModelConfig, micro_batch: int, tensor: int = 1, sequence_parallel: bool = False, recompute: str = "none"
) -> float:
    """Bytes a layer by table 2 of arXiv:2205.05198: f = 4 h, 16-bit activations, masks of one byte.

    `recompute`: none (eqs. 1, 2 and 4), selective (core attention; eq. 6) or full. A full recomputation keeps the
    layer's input on every tensor rank; with sequence parallelism it could be a part of it (section 5), which the table
    leaves out.
    """
    s, h = model.sequence_length, model.hidden_size
    if recompute == "full":
        return 2.0 * s * micro_batch * h
    outside = 10 / tensor if sequence_parallel else 10
    attention = 0.0 if recompute == "selective" else 5 * model.heads * s / (h * tensor)
    return s * micro_batch * h * (outside + 24 / tensor + attention)


def _with_experts(family: str, sizes: tuple[int, ...], experts: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """`model` of a job: layers, hidden size, heads, key-value heads, inner width, vocabulary; experts, those of a
    token, their inner width."""
    names = "layers", "hidden_size", "heads", "kv_heads", "ffn_hidden_size", "vocabulary_size"
    moe = dict(zip(("experts", "per_token", "ffn_hidden_size"), experts, strict=True)) | more.pop("moe", {})
    return {"family": family, "sequence_length": 4096, **dict(zip(names, sizes, strict=True)), "moe": moe, **more}


MODELS_WITH_EXPERTS = {
    "Mixtral 8x7B": _with_experts("llama", (32, 4096, 32, 8, 14336, 32000), (8, 2, 14336)),
    "Qwen3 30B A3B": _with_experts("qwen", (48, 2048, 32, 4, 6144, 151936), (128, 8, 768), head_dim=128),
    "Qwen3 235B A22B": _with_experts("qwen", (94, 4096, 64, 4, 12288, 151936), (128, 8, 1536), head_dim=128),
    "DeepSeek V3": _with_experts(
        *("deepseek", (61, 7168, 128, 128, 18432, 129280), (256, 8, 2048)),
        latent_attention={"q_rank": 1536, "kv_rank": 512, "rope_size": 64, "nope_size": 128, "value_size": 128},
        moe={
            "first_dense": 3, "shared": 1, "score": "sigmoid", "scale": 2.5, "groups": 8, "groups_per_token": 4,
            "balance": {"weight": 1e-4, "bias_rate": 1e-3},
        },
    ),
}  # fmt: skip
"""arXiv:2401.04088, table 1; arXiv:2505.09388, table 2; arXiv:2412.19437, section 4.2; widths that these lack from the
models' config.json."""
