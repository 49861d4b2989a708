"""The pipeline of a rank that has the whole model: most micro-batches are replayed from a CUDA graph (`recording.py`).

Some are computed normally: the first of a step, during which parameters may still be gathered, and whose gradients
overwrite those of the last step; the last one, if its backward starts sums over replicas; those of another size; and
all of a step that is measured or traced. With deterministic kernels, replays do not change the bits.
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
from workers.parallel.pipeline.runtime import Pipeline, Stage
from workers.parallel.pipeline.schedules.action import Action
from workers.parallel.pipeline.step_state import Step


class GraphedPipeline(Pipeline):
    """For layouts without tensor and pipeline parallelism, with 1F1B: each backward directly follows its forward."""

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
        """Micro-batches of the step that were replayed, backward included."""
        self._place: Hashable = None
        """Addresses of all parameters and gradients; the same object as long as they stay there."""

    def train(self, batch: list[MicroBatch], loss_scale: float) -> Loss:
        """See `Pipeline.train`."""
        self._replayed.clear()
        place = tuple(_addresses(each) for each in self.model.parameters())
        if place != self._place:  # comparing an object with itself takes no time
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
        """Replay forward and backward of a micro-batch; False, with nothing done, if that cannot be recorded."""
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
        """See `recording.Compute`. The micro-batch is computed as the only one of a separate step."""
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
    """Addresses of a parameter and its gradients; 0 for one that does not exist."""
    gradients = (getattr(parameter, "main_grad", None), parameter.grad)
    return (parameter.data_ptr(), *(0 if each is None else each.data_ptr() for each in gradients))
