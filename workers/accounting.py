"""Parameters and FLOPs of a model by arithmetic. Pure Python.

Only matrix products count, a multiply-add as 2 FLOPs; a backward pass costs twice its forward
(arXiv:2205.05198, appendix A). `full` counts attention over all s^2 pairs, `causal` over half of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.config import JobSpec, ModelConfig


@dataclass(frozen=True)
class StepFlops:
    """FLOPs of one optimizer step over the whole global batch."""

    model_full: int
    """Forward and backward, attention counted in full."""
    model_causal: int
    """Forward and backward, half of the attention counted."""
    hardware_full: int
    """model_full plus the recomputation that the layout asks for."""


def parameter_count(spec: JobSpec) -> int:
    """Trainable parameters of the whole model, without padding."""
    model, h, f = spec.model, spec.model.hidden_size, spec.model.ffn_size
    bias = 1 if model.bias else 0
    layer = 4 * h * h + 2 * h * f + bias * (3 * h + h + f + h) + 2 * (1 + bias) * h
    embeddings = spec.vocabulary_size * h * (1 if model.tie_embeddings else 2) + model.sequence_length * h
    return model.layers * layer + embeddings + (1 + bias) * h


def core_attention_forward(model: ModelConfig) -> int:
    """FLOPs of q k^T and of the scores times v for one sequence in one layer: 4 s^2 h (arXiv:2205.05198, app. A)."""
    return 4 * model.sequence_length**2 * model.hidden_size


def forward_flops(spec: JobSpec) -> tuple[int, int]:
    """Forward FLOPs of one sequence: (all matrix products but core attention, core attention in full).

    For ffn_hidden_size = 4 h, three times their sum is 72 B L s h^2 (1 + s/(6h) + v/(12hL)) for B = 1
    (arXiv:2205.05198, eq. 7).
    """
    model, s, h = spec.model, spec.model.sequence_length, spec.model.hidden_size
    dense = model.layers * (8 * s * h * h + 4 * s * h * model.ffn_size) + 2 * s * h * spec.vocabulary_size
    return dense, model.layers * core_attention_forward(model)


def step_flops(spec: JobSpec, sequences: int | None = None) -> StepFlops:
    """FLOPs of one step over `sequences` (default: the global batch). Selective recomputation runs the core
    attention's forward once more."""
    dense, attention = forward_flops(spec)
    batch = spec.train.global_batch_size if sequences is None else sequences
    recomputed = attention if spec.layout.recompute == "selective" else 0
    return StepFlops(
        model_full=3 * batch * (dense + attention),
        model_causal=3 * batch * (dense + attention // 2),
        hardware_full=batch * (3 * (dense + attention) + recomputed),
    )
