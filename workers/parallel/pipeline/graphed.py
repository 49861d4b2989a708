"""The pipeline of a rank that has the whole model, which replays micro-batches where it can (`recording.py`).

Of a step these are computed as ever: the first micro-batch, before which parameters may still be gathered and whose
gradients take the place of what was there; the last one, where its backward starts sums over replicas; one of another
size; all, where the step is measured or traced. The bits are those of a step without replays, where kernels give the
same each time.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch
from torch import nn

from workers.comm.comm import Comm
from workers.config import JobSpec
from workers.data.batches import MicroBatch
from workers.parallel.data.step_statistics import Loss
from workers.parallel.pipeline.recording import Inputs, MicroBatchRecorder, Recording
from workers.parallel.pipeline.runtime import Pipeline, Stage, Step
from workers.parallel.pipeline.schedules.action import Action


class GraphedPipeline(Pipeline):
    """For layouts without tensor and pipeline parallelism, under 1F1B: a micro-batch's backward follows its forward."""

    def __init__(
        self,
        spec: JobSpec,
        model: Stage,
        comm: Comm,
        new_recording: Callable[[], Recording],
        when_done: Callable[[Action], None] | None = None,
        when_added: Callable[[nn.Parameter], None] | None = None,
    ):
        super().__init__(spec, model, comm, when_done, when_added)
        self.recorder = MicroBatchRecorder(new_recording)
        self._replayed: set[int] = set()
        """Micro-batches of the step whose backward is done with their forward."""
        self._place: Hashable = None

    def train(self, batch: list[MicroBatch], loss_scale: float) -> Loss:
        """As `Pipeline.train`."""
        self._replayed.clear()
        place = tuple(_addresses(each) for each in self.model.parameters())
        if place != self._place:  # else the same object, which is compared at once
            self._place = place
        return super().train(batch, loss_scale)

    def _forward(self, action: Action, held: Step) -> None:
        micro_batch = action.micro_batch
        if not (self._may_replay(micro_batch, held) and self._replay(micro_batch, held)):
            super()._forward(action, held)

    def _backward(self, action: Action, held: Step) -> None:
        if action.micro_batch in self._replayed:
            return
        super()._backward(action, held)
        if self._is_like_others(action.micro_batch, held):
            self.recorder.computed()

    def _may_replay(self, micro_batch: int, held: Step) -> bool:
        step, is_last = self.comm.step, micro_batch == len(held.batch) - 1
        if not torch.is_grad_enabled() or step.recorder is not None or step.parts.measuring:
            return False
        if is_last and self._when_added is not None:
            return False
        return self.recorder.ready and self._is_like_others(micro_batch, held)

    def _is_like_others(self, micro_batch: int, held: Step) -> bool:
        return micro_batch > 0 and len(held.batch[micro_batch].samples) == self.spec.train.micro_batch_size

    def _replay(self, micro_batch: int, held: Step) -> bool:
        """Forward and backward of a micro-batch; False where that cannot be recorded, and nothing was done."""
        given, again = held.batch[micro_batch], (micro_batch, 0) in held.recomputed
        assert given.inputs_sb is not None and given.targets_sb is not None
        keys_b = held.dropout_keys[micro_batch] if held.dropout_keys else None
        inputs = Inputs(given.inputs_sb, given.targets_sb, held.scale, keys_b)

        def compute(inputs: Inputs, sums: torch.Tensor) -> Sequence[nn.Parameter]:
            return self._computed(inputs, sums, again)

        recorded = self.recorder.run(inputs, (self._place, again), compute)
        if recorded is None:
            return False
        self._replayed.add(micro_batch)
        loss, z_loss, tokens = recorded.sums
        held.losses_m[micro_batch] = loss
        held.z_losses_m[micro_batch] = z_loss
        held.valid_tokens += tokens
        if self._when_added is not None:
            for parameter in recorded.added:
                self._when_added(parameter)
        return True

    def _computed(self, inputs: Inputs, sums: torch.Tensor, again: bool) -> Sequence[nn.Parameter]:
        """Compute a micro-batch, as `recording.Compute` says. It is the only one of a step of its own."""
        sums.zero_()
        batch = MicroBatch(range(inputs.inputs_sb.shape[1]), inputs.inputs_sb, inputs.targets_sb)
        recomputed = frozenset({(0, 0)} if again else ())
        keys = () if inputs.keys_b is None else (inputs.keys_b,)
        held = Step([batch], inputs.scale, recomputed, sums[:1], sums[1:2], sums[2], keys)
        added: list[nn.Parameter] = []
        with self.model.weight_gradients.reported(added.append):
            super()._forward(Action("forward", 0), held)
            super()._backward(Action("backward", 0), held)
        return added


def _addresses(parameter: nn.Parameter) -> tuple[int, ...]:
    """Of a parameter and its gradients."""
    gradients = (getattr(parameter, "main_grad", None), parameter.grad)
    return (parameter.data_ptr(), *(0 if each is None else each.data_ptr() for each in gradients))
