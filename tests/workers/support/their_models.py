"""Small models of `transformers` with random weights, saved as their library saves them."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from manta.workers.config import JobSpec
from manta.workers.model.rotary import frequencies_of

LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "original_max_position_embeddings": 32,
    "low_freq_factor": 1.0, "high_freq_factor": 4.0,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 64,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
_LLAMA = {
    "vocab_size": 263, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "max_position_embeddings": 16, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
_GPT2 = {
    "vocab_size": 263, "n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 16, "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
_DEEPSEEK = {
    **_LLAMA, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 6, "qk_nope_head_dim": 8,
    "v_head_dim": 10, "n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 12,
    "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "num_mtp_layers": 0,
}  # fmt: skip
_NO_EXPERTS = {
    "n_routed_experts": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 48, "n_shared_experts": 1, "n_group": 1,
    "topk_group": 1, "routed_scaling_factor": 1.0,
}  # fmt: skip
"""What exports of models without experts say of them."""
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**_LLAMA, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "rope_parameters": LLAMA3}),
    "llama, all heads, biases, tied": (
        "Llama",
        {**_LLAMA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True, "head_dim": 16},
    ),
    "mistral": ("Mistral", {**_LLAMA, "num_key_value_heads": 1, "head_dim": 8, "sliding_window": 3}),
    "qwen3": (
        "Qwen3",
        {
            **_LLAMA, "num_key_value_heads": 2, "head_dim": 12, "tie_word_embeddings": True, "rope_parameters": YARN,
            "max_position_embeddings": 256,
            "use_sliding_window": True, "sliding_window": 5, "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "mixtral": (
        "Mixtral",
        {**_LLAMA, "head_dim": 8, "num_key_value_heads": 2, "num_local_experts": 5, "num_experts_per_tok": 2},
    ),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            **_LLAMA, "num_key_value_heads": 2, "head_dim": 12, "num_experts": 6, "num_experts_per_tok": 3,
            "moe_intermediate_size": 20, "decoder_sparse_step": 2, "mlp_only_layers": [0, 1], "norm_topk_prob": True,
        },
    ),
    "deepseek": (
        "DeepseekV3",
        {
            **_DEEPSEEK, "q_lora_rank": 24, "num_hidden_layers": 4, "first_k_dense_replace": 1, "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 5000.0, "factor": 4.0, "original_max_position_embeddings": 64,
                "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
            },
            "max_position_embeddings": 256,
        },
    ),
    "deepseek, plain queries, dense": (
        "DeepseekV3",
        {**_DEEPSEEK, "q_lora_rank": None, "first_k_dense_replace": 4, "v_head_dim": 20, **_NO_EXPERTS},
    ),
    "gpt2": ("GPT2", _GPT2),
    "gpt2, exact gelu, untied": ("GPT2", {**_GPT2, "activation_function": "gelu", "tie_word_embeddings": False}),
}  # fmt: skip


def their_model(kind: str, **more: Any) -> torch.nn.Module:
    """A random one in fp32, whose norms and biases are not what they are initialised with."""
    transformers = pytest.importorskip("transformers")
    name, config = KINDS[kind]
    config = {"attn_implementation": "eager", "experts_implementation": "eager", **config, **more}
    made = getattr(transformers, {"GPT2": "GPT2LMHeadModel"}.get(name, f"{name}ForCausalLM"))(
        getattr(transformers, f"{name}Config")(**config)
    )
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1 + (parameter.mean() > 0.5))
        for bias in choice_biases(made):
            bias.copy_(torch.randn(bias.shape, generator=generator) * 0.1)
    return made.eval()


def choice_biases(made: torch.nn.Module) -> list[torch.Tensor]:
    """What DeepSeek's layers add to the scores of experts for their choice."""
    return [buffer for name, buffer in made.named_buffers() if name.endswith("e_score_correction_bias")]


def saved(kind: str, folder: Path, dtype: torch.dtype = torch.float32, shard: str = "40KB", **more: Any) -> Path:
    """A folder as `save_pretrained` makes it."""
    made = their_model(kind, **more)
    biases = [bias.clone() for bias in choice_biases(made)]
    for bias, wide in zip(choice_biases(made.to(dtype)), biases, strict=True):
        bias.data = wide  # which stays fp32 in files
    made.save_pretrained(folder, max_shard_size=shard)
    return folder


def in_fp64(made: torch.nn.Module, job: JobSpec) -> torch.nn.Module:
    """A model of theirs in fp64, without the fp32 that some of its parts have inside."""
    made = made.double().eval()
    if job.model.family != "gpt":
        made.model.rotary_emb = _TablesInFp64(job)
    for module in made.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = functools.partial(_normed, module)
    return made


def _normed(norm: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


class _TablesInFp64(torch.nn.Module):
    """Their tables, which are fp32 whatever the model is, from our angles in fp64 (compared with theirs in
    tests/workers/model/test_llama.py)."""

    def __init__(self, job: JobSpec):
        super().__init__()
        frequencies, self.scale = frequencies_of(job.model.rope_or_default, job.model.rotated_size)
        angles = torch.outer(torch.arange(job.model.sequence_length).double(), frequencies)
        self.angles = torch.cat([angles, angles], -1).unsqueeze(0)

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor, **kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines."""
        return self.angles.cos() * self.scale, self.angles.sin() * self.scale
