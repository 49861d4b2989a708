"""Bytes of device memory that a rank takes in a step, by arithmetic, before it runs. Pure Python.

What rests between steps is exact up to alignment; activations are those of `activation_bytes.py`; the workspace is what
the backward pass of the widest products needs beside them. What torch and NCCL take for themselves (contexts, kernels,
buffers of communicators, memory lost between blocks) comes on top. Left out are the keys and values that a GPU repeats
for grouped heads in fp32 and under masks (`workers/model/core_attention.py`).

Shapes as in `activation_bytes.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.accounting.activation_bytes import layer_bytes, layer_input_bytes, rank_bytes
from workers.accounting.flops import (
    frozen_parameters,
    padded_vocabulary,
    rank_parameters,
    waiting_gradient_buffers,
)
from workers.config import JobSpec
from workers.parallel.pipeline.schedules import SPLIT_BACKWARD

WIDE = 4
"""Bytes of an element of gradients, master weights and moments."""


@dataclass(frozen=True)
class DeviceBytes:
    """Memory of one rank."""

    parameters: int
    """In the precision of compute."""
    gradients: int
    """The flat buffer, and what elastic sums wait in."""
    optimizer: int
    """Moments, and in 16 bits the master weights."""
    activations: int
    """Most that is kept for backward at once."""
    workspace: int
    """Most that a pass or an update needs beside all of these, at the moment of the peak."""

    @property
    def total(self) -> int:
        """The peak of a step."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.workspace


def device_bytes(spec: JobSpec) -> tuple[DeviceBytes, ...]:
    """Of a rank of each pipeline stage."""
    held, frozen, activations = rank_parameters(spec), frozen_parameters(spec), rank_bytes(spec)
    return tuple(bytes_of_stage(spec, *each) for each in zip(range(len(held)), held, frozen, activations, strict=True))


def bytes_of_stage(spec: JobSpec, stage: int, held: int, frozen: int, activations: int) -> DeviceBytes:
    """Of a rank of one stage that holds so many parameters, `frozen` of them not trained, and keeps so many bytes of
    activations at once."""
    replicas, width = spec.layout.data, 4 if spec.train.precision == "fp32" else 2
    trained, part = held - frozen, (held - frozen) // replicas
    kept = part if spec.layout.zero else trained
    gradients = WIDE * trained * (1 + waiting_gradient_buffers(spec))
    masters = 0 if width == WIDE else kept
    # Without masters the weights that are updated are the parameters.
    optimizer = WIDE * (masters + 2 * kept)
    # Updated parts are copied to be gathered, when no activations are left.
    copies = width * part if spec.layout.zero and replicas > 1 else 0
    computing = activations + _workspace(spec, stage)
    workspace = max(computing, copies) - activations
    return DeviceBytes(width * held, gradients, optimizer, activations, workspace)


def _workspace(spec: JobSpec, stage: int) -> int:
    """What backward through the widest pair of products takes: the gradient of their result, their gathered input, and
    its gradient whole and reduced (a weight's gradient is added as it is made, by torch 2.13 and later); with a layer
    that is recomputed as a whole that layer's activations too."""
    model, layout = spec.model, spec.layout
    t, width, h = layout.tensor, 4 if spec.train.precision == "fp32" else 2, model.hidden_size
    tokens = model.sequence_length * spec.train.micro_batch_size
    outside = tokens // t if layout.sequence_parallel_on else tokens
    gathered = tokens if layout.sequence_parallel_on else 0
    inner = model.ffn_size // t
    gates = 2 if model.parts.gated_mlp else 1

    outside_of_result = (gathered + tokens + outside) * h  # the logits' own gradient counts as activations
    again = _recomputed_layer(spec)
    if stage == _last_rank(spec) and layout.schedule not in SPLIT_BACKWARD:
        # Where products for weights do not wait, the logits are gone before a layer is computed again.
        again = max(0, again - width * tokens * padded_vocabulary(spec) // t)
    most = width * (gates * tokens * inner + outside_of_result) + again
    return max(most, _written_out_attention(spec))


def _written_out_attention(spec: JobSpec) -> int:
    """Gradients of the scores and of the weights, and where these are computed again, they too; fused kernels keep
    none."""
    if not spec.attention_is_explicit:
        return 0
    model, layout, width = spec.model, spec.layout, 4 if spec.train.precision == "fp32" else 2
    scores = spec.train.micro_batch_size * model.heads // layout.tensor * model.sequence_length**2 * width
    again = layout.recompute == "selective" and "core_attention" in layout.recompute_modules
    return (3 if again else 2) * scores


def _recomputed_layer(spec: JobSpec) -> int:
    """Bytes that a layer keeps beside its input while it is recomputed as a whole."""
    return layer_bytes(spec) - layer_input_bytes(spec) if spec.layout.recompute == "full" else 0


def _last_rank(spec: JobSpec) -> int:
    """The pipeline rank with the last virtual stage."""
    return 0 if spec.layout.schedule == "zb-v" else spec.layout.pipeline - 1
