"""`parallel`, `elastic`, `resources`: the layout, how far its size may change, and on what it runs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from workers.config.fields import (
    Accelerator,
    AcceleratorType,
    AxisSize,
    Chunks,
    Count,
    FixedMapping,
    Layers,
    PositiveFloat,
    RecomputeModule,
    Section,
    StrictBool,
    Threads,
)


class ParallelConfig(Section):
    """The layout: tensor x pipeline x data ranks."""

    tensor: AxisSize = 1
    """Tensor-parallel size (t): ranks that share each layer."""
    pipeline: AxisSize = 1
    """Pipeline-parallel size (p): stages."""
    data: AxisSize = 1
    """Data-parallel size (d): replicas."""
    context: AxisSize = 1
    """Context-parallel size. Built: 1."""
    virtual_stages: Layers = 1
    """Model chunks per stage (v): any number for interleaved, 2 for zb-v, 1 for the others."""
    stage_layers: Annotated[tuple[Layers, ...], Field(max_length=10_000)] | None = None
    """Layers of each virtual stage, in the model's order: pipeline x virtual_stages numbers that add up to
    model.layers. Default: evenly, which also holds where the job goes on with another pipeline size
    (elastic.reshape). With a large vocabulary fewer on the last one, which has the logits (docs/parallelism.md); `auto`
    finds them."""
    stage_accelerators: tuple[AcceleratorType, ...] | None = None
    """For each stage, the type that the GPUs of its nodes must have, as Ray calls it and `manta nodes` shows it, such
    as [A100, A100, V100]; for clusters of unequal nodes (docs/planner.md). null: nodes of any type."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"] = "1f1b"
    """Order of forwards and backwards in the pipeline (docs/parallelism.md)."""
    sequence_parallel: StrictBool | None = None
    """Split norms and residuals along the sequence over the tensor group (arXiv:2205.05198, section 4.2.2);
    default: exactly when tensor > 1."""
    forward_chunks: Chunks = 1
    """Chunks along the sequence in which, forward, products overlap their communication over the tensor group: one
    is gathered or summed while another is computed (docs/parallelism.md). Nothing changes with tensor 1. 1: first all
    of one, then all of the other; the default, because smaller products and more messages may cost more than they hide,
    and it has not been measured on several GPUs."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activations recomputed in backward. selective: those of recompute_modules; full: whole layers, of which only
    the input is kept (arXiv:2205.05198, section 5)."""
    recompute_modules: tuple[RecomputeModule, ...] = ("core_attention",)
    """What selective recomputation drops: core_attention (scores, softmax and dropout), norm (outputs of the layer
    norms), mlp_activation (output of the MLP's activation function)."""
    recompute_every: Layers = 1
    """Full recomputation drops every k-th layer only, beginning with layer 0."""
    recompute_keep: Count = 0
    """Micro-batches in flight on each stage that keep all their activations; only the others are recomputed
    (arXiv:2205.05198, appendix C)."""
    offload_layers: Count = 0
    """Of the layers of each virtual stage, how many, evenly spread, have what they keep for backward in pinned host
    memory meanwhile; with recomputation, what that keeps. The same numbers. Copies overlap the layers between; where
    they take longer than those, the device waits (docs/parallelism.md). 0: none, which is fastest where they fit."""
    zero: Literal[0, 1, 3] = 1
    """ZeRO stage (arXiv:1910.02054). 0: every replica holds the whole optimizer state; 1: it is split over the data
    group. 3 is not built."""
    bucket_megabytes: PositiveFloat | Literal["auto"] = "auto"
    """Size of the buckets in which gradients are reduced over the data group while backward still runs, in 10^6
    bytes. auto: 25 on a CPU; on a GPU 160 or 4 times the replicas, whichever is more, so that each part of a bucket
    keeps a link busy for longer than a message's latency."""

    gather: Literal["after_update", "beside_forward"] = "after_update"
    """When updated parameters come from the other replicas under ZeRO 1. beside_forward: while the next step's forward
    begins, each layer of which waits for its own; in 16 bits or with train.optimizer.offload, else as
    after_update. The same bits either way. Off until
    it has been measured on a GPU."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def micro_batch_unit(self) -> int:
        """What the number of a replica's micro-batches is a multiple of: interleaving takes one for each stage at a
        time."""
        return self.pipeline if self.schedule == "interleaved" else 1

    def bucket_bytes(self, on_gpu: bool) -> float:
        """Size of the gradient buckets."""
        if self.bucket_megabytes != "auto":
            return self.bucket_megabytes * 1e6
        return max(160e6, 4e6 * self.data) if on_gpu else 25e6

    @property
    def sequence_parallel_on(self) -> bool:
        """Whether activations between the tensor-parallel blocks are split along the sequence."""
        if self.sequence_parallel is None:
            return self.tensor > 1
        return self.sequence_parallel and self.tensor > 1


class ElasticConfig(Section):
    """How far the layout may move while the job runs."""

    min_data: AxisSize | None = None
    """Fewest replicas the job may go on with; default: parallel.data."""
    max_data: AxisSize | None = None
    """Most replicas the job may grow to; default: parallel.data."""
    reshape: StrictBool = False
    """Whether the job may go on with smaller tensor and pipeline sizes, which divide its own, when min_data replicas do
    not fit; it goes back when they do. Each rank then holds more of the model, and the loss curve is the same to
    rounding only."""


class ResourcesConfig(Section):
    """What a rank runs on."""

    accelerator: Accelerator = "auto"
    """auto: GPUs where the cluster has any, else CPU slots."""
    environment: Annotated[dict[str, str], AfterValidator(FixedMapping)] = Field(default_factory=FixedMapping)
    """Environment variables of the trainers: those of NCCL, gloo and the GPU's allocator that docs/parallelism.md
    lists, such as NCCL_SOCKET_IFNAME."""
    threads: Threads | Literal["auto"] = "auto"
    """Threads that each rank computes with on a CPU. Bits depend on their number, so it is decided once for a job and
    never changes with machine or layout. auto: when the job first starts, the cores of a node, divided by the most
    ranks that the job may ever have there; 1 on GPUs and with train.deterministic: elastic (docs/training.md)."""
