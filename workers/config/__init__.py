# ruff: noqa: F401 - what a JobSpec is made of is imported from here
"""JobSpec: the job that a user requests. Pure Python, imports in milliseconds, shared by api, service and workers.

Documents are read and validated by `workers/spec/reading.py`; rules across fields are in `workers/spec/rules.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from manta.workers.config.data import DataConfig, ValidationSet
from manta.workers.config.fields import (
    BUILT_IN_TOKENIZERS,
    BYTE_VOCABULARY,
    CHATML,
    END_OF_TEXT,
    MAX_LABELS,
    MIN_WINDOW,
    NO_TOKEN,
    PART_OF_A_NAME,
    TRAINED_VOCABULARY,
    Accelerator,
    FixedMapping,
    JobName,
    LabelKey,
    LabelValue,
    LoraTarget,
    ParameterGroup,
    PositiveFloat,
    Priority,
    RecomputeModule,
    Section,
)
from manta.workers.config.model import LatentAttentionConfig, ModelConfig, MoeConfig, RopeConfig, RopeScaling
from manta.workers.config.parallel import ElasticConfig, ParallelConfig, ResourcesConfig
from manta.workers.config.recovery import CheckpointConfig, RecoveryConfig
from manta.workers.config.train import BatchRamp, LoraConfig, OptimizerConfig, TrainConfig


class JobSpec(Section):
    """One training job, as submitted."""

    name: JobName = "job"
    """A display name; need not be unique."""
    labels: Annotated[dict[LabelKey, LabelValue], Field(max_length=MAX_LABELS), AfterValidator(FixedMapping)] = Field(
        default_factory=FixedMapping
    )
    """Labels to filter lists of jobs by, such as `team: vision`; they have no other effect."""
    model: ModelConfig
    """The transformer."""
    data: DataConfig
    """The corpus."""
    train: TrainConfig
    """Steps, batches, optimizer."""
    parallel: ParallelConfig | Literal["auto"] = ParallelConfig()
    """The layout, or `auto`: at submission the planner chooses the fastest that fits on the free slots of the cluster,
    or on all of them if it fits on none that are free. Default: auto on GPUs, one rank on CPUs."""
    elastic: ElasticConfig = ElasticConfig()
    """Bounds for resizing."""
    resources: ResourcesConfig = ResourcesConfig()
    """Accelerators, environment variables and threads."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Durable checkpoints and snapshots."""
    recovery: RecoveryConfig = RecoveryConfig()
    """Limits of automatic recovery."""
    priority: Priority = 0
    """Among queued jobs, higher priorities start first."""
    max_duration: PositiveFloat | None = None
    """Maximum seconds that the job may take, excluding time in the queue and in pauses. When they are over, its state
    is saved as for a pause, and it fails with reason max_duration. A retry starts a new limit. Default: no limit."""

    @property
    def layout(self) -> ParallelConfig:
        """The explicit layout. Raises ValueError if it is still `auto`."""
        if isinstance(self.parallel, str):
            raise ValueError("parallel is still 'auto': plan it first")
        return self.parallel

    @property
    def micro_batches(self) -> int:
        """Maximum number of micro-batches of a replica in a step (m), once the batch has reached its full size."""
        layout, train = self.layout, self.train
        if train.deterministic == "elastic":
            whole = -(-train.global_batch_size // train.micro_batch_size)
            return -(-(whole // layout.micro_batch_unit) // layout.data) * layout.micro_batch_unit
        share = -(-train.global_batch_size // layout.data)
        return -(-share // train.micro_batch_size)

    @property
    def attention_is_explicit(self) -> bool:
        """Whether attention is computed by explicit matrix products: requested, or required for dropout that does not
        depend on the layout."""
        return self.train.attention == "explicit" or (self.train.attention == "auto" and self.model.dropout > 0)

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids, without padding. Raises ValueError if it is only known from the tokenizer's file
        (`manta.workers.spec.submitted`)."""
        size = self.model.vocabulary_size or self.data.token_ids
        if size is None:
            raise ValueError("the vocabulary's size is not known before the tokenizer's file is read")
        return size
