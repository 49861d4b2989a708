"""Runs one rank's actions of a schedule: the only module that depends on both the schedule and the model.

Shapes: s sequence, b micro-batch, h hidden, m micro-batches, v vocabulary of the rank, n = s b tokens; t
tensor-parallel size.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from manta.workers.comm.backend import Handle, Transfer
from manta.workers.comm.comm import Comm
from manta.workers.config import JobSpec
from manta.workers.data.batches import NO_TARGET, MicroBatch
from manta.workers.parallel.data.agreement import Loss
from manta.workers.parallel.pipeline.forward_pass import ForwardPass
from manta.workers.parallel.pipeline.schedules import forward_only, schedule
from manta.workers.parallel.pipeline.schedules.action import Action
from manta.workers.parallel.pipeline.stages import Place, neighbours, stages_of_rank
from manta.workers.parallel.recompute import NOTHING, Recompute, recomputed
from manta.workers.parallel.tensor.cross_entropy import (
    BY_BLOCKS,
    Gradients,
    HeadLoss,
    LossKernels,
    compiled_kernels,
    cross_entropy_and_log_z,
    vocabulary_parallel_cross_entropy,
)
from manta.workers.parallel.tensor.dropout import sample_keys
from manta.workers.parallel.tensor.layers import VocabularyParallelOutput
from manta.workers.parallel.tensor.weight_gradients import Task, WeightGradients
from manta.workers.spec.parameters import takes_gradient

Key = tuple[int, int]
"""(chunk, micro-batch)."""


@dataclass
class Receiving:
    """A receive that has been posted."""

    buffer: torch.Tensor
    work: Handle
    shape: tuple[int, ...]
    """Shape of the whole tensor; the message may be one tensor rank's part of it."""


@dataclass
class Step:
    """State of a rank's micro-batches during one step."""

    batch: list[MicroBatch]
    scale: torch.Tensor
    """Factor on the loss in backward, a scalar in the precision of losses."""
    recomputed: frozenset[tuple[int, int]]
    """(micro-batch, chunk) pairs whose activations are recomputed."""
    losses_m: torch.Tensor
    """fp64 [m]: loss of each micro-batch, summed over its tokens."""
    z_losses_m: torch.Tensor
    """fp64 [m]: its weighted z-loss."""
    valid_tokens: torch.Tensor
    """fp64 scalar: tokens that have a target."""
    dropout_keys: tuple[torch.Tensor, ...]
    """Keys of each micro-batch's samples; empty without dropout."""
    messages: dict[tuple[str, int, int], Receiving] = field(default_factory=dict)
    inputs: dict[Key, torch.Tensor] = field(default_factory=dict)
    """Leaves of the graphs, whose .grad is sent to the previous virtual stage."""
    outputs: dict[Key, torch.Tensor] = field(default_factory=dict)
    """Results that were not sent yet."""
    edges: dict[Key, GradientEdge] = field(default_factory=dict)
    """Where backward begins. The output itself is freed once sent: backward does not need its values."""
    head_inputs: dict[Key, torch.Tensor] = field(default_factory=dict)
    """Inputs of the output layer, for backward with `train.head_tokens`."""
    gradients: dict[Key, torch.Tensor] = field(default_factory=dict)
    """Gradients of outputs that went to another chunk of this rank."""
    input_gradients: dict[Key, torch.Tensor] = field(default_factory=dict)
    """Gradients that were not sent yet."""
    weight_tasks: dict[Key, list[Task]] = field(default_factory=dict)
    """The weights' half of backward, for schedules that separate it."""
    sends: deque[tuple[Transfer, torch.Tensor]] = field(default_factory=deque)
    """Sends in progress, and the tensors that must stay until they are done."""


_Plan = tuple[list[Action], frozenset[tuple[int, int]]]
"""Actions, and the (micro-batch, chunk) pairs that are recomputed."""


class Stage(Protocol):
    """All virtual stages of a rank."""

    chunks: nn.ModuleList
    """Chunks, by the schedule's numbers; each maps (input, ForwardPass) to its output."""
    weight_gradients: WeightGradients

    def begin(self) -> None:
        """A step or an evaluation begins; its weights may differ from those of the last one."""
        ...

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters of all chunks."""
        ...


class Pipeline:
    """One rank's end of the pipeline of its replica."""

    def __init__(
        self,
        spec: JobSpec,
        model: Stage,
        comm: Comm,
        when_done: Callable[[Action], None] | None = None,
        when_added: Callable[[nn.Parameter], None] | None = None,
    ):
        """`when_done` is called with each action when it is done; `when_added` with a parameter each time a
        micro-batch's gradient has been added to it."""
        self.spec, self.model, self.comm = spec, model, comm
        self.rank, layout = comm.index("pipeline"), spec.layout
        self.split = layout.tensor if layout.sequence_parallel_on else 1
        # Without sequence parallelism every tensor rank has the same boundary tensor: each sends its part of it, and
        # the receiver gathers them (arXiv:2104.04473, section 4.1).
        self.scatters = layout.tensor > 1 and not layout.sequence_parallel_on
        self.places = [
            neighbours(layout.schedule, layout.pipeline, layout.virtual_stages, self.rank, chunk)
            for chunk in range(layout.virtual_stages)
        ]
        takes = takes_gradient(spec)
        indices = stages_of_rank(layout.schedule, layout.pipeline, layout.virtual_stages, self.rank)
        self._stages = indices
        self.takes_gradient = [takes[index] for index in indices]
        """For each chunk: whether backward reaches it, which it does if something up to and including it is trained."""
        self.passes_gradient = [index > 0 and takes[index - 1] for index in indices]
        """For each chunk: whether it sends a gradient to the chunk before it."""
        self.dtype = next(model.parameters()).dtype
        self._when_done, self._when_added = when_done, when_added
        self._known: dict[tuple[bool, int], _Plan] = {}
        self._loss = MicroBatchLoss(spec, comm, model.chunks)

    def _plan(self, micro_batches: int, training: bool) -> _Plan:
        """This rank's actions, and the (micro-batch, chunk) pairs that it recomputes."""
        key = (training, micro_batches)
        if key not in self._known:
            layout = self.spec.layout
            make = schedule if training else forward_only
            actions = make(layout.schedule, layout.pipeline, layout.virtual_stages, micro_batches)[self.rank]
            self._known[key] = (actions, recomputed(actions, layout) if training else frozenset())
        return self._known[key]

    def train(self, batch: list[MicroBatch], loss_scale: float) -> Loss:
        """Forward and backward of all micro-batches. Gradients of the loss summed over tokens (the z-loss included),
        times `loss_scale`, accumulate in the parameters.

        Returns this rank's share of the loss, which is zero except on one tensor rank of the last stage.
        """
        actions, again = self._plan(len(batch), training=True)
        held = self._step(batch, loss_scale, again)
        with self.model.weight_gradients.reported(self._when_added):
            self._run(actions, held)
        z_losses_m = held.z_losses_m if self.spec.train.z_loss else None
        return Loss(held.losses_m, held.valid_tokens, loss_scale, z_losses_m)

    @torch.no_grad()
    def evaluate(self, batch: list[MicroBatch]) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward only. Returns this rank's share of (each micro-batch's loss summed over tokens [m], tokens with a
        target), fp64, without a z-loss."""
        actions, again = self._plan(len(batch), training=False)
        held = self._step(batch, 1.0, again)
        self._run(actions, held)
        return held.losses_m, held.valid_tokens

    def _step(self, batch: list[MicroBatch], loss_scale: float, again: frozenset[tuple[int, int]]) -> Step:
        self.model.begin()
        zeros = torch.zeros(1 + 2 * len(batch), dtype=torch.float64, device=self.comm.device)
        losses_m, z_losses_m = zeros[1:].chunk(2)
        sizes = [len(each.samples) for each in batch]
        samples = [sample for each in batch for sample in each.samples]
        keys: tuple[torch.Tensor, ...] = ()
        if self.spec.model.dropout > 0.0:
            # All at once: on a GPU each copy from the host may wait for the device.
            keys = sample_keys(self.spec.train.seed, samples, self.comm.device).split(sizes)
        wide = torch.promote_types(self.dtype, torch.float32)
        scale = torch.full((), loss_scale, dtype=wide, device=self.comm.device)
        return Step(batch, scale, again, losses_m, z_losses_m, zeros[0], keys)

    def _run(self, actions: list[Action], held: Step) -> None:
        runners: dict[str, Callable[[Action, Step], None]] = {
            "receive_forward": self._receive_forward,
            "forward": self._forward,
            "send_forward": self._send_forward,
            "receive_backward": self._receive_backward,
            "backward": self._backward,
            "backward_input": self._backward_input,
            "backward_weight": self._backward_weight,
            "send_backward": self._send_backward,
        }
        step, training = self.comm.step, torch.is_grad_enabled()
        for action in actions:
            self.comm.raise_if_over()
            stage = self._stages[action.chunk]
            with step.phase(action.kind if training else "validation", action.micro_batch, stage):
                runners[action.kind](action, held)
                if self._when_done is not None:
                    self._when_done(action)
        for send, _ in held.sends:
            send.wait()

    def _forward(self, action: Action, held: Step) -> None:
        chunk, key = self.model.chunks[action.chunk], (action.chunk, action.micro_batch)
        x = self._input(action, held)
        y = chunk(x, self._forward_pass(action, held))
        _, behind = self.places[action.chunk]
        takes = torch.is_grad_enabled() and self.takes_gradient[action.chunk]
        if chunk.is_last and self._loss.head is None:
            y = self._loss.of_logits(y, action.micro_batch, held)
        elif chunk.is_last and takes:
            held.head_inputs[key] = y.detach()
        elif chunk.is_last:
            self._loss.of_head_input(y, action.micro_batch, held, None)
        if behind is not None and behind[0] == self.rank:
            held.inputs[behind[1], action.micro_batch] = y.detach().requires_grad_(takes)
        elif behind is not None:
            held.outputs[key] = y.detach()
        if takes and y.requires_grad:
            held.edges[key] = get_gradient_edge(y)
        if not (takes and self.passes_gradient[action.chunk]):
            held.inputs.pop(key, None)

    def _input(self, action: Action, held: Step) -> torch.Tensor:
        key = (action.chunk, action.micro_batch)
        before, _ = self.places[action.chunk]
        if before is None:
            tokens = held.batch[action.micro_batch].inputs_sb
            assert tokens is not None
            return tokens
        if before[0] != self.rank:
            x = self._arrived("forward", key, held)
            held.inputs[key] = x.requires_grad_(torch.is_grad_enabled() and self.passes_gradient[action.chunk])
        return held.inputs[key]

    def _forward_pass(self, action: Action, held: Step) -> ForwardPass:
        training, rate = torch.is_grad_enabled(), self.spec.model.dropout
        keys = held.dropout_keys[action.micro_batch] if training and rate > 0.0 else None
        documents = held.batch[action.micro_batch].documents
        again = (action.micro_batch, action.chunk) in held.recomputed
        recompute = Recompute.of(self.spec.layout) if again else NOTHING
        return ForwardPass(keys, recompute, documents=documents, logits=self._loss.head is None)

    def _backward(self, action: Action, held: Step) -> None:
        if not self.takes_gradient[action.chunk]:
            return
        key = (action.chunk, action.micro_batch)
        before, _ = self.places[action.chunk]
        edge = held.edges.pop(key, None)
        grad = self._gradient(action, held, edge is not None)
        if edge is not None and grad is not None:
            torch.autograd.backward([edge], [grad])
        if before is None or not self.passes_gradient[action.chunk]:
            return
        grad_x = held.inputs.pop(key).grad
        assert grad_x is not None
        if before[0] == self.rank:
            held.gradients[before[1], action.micro_batch] = grad_x
        else:
            held.input_gradients[key] = grad_x

    def _gradient(self, action: Action, held: Step, wanted: bool) -> torch.Tensor | None:
        """The gradient of the chunk's output, if it is `wanted`: it is not if only the output layer is trained."""
        key = (action.chunk, action.micro_batch)
        _, behind = self.places[action.chunk]
        if behind is None:
            if self._loss.head is None:
                return held.scale
            x = held.head_inputs.pop(key)
            return self._loss.of_head_input(x, action.micro_batch, held, Gradients(held.scale, wanted))
        if behind[0] == self.rank:
            return held.gradients.pop(key)
        return self._arrived("backward", key, held)

    def _backward_input(self, action: Action, held: Step) -> None:
        with self.model.weight_gradients.kept() as tasks:
            self._backward(action, held)
        held.weight_tasks[action.chunk, action.micro_batch] = tasks

    def _backward_weight(self, action: Action, held: Step) -> None:
        with torch.no_grad():
            tasks = deque(held.weight_tasks.pop((action.chunk, action.micro_batch)))
            while tasks:  # each frees what it holds
                tasks.popleft()()

    def _send_forward(self, action: Action, held: Step) -> None:
        self._send(self.places[action.chunk][1], held.outputs.pop((action.chunk, action.micro_batch)), held)

    def _send_backward(self, action: Action, held: Step) -> None:
        if self.passes_gradient[action.chunk]:
            gradient = held.input_gradients.pop((action.chunk, action.micro_batch))
            self._send(self.places[action.chunk][0], gradient, held)

    def _send(self, to: Place | None, whole: torch.Tensor, held: Step) -> None:
        assert to is not None
        part = whole.contiguous()
        if self.scatters:
            part = part.view(self.comm.size("tensor"), -1)[self.comm.index("tensor")]
        held.sends.append((self.comm.send(to[0], part), part))
        while held.sends and held.sends[0][0].done:  # frees what has been sent
            held.sends.popleft()

    def _receive_forward(self, action: Action, held: Step) -> None:
        self._receive("forward", self.places[action.chunk][0], action, held)

    def _receive_backward(self, action: Action, held: Step) -> None:
        if self.takes_gradient[action.chunk]:
            self._receive("backward", self.places[action.chunk][1], action, held)

    def _receive(self, direction: str, source: Place | None, action: Action, held: Step) -> None:
        assert source is not None
        samples = len(held.batch[action.micro_batch].samples)
        shape = (self.spec.model.sequence_length // self.split, samples, self.spec.model.hidden_size)
        mine = (math.prod(shape) // self.comm.size("tensor"),) if self.scatters else shape
        buffer = torch.empty(mine, dtype=self.dtype, device=self.comm.device)
        work = self.comm.receive(source[0], buffer)
        held.messages[direction, action.chunk, action.micro_batch] = Receiving(buffer, work, shape)

    def _arrived(self, direction: str, key: Key, held: Step) -> torch.Tensor:
        """Wait for a message; if it was sent in parts, gather them."""
        message = held.messages.pop((direction, *key))
        message.work.wait()
        if not self.scatters:
            return message.buffer
        return self.comm.all_gather("tensor", message.buffer).view(message.shape)


class MicroBatchLoss:
    """Losses of micro-batches on the last stage, added to the sums of the step: from logits, or together with the
    output layer a few tokens at a time (`train.head_tokens`)."""

    def __init__(self, spec: JobSpec, comm: Comm, chunks: Iterable[nn.Module]):
        self._spec, self._comm = spec, comm
        at_once, size = spec.train.head_tokens, spec.vocabulary_size
        outputs = [each.output for each in chunks if at_once and isinstance(each.output, VocabularyParallelOutput)]
        self.head = HeadLoss(outputs[0], size, at_once, self._kernels) if outputs else None
        """Output layer and loss combined, if they process a few tokens at a time."""

    @property
    def _kernels(self) -> LossKernels:
        return compiled_kernels() if self._spec.train.compile else BY_BLOCKS

    def of_logits(self, logits: torch.Tensor, micro_batch: int, held: Step) -> torch.Tensor:
        """Sum of the micro-batch's losses, z-loss included, for backward, from logits [s, b, v]; adds both to the sums
        of `held`. Raises PeerLost."""
        logits, targets_n = _with_targets(logits, micro_batch, held)
        given = (logits.flatten(0, 1), targets_n, self._spec.vocabulary_size, self._comm, self._kernels)
        weight = self._spec.train.z_loss
        if weight and torch.is_grad_enabled():
            losses_n, squares_n = cross_entropy_and_log_z(*given)
            self._count(micro_batch, targets_n, losses_n, squares_n, held)
            return losses_n.sum() + weight * squares_n.sum()
        losses_n = vocabulary_parallel_cross_entropy(*given)
        self._count(micro_batch, targets_n, losses_n, None, held)
        return losses_n.sum()

    def of_head_input(
        self, x: torch.Tensor, micro_batch: int, held: Step, gradients: Gradients | None
    ) -> torch.Tensor | None:
        """Adds the losses to the sums of `held` like `of_logits`, from the output layer's input x [s or s/t, b, h].
        With `gradients` the weight's gradient is added to its sum, and that of x is returned if it is wanted. Raises
        PeerLost."""
        rows, targets_n = _with_targets(x, micro_batch, held)
        assert self.head is not None
        weight = self._spec.train.z_loss if gradients is not None else 0.0
        losses = self.head(rows, targets_n, weight, gradients)
        self._count(micro_batch, targets_n, losses.losses_n, losses.squares_n, held)
        return losses.grad_x if losses.grad_x is None or rows is x else losses.grad_x.transpose(0, 1)

    def _count(
        self,
        micro_batch: int,
        targets_n: torch.Tensor,
        losses_n: torch.Tensor,
        squares_n: torch.Tensor | None,
        held: Step,
    ) -> None:
        if self._comm.index("tensor") == 0:
            if squares_n is not None:
                squares = squares_n.detach().sum(dtype=torch.float64)
                held.z_losses_m[micro_batch] = self._spec.train.z_loss * squares
            held.losses_m[micro_batch] = losses_n.detach().sum(dtype=torch.float64)
            held.valid_tokens += (targets_n != NO_TARGET).sum()


def _with_targets(x: torch.Tensor, micro_batch: int, held: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's output for each token, in memory order, and the targets [n] in the same order."""
    targets_sb = held.batch[micro_batch].targets_sb
    assert targets_sb is not None
    if not x.is_contiguous():  # a sample's tokens are contiguous
        x, targets_sb = x.transpose(0, 1), targets_sb.t()
    return x, targets_sb.flatten()
