"""`train`: steps, batches, optimizer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from workers.config.fields import (
    Batch,
    Count,
    Fraction,
    MayBeOff,
    NonNegativeFloat,
    ParameterGroup,
    PositiveFloat,
    Section,
    Seed,
    Steps,
    StepsOrNever,
    StrictBool,
)


class OptimizerConfig(Section):
    """AdamW with decoupled weight decay (Loshchilov & Hutter 2019), and the learning rate by step."""

    name: Literal["adamw"] = "adamw"
    """Optimizer."""
    learning_rate: PositiveFloat = 1.0e-3
    """Highest learning rate, reached at the end of the warm-up."""
    min_learning_rate: NonNegativeFloat = 1.0e-4
    """Learning rate of the last step; inverse-sqrt falls no lower, constant ignores it."""
    schedule: Literal["cosine", "linear", "wsd", "inverse-sqrt", "constant"] = "cosine"
    """How the learning rate goes on after the warm-up (workers/learning_rate.py has the formulas). cosine, linear: down
    to min_learning_rate at the last step; wsd: it stays until the decay at the end of the job (arXiv:2404.06395);
    inverse-sqrt: with the square root of warmup_steps / step; constant: it stays."""
    decay_steps: Steps | None = None
    """wsd: steps of the decay, the last ones of the job; default: decay_fraction of them."""
    decay_fraction: Annotated[float, Field(gt=0, le=1, strict=True, allow_inf_nan=False)] | None = None
    """wsd: the decay's part of train.steps; default: a tenth, as in arXiv:2404.06395."""
    decay_shape: Literal["linear", "cosine", "1-sqrt"] = "linear"
    """wsd: shape of the decay. 1-sqrt is steep at first, and best in arXiv:2405.18392."""
    warmup_steps: StepsOrNever = 0
    """Steps over which the learning rate rises linearly from 0."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, of the parameters that weight_decay_groups names."""
    weight_decay_groups: tuple[ParameterGroup, ...] = ("linear", "embedding")
    """What is decayed. linear: weights of linear layers, an output layer of its own included; embedding: tables of
    tokens and of positions, the output layer's where that is tied; norm: weights of norms; bias: biases of linear
    layers and of norms."""
    beta1: Fraction = 0.9
    """Decay of the first moment."""
    beta2: Fraction = 0.95
    """Decay of the second moment."""
    epsilon: PositiveFloat = 1.0e-8
    """Added to the square root of the second moment."""
    clip_norm: NonNegativeFloat = 1.0
    """Largest global gradient norm (L2); larger gradients are scaled down to it. 0 turns clipping off."""
    offload: StrictBool = False
    """Whether the state (weights in fp32 and both moments) lies in pinned host memory and comes to the GPU for its
    update, a slice at a time. The same numbers, and 12 bytes a parameter less on the device (8 in fp32), over the
    replicas with parallel.zero: 1; each update takes as long as those bytes take over the GPU's link, which nothing
    hides (docs/parallelism.md). false, since that costs where the state fits. On a CPU there is nothing to save."""


class BatchRamp(Section):
    """A batch that grows in equal steps while the first samples are consumed (arXiv:2201.11990, section 3.2)."""

    start: Batch
    """Sequences in the first step."""
    increment: Batch
    """Sequences by which the batch grows each time."""
    samples: Annotated[int, Field(gt=0, le=10**15, strict=True)]
    """Sequences consumed until the batch has reached train.global_batch_size."""


class TrainConfig(Section):
    """How long, how much at once, how fast."""

    steps: Steps
    """Optimizer steps of the whole job."""
    global_batch_size: Batch = 16
    """Sequences in one step, over all data-parallel replicas."""
    micro_batch_size: Batch = 1
    """Sequences that one replica processes at once; a step accumulates over its micro-batches. The last one of a step
    is smaller where it does not divide."""
    seed: Seed = 1234
    """Seed of initialisation and sample order."""
    deterministic_kernels: bool = False
    """Whether a GPU computes by kernels that give the same bits each time, so that a job that was recovered has the
    very curve that it would have had. false: the fastest, whose attention adds in the order in which its blocks happen
    to come, so that the curve is the same but for rounding. With deterministic: elastic they are always such. CPUs have
    no others."""
    deterministic: Literal["layout", "elastic"] = "layout"
    """What the bits of a job's results depend on. layout: the same layout gives the same bits. elastic: the number of
    replicas does not matter either, at the same tensor and pipeline size: gradients are added in a fixed tree over the
    global batch's micro-batches, which replicas share as wholes. Takes up to 2 log2(m) more gradient buffers a rank for
    m micro-batches of a replica, and no reduction overlaps backward (docs/parallelism.md)."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Number format of compute. bf16 and fp16 keep fp32 master weights, moments and gradient sums; fp16 also scales
    the loss dynamically."""
    fp8: Annotated[Literal["off", "tensorwise", "rowwise"], MayBeOff] = "off"
    """Whether the products of the linear layers inside of the transformer layers take 8-bit matrices, forward and
    backward; with precision bf16. Embedding, output layer, norms and attention stay as they are, and so do master
    weights, gradient sums and what is kept for backward. tensorwise: each matrix has one scale, gradients are e5m2;
    rowwise: each row has its own, gradients are e4m3, more is computed besides the products. Needs a GPU of compute
    capability 8.9 or above, or a CPU, where it is slow. Takes 2 bytes more for each weight (docs/parallelism.md)."""
    attention: Literal["auto", "sdpa", "explicit"] = "auto"
    """How attention is computed: sdpa: torch's fused kernels, which never hold the s x s scores; explicit: batched
    matrix products that do. auto: sdpa, or explicit with dropout (the fused kernels' dropout depends on the layout)."""
    compile: StrictBool = False
    """Whether each transformer block is compiled by torch.compile."""
    head_tokens: Count = 0
    """Tokens whose logits are in memory at once: output layer, loss and their gradients are computed for so many after
    the other (docs/parallelism.md). 0: those of a whole micro-batch. Fewer take less memory, and one pass more over the
    gradient of the output layer's weight each time, which 1024 or more tokens outweigh on a GPU; on a CPU, and where
    logits are no large part of the memory, there is nothing to gain. Changes roundings of that one gradient."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and learning rate."""
    frozen: Annotated[tuple[str, ...], Field(max_length=1000)] = ()
    """Parameters that are not trained, as patterns of their names: `embedding`, `layers.0-3`, `*.mlp`
    (docs/training.md). They have no gradient and no moments, and backward ends where nothing before it is trained."""
    z_loss: NonNegativeFloat = 0.0
    """Weight of log(Z)^2 of each token, Z being the sum of exponentials of its logits, in what is minimised: it keeps
    the logits from drifting away (arXiv:2204.02311, section 5, with 1.0e-4). 0: none. `loss` stays the cross-entropy
    alone; `z_loss` in the metrics is what comes on top, as a mean over the same tokens."""
    validate_every: StepsOrNever = 0
    """Steps between two validations; 0: never."""
    validation_batches: Steps = 8
    """Global batches of held-out text in one validation, at most the whole held-out part."""
    batch_ramp: BatchRamp | None = None
    """Growth of the batch at the start of the job; default: global_batch_size from the first step."""
    time_parts_every: StepsOrNever = 10
    """Steps between two measurements of where a step's time goes; 0: never."""

    @property
    def dtype(self) -> str:
        """Name of the torch dtype of compute."""
        return {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[self.precision]
