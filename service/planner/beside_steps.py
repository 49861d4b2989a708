"""What a training does in addition to its steps: validations, snapshots, durable checkpoints. Pure Python.

Not counted: memory bandwidth and cores that copies take from other work, reading held-out texts, and writing the last
checkpoint, since the speed of the storage is unknown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from manta.service.planner.hardware import HOST_COPY, HOST_CORE_COPY
from manta.service.planner.operations import host_wait, memory_seconds
from manta.service.planner.step_time import StagePasses, StepModel, StepTime, slowest_of
from manta.workers.accounting.state_costs import bytes_per_parameter, checkpoint_bytes, owned_elements, steps_between


@dataclass(frozen=True)
class BesideSteps:
    """The work of one training outside its steps, in seconds of wall time."""

    steps_seconds: float
    """All steps together."""
    validations: int
    validation_seconds: float
    """Upper bound for one validation: a held-out text may be shorter than the number of batches asked for."""
    snapshots: int
    snapshot_every: int
    """Steps between snapshots; 0: none are taken."""
    stall_seconds: float
    """How long an update waits for a copy of the state that takes longer than the passes before the update."""
    checkpoints: int
    """Durable checkpoints."""
    copied_checkpoints: int
    """Durable checkpoints at steps without a snapshot, for which the state is copied."""
    checkpoint_bytes: int
    storage_rate: float | None
    """Bytes/s needed to write one checkpoint before the next is due; None if there is only one."""

    @property
    def validation(self) -> float:
        """Seconds of all validations."""
        return self.validations * self.validation_seconds

    @property
    def snapshot(self) -> float:
        """Seconds of all updates that wait for snapshots."""
        return self.snapshots * self.stall_seconds

    @property
    def checkpoint(self) -> float:
        """Seconds of all updates that wait for a checkpoint's copy of the state."""
        return self.copied_checkpoints * self.stall_seconds

    @property
    def seconds(self) -> float:
        """Seconds of all this work together."""
        return self.validation + self.snapshot + self.checkpoint

    def sentences(self) -> tuple[str, ...]:
        """The explanation, one sentence per item."""
        said, whole = [], self.steps_seconds + self.seconds
        if self.validations:
            one, part = f"{self.validation_seconds:.3g} s", f"{self.validation / whole:.1%}"
            said.append(f"{part} of the training: {self.validations} validations, each of {one} at most.")
        if self.snapshot:
            every, stall = self.snapshot_every, f"{self.stall_seconds:.3g} s"
            part = f"{self.snapshot / whole:.1%} of the training"
            said.append(f"{part}: an update waits {stall} for the snapshot before it, every {every} steps.")
        if self.storage_rate is not None:
            size, rate = _amount(self.checkpoint_bytes), _amount(self.storage_rate)
            said.append(f"Checkpoints of {size} are written alongside the training, for which storage needs {rate}/s.")
        return tuple(said)

    def to_json(self) -> dict[str, Any]:
        """As JSON, in the form of `manta.api.schemas.BesideSteps`."""
        return {
            "validation_seconds": self.validation_seconds if self.validations else None,
            "validation_hours": self.validation / 3600,
            "snapshot_every_steps": self.snapshot_every or None,
            "snapshot_stall_seconds": self.stall_seconds,
            "snapshot_hours": self.snapshot / 3600,
            "checkpoint_bytes": self.checkpoint_bytes,
            "checkpoint_hours": self.checkpoint / 3600,
            "storage_bytes_per_second": self.storage_rate,
        }


def _amount(size: float) -> str:
    if size < 1e8:
        return f"{size / 1e6:.2g} MB"
    count = size / 1e9
    return f"{count:,.0f} GB" if count >= 100 else f"{count:.2g} GB"


def beside_steps(model: StepModel, time: StepTime) -> BesideSteps:
    """The work outside steps of the training whose step is `model` and takes `time`."""
    spec = model.spec
    steps, train, keeps = spec.train.steps, spec.train, spec.checkpoint
    stall = stall_seconds(model, time)
    wanted = 0 if keeps.snapshots == "off" else keeps.snapshot_every_steps
    every = steps_between(stall, time.seconds) if wanted == "auto" else wanted
    saved = -(-steps // keeps.every_steps) if keeps.every_steps else 0  # one of the last step among them
    size, between = checkpoint_bytes(spec), keeps.every_steps * time.seconds
    validations = -(-steps // train.validate_every) if train.validate_every else 0  # also one after the last step
    return BesideSteps(
        steps * time.seconds,
        validations,
        validation_seconds(model) if validations else 0.0,
        steps // every if every else 0,
        every,
        stall,
        saved,
        saved - _at_snapshots(steps, keeps.every_steps, every),
        size,
        size / between if 0 < keeps.every_steps < steps else None,
    )


def _at_snapshots(steps: int, every: int, snapshot_every: int) -> int:
    """How many of the checkpoints are of steps that also have a snapshot."""
    if every == 0 or snapshot_every == 0:
        return 0
    last_alone = steps % every != 0 and steps % snapshot_every == 0
    return steps // math.lcm(every, snapshot_every) + last_alone


def validation_seconds(model: StepModel) -> float:
    """Seconds of one validation of all held-out texts, with the number of global batches asked for: forward passes
    only, and then the wait for the slowest replica."""
    spec = model.spec
    default = spec.train.validation_batches
    batches = default if spec.data.validation_fraction > 0 else 0
    batches += sum(each.batches or default for each in spec.data.validation)
    return batches * _forwards(model) * slowest_of(spec.layout.data, model.cluster)


def _forwards(model: StepModel) -> float:
    """Seconds of the forward passes of one global batch. Nothing is kept for a backward, so no activations go to host
    memory."""
    spec, machine = model.spec, model.cluster.machine
    if model.part_of(0) is not model:  # stages on several kinds of nodes
        return replace(model.pipeline(), trains=False).seconds(spec.micro_batches)
    parts = model.passes.parts
    passes = StagePasses(model.layer, replace(parts, forward=replace(parts.forward, copies=0.0)))
    evaluating = StepModel(spec, model.cluster, model.software, passes, model.most_trained)
    if (budgets := evaluating.full_model()) is not None:
        # No backward follows in which the host could get ahead.
        return spec.micro_batches * (budgets[0].device_seconds + host_wait(machine, budgets[0]))
    return replace(evaluating.pipeline(), trains=False).seconds(spec.micro_batches)


def stall_seconds(model: StepModel, time: StepTime) -> float:
    """How long an update waits for a copy of the state, which overlaps with the step's passes. A device copies to its
    host's memory; a core copies within host memory, also if the optimizer's state is offloaded there."""
    spec, machine = model.spec, model.cluster.machine
    state = bytes_per_parameter(spec) * max(owned_elements(spec, stage) for stage in range(spec.layout.pipeline))
    if machine.core is not None:
        copy = memory_seconds(machine, 2 * state)
    elif spec.train.optimizer.offload:
        copy = state / HOST_CORE_COPY
    else:
        copy = state / (HOST_COPY if machine.gpu is None else machine.gpu.copy)
    return max(0.0, copy - (time.seconds - time.optimizer))
