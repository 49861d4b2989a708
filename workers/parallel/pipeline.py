"""Runs one stage's actions of a schedule: the only place that knows both the schedule and the model.

Shapes: s sequence, b micro-batch, h hidden, n tokens of a micro-batch; t tensor-parallel size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from workers.comm import Comm, Handle
from workers.config import JobSpec
from workers.data.batches import MicroBatch
from workers.model.gpt import GPTStage
from workers.parallel.cross_entropy import vocabulary_parallel_cross_entropy
from workers.parallel.schedules import Action, schedule


@dataclass
class _InFlight:
    """What a stage holds of the micro-batches between their forward and backward."""

    loss_sum: torch.Tensor
    inputs: dict[int, torch.Tensor] = field(default_factory=dict)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)
    sends: list[Handle] = field(default_factory=list)


class Pipeline:
    """One rank's end of the pipeline of its replica."""

    def __init__(self, spec: JobSpec, model: GPTStage, comm: Comm):
        self.spec, self.model, self.comm = spec, model, comm
        self.stage, self.stages = comm.index("pipeline"), comm.size("pipeline")
        layout = spec.layout
        split = layout.tensor if layout.sequence_parallel_on else 1
        self.boundary_shape = (
            spec.model.sequence_length // split,
            spec.train.micro_batch_size,
            spec.model.hidden_size,
        )
        self.training_actions = schedule(layout.schedule, self.stages, spec.micro_batches)[self.stage]
        self.evaluation_actions = schedule("forward_only", self.stages, spec.micro_batches)[self.stage]
        self.tokens_per_step = spec.train.global_batch_size * spec.model.sequence_length

    def train(self, batch: list[MicroBatch]) -> torch.Tensor:
        """Forward and backward of all micro-batches; gradients of the global mean loss accumulate in the parameters.

        Returns this rank's share of that loss (fp64 scalar): zero except on one tensor rank of the last stage.
        """
        return self._run(self.training_actions, batch)

    @torch.no_grad()
    def evaluate(self, batch: list[MicroBatch]) -> torch.Tensor:
        """Forward alone; returns this rank's share of the mean loss, as `train` does."""
        return self._run(self.evaluation_actions, batch)

    def _run(self, actions: list[Action], batch: list[MicroBatch]) -> torch.Tensor:
        held = _InFlight(torch.zeros((), dtype=torch.float64, device=self.comm.device))
        runners: dict[str, Callable[[int, list[MicroBatch], _InFlight], None]] = {
            "receive_forward": self._receive_forward,
            "forward": self._forward,
            "send_forward": self._send_forward,
            "receive_backward": self._receive_backward,
            "backward": self._backward,
            "send_backward": self._send_backward,
        }
        for action in actions:
            runners[action.kind](action.micro_batch, batch, held)
        for send in held.sends:
            send.wait()
        return held.loss_sum

    def _receive_forward(self, index: int, batch: list[MicroBatch], held: _InFlight) -> None:
        x = torch.empty(self.boundary_shape, device=self.comm.device)
        self.comm.receive(self.stage - 1, x).wait()
        held.inputs[index] = x.requires_grad_(torch.is_grad_enabled())

    def _forward(self, index: int, batch: list[MicroBatch], held: _InFlight) -> None:
        x = batch[index].inputs_sb if self.stage == 0 else held.inputs[index]
        y = self.model(x)
        if self.stage == self.stages - 1:
            losses_n = vocabulary_parallel_cross_entropy(
                y.flatten(0, 1), batch[index].targets_sb.flatten(), self.spec.vocabulary_size, self.comm
            )
            y = losses_n.sum() / self.tokens_per_step
            if self.comm.index("tensor") == 0:
                held.loss_sum += losses_n.detach().double().sum() / self.tokens_per_step
        if torch.is_grad_enabled() or self.stage < self.stages - 1:
            held.outputs[index] = y

    def _send_forward(self, index: int, batch: list[MicroBatch], held: _InFlight) -> None:
        held.sends.append(self.comm.send(self.stage + 1, held.outputs[index].detach().contiguous()))
        if not torch.is_grad_enabled():
            del held.outputs[index]
            held.inputs.pop(index, None)

    def _receive_backward(self, index: int, batch: list[MicroBatch], held: _InFlight) -> None:
        grad = torch.empty(self.boundary_shape, device=self.comm.device)
        self.comm.receive(self.stage + 1, grad).wait()
        held.gradients[index] = grad

    def _backward(self, index: int, batch: list[MicroBatch], held: _InFlight) -> None:
        torch.autograd.backward(held.outputs.pop(index), held.gradients.pop(index, None))

    def _send_backward(self, index: int, batch: list[MicroBatch], held: _InFlight) -> None:
        grad = held.inputs.pop(index).grad
        assert grad is not None
        held.sends.append(self.comm.send(self.stage - 1, grad.contiguous()))
