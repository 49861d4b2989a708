"""Predicts the memory of a job's ranks by part, and says what would make the job fit. Pure Python.

The arithmetic is that of `workers/accounting/device_bytes.py`, which is checked against torch's own count of a step.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from manta.service.planner.candidates import MIN_CONTEXT_TOKENS, expert_sizes, whole_expert_sizes
from manta.service.planner.hardware import GIB, Cluster, Machine, parts_of
from manta.service.planner.stage_shares import chunks_of, shared_out
from manta.workers.accounting.activation_bytes import host_bytes_of_rank
from manta.workers.accounting.device_bytes import DeviceBytes, bytes_of_stage
from manta.workers.accounting.flops import layers_of_rank, stages_on_rank
from manta.workers.accounting.state_costs import SLOTS, copies_bytes, held_bytes, host_state_bytes
from manta.workers.accounting.step_peak import StepPeak
from manta.workers.config import JobSpec
from manta.workers.schedules import SCHEDULES
from manta.workers.schedules.stages import layer_counts, layers_of
from manta.workers.spec.parameters import first_trained_layer, layer_kinds, layers_differ
from manta.workers.spec.rules import broken_keys

RESERVE = 0.04
"""Part of a device's memory that stays free for fragmentation, since the allocator keeps blocks of the sizes that were
requested, and for the workspaces of libraries (`workers/accounting/device_bytes.py`)."""


HEAD_TOKENS = 1024
"""The value suggested for `train.head_tokens`: large enough for a GPU's matrix products."""


def usable_bytes(cluster: Cluster) -> float:
    """Bytes of a device's memory that a rank may use."""
    return cluster.machine.accelerator.memory_bytes * (1 - RESERVE)


def worst_rank(
    spec: JobSpec, machine: Machine | None = None, usable: float = math.inf, known: StepPeak | None = None
) -> DeviceBytes:
    """The rank that needs most; if one needs more than `usable` bytes, the first such rank found. `machine`: what ranks
    run on, which changes some tensors; by default a GPU. `known`: of a job as `StepPeak.with_stages` takes it."""
    passes, memories = step_peak_on(spec, machine, known), []
    for rank in _candidates(spec):
        memories.append(_memory(passes, rank))
        if memories[-1].total > usable:
            break
    return max(memories, key=lambda each: each.total)


def tightest(spec: JobSpec, cluster: Cluster) -> tuple[DeviceBytes, float]:
    """The rank with the least memory to spare, and the bytes that it may use. Raises UnknownMachine if the layout asks
    for nodes that the cluster does not have."""
    parts = parts_of(spec, cluster)
    if spec.layout.stage_accelerators is None:  # any kind of node may be used, so the one with the least room counts
        memories = [(worst_rank(spec, part.machine), usable_bytes(part)) for part in cluster.parts]
    elif all(part is parts[0] for part in parts):
        memories = [(worst_rank(spec, parts[0].machine), usable_bytes(parts[0]))]
    else:
        memories = by_kind(spec, parts)
    return rank_with_least_room(memories)


def by_stage(spec: JobSpec, cluster: Cluster) -> list[tuple[DeviceBytes, float]]:
    """Memory of a rank of each pipeline stage, and what it may take; on the nodes with least room where the layout does
    not say on which it is. Raises UnknownMachine as `tightest`."""
    parts: list[tuple[Cluster, ...]] = [(part,) for part in parts_of(spec, cluster)]
    if spec.layout.stage_accelerators is None:
        parts = [cluster.parts] * spec.layout.pipeline
    return [
        rank_with_least_room([(memory_of(spec, rank, each.machine), usable_bytes(each)) for each in own])
        for rank, own in enumerate(parts)
    ]


def rank_with_least_room(memories: Sequence[tuple[DeviceBytes, float]]) -> tuple[DeviceBytes, float]:
    """The rank with the fewest bytes left; each comes with the bytes that it may use."""
    return max(memories, key=lambda each: each[0].total - each[1])


def by_kind(spec: JobSpec, parts: Sequence[Cluster]) -> list[tuple[DeviceBytes, float]]:
    """Memory of the ranks that may need most, and the bytes that each may use; `parts`: the nodes of each stage."""
    ranks = _candidates(spec, [part.type for part in parts])
    return [(memory_of(spec, rank, parts[rank].machine), usable_bytes(parts[rank])) for rank in ranks]


def _candidates(spec: JobSpec, types: Sequence[str | None] | None = None) -> list[int]:
    """Ranks of which one needs most: both ends, the second one, and of ranks that are alike (also in the `types` of
    their nodes) the first, which holds most micro-batches. If chunks turn back that may be the last instead, and with a
    frozen part the second, since backward may end in the first."""
    last, alike = spec.layout.pipeline - 1, dict[object, list[int]]()
    for rank in range(last + 1):
        kind = _kind_of(spec, rank), None if types is None else types[rank]
        alike.setdefault(kind, []).append(rank)
    few = 2 if layers_differ(spec) else 1
    ranks = {last}.union(*(each[:few] for each in alike.values()))
    if SCHEDULES[spec.layout.schedule].turns_back:
        ranks.update(each[-1] for each in alike.values())
    return sorted(ranks) + ([1] if last > 1 and 1 not in ranks else [])


def _kind_of(spec: JobSpec, rank: int) -> tuple[object, ...]:
    """A key that is equal for ranks that are alike: number of layers of each chunk, and of which kinds they are."""
    first, by_layer = first_trained_layer(spec), layer_kinds(spec)
    chunks = (layers_of(spec.model.layers, spec.layout, index) for index in stages_on_rank(spec, rank))
    return tuple((len(layers), by_layer[max(first, layers.start) : layers.stop]) for layers in chunks)


def memory_of(spec: JobSpec, rank: int, machine: Machine | None = None) -> DeviceBytes:
    """What pipeline rank `rank` needs; `machine` as in `worst_rank`."""
    return _memory(step_peak_on(spec, machine), rank)


def step_peak_on(spec: JobSpec, machine: Machine | None, known: StepPeak | None = None) -> StepPeak:
    """Of a job whose ranks are on such a machine; by default on GPUs. `known`: as in `worst_rank`."""
    if known is not None:
        return known.with_stages(spec)
    return StepPeak(spec) if machine is None else StepPeak(spec, machine.has_gpus, machine.sums_apart)


def _memory(passes: StepPeak, rank: int) -> DeviceBytes:
    return bytes_of_stage(passes, rank, _enough(passes.spec))


def _enough(spec: JobSpec) -> int:
    """Enough micro-batches for the most that can be in flight, which under some schedules are all of them."""
    layout, m = spec.layout, spec.micro_batches
    if SCHEDULES[layout.schedule].all_in_flight:
        return m
    most = 3 * layout.pipeline
    return min(m, most if m % layout.pipeline == 0 else most + m % layout.pipeline)


def host_bytes(spec: JobSpec, gpus_per_node: int) -> int:
    """Bytes of a node's memory that its ranks use for snapshots (without backups of other ranks), for other copies of
    their state, and for offloaded activations and optimizer state."""
    ranks, stages = min(gpus_per_node, spec.layout.world_size), range(spec.layout.pipeline)
    waiting = max(
        host_bytes_of_rank(spec, stage, _enough(spec)) + host_state_bytes(spec, stage) + copies_bytes(spec, stage)
        for stage in stages
    )
    if spec.checkpoint.snapshots == "off":
        return waiting * ranks
    return round((SLOTS * held_bytes(spec) + waiting) * ranks)


def layers_with_room(
    spec: JobSpec, usable: float, machine: Machine | None = None, known: StepPeak | None = None
) -> tuple[int, ...]:
    """For how many layers each pipeline rank has room in so many bytes, by what it needs now and what one more on each
    of its virtual stages would need. Both are looked at for the ranks at the ends and those beside them; between those
    they change from one to the next as the number of micro-batches in flight does. `machine`, `known`: as in
    `worst_rank`."""
    stages = spec.layout.pipeline
    passes = step_peak_on(spec, machine, known)
    lines = {rank: _growth(passes, rank) for rank in sorted({0, 1, stages - 2, stages - 1} & set(range(stages)))}
    room = []
    for rank in range(stages):
        if rank in lines:
            none, each = lines[rank]
        else:
            part = (rank - 1) / (stages - 3)
            none, each = (a + part * (b - a) for a, b in zip(lines[1], lines[stages - 2], strict=True))
        room.append(max(0, int((usable - none) / each)))
    return tuple(room)


def _within_room(spec: JobSpec, usable: float, machine: Machine) -> tuple[int, ...] | None:
    """Layers of each virtual stage for which there seems to be room, as even as possible; None if that does not differ
    from the present ones."""
    layout = spec.layout
    if layout.pipeline == 1:
        return None
    chunks = chunks_of(layout.schedule, layout.pipeline, layout.virtual_stages)
    room = layers_with_room(spec, usable, machine)
    stages = layout.pipeline * layout.virtual_stages
    counts = shared_out(spec.model.layers, chunks, [(1.0, 0.0)] * stages, room)
    return None if counts == layer_counts(spec.model.layers, layout) else counts


def _growth(passes: StepPeak, rank: int) -> tuple[float, float]:
    """Bytes that a rank needs without layers, and for each layer, by linear extrapolation from two numbers of
    layers."""
    spec = passes.spec
    layout, counts = spec.layout, list(layer_counts(spec.model.layers, spec.layout))
    now = layers_of_rank(spec, rank)
    for index in stages_on_rank(spec, rank):
        counts[index] += 1
    model = spec.model.model_copy(update={"layers": sum(counts)})
    more = layout.model_copy(update={"stage_layers": tuple(counts)})
    larger = spec.model_copy(update={"model": model, "parallel": more})
    needs = _memory(passes, rank).total
    each = (_memory(passes.with_stages(larger), rank).total - needs) / layout.virtual_stages
    return needs - now * each, each


@dataclass(frozen=True)
class Fit:
    """Whether a job fits, and if not, by how much it misses and what would help."""

    memory: DeviceBytes
    usable: float
    """Bytes of a device that a rank may take."""
    change: str | None = None
    """The smallest change that makes it fit; None if it fits, or if none was found."""

    @property
    def fits(self) -> bool:
        """Whether there is room for the rank that needs most."""
        return self.missing <= 0

    @property
    def missing(self) -> float:
        """Bytes that are missing; negative where some are left."""
        return self.memory.total - self.usable

    def __str__(self) -> str:
        if self.fits:
            return f"fits, with {-self.missing / GIB:.1f} GiB to spare"
        parts = self.memory.parts()
        largest = max((name for name in parts if name != "total"), key=lambda name: parts[name])
        advice = f" (try: {self.change})" if self.change else ""
        return (
            f"{self.missing / GIB:.1f} GiB more than the {self.usable / GIB:.1f} GiB that a rank may use; the largest "
            f"part is {largest}, {parts[largest] / GIB:.1f} GiB{advice}"
        )


def fits(spec: JobSpec, cluster: Cluster) -> Fit:
    """Whether `spec` fits on the devices of `cluster`; if not, with the smallest change that helps."""
    fit = Fit(*tightest(spec, cluster))
    if fit.fits:
        return fit
    is_placed, broken = spec.layout.stage_accelerators is not None, broken_keys(spec)
    widths = [part.gpus_per_node for part in (parts_of(spec, cluster) if is_placed else cluster.parts)]
    widest = min(widths) if is_placed else max(widths)
    for change, other in _changes(spec, fit.usable, cluster.machine):
        if other.layout.tensor > widest or broken_keys(other) - broken:
            continue
        if Fit(*tightest(other, cluster)).fits:
            return Fit(fit.memory, fit.usable, change + _on_more(other, cluster))
    return fit


def _on_more(spec: JobSpec, cluster: Cluster) -> str:
    """How many places a layout needs, where that is more than the cluster has."""
    layout, places = spec.layout, "GPUs" if cluster.machine.has_gpus else "slots"
    if layout.stage_accelerators is not None:
        stages = Counter(parts_of(spec, cluster))
        room = {part: part.nodes * (part.gpus_per_node // layout.tensor) for part in stages}
        replicas = layout.data * layout.context
        more = [part for part, count in stages.items() if count * replicas > room[part]]
        needed = (f"{stages[part] * replicas * layout.tensor} {part.type}" for part in more)
        return f", on {' and '.join(needed)} {places}" if more else ""
    groups = sum(part.nodes * (part.gpus_per_node // layout.tensor) for part in cluster.parts)
    return "" if layout.world_size <= groups * layout.tensor else f", on {layout.world_size} {places}"


def _changes(spec: JobSpec, usable: float, machine: Machine) -> Iterator[tuple[str, JobSpec]]:
    """One change at a time, from the cheapest to those that need another cluster."""
    layout, size = spec.layout, spec.train.micro_batch_size

    def with_layout(**values: object) -> JobSpec:
        return spec.model_copy(update={"parallel": layout.model_copy(update=values)})

    def with_train(**values: object) -> JobSpec:
        return spec.model_copy(update={"train": spec.train.model_copy(update=values)})

    if layout.holders > 1 and not layout.zero:
        yield "parallel.zero: 1", with_layout(zero=1)
    whole = layout.expert_tensor is not None
    sizes = whole_expert_sizes(spec, layout.holders, layout.tensor) if whole else expert_sizes(spec, layout.holders)
    for expert in sizes:
        if expert > layout.expert_size:
            yield f"parallel.expert: {expert}", with_layout(expert=expert)
    if layout.expert_size == 1 and layout.holders > 1 and layout.pipeline == 1:
        yield from ((f"parallel.zero: {zero}", with_layout(zero=zero)) for zero in (2, 3) if zero > layout.zero)
    if layout.recompute == "none" and spec.attention_is_explicit:
        yield "parallel.recompute: selective", with_layout(recompute="selective")
    if not spec.train.head_tokens and spec.train.micro_batch_size * spec.model.sequence_length > HEAD_TOKENS:
        yield f"train.head_tokens: {HEAD_TOKENS}", with_train(head_tokens=HEAD_TOKENS)
    while size > 1:
        size //= 2
        yield f"train.micro_batch_size: {size}", with_train(micro_batch_size=size)
    is_placed = layout.stage_accelerators is not None
    counts = None if is_placed else _within_room(spec, usable, machine)
    if counts is not None:
        yield f"parallel.stage_layers: {list(counts)}", with_layout(stage_layers=counts)
    if layout.recompute != "full":
        yield "parallel.recompute: full", with_layout(recompute="full", recompute_every=1, recompute_keep=0)
    if layout.offload_layers < spec.model.layers:
        layers = max(layer_counts(spec.model.layers, layout))
        yield f"parallel.offload_layers: {layers}", with_layout(offload_layers=layers)
    if not spec.train.optimizer.offload:
        there = spec.train.optimizer.model_copy(update={"offload": True})
        yield "train.optimizer.offload: true", with_train(optimizer=there)
    for times in (2, 4, 8, 16, 32, 64):
        tensor, pipeline, context = layout.tensor * times, layout.pipeline * times, layout.context * times
        yield f"parallel.tensor: {tensor}", with_layout(tensor=tensor)
        fits = pipeline * layout.virtual_stages <= spec.model.layers
        if fits and not SCHEDULES[layout.schedule].in_groups and not is_placed:
            yield f"parallel.pipeline: {pipeline}", with_layout(pipeline=pipeline, stage_layers=None)
        if spec.model.sequence_length >= MIN_CONTEXT_TOKENS:
            yield f"parallel.context: {context}", with_layout(context=context)
