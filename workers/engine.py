"""One rank's engine, built from a JobSpec: its virtual stages, their optimizer and its end of the pipeline."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable

import torch

from manta.workers.comm.comm import Comm
from manta.workers.config import JobSpec
from manta.workers.data.batch_plan import most_micro_batches
from manta.workers.data.batches import NO_TARGET, MicroBatch
from manta.workers.model.stage import (
    ModelStage,
    call_around_parts,
    compile_layers,
    compute_in_fp8,
    linear_layers,
    parts_in_order,
    wait_before_parts,
)
from manta.workers.parallel.data.agreement import CountedNorm, Loss, StepStatistics, StepSums
from manta.workers.parallel.data.elastic_sums import ElasticReduction, ElasticStepSums
from manta.workers.parallel.data.flat import FlatParameters, Unit
from manta.workers.parallel.data.loss_scaling import LossScale
from manta.workers.parallel.data.reduction import GradientReduction, SharedGradients
from manta.workers.parallel.data.state import StatePart, tensors_of
from manta.workers.parallel.data.units import ElasticUnitReduction, GatheredWeights, UnitPasses, UnitReduction
from manta.workers.parallel.data.zero import ZeroOptimizer
from manta.workers.parallel.experts.balance import has_losses
from manta.workers.parallel.experts.choice import StepRouting
from manta.workers.parallel.pipeline.graphed import CudaRecording, GraphedPipeline, Recording
from manta.workers.parallel.pipeline.runtime import Pipeline
from manta.workers.parallel.tensor import compiled_operators
from manta.workers.parallel.tensor.fp8 import Fp8Products
from manta.workers.parallel.tensor.products import Products
from manta.workers.parallel.tensor.shards import NamedShard, fill_initial
from manta.workers.schedules.schedule import Action
from manta.workers.system.host_memory import keep_freed_memory


class Engine:
    """Trains one rank of a job; independent of data, checkpoints and reports."""

    def __init__(
        self,
        spec: JobSpec,
        comm: Comm,
        dtype: torch.dtype | None = None,
        products: Products | None = None,
        new_recording: Callable[[], Recording] | None = None,
    ):
        """`dtype` overrides the precision of compute: fp64 checks the arithmetic. `products` computes the linear
        layers; default: torch, in 8 bits where the job wants that. `new_recording` makes what `train.cuda_graphs`
        replays; default: a CUDA graph on a GPU, on a CPU nothing."""
        self.spec, self.comm = spec, comm
        layout = spec.layout
        if comm.device.type == "cpu":
            keep_freed_memory()
        dtype = dtype or getattr(torch, spec.train.dtype)
        fp8: Fp8Products | None = None
        if products is None and spec.train.fp8 != "off":
            products = fp8 = Fp8Products(spec.train.fp8, comm.device, compiled=spec.train.compile)
        with torch.device(comm.device):
            self.model = ModelStage(spec, comm, products)
        bucket_bytes = layout.bucket_bytes(comm.device.type == "cuda")
        decayed = spec.train.optimizer.weight_decay_groups
        self.flat = FlatParameters(
            *(self.model.named_shards(), layout.holders, comm.device, dtype, bucket_bytes, decayed),
            zero=layout.sharding,
            holder=comm.index(comm.grid.holders),
            expert=layout.exchange_size,
        )
        if fp8 is not None:
            compute_in_fp8(self.model, fp8)
        self.units: UnitPasses | None = None
        """Under ZeRO 2 and 3, what happens before and after each unit computes."""
        self.reduction: GradientReduction
        sums, when_done, when_added = self._make_reduction(fp8)
        if new_recording is None and comm.device.type == "cuda":
            new_recording = CudaRecording
        self.pipeline: Pipeline
        if spec.train.cuda_graphs and new_recording is not None:
            self.pipeline = GraphedPipeline(spec, self.model, comm, new_recording, when_done, when_added)
        else:
            self.pipeline = Pipeline(spec, self.model, comm, when_done, when_added)
        # On a CPU torch's kernels, pass after pass, are no slower, and need no compilation.
        one_pass = spec.train.compile and comm.device.type == "cuda"
        self.optimizer = ZeroOptimizer(
            self.flat, spec.train.optimizer, comm, self.reduction, sums, layout.sharding, one_pass
        )
        if layout.gather == "beside_forward" and (arriving := self.optimizer.start_gather_with_forward()) is not None:
            wait_before_parts(self.model, arriving.wait_for)
        if spec.train.compile:
            compile_layers(self.model)
        self.loss_scale = LossScale(spec.train.precision == "fp16")

    def _make_reduction(
        self, fp8: Fp8Products | None
    ) -> tuple[StepSums, Callable[[Action], None] | None, Callable[[torch.nn.Parameter], None] | None]:
        """Make the reduction of gradients; returns the sums of a step, and what the pipeline calls when it is done with
        an action and has added to a gradient."""
        spec, flat, comm = self.spec, self.flat, self.comm
        shared = SharedGradients(flat, comm, spec.layout.sequence_parallel_on)
        elastic = spec.train.deterministic == "elastic"
        if elastic and not flat.by_unit:
            tree = self.reduction = ElasticReduction(flat, comm, shared, spec, self.model.chunks)
            return ElasticStepSums(comm, tree), tree.done, None
        if elastic:
            by_round = self.reduction = ElasticUnitReduction(flat, comm, shared, self._uses(), spec)
            self.units = self._unit_passes(by_round, fp8)
            return ElasticStepSums(comm, by_round), by_round.done, by_round.added
        sums = StepSums(comm, CountedNorm(flat, flat.parts(flat.holder), comm.index("tensor")))
        if flat.by_unit:
            by_unit = self.reduction = UnitReduction(flat, comm, shared, self._uses(), spec)
            self.units = self._unit_passes(by_unit, fp8)
            return sums, by_unit.done, by_unit.added
        self.reduction = GradientReduction(flat, comm, shared, self._uses())
        return sums, None, self.reduction.added if self.reduction.overlaps else None

    def _unit_passes(self, reduction: UnitReduction, fp8: Fp8Products | None) -> UnitPasses:
        """The passes of this rank's units, around which the model calls them."""
        linear = defaultdict(list)
        for _, module in linear_layers(self.model):
            linear[self.flat.unit_of(module.weight)].append(module)

        def arrived(unit: Unit) -> None:
            """Layers whose weights share their memory with those of others are found by it, from now on this unit's."""
            if fp8 is not None:
                fp8.replace([module.weight for module in linear[unit]])
            for module in linear[unit] if self.model.compiled else ():
                compiled_operators.enter(module)

        weights = GatheredWeights(self.flat, self.comm, arrived) if self.flat.zero == 3 else None
        looks_up = self.spec.model.family != "custom"  # whose embeddings may compute anything
        passes = UnitPasses(parts_in_order(self.model), self.flat, reduction, weights, looks_up)
        call_around_parts(self.model, passes.before, passes.after)
        return passes

    def _uses(self) -> dict[torch.nn.Parameter, int]:
        """How many times a micro-batch adds to the gradient of each weight of the flat buffer's head."""
        return {
            slot.entry.parameter: 2 if slot.entry.parameter is self.model.used_twice else 1 for slot in self.flat.head()
        }

    def initialise(self, seed: int) -> None:
        """Give the parameters their initial values, which depend only on the seed and their names, and discard
        everything learned: a process that lost its peers may have to start over."""
        self.begin_with(lambda entry, part: fill_initial(entry, part, seed))

    def begin_with(
        self,
        fill: Callable[[NamedShard, torch.Tensor], None],
        fill_router_bias: Callable[[torch.Tensor], object] = torch.Tensor.zero_,
    ) -> None:
        """Give the parameters initial values: `fill` writes them into memory (fp32, shaped like the parameter), for one
        parameter after the other, so that there is never more than one in addition to the state. `fill_router_bias`:
        does so for the choice of experts, [layers with experts, E]."""
        slots, device = (*self.flat.slots, *self.flat.frozen), self.comm.device
        memory = torch.empty(max(slot.end - slot.start for slot in slots), dtype=torch.float32, device=device)
        for slot, end in zip(slots, [*(following.start for following in slots[1:]), self.flat.total_size], strict=True):
            part = memory[: slot.end - slot.start]
            fill(slot.entry, part.view(slot.entry.parameter.shape))
            self.comm.progress.moved()
            self.optimizer.load_range(slot.start, part)
            self.optimizer.load_range(slot.end, torch.zeros(end - slot.end, device=device))
        self.optimizer.forget()
        self.forget_small()
        if self.model.router_biases is not None:
            fill_router_bias(self.model.router_biases)

    def forget_small(self) -> None:
        """Reset the small parts of the state, of which a checkpoint may lack some, to those before the first step."""
        self.loss_scale.forget()
        if self.model.router_biases is not None:
            self.model.router_biases.zero_()

    def step(
        self,
        batch: list[MicroBatch],
        sequences: int,
        learning_rate: float,
        memory_bytes: int,
        before_update: Callable[[], object] = lambda: None,
    ) -> StepStatistics:
        """One optimizer step over this replica's micro-batches of a global batch of `sequences`. `before_update` is
        called before the state may change (`ZeroOptimizer.step`).

        If an fp16 gradient overflows, the step is repeated with a smaller loss scale, so no sample is skipped. If
        statistics are not finite, nothing was changed, including the loss scale.
        """
        # A mean over all positions in backward; the optimizer corrects for positions without a target.
        positions = sequences * self.spec.model.sequence_length
        scale_before = self.loss_scale.state.clone()
        targets = self._targets_per_sequence(batch, sequences)
        while True:
            self.reduction.begin(len(batch), sequences)
            scale = self.loss_scale.value / positions
            routing = self._routing(len(batch), sequences, targets, scale)
            loss = self._passes(batch, sequences, scale, routing)
            statistics = self.optimizer.step(learning_rate, loss, memory_bytes, before_update)
            if statistics.finite:
                self.loss_scale.after_finite()
                self._move_router_biases(statistics)
                return statistics
            self.optimizer.updating = True
            # A loss that is itself not finite does not depend on the scale of its gradients.
            if not math.isfinite(statistics.loss) or not self.loss_scale.after_overflow():
                self.loss_scale.state.copy_(scale_before)
                return statistics

    def _targets_per_sequence(self, batch: list[MicroBatch], sequences: int) -> torch.Tensor | None:
        """The number of targets of the global batch over that of its sequences, fp64 scalar, if routers have losses of
        their own: in backward a loss is a sum over targets, by whose number the optimizer divides, so what is a mean
        over sequences has this factor for each."""
        if not has_losses(self.spec.model):
            return None
        total = torch.zeros(1, dtype=torch.int64, device=self.comm.device)
        if self.comm.index("tensor") == 0 and any(chunk.is_last for chunk in self.model.chunks):
            for targets_sb in (micro_batch.targets_sb for micro_batch in batch):
                assert targets_sb is not None
                total += (targets_sb != NO_TARGET).sum()
        with self.comm.step.phase("data"):
            self.comm.all_reduce("world", total)
        return total[0].clamp(min=1).double() / sequences

    def _routing(
        self, micro_batches: int, sequences: int, targets: torch.Tensor | None, scale: float
    ) -> StepRouting | None:
        """What layers with experts count in a step; None without such."""
        if not self.spec.model.expert_layers:
            return None
        loss_scale = None if targets is None else targets * scale
        return StepRouting(self.spec.model, self.comm, micro_batches, sequences, loss_scale)

    def _move_router_biases(self, statistics: StepStatistics) -> None:
        """After a step that has updated the parameters (DeepSeek-V3, arXiv:2412.19437, section 2.1.2)."""
        moe, biases_le = self.spec.model.moe, self.model.router_biases
        if moe is None or biases_le is None or not statistics.updated:
            return
        tokens_le = torch.tensor(statistics.expert_tokens, dtype=torch.int64, device=biases_le.device)
        missing_le = tokens_le.sum(1, keepdim=True) - moe.experts * tokens_le  # of integers: on all ranks the same
        biases_le.add_(missing_le.sign(), alpha=moe.balance.bias_rate)

    def _passes(self, batch: list[MicroBatch], sequences: int, scale: float, routing: StepRouting | None) -> Loss:
        """Forward and backward of this replica's micro-batches."""
        if self.units is None:
            return self.pipeline.train(batch, scale, routing)
        rounds = most_micro_batches(sequences, self.spec)
        self.units.begin(rounds)
        loss = self.pipeline.train(batch, scale, routing)
        if rounds > len(batch):
            with self.comm.step.phase("reduction"):
                self.units.idle(rounds - len(batch), training=True)
        return loss

    def evaluate(self, batch: list[MicroBatch], sequences: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Forward of this replica's micro-batches of a global batch of `sequences`; returns what `Pipeline.evaluate`
        does."""
        if self.units is None:
            return self.pipeline.evaluate(batch)
        self.units.begin()
        sums = self.pipeline.evaluate(batch)
        self.units.idle(most_micro_batches(sequences, self.spec) - len(batch), training=False)
        return sums

    @property
    def not_recorded(self) -> str | None:
        """Why micro-batches are computed that `train.cuda_graphs` would replay; None where nothing is wrong."""
        return self.pipeline.recorder.refusal if isinstance(self.pipeline, GraphedPipeline) else None

    @property
    def settled(self) -> bool:
        """Whether the state is that of the last committed step, untouched by an aborted one."""
        return not self.optimizer.updating

    def settle(self) -> None:
        """The present state belongs to a committed step."""
        self.optimizer.updating = False

    def parts(self) -> list[StatePart]:
        """The named parts of this rank's state, in the order of a snapshot: those that no step changes come last."""
        ranks = tuple(range(self.comm.size("world")))
        loss_scale = StatePart("loss_scale", (self.loss_scale.state,), self.loss_scale.dynamic, ranks)
        small, biases_le = [loss_scale], self.model.router_biases
        if biases_le is not None:
            small.insert(0, StatePart("router_bias", (biases_le.view(-1),), True, ranks))
        return [*self.optimizer.parts(), *small, *self.optimizer.frozen_parts()]

    def state(self) -> list[torch.Tensor]:
        """All tensors (1-D) that a step may change."""
        return tensors_of(part for part in self.parts() if part.changes)
