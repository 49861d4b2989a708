"""Low-rank adapters of a plain model: what the engine's are measured against. Nothing of the engine is used but the
hash of dropout's masks, which here is computed for all samples, rows and columns at once."""

from __future__ import annotations

import math

import torch
from plain_gpt import PlainGPT
from plain_llama import plain_model
from torch import nn

from manta.workers.config import JobSpec
from manta.workers.parallel.tensor.dropout import derived_keys, kept, sample_keys

INPUTS = {"q": 0, "k": 0, "v": 0, "o": 1, "gate": 2, "up": 2, "down": 3}
"""Which of a layer's inputs of linear layers each target reads."""


def adapted_model(spec: JobSpec) -> PlainGPT:
    """The plain model of a spec; where that has `train.lora`, with adapters, beside which everything is frozen."""
    model = plain_model(spec)
    if spec.train.lora is not None:
        model.requires_grad_(False)
        for index, layer in enumerate(model.layers):
            _adapt(spec, index, layer)
    return model


def _adapt(spec: JobSpec, index: int, layer: nn.Module) -> None:
    lora, attention, mlp = spec.train.lora, layer.attention, layer.mlp
    latent, has_experts = spec.model.latent_attention is not None, spec.model.moe is not None
    in_attention = "o" if latent else "qkvo"
    in_mlp = () if has_experts else ("gate", "up", "down")
    for target in lora.targets or (*in_attention, *in_mlp):
        if target in "qkv":
            size, fused = attention.size, attention.kv_heads == attention.heads
            owner, name = attention, target
            together = "qkv" if fused else "q" if target == "q" else "kv"
            linear = getattr(attention, together)
            rows = torch.arange(len(linear.weight)).view(-1, len(together), size)[:, together.index(target)].flatten()
        else:
            owner, name = (attention, "output") if target == "o" else (mlp, target)
            if not hasattr(owner, name):
                continue
            linear = getattr(owner, name)
            rows = torch.arange(len(linear.weight))
        if not hasattr(owner, name):
            owner.add_module(name, nn.Module())
        holder = getattr(owner, name)
        holder.lora_a = nn.Parameter(torch.empty(lora.rank, linear.weight.shape[1]))
        holder.lora_b = nn.Parameter(torch.empty(len(rows), lora.rank))
        place = 1 + 3 * spec.model.layers + 4 * index + INPUTS[target] - latent
        linear.register_forward_hook(_added(spec, holder, rows, place))


def _added(spec: JobSpec, holder: nn.Module, rows: torch.Tensor, place: int):
    lora = spec.train.lora
    scale = lora.alpha / (lora.rank if lora.scaling == "standard" else math.sqrt(lora.rank))

    def added(_, inputs: tuple[torch.Tensor], y: torch.Tensor) -> torch.Tensor:
        (x,) = inputs
        if lora.dropout:
            keys_b = derived_keys(sample_keys(spec.train.seed, range(len(x)), torch.device("cpu")), place)
            keys_bs = derived_keys(keys_b.unsqueeze(1), torch.arange(x.shape[1], dtype=torch.int32))
            x = x * kept(keys_bs, x.shape[2], lora.dropout) / (1 - lora.dropout)
        return y.index_add(-1, rows, scale * (x @ holder.lora_a.T @ holder.lora_b.T))

    return added
