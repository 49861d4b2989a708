"""`parallel`, `elastic`, `resources`: the layout, the bounds of its size, and the hardware it runs on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import AfterValidator, Field

from manta.workers.config.fields import (
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
from manta.workers.schedules import RUN_BY_ENGINE, SCHEDULES

if TYPE_CHECKING:
    ScheduleName = str
else:
    ScheduleName = Literal[RUN_BY_ENGINE]


class ParallelConfig(Section):
    """The layout: tensor x pipeline x context x data ranks."""

    tensor: AxisSize = 1
    """Tensor-parallel size (t): number of ranks that share each layer. Untested on several GPUs (docs/tested.md)."""
    pipeline: AxisSize = 1
    """Pipeline-parallel size (p): number of stages. Untested on several GPUs (docs/tested.md)."""
    data: AxisSize = 1
    """Data-parallel size (d): number of replicas. Untested on several GPUs (docs/tested.md)."""
    context: AxisSize = 1
    """Context-parallel size (c): number of ranks that share each sample's sequence. Untested on several GPUs
    (docs/tested.md)."""
    context_method: Literal["all_gather", "all_to_all", "ring"] | None = None
    """How attention reads keys and values of other context ranks. all_gather: each layer gathers them; all_to_all: each
    rank attends with a part of the heads to the whole sequence (arXiv:2309.14509); ring: they travel from rank to rank
    (arXiv:2310.01889). Default: all_gather."""
    context_order: Literal["zigzag", "contiguous"] | None = None
    """Which part of the sequence a context rank has. zigzag: two runs, i and 2c - 1 - i of 2c equal ones, so that under
    a causal mask all ranks compute equally much; contiguous: one. Default: zigzag."""
    expert: AxisSize | None = None
    """Expert-parallel size (e): number of ranks that the experts of each layer are spread over, among the data x
    context ranks that would hold the same, and with expert_tensor 1 the tensor ranks; each token goes to its experts'
    ranks and back. Default: 1. Untested on several GPUs (docs/tested.md)."""
    expert_dispatch: Literal["all_gather", "all_to_all"] | None = None
    """How tokens come to the ranks of their experts. all_gather: each rank gets the tokens of all e ranks, and takes
    those for its experts; all_to_all: only tokens for its experts are sent to it. Default: all_gather among up to
    model.moe.per_token ranks (e, or e / tensor with expert_tensor 1); among more, all_to_all sends less."""
    expert_tensor: Literal[1] | None = None
    """1: each expert is whole on one rank, and the tensor ranks are among those that expert, a multiple of tensor,
    spreads experts over; default: each expert is split over the tensor ranks."""
    virtual_stages: Layers = 1
    """Model chunks per stage (v): any number for interleaved, 2 for zb-v, 1 for the other schedules."""
    stage_layers: Annotated[tuple[Layers, ...], Field(max_length=10_000)] | None = None
    """Number of layers of each virtual stage, in the model's order: pipeline x virtual_stages numbers that add up to
    model.layers. Default: evenly distributed. With a large vocabulary, fewer layers on the last stage are faster
    (docs/parallelism.md); parallel: auto finds the numbers."""
    stage_accelerators: tuple[AcceleratorType, ...] | None = None
    """GPU type required for the nodes of each stage, such as [A100, A100, V100], by the names that `manta nodes` shows;
    for clusters of unequal nodes (docs/planner.md). Default: nodes of any type."""
    schedule: ScheduleName = "1f1b"
    """Pipeline schedule: the order of forward and backward passes (docs/parallelism.md)."""
    sequence_parallel: StrictBool | None = None
    """Whether norms and residuals are split along the sequence over the tensor group (arXiv:2205.05198, section 4.2.2);
    default: true if tensor > 1."""
    forward_chunks: Chunks = 1
    """Number of chunks along the sequence into which the matmuls of the forward pass are split, to overlap them with
    the communication of the tensor group; 1: no overlap. No effect with tensor: 1 (docs/parallelism.md). Untested on
    GPUs (docs/tested.md)."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Which activations are recomputed in backward. selective: those of recompute_modules; full: whole layers, keeping
    only their inputs (arXiv:2205.05198, section 5)."""
    recompute_modules: tuple[RecomputeModule, ...] = ("core_attention",)
    """Activations that selective recomputation does not keep: core_attention (scores, softmax and dropout), norm
    (outputs of the layer norms), mlp_activation (output of the MLP's activation function)."""
    recompute_every: Layers = 1
    """Full recomputation applies to every k-th layer only, starting with layer 0."""
    recompute_keep: Count = 0
    """Number of micro-batches in flight on each stage that keep all their activations; only the others are recomputed
    (arXiv:2205.05198, appendix C)."""
    offload_layers: Count = 0
    """Number of layers of each virtual stage, evenly spread, whose saved activations are kept in pinned host memory
    until backward; 0: none. Results do not change. Copies overlap with the layers in between (docs/parallelism.md)."""
    zero: Literal[0, 1, 2, 3] = 1
    """ZeRO stage (arXiv:1910.02054): what is sharded over the ranks that hold the same parameters. 0: nothing; 1: the
    optimizer state; 2: gradients as well, reduced for each micro-batch; 3: weights as well, gathered layer by layer for
    each micro-batch (docs/parallelism.md). 2 and 3: without pipeline stages. Untested on GPUs (docs/tested.md)."""
    bucket_megabytes: PositiveFloat | Literal["auto"] = "auto"
    """Size of the buckets in which gradients are reduced over the data group during backward, in 10^6 bytes. auto: 25
    on a CPU; on a GPU 160, or 4 times the number of replicas if that is larger."""

    gather: Literal["after_update", "beside_forward"] = "after_update"
    """When ranks gather updated parameters from the other replicas under ZeRO 1. beside_forward: during the next
    forward pass, in which each layer waits for its own parameters; only with 16-bit precision or
    train.optimizer.offload. Results are bit-identical. Untested on GPUs (docs/tested.md)."""

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tensor * self.pipeline * self.data * self.context

    @property
    def expert_size(self) -> int:
        """Expert-parallel size: of the experts of a layer, each rank has one of so many parts."""
        return self.expert or 1

    @property
    def expert_split(self) -> int:
        """Number of tensor ranks that share each expert."""
        return self.expert_tensor or self.tensor

    @property
    def exchange_size(self) -> int:
        """Number of ranks, among those with the same dense parameters, over which experts are spread: these exchange
        tokens, and the tensor ranks, which all have them, do not."""
        return max(1, self.expert_size * self.expert_split // self.tensor)

    def dispatch(self, per_token: int) -> Literal["all_gather", "all_to_all"]:
        """How tokens come to the ranks of their experts, if each goes to `per_token` of them (`expert_dispatch`)."""
        if self.expert_dispatch is not None:
            return self.expert_dispatch
        return "all_gather" if self.exchange_size <= per_token else "all_to_all"

    @property
    def expert_holders(self) -> int:
        """Number of ranks that hold the same experts."""
        return self.holders // self.exchange_size

    def expert_index(self, tensor: int, data: int, context: int) -> int | None:
        """Which of the equal parts of the experts the ranks with this index in their tensor group, of this replica and
        index in their context group, have; None if every rank has all."""
        if self.expert_size == 1:
            return None
        group = (data * self.context + context) % self.exchange_size
        return group if self.expert_tensor is None else group * self.tensor + tensor

    @property
    def holders(self) -> int:
        """Number of ranks that hold the same parameters."""
        return self.data * self.context

    @property
    def attends_by_tiles(self) -> bool:
        """Whether a rank attends tile by tile to keys and values of other ranks, which keeps no scores: with context
        parallelism, unless it exchanges heads."""
        return self.context > 1 and self.context_method != "all_to_all"

    @property
    def exchanges_heads(self) -> bool:
        """Whether a rank attends with a part of the heads to the whole sequence."""
        return self.context > 1 and self.context_method == "all_to_all"

    @property
    def state_shards(self) -> int:
        """Number of ranks over which the optimizer state of the same parameters is sharded."""
        return self.holders if self.zero else 1

    @property
    def sharding(self) -> int:
        """The ZeRO stage that takes effect: without other ranks that hold the same parameters nothing is sharded."""
        return self.zero if self.holders > 1 else min(self.zero, 1)

    @property
    def micro_batch_unit(self) -> int:
        """The number of a replica's micro-batches is a multiple of this: interleaving takes one micro-batch per stage
        at a time."""
        return self.pipeline if SCHEDULES[self.schedule].in_groups else 1

    def bucket_bytes(self, on_gpu: bool) -> float:
        """Size of the gradient buckets, in bytes."""
        if self.bucket_megabytes != "auto":
            return self.bucket_megabytes * 1e6
        return max(160e6, 4e6 * self.holders) if on_gpu else 25e6

    @property
    def sequence_parallel_on(self) -> bool:
        """Whether activations between the tensor-parallel blocks are split along the sequence."""
        if self.sequence_parallel is None:
            return self.tensor > 1
        return self.sequence_parallel and self.tensor > 1


class ElasticConfig(Section):
    """How far the layout may change while the job runs."""

    min_data: AxisSize | None = None
    """Minimum number of replicas that the job may continue with; default: parallel.data. With parallel.expert, replicas
    come and go in whole expert groups."""
    max_data: AxisSize | None = None
    """Maximum number of replicas that the job may grow to; default: parallel.data."""
    reshape: StrictBool = False
    """Whether the job may continue with smaller tensor, pipeline, context and expert sizes, which divide the configured
    ones, if min_data replicas do not fit; it returns to the configured sizes when they fit again. Meanwhile each rank
    holds more of the model, and the loss curve is the same except for rounding."""


class ResourcesConfig(Section):
    """The hardware and environment of each rank."""

    accelerator: Accelerator = "auto"
    """auto: GPUs if the cluster has any, otherwise CPU slots."""
    environment: Annotated[dict[str, str], AfterValidator(FixedMapping)] = Field(default_factory=FixedMapping)
    """Environment variables of the trainers, such as NCCL_SOCKET_IFNAME. Allowed are the variables of NCCL, gloo and
    the GPU's allocator that docs/parallelism.md lists."""
    threads: Threads | Literal["auto"] = "auto"
    """Number of compute threads of each rank on a CPU, fixed when the job first starts, since results depend on it bit
    by bit. auto: the cores of a node divided by the maximum number of ranks that the job may have there; 1 on GPUs and
    with train.deterministic: elastic (docs/training.md)."""
