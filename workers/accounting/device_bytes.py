"""Bytes of device memory that a rank takes in a step, by arithmetic, before it runs. Pure Python.

What rests between steps is exact up to alignment; activations are those of `activation_bytes.py`; the workspace is what
the backward pass of the widest products needs beside them. What torch and NCCL take for themselves (contexts, kernels,
buffers of communicators, memory lost between blocks) comes on top. Left out are the keys and values that a GPU repeats
for grouped heads in fp32 and under masks (`workers/model/core_attention.py`).

Shapes as in `activation_bytes.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from workers.accounting.activation_bytes import layer_bytes, layer_input_bytes, put_off_layer_bytes, rank_bytes
from workers.accounting.flops import (
    frozen_parameters,
    padded_vocabulary,
    rank_parameters,
    waiting_gradient_buffers,
)
from workers.config import JobSpec
from workers.parallel.pipeline.schedules import SPLIT_BACKWARD
from workers.spec.parameters import TOKEN_EMBEDDING, frozen_names

WIDE = 4
"""Bytes of an element of gradients, master weights and moments."""
LOSS_ROWS, LOSS_ELEMENTS = 256, 2**24
"""Of a block of 16-bit logits: rows at least, and elements."""


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
    computing = activations + (_workspace(spec, stage) if trained else _forward_workspace(spec))
    if stage == 0 and TOKEN_EMBEDDING not in frozen_names(spec):
        # By then the layers of that micro-batch are through.
        others = activations - activations // min(spec.micro_batches, spec.layout.pipeline)
        computing = max(computing, others + _embedding_gradient(spec))
    workspace = max(computing, copies) - activations
    return DeviceBytes(width * held, gradients, optimizer, activations, workspace)


def _workspace(spec: JobSpec, stage: int) -> int:
    """What backward through the widest pair of products takes: the gradient of their result, their gathered input, and
    its gradient whole and reduced (a weight's gradient is added as it is made, by torch 2.13 and later), or the
    gradients of both gates with the activation in between; with a layer that is recomputed as a whole that layer's
    activations too; messages of the pipeline. On the last stage a block of the logits in fp32 may be more."""
    layout, sizes = spec.layout, _Sizes.of(spec)
    again, logits = _recomputed_layer(spec), 0
    if layout.schedule in SPLIT_BACKWARD:
        # What products for weights wait for, which counts as activations, is made of the layer that is recomputed.
        again = max(0, again - put_off_layer_bytes(spec))
    if stage == _last_rank(spec):
        logits = sizes.width * sizes.tokens * padded_vocabulary(spec) // layout.tensor
        if layout.schedule not in SPLIT_BACKWARD:
            # Where products for weights do not wait, the logits are gone before a layer is computed again.
            again, logits = max(0, again - logits), 0
    # The logits' own gradient counts as activations; where it waits for its product there are those of the next
    # micro-batch meanwhile.
    h, inside = spec.model.hidden_size, sizes.tokens * sizes.inner
    product = sizes.gates * inside + (sizes.gathered + sizes.tokens + sizes.outside) * h
    gates = 3 * inside + sizes.outside * h if sizes.gates > 1 else 0
    messages = 2 * layout.virtual_stages * sizes.outside * h if layout.pipeline > 1 else 0
    most = sizes.width * (max(product, gates) + messages) + again + logits
    return max(most, _written_out_attention(spec), _loss_block(spec) if stage == _last_rank(spec) else 0)


def _loss_block(spec: JobSpec) -> int:
    """The logits that a GPU widens at a time (`workers/parallel/tensor/cross_entropy.py`); compiled kernels do not."""
    if spec.train.precision == "fp32" or spec.train.compile:
        return 0
    columns = padded_vocabulary(spec) // spec.layout.tensor
    return WIDE * columns * min(_Sizes.of(spec).tokens, max(LOSS_ROWS, LOSS_ELEMENTS // columns))


@dataclass(frozen=True)
class _Sizes:
    """Of what a layer computes on one rank."""

    width: int
    """Bytes of an element."""
    tokens: int
    outside: int
    """Tokens that a rank has between blocks."""
    gathered: int
    """Tokens that are brought together for a block."""
    inner: int
    gates: int

    @classmethod
    def of(cls, spec: JobSpec) -> _Sizes:
        model, layout = spec.model, spec.layout
        tokens = model.sequence_length * spec.train.micro_batch_size
        apart = layout.sequence_parallel_on
        return cls(
            width=4 if spec.train.precision == "fp32" else 2,
            tokens=tokens,
            outside=tokens // layout.tensor if apart else tokens,
            gathered=tokens if apart else 0,
            inner=model.ffn_size // layout.tensor,
            gates=2 if model.parts.gated_mlp else 1,
        )


def _forward_workspace(spec: JobSpec) -> int:
    """What forward through an MLP takes on a rank that trains nothing: the inputs of its second product, with what
    they are made of, its gathered input, and what is around it: residual, norm, what has come and what is to go."""
    sizes = _Sizes.of(spec)
    inside = (sizes.gates + 1) * sizes.tokens * sizes.inner
    return sizes.width * (inside + (sizes.gathered + 4 * sizes.outside) * spec.model.hidden_size)


def _embedding_gradient(spec: JobSpec) -> int:
    """What the token embedding's gradient takes on a GPU: a table in fp32 that is added to the sum, gradients of its
    rows in fp32 and as they came, and messages."""
    sizes, h = _Sizes.of(spec), spec.model.hidden_size
    rows = padded_vocabulary(spec) // spec.layout.tensor
    return WIDE * (rows + sizes.tokens) * h + sizes.width * (sizes.tokens + 2 * sizes.outside) * h


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
