"""Estimates the device memory of a rank in a step, in bytes, before it runs. Pure Python.

Memory held between steps is exact up to alignment; activations are from `activation_bytes.py`; allocations during
passes are simulated in `step_peak.py`. With `train.deterministic: elastic`, replicas send each other sums at the end of
a step, bucket by bucket (`workers/parallel/data/elastic_sums.py`), and half-made gradients wait (`LeafSum` there).
Memory of torch and NCCL themselves (contexts, kernels, buffers of communicators, fragmentation) is not included, nor
are the workspaces of cuBLAS, which torch allocates for each thread and stream that computes products: 32 MiB each on
Hopper and Blackwell and with `train.deterministic_kernels`, otherwise 8.1 MiB. Forward and backward are two threads,
and a recorded micro-batch has a stream of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from manta.workers.accounting.activation_bytes import WIDE, ExpertRows, bytes_of_rank, tokens_of, width_of, worst_rows
from manta.workers.accounting.flops import (
    frozen_parameters_of_rank,
    layers_of_rank,
    parameters_of_rank,
    stages_on_rank,
    vocabulary_rows,
    waiting_gradient_buffers,
)
from manta.workers.accounting.layer_passes import weight_bytes
from manta.workers.accounting.state_costs import owned_elements, slice_buffer_bytes, trained_regions
from manta.workers.accounting.step_peak import StepPeak
from manta.workers.accounting.unit_bytes import buffer_elements, shared_adapter_elements, units_of
from manta.workers.config import JobSpec
from manta.workers.data.batch_plan import BatchPlan, leaf_share
from manta.workers.parallel.data.tree_sum import cover
from manta.workers.schedules import SCHEDULES
from manta.workers.schedules.action_lists import training_actions
from manta.workers.schedules.stages import layers_of
from manta.workers.spec.layer_table import layer_table, layer_table_of
from manta.workers.spec.parameters import TOKEN_EMBEDDING, frozen_names, layers_of_kinds


@dataclass(frozen=True)
class DeviceBytes:
    """Memory of one rank."""

    rank: int
    """Pipeline index of the rank."""
    parameters: int
    """In the precision of compute; with train.fp8 also the 8-bit copies of weights, in both orientations."""
    gradients: int
    """The flat buffer, and the buffers in which elastic sums wait for others, complete or half made."""
    optimizer: int
    """Moments, and with 16-bit compute the master weights; zero if all of that is in host memory."""
    activations: int
    """Most that is kept for backward at any time."""
    workspace: int
    """Most that a pass or an update needs in addition to all of these, at the moment of the peak; with
    train.cuda_graphs also what a recorded micro-batch keeps for itself."""

    @property
    def total(self) -> int:
        """The peak of a step."""
        return self.parameters + self.gradients + self.optimizer + self.activations + self.workspace

    def parts(self) -> dict[str, int]:
        """Bytes of each part, by the names that users see, and the total."""
        names = ("parameters", "gradients", "optimizer", "activations")
        return {name: getattr(self, name) for name in names} | {"buffers": self.workspace, "total": self.total}


def device_bytes(spec: JobSpec, gpu: bool = True, rows: Sequence[ExpertRows] | None = None) -> tuple[DeviceBytes, ...]:
    """Memory of a rank of each pipeline stage, on a `gpu` or not. `rows`: for each layer those that its experts get, if
    they are not as planned (`activation_bytes.planned_rows`)."""
    passes = StepPeak(spec, gpu, rows=rows)
    return tuple(bytes_of_stage(passes, stage, spec.micro_batches) for stage in range(spec.layout.pipeline))


def worst_bytes(spec: JobSpec, gpu: bool = True) -> int | None:
    """Most memory of a rank if all tokens of an expert group go to the experts of one rank; None if experts are not
    spread over ranks, so that there is no such case."""
    if spec.layout.expert_size == 1:
        return None
    return max(each.total for each in device_bytes(spec, gpu, [worst_rows(spec)] * spec.model.layers))


def bytes_of_stage(passes: StepPeak, stage: int, micro_batches: int) -> DeviceBytes:
    """Memory of a rank of `stage`, in a step of `micro_batches` micro-batches."""
    spec = passes.spec
    holders, width = spec.layout.holders, width_of(spec)
    part = sum(each.part for each in trained_regions(spec, stage))
    kept, offload = owned_elements(spec, stage), spec.train.optimizer.offload
    gradients, parameters = _gradient_bytes(spec, stage, micro_batches), _parameter_bytes(spec, stage)
    # Without master weights, the parameters themselves are updated.
    masters = 0 if width == WIDE and not offload else kept
    optimizer = 0 if offload and passes.gpu else WIDE * (masters + len(spec.train.optimizer.moments) * kept)
    # Updated parts are copied for the gather, when no activations are left; of offloaded state, slices are copied.
    copies = width * part if spec.layout.state_shards > 1 and spec.layout.sharding < 3 else 0
    if offload:
        copies = slice_buffer_bytes(spec, kept)
    # On CPUs every holder's part of each bucket arrives before it is summed (`workers/comm/links_backend.py`).
    incoming = gradients // holders * (holders - 1)
    if spec.layout.exchange_size > 1:  # which refuses elastic sums, so that there are no others
        incoming = WIDE * sum(each.elements - each.part for each in trained_regions(spec, stage))
    if spec.layout.sharding >= 2:  # while backward goes on
        incoming = WIDE * buffer_elements(units_of(spec), lambda unit: unit.trained) // holders * (holders - 1)
    if passes.gpu or spec.train.deterministic == "elastic":
        incoming = arriving_bytes(spec, stage, passes.gpu)
    activations, in_passes = (
        bytes_of_rank(spec, stage, micro_batches, passes.rows),
        passes.of_rank(stage, micro_batches),
    )
    most = max(in_passes, copies, incoming if spec.layout.sharding < 2 else in_passes + incoming)
    workspace = max(0, most - activations) + _recorded_bytes(passes, stage)
    return DeviceBytes(stage, parameters, gradients, optimizer, activations, workspace)


def _parameter_bytes(spec: JobSpec, stage: int) -> int:
    """Bytes of parameters in the precision of compute and in 8 bits."""
    elements, in_8_bits = parameters_of_rank(spec, stage), weight_bytes(spec, stage)
    if spec.layout.sharding == 3:
        units = units_of(spec)
        sharded = sum(unit.elements for unit in units)
        elements -= sharded - sharded // spec.layout.holders
        elements += buffer_elements(units, lambda unit: unit.elements)
        # 8-bit weights are there as long as those that they are made of.
        in_8_bits = in_8_bits * min(2, spec.model.layers) // spec.model.layers
    return width_of(spec) * elements + in_8_bits


def _gradient_bytes(spec: JobSpec, stage: int, micro_batches: int) -> int:
    """Bytes of gradients, and of sums of them that wait for others."""
    trained = parameters_of_rank(spec, stage) - frozen_parameters_of_rank(spec, stage)
    waiting = waiting_gradient_buffers(spec)
    if spec.layout.sharding < 2:
        return WIDE * trained * (1 + waiting) + halves_bytes(spec, stage, micro_batches)
    units, holders = units_of(spec), spec.layout.holders
    head = sum(unit.trained for unit in units)
    elements = head // holders * (1 + waiting) + trained - head + buffer_elements(units, lambda unit: unit.trained)
    if spec.train.deterministic == "elastic":  # the tail's parts wait apart, and one unit's arrive
        elements += (trained - head) // holders * (1 + waiting)
        elements += max([(trained - head), *(unit.trained for unit in units)])
    return WIDE * elements


def _recorded_bytes(passes: StepPeak, stage: int) -> int:
    """Memory of a CUDA graph: all that a micro-batch takes, which no other computation may use in between, and the
    micro-batch's tokens and targets (`workers/parallel/pipeline/graphed.py`)."""
    if not (passes.spec.train.cuda_graphs and passes.gpu):
        return 0
    return passes.of_rank(stage, 1) - passes.tables + 2 * 8 * tokens_of(passes.spec)[0]


def arriving_bytes(spec: JobSpec, stage: int, gpu: bool) -> int:
    """Most bytes that other replicas' sums of one bucket take on a rank of this stage; on a `gpu` or not."""
    replicas, nodes = spec.layout.data, _nodes_of_others(spec)
    if not nodes or spec.layout.sharding >= 2:  # whose sums arrive where there is always room
        return 0
    trained = parameters_of_rank(spec, stage) - frozen_parameters_of_rank(spec, stage)
    tail = _tail(spec, stage)
    head = min(int(spec.layout.bucket_bytes(gpu)) // WIDE, trained - tail)
    return WIDE * max(head, tail) // replicas * nodes


def halves_bytes(spec: JobSpec, stage: int, micro_batches: int) -> int:
    """Most bytes of half-made gradients of the tied embedding on a rank of this stage, if it has both ends of the
    model: passes of other micro-batches come between the two halves."""
    model, layout = spec.model, spec.layout
    stages, last = stages_on_rank(spec, stage), layout.pipeline * layout.virtual_stages - 1
    if spec.train.deterministic == "layout" or not model.tie_embeddings or not (0 in stages and last in stages):
        return 0
    if TOKEN_EMBEDDING in frozen_names(spec):
        return 0
    split = SCHEDULES[layout.schedule].splits_backward
    of_table = ("backward_weight" if split else "backward", stages.index(0))
    of_output = ("backward_input" if split and spec.train.head_tokens else of_table[0], stages.index(last))
    if of_table == of_output:
        return 0
    made: set[int] = set()
    most = 0
    for action in training_actions(layout.schedule, layout.pipeline, layout.virtual_stages, micro_batches)[stage]:
        if (action.kind, action.chunk) in (of_table, of_output):
            made ^= {action.micro_batch}
            most = max(most, len(made))
    return WIDE * most * vocabulary_rows(spec) * model.hidden_size


def _nodes_of_others(spec: JobSpec) -> int:
    """Most sums that all other replicas together send to one; each has the size of its part of a bucket."""
    if spec.train.deterministic == "layout" or spec.layout.data == 1:
        return 0
    most = 0
    for level in BatchPlan(spec.train).levels:
        leaves = -(-level.size // spec.train.micro_batch_size)
        shares = [leaf_share(leaves, spec.layout, replica) for replica in range(spec.layout.data)]
        counts = [len(cover(leaves, share.start, share.stop)) for share in shares]
        most = max(most, sum(counts) - min(counts))
    return most


def _tail(spec: JobSpec, stage: int) -> int:
    """Elements of the last bucket except vectors (`workers/parallel/data/flat.py`): the table that another stage holds
    too, positions, and keys and values, routers and other weights that several tensor ranks hold; or what of adapters
    these hold."""
    model, layout, h = spec.model, spec.layout, spec.model.hidden_size
    if spec.train.lora is not None:
        return layers_of_rank(spec, stage) * shared_adapter_elements(layer_table_of(spec), layout.tensor)
    stages, last = stages_on_rank(spec, stage), layout.pipeline * layout.virtual_stages - 1
    is_shared = model.tie_embeddings and (0 in stages) != (last in stages)
    elements = vocabulary_rows(spec) * h if is_shared else 0
    if 0 in stages and not model.parts.rotary:
        elements += model.sequence_length * h
    layers = (layer for index in stages for layer in layers_of(model.layers, layout, index))
    for layer, times in layers_of_kinds(spec, layers):
        copied = (each.elements for each in layer_table(model, layout.tensor, layer).weights if each.copies > 1)
        elements += times * sum(copied)
    return elements
