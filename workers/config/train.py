"""`train`: steps, batches, optimizer."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import ConfigDict, Field

from manta.workers.config.fields import (
    Batch,
    Count,
    Epsilon,
    FalseAsOff,
    Fraction,
    LoraTarget,
    NonNegativeFloat,
    ParameterGroup,
    PositiveFloat,
    Section,
    Seed,
    Steps,
    StepsOrNever,
    StrictBool,
)

MIN_LEARNING_RATE = 1.0e-4
"""Default of `min_learning_rate`."""


class OptimizerConfig(Section):
    """AdamW with decoupled weight decay (Loshchilov & Hutter 2019), and the learning rate by step."""

    name: Literal["adamw"] = "adamw"
    """Optimizer."""
    learning_rate: PositiveFloat = 1.0e-3
    """Highest learning rate, reached at the end of the warm-up. Default with model.from: 1e-5, with train.lora too:
    2e-4."""
    min_learning_rate: NonNegativeFloat = MIN_LEARNING_RATE
    """Learning rate of the last step; the lower bound for inverse-sqrt; ignored by constant. Default with model.from
    and a learning_rate below 1e-4: a tenth of that."""
    schedule: Literal["cosine", "linear", "wsd", "inverse-sqrt", "constant"] = "cosine"
    """Learning rate after the warm-up (formulas in workers/training/learning_rate.py). cosine, linear: decays to
    min_learning_rate at the last step; wsd: constant until the decay at the end of the job (arXiv:2404.06395);
    inverse-sqrt: proportional to the square root of warmup_steps / step; constant: constant."""
    decay_steps: Steps | None = None
    """wsd: number of steps of the decay at the end of the job; default: given by decay_fraction."""
    decay_fraction: Annotated[float, Field(gt=0, le=1, strict=True, allow_inf_nan=False)] | None = None
    """wsd: fraction of train.steps that the decay takes; default: 0.1, as in arXiv:2404.06395."""
    decay_shape: Literal["linear", "cosine", "1-sqrt"] = "linear"
    """wsd: shape of the decay. 1-sqrt is steep at first; it performed best in arXiv:2405.18392."""
    warmup_steps: StepsOrNever = 0
    """Steps over which the learning rate rises linearly from 0."""
    weight_decay: NonNegativeFloat = 0.1
    """Decoupled weight decay, applied to the parameters in weight_decay_groups."""
    weight_decay_groups: tuple[ParameterGroup, ...] = ("linear", "embedding")
    """Parameters that weight decay applies to. linear: weights of linear layers, including an untied output layer;
    embedding: token and position embeddings, including a tied output layer; norm: weights of norms; bias: biases of
    linear layers and of norms."""
    beta1: Fraction = 0.9
    """Decay rate of the first moment."""
    beta2: Fraction = 0.95
    """Decay rate of the second moment."""
    epsilon: Epsilon = 1.0e-8
    """Added to the square root of the second moment; at least 1e-30."""
    clip_norm: NonNegativeFloat = 1.0
    """Maximum global gradient norm (L2); larger gradients are scaled down to it. 0 disables clipping."""
    offload: StrictBool = False
    """Whether weights in fp32 and both moments are kept in pinned host memory and copied to the GPU slice by slice for
    each update. Results do not change. Saves 12 bytes per parameter of GPU memory (8 in fp32), divided by the replicas
    under ZeRO 1; the copies do not overlap with computation (docs/parallelism.md). No effect on a CPU. Untested on GPUs
    (docs/tested.md)."""

    @property
    def moments(self) -> tuple[str, ...]:
        """What the optimizer keeps for each trained element in addition to its weight, all in fp32: names, which
        snapshots and checkpoints use."""
        return ("exp_avg", "exp_avg_sq")


class BatchRamp(Section):
    """A batch size that grows in equal increments while the first samples are consumed (arXiv:2201.11990, section
    3.2)."""

    start: Batch
    """Sequences in the first step."""
    increment: Batch
    """Sequences by which the batch grows at each increment."""
    samples: Annotated[int, Field(gt=0, le=10**15, strict=True)]
    """Sequences consumed until the batch has reached train.global_batch_size."""


class LoraConfig(Section):
    """Low-rank adapters (LoRA, arXiv:2106.09685): W x + (scale B) A x, where A and B are trained and W is not."""

    model_config = ConfigDict(serialize_by_alias=True)

    rank: Annotated[int, Field(gt=0, le=4096, strict=True)] = 16
    """Rank r of the adapters: A is [r, in], B is [out, r]."""
    alpha: PositiveFloat = 32.0
    """Numerator of the scale."""
    targets: Annotated[tuple[LoraTarget, ...], Field(min_length=1)] | None = None
    """Projections that have adapters, of q, k, v, o (queries, keys, values and output of attention), gate, up and down
    (of the MLP); default: all that the family has."""
    dropout: Fraction = 0.0
    """Probability of zeroing an element of an adapter's input in training. Adapters with the same input (q, k and v;
    gate and up) share what is zeroed. Not with train.compile."""
    scaling: Literal["standard", "root"] = "standard"
    """Scale of an adapter. standard: alpha / rank; root: alpha / sqrt(rank) (arXiv:2312.03732)."""
    init: Literal["default", "gaussian"] = "default"
    """Initial values of A. default: uniform, as those of linear layers in torch; gaussian: normal with standard
    deviation 1 / rank. B begins at zero, so that the model begins as its base."""
    from_: Annotated[str, Field(min_length=1)] | None = Field(default=None, alias="from")
    """Folder of an adapter in the format of PEFT, whose values A and B begin with; default: initial values."""


class TrainConfig(Section):
    """Duration, batch sizes, precision and optimizer."""

    steps: Steps
    """Number of optimizer steps of the job."""
    global_batch_size: Batch = 16
    """Sequences per step, over all data-parallel replicas."""
    micro_batch_size: Batch = 1
    """Sequences that a replica processes at once; a step accumulates gradients over its micro-batches. The last
    micro-batch of a step is smaller if the batch does not divide evenly. Default: on GPUs the planner's at submission,
    as for the layout; otherwise 1."""
    seed: Seed = 1234
    """Seed of the initial weights and the sample order."""
    deterministic_kernels: bool = False
    """Whether a GPU uses deterministic kernels, so that a recovered job has exactly the loss curve of an undisturbed
    one. false: the fastest kernels, which agree except for rounding. Always on with deterministic: elastic; CPUs are
    always deterministic."""
    deterministic: Literal["layout", "elastic"] = "layout"
    """Which changes of the layout keep results bit-identical. layout: none, but the same layout gives the same bits;
    elastic: also a different number of replicas. elastic requires up to 2 log2(m) more gradient buffers per rank, for m
    micro-batches per replica, and reductions do not overlap with backward (docs/parallelism.md)."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Number format of the computation. bf16 and fp16 keep master weights, moments and gradient sums in fp32; fp16 also
    scales the loss dynamically. Default: bf16 if all GPUs of the cluster have it at submission, otherwise fp32."""
    fp8: Annotated[Literal["off", "tensorwise", "rowwise"], FalseAsOff] = "off"
    """Whether the linear layers of the transformer layers multiply 8-bit matrices, forward and backward. tensorwise:
    one scale per matrix, gradients in e5m2; rowwise: one scale per row, gradients in e4m3, slower. Requires precision
    bf16 and a GPU of compute capability 8.9 or above (a CPU works, slowly); uses 2 more bytes per weight
    (docs/parallelism.md)."""
    attention: Literal["auto", "sdpa", "explicit"] = "auto"
    """How attention is computed. sdpa: torch's fused kernels, which do not store the s x s scores; explicit: batched
    matmuls, which do; auto: sdpa, or explicit with dropout, since the dropout of fused kernels depends on the layout.
    """
    compile: StrictBool = False
    """Whether each transformer block is compiled by torch.compile."""
    cuda_graphs: StrictBool = False
    """Whether a GPU replays each micro-batch as one CUDA graph instead of launching its kernels one by one. Results do
    not change. For small models, whose host cannot keep up with the GPU. Requires several micro-batches per step and no
    tensor or pipeline parallelism; uses the memory of one more micro-batch's activations. No effect on a CPU. Untested
    on GPUs (docs/tested.md)."""
    head_tokens: Count = 0
    """Number of tokens whose logits, loss and gradients are computed at a time; 0: all tokens of a micro-batch. Smaller
    values save memory with large vocabularies, at a small cost from 1024 tokens on a GPU, and change only the rounding
    of the output layer's gradient (docs/parallelism.md)."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and learning rate."""
    frozen: Annotated[tuple[str, ...], Field(max_length=1000)] = ()
    """Parameters that are not trained, as patterns of their names: `embedding`, `layers.0-3`, `*.mlp`
    (docs/training.md). They have no gradients and no moments, and backward stops at the first trained parameter."""
    lora: LoraConfig | None = None
    """Low-rank adapters, which alone are trained (docs/fine_tuning.md); default: none, the model is trained. Not for
    custom models. Untested on GPUs (docs/tested.md)."""
    z_loss: NonNegativeFloat = 0.0
    """Coefficient of an additional loss, log(Z)^2 of each token, where Z is the sum of the exponentials of its logits;
    it keeps logits from drifting (arXiv:2204.02311, section 5, with 1.0e-4). 0: none. The metric `loss` remains the
    cross-entropy."""
    validate_every: StepsOrNever = 0
    """Steps between validations, of which there is one more after the last step; 0: never."""
    validation_batches: Steps = 8
    """Global batches of held-out text per validation, at most the whole held-out part."""
    batch_ramp: BatchRamp | None = None
    """Growth of the batch size at the start of the job; default: global_batch_size from the first step."""
    time_parts_every: StepsOrNever = 10
    """Steps between measurements of a step's time by phase; 0: never."""
    log_every: StepsOrNever = 10
    """Steps between lines in the log with loss, gradient norm, learning rate, speed and memory; the first and the last
    step have one as well. 1: a line for each step; 0: none."""

    @property
    def dtype(self) -> str:
        """Name of the torch dtype of the computation."""
        return {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[self.precision]
