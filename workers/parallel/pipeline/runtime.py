"""Runs one rank's actions of a schedule: the only module that depends on both the schedule and the model.

Shapes: s sequence, b micro-batch, h hidden, m micro-batches, v vocabulary of the rank, n = s b tokens; t
tensor-parallel size.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from manta.workers.comm.backend import DONE, Handle, Transfer
from manta.workers.comm.comm import Comm
from manta.workers.config import JobSpec
from manta.workers.data.batches import NO_TARGET, MicroBatch
from manta.workers.parallel.data.agreement import Loss
from manta.workers.parallel.experts.choice import MicroBatchRouting, StepRouting
from manta.workers.parallel.pipeline.forward_pass import ForwardPass
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
from manta.workers.parallel.tensor.positions import Positions
from manta.workers.parallel.tensor.weight_gradients import Task, WeightGradients
from manta.workers.schedules.action_lists import evaluation_actions, training_actions
from manta.workers.schedules.schedule import Action
from manta.workers.schedules.stages import ChunkLocation, neighbours, stages_of_rank
from manta.workers.spec.parameters import needs_gradient
from manta.workers.spec.sequence_runs import runs_of

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
    routing: StepRouting | None = None
    """What layers with experts count; None without such, and in evaluation."""
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
        self.positions = Positions(runs_of(layout, spec.model.sequence_length, comm.index("context")))
        """Positions of the tokens that this rank computes, together with its tensor group."""
        # Without sequence parallelism every tensor rank has the same boundary tensor: each sends its part of it, and
        # the receiver gathers them (arXiv:2104.04473, section 4.1).
        self.scatters = layout.tensor > 1 and not layout.sequence_parallel_on
        self.neighbours = [
            neighbours(layout.schedule, layout.pipeline, layout.virtual_stages, self.rank, chunk)
            for chunk in range(layout.virtual_stages)
        ]
        stage_needs_gradient = needs_gradient(spec)
        indices = stages_of_rank(layout.schedule, layout.pipeline, layout.virtual_stages, self.rank)
        self._stages = indices
        self.needs_gradient = [stage_needs_gradient[index] for index in indices]
        """For each chunk: whether backward reaches it, which it does if something up to and including it is trained."""
        self.passes_gradient = [index > 0 and stage_needs_gradient[index - 1] for index in indices]
        """For each chunk: whether it sends a gradient to the chunk before it."""
        self.dtype = next(model.parameters()).dtype
        lora = spec.train.lora
        self._drops_adapters = lora is not None and lora.dropout > 0.0
        self._when_done, self._when_added = when_done, when_added
        self._known: dict[tuple[bool, int], _Plan] = {}
        self._loss = MicroBatchLoss(spec, comm, model.chunks)

    def _plan(self, micro_batches: int, training: bool) -> _Plan:
        """This rank's actions, and the (micro-batch, chunk) pairs that it recomputes."""
        key = (training, micro_batches)
        if key not in self._known:
            layout = self.spec.layout
            make = training_actions if training else evaluation_actions
            actions = make(layout.schedule, layout.pipeline, layout.virtual_stages, micro_batches)[self.rank]
            self._known[key] = (actions, recomputed(actions, layout) if training else frozenset())
        return self._known[key]

    def train(self, batch: list[MicroBatch], loss_scale: float, routing: StepRouting | None = None) -> Loss:
        """Forward and backward of all micro-batches. Gradients of the loss summed over tokens (the z-loss included),
        times `loss_scale`, accumulate in the parameters. `routing`: where layers with experts count, if there are any.

        Returns this rank's share of the loss, which is zero except on one tensor rank of the last stage.
        """
        actions, recomputed_pairs = self._plan(len(batch), training=True)
        step_state = self._step(batch, loss_scale, recomputed_pairs)
        step_state.routing = routing
        with self.model.weight_gradients.reported(self._when_added):
            self._run(actions, step_state)
        z_losses_m = step_state.z_losses_m if self.spec.train.z_loss else None
        loss = Loss(step_state.losses_m, step_state.valid_tokens, loss_scale, z_losses_m)
        return loss if routing is None else replace(loss, balance_m=routing.losses_m, expert_tokens=routing.tokens_le)

    @torch.no_grad()
    def evaluate(self, batch: list[MicroBatch]) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward only. Returns this rank's share of (each micro-batch's loss summed over tokens [m], tokens with a
        target), fp64, without a z-loss."""
        actions, recomputed_pairs = self._plan(len(batch), training=False)
        step_state = self._step(batch, 1.0, recomputed_pairs)
        self._run(actions, step_state)
        return step_state.losses_m, step_state.valid_tokens

    def _step(self, batch: list[MicroBatch], loss_scale: float, recomputed_pairs: frozenset[tuple[int, int]]) -> Step:
        self.model.begin()
        zeros = torch.zeros(1 + 2 * len(batch), dtype=torch.float64, device=self.comm.device)
        losses_m, z_losses_m = zeros[1:].chunk(2)
        sizes = [len(micro_batch.samples) for micro_batch in batch]
        samples = [sample for micro_batch in batch for sample in micro_batch.samples]
        keys: tuple[torch.Tensor, ...] = ()
        if self.spec.model.dropout > 0.0 or self._drops_adapters:
            # All at once: on a GPU each copy from the host may wait for the device.
            keys = sample_keys(self.spec.train.seed, samples, self.comm.device).split(sizes)
        wide = torch.promote_types(self.dtype, torch.float32)
        scale = torch.full((), loss_scale, dtype=wide, device=self.comm.device)
        return Step(batch, scale, recomputed_pairs, losses_m, z_losses_m, zeros[0], keys)

    def _run(self, actions: list[Action], step_state: Step) -> None:
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
                runners[action.kind](action, step_state)
                if self._when_done is not None:
                    self._when_done(action)
        for send, _ in step_state.sends:
            send.wait()

    def _forward(self, action: Action, step_state: Step) -> None:
        chunk, key = self.model.chunks[action.chunk], (action.chunk, action.micro_batch)
        x = self._input(action, step_state)
        y = chunk(x, self._forward_pass(action, step_state))
        _, following = self.neighbours[action.chunk]
        with_gradient = torch.is_grad_enabled() and self.needs_gradient[action.chunk]
        if chunk.is_last and self._loss.head is None:
            y = self._loss.of_logits(y, action.micro_batch, step_state)
        elif chunk.is_last and with_gradient:
            step_state.head_inputs[key] = y.detach()
        elif chunk.is_last:
            self._loss.of_head_input(y, action.micro_batch, step_state, None)
        if following is not None and following[0] == self.rank:
            step_state.inputs[following[1], action.micro_batch] = y.detach().requires_grad_(with_gradient)
        elif following is not None:
            step_state.outputs[key] = y.detach()
        if with_gradient and y.requires_grad:
            step_state.edges[key] = get_gradient_edge(y)
        if not (with_gradient and self.passes_gradient[action.chunk]):
            step_state.inputs.pop(key, None)

    def _input(self, action: Action, step_state: Step) -> torch.Tensor:
        key = (action.chunk, action.micro_batch)
        preceding, _ = self.neighbours[action.chunk]
        if preceding is None:
            tokens = step_state.batch[action.micro_batch].inputs_sb
            assert tokens is not None
            return tokens
        if preceding[0] != self.rank:
            x = self._arrived("forward", key, step_state)
            step_state.inputs[key] = x.requires_grad_(torch.is_grad_enabled() and self.passes_gradient[action.chunk])
        return step_state.inputs[key]

    def _forward_pass(self, action: Action, step_state: Step) -> ForwardPass:
        keys = (
            step_state.dropout_keys[action.micro_batch] if torch.is_grad_enabled() and step_state.dropout_keys else None
        )
        of_model, of_adapters = self.spec.model.dropout > 0.0, self._drops_adapters
        documents = step_state.batch[action.micro_batch].documents
        is_recomputed = (action.micro_batch, action.chunk) in step_state.recomputed
        recompute = Recompute.of(self.spec.layout) if is_recomputed else NOTHING
        routing = step_state.routing
        return ForwardPass(
            self.positions,
            keys if of_model else None,
            recompute,
            documents=documents,
            logits=self._loss.head is None,
            adapter_keys_b=keys if of_adapters else None,
            most_samples=step_state.batch[action.micro_batch].most_samples,
            routing=None if routing is None else MicroBatchRouting(routing, action.micro_batch),
        )

    def _backward(self, action: Action, step_state: Step) -> None:
        if not self.needs_gradient[action.chunk]:
            return
        key = (action.chunk, action.micro_batch)
        preceding, _ = self.neighbours[action.chunk]
        edge = step_state.edges.pop(key, None)
        grad = self._gradient(action, step_state, edge is not None)
        if edge is not None and grad is not None:
            torch.autograd.backward([edge], [grad])
        if preceding is None or not self.passes_gradient[action.chunk]:
            return
        grad_x = step_state.inputs.pop(key).grad
        assert grad_x is not None
        if preceding[0] == self.rank:
            step_state.gradients[preceding[1], action.micro_batch] = grad_x
        else:
            step_state.input_gradients[key] = grad_x

    def _gradient(self, action: Action, step_state: Step, wanted: bool) -> torch.Tensor | None:
        """The gradient of the chunk's output, if it is `wanted`: it is not if only the output layer is trained."""
        key = (action.chunk, action.micro_batch)
        _, following = self.neighbours[action.chunk]
        if following is None:
            if self._loss.head is None:
                return step_state.scale
            x = step_state.head_inputs.pop(key)
            return self._loss.of_head_input(x, action.micro_batch, step_state, Gradients(step_state.scale, wanted))
        if following[0] == self.rank:
            return step_state.gradients.pop(key)
        return self._arrived("backward", key, step_state)

    def _backward_input(self, action: Action, step_state: Step) -> None:
        with self.model.weight_gradients.deferred() as tasks:
            self._backward(action, step_state)
        step_state.weight_tasks[action.chunk, action.micro_batch] = tasks

    def _backward_weight(self, action: Action, step_state: Step) -> None:
        with torch.no_grad():
            tasks = deque(step_state.weight_tasks.pop((action.chunk, action.micro_batch)))
            while tasks:  # each frees what it holds
                tasks.popleft()()

    def _send_forward(self, action: Action, step_state: Step) -> None:
        self._send(
            self.neighbours[action.chunk][1], step_state.outputs.pop((action.chunk, action.micro_batch)), step_state
        )

    def _send_backward(self, action: Action, step_state: Step) -> None:
        if self.passes_gradient[action.chunk]:
            gradient = step_state.input_gradients.pop((action.chunk, action.micro_batch))
            self._send(self.neighbours[action.chunk][0], gradient, step_state)

    def _send(self, to: ChunkLocation | None, tensor: torch.Tensor, step_state: Step) -> None:
        assert to is not None
        if not tensor.numel():  # of a micro-batch without samples, which the receiver knows too
            return
        part = tensor.contiguous()
        if self.scatters:
            part = part.view(self.comm.size("tensor"), -1)[self.comm.index("tensor")]
        step_state.sends.append((self.comm.send(to[0], part), part))
        while step_state.sends and step_state.sends[0][0].done:  # frees what has been sent
            step_state.sends.popleft()

    def _receive_forward(self, action: Action, step_state: Step) -> None:
        self._receive("forward", self.neighbours[action.chunk][0], action, step_state)

    def _receive_backward(self, action: Action, step_state: Step) -> None:
        if self.needs_gradient[action.chunk]:
            self._receive("backward", self.neighbours[action.chunk][1], action, step_state)

    def _receive(self, direction: str, source: ChunkLocation | None, action: Action, step_state: Step) -> None:
        assert source is not None
        samples = len(step_state.batch[action.micro_batch].samples)
        shape = (self.positions.length // self.split, samples, self.spec.model.hidden_size)
        message_shape = (math.prod(shape) // self.comm.size("tensor"),) if self.scatters else shape
        buffer = torch.empty(message_shape, dtype=self.dtype, device=self.comm.device)
        work = self.comm.receive(source[0], buffer) if samples else DONE
        step_state.messages[direction, action.chunk, action.micro_batch] = Receiving(buffer, work, shape)

    def _arrived(self, direction: str, key: Key, step_state: Step) -> torch.Tensor:
        """Wait for a message; if it was sent in parts, gather them."""
        message = step_state.messages.pop((direction, *key))
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
        outputs = [chunk.output for chunk in chunks if at_once and isinstance(chunk.output, VocabularyParallelOutput)]
        self.head = HeadLoss(outputs[0], size, at_once, self._kernels) if outputs else None
        """Output layer and loss combined, if they process a few tokens at a time."""

    @property
    def _kernels(self) -> LossKernels:
        return compiled_kernels() if self._spec.train.compile else BY_BLOCKS

    def of_logits(self, logits: torch.Tensor, micro_batch: int, step_state: Step) -> torch.Tensor:
        """Sum of the micro-batch's losses, z-loss included, for backward, from logits [s, b, v]; adds both to the sums
        of `step_state`. Raises PeerLost."""
        logits, targets_n = _with_targets(logits, micro_batch, step_state)
        arguments = (logits.flatten(0, 1), targets_n, self._spec.vocabulary_size, self._comm, self._kernels)
        weight = self._spec.train.z_loss
        if weight and torch.is_grad_enabled():
            losses_n, squares_n = cross_entropy_and_log_z(*arguments)
            self._count(micro_batch, targets_n, losses_n, squares_n, step_state)
            return losses_n.sum() + weight * squares_n.sum()
        losses_n = vocabulary_parallel_cross_entropy(*arguments)
        self._count(micro_batch, targets_n, losses_n, None, step_state)
        return losses_n.sum()

    def of_head_input(
        self, x: torch.Tensor, micro_batch: int, step_state: Step, gradients: Gradients | None
    ) -> torch.Tensor | None:
        """Adds the losses to the sums of `step_state` like `of_logits`, from the output layer's input x [s or s/t, b,
        h]. With `gradients` the weight's gradient is added to its sum, and that of x is returned if it is wanted.
        Raises PeerLost."""
        rows, targets_n = _with_targets(x, micro_batch, step_state)
        assert self.head is not None
        weight = self._spec.train.z_loss if gradients is not None else 0.0
        losses = self.head(rows, targets_n, weight, gradients)
        self._count(micro_batch, targets_n, losses.losses_n, losses.squares_n, step_state)
        return losses.grad_x if losses.grad_x is None or rows is x else losses.grad_x.transpose(0, 1)

    def _count(
        self,
        micro_batch: int,
        targets_n: torch.Tensor,
        losses_n: torch.Tensor,
        squares_n: torch.Tensor | None,
        step_state: Step,
    ) -> None:
        if self._comm.index("tensor") == 0:
            if squares_n is not None:
                squares = squares_n.detach().sum(dtype=torch.float64)
                step_state.z_losses_m[micro_batch] = self._spec.train.z_loss * squares
            step_state.losses_m[micro_batch] = losses_n.detach().sum(dtype=torch.float64)
            step_state.valid_tokens += (targets_n != NO_TARGET).sum()


def _with_targets(x: torch.Tensor, micro_batch: int, step_state: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """The model's output for each token, in memory order, and the targets [n] in the same order."""
    targets_sb = step_state.batch[micro_batch].targets_sb
    assert targets_sb is not None
    if not x.is_contiguous():  # a sample's tokens are contiguous
        x, targets_sb = x.transpose(0, 1), targets_sb.t()
    return x, targets_sb.flatten()
