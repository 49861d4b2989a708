"""The layouts that are looked at, and what can be said of each in a few operations: least time, least memory. Pure
Python.

Left out is what another layout of the same search is never worse than: gpipe (1f1b takes as long and holds less);
`zero: 0`; layouts without sequence parallelism where it is possible. Of many GPUs or layers (above `COMPLETE`) also
what is hardly ever best: more stages than the layers of the fullest one need, but for two, which make the ends of the
model lighter; chunks whose rounding gives a rank more layers; fewer replicas than find room, but where the batch
divides.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from service.planner.communication import groups_of
from service.planner.engine_passes import layer_time
from service.planner.hardware import Cluster, with_threads
from service.planner.layer_time import Passes
from service.planner.pipeline import StageTimes
from service.planner.software import Software
from service.planner.step_time import StepModel, slowest_of, stage_totals, threads_in
from workers.accounting.activation_bytes import layer_bytes, layer_input_bytes
from workers.accounting.flops import rank_parameters
from workers.config import JobSpec, ParallelConfig
from workers.parallel.pipeline.stages import even_counts
from workers.spec.divisors import divisors

RECOMPUTE = ("none", "selective", "full")
MOST_STAGES = 256
"""Pipeline stages; of more no simulation would be done in time."""
COMPLETE = 2048
"""GPUs times layers up to which every size is looked at."""
MOST_MICRO_BATCH = 64
"""Sequences; beyond it products gain nothing any more."""


@dataclass(frozen=True, order=True)
class Candidate:
    """A layout and a micro-batch size; ordered by simplicity, which decides between equals."""

    pipeline: int
    tensor: int
    data: int
    virtual_stages: int
    schedule: str
    micro_batch: int
    recompute: str

    def layout(self, wish: ParallelConfig) -> ParallelConfig:
        """As a layout, with what the search leaves alone as in `wish`."""
        return wish.model_copy(
            update={
                "tensor": self.tensor,
                "pipeline": self.pipeline,
                "data": self.data,
                "virtual_stages": self.virtual_stages,
                "stage_layers": None,
                "schedule": self.schedule,
                "recompute": self.recompute,
                "zero": 1,
                "sequence_parallel": None,
            }
        )

    @property
    def ranks(self) -> int:
        """Of the whole job."""
        return self.pipeline * self.tensor * self.data

    @property
    def without_recomputation(self) -> Candidate:
        """The same that keeps everything."""
        return replace(self, recompute="none")

    def micro_batches(self, job: JobSpec) -> int:
        """Of a replica in a step."""
        share = -(-job.train.global_batch_size // self.data)
        return -(-share // self.micro_batch)

    def spec(self, job: JobSpec) -> JobSpec:
        """`job` under this layout."""
        wish = ParallelConfig() if isinstance(job.parallel, str) else job.layout
        train = job.train.model_copy(update={"micro_batch_size": self.micro_batch})
        return job.model_copy(update={"parallel": self.layout(wish), "train": train})


def candidates(job: JobSpec, cluster: Cluster) -> Iterator[Candidate]:
    """All of them, in no order that matters."""
    batch, every = job.train.global_batch_size, is_complete(job, cluster)
    for tensor, pipeline, data in axes(job, cluster):
        share = -(-batch // data)
        for micro_batch in _micro_batches(job, share):
            m = -(-share // micro_batch)
            whole = batch % (data * pipeline * micro_batch) == 0
            for schedule, virtual_stages in _schedules(job.model.layers, pipeline, whole and m % pipeline == 0, every):
                for recompute in RECOMPUTE:
                    yield Candidate(pipeline, tensor, data, virtual_stages, schedule, micro_batch, recompute)


def _micro_batches(job: JobSpec, share: int) -> list[int]:
    """Sizes that divide what a replica has of the batch; where the job says one, that one."""
    if "micro_batch_size" in job.train.model_fields_set:
        return [job.train.micro_batch_size]
    return [size for size in divisors(share) if size <= MOST_MICRO_BATCH]


def is_complete(job: JobSpec, cluster: Cluster) -> bool:
    """Whether every size is looked at."""
    return cluster.gpus * job.model.layers <= COMPLETE


def axes(job: JobSpec, cluster: Cluster) -> Iterator[tuple[int, int, int]]:
    """Tensor, pipeline and data sizes that find room: a tensor group lies on one node."""
    model, batch, complete = job.model, job.train.global_batch_size, is_complete(job, cluster)
    for tensor in range(1, cluster.gpus_per_node + 1):
        if model.heads % tensor or model.ffn_size % tensor:
            continue
        groups = cluster.nodes * (cluster.gpus_per_node // tensor)
        for pipeline in range(1, model.layers + 1) if complete else _pipeline_sizes(model.layers):
            if pipeline > min(groups, MOST_STAGES):
                break
            most = min(groups // pipeline, batch)
            for data in range(1, most + 1) if complete else _data_sizes(most, batch, pipeline):
                yield tensor, pipeline, data


@lru_cache(maxsize=256)
def _pipeline_sizes(layers: int) -> tuple[int, ...]:
    """For each number of layers of the fullest stage as few stages as it takes, and up to two more."""
    fewest = {-(-layers // each) for each in range(1, layers + 1)}
    return tuple(sorted({size + more for size in fewest for more in range(3) if size + more <= layers}))


def _data_sizes(most: int, batch: int, pipeline: int) -> list[int]:
    """The largest; the largest that divides the batch evenly, also into micro-batches as interleaving takes them."""
    even = [size for size in divisors(batch) if size <= most]
    whole = [size for size in even if batch // size % pipeline == 0]
    return sorted({most, even[-1], *whole[-1:]})


def _schedules(layers: int, pipeline: int, whole: bool, every: bool) -> Iterator[tuple[str, int]]:
    """Schedules and chunks a stage. `whole`: micro-batches come in groups as interleaving takes them; `every`: whatever
    becomes of the layers."""
    yield "1f1b", 1
    if pipeline == 1:
        return
    yield "zb-h1", 1
    if layers >= 2 * pipeline:
        yield "zb-v", 2
    if whole:
        for virtual_stages in range(2, layers // pipeline + 1) if every else _chunk_numbers(layers, pipeline):
            yield "interleaved", virtual_stages


@lru_cache(maxsize=4096)
def _chunk_numbers(layers: int, pipeline: int) -> tuple[int, ...]:
    """Numbers of chunks a stage that give no stage more layers than it has without."""
    return tuple(
        virtual_stages
        for virtual_stages in range(2, layers // pipeline + 1)
        if max(stage_totals(layers, pipeline, virtual_stages)) == -(-layers // pipeline)
    )


@dataclass(frozen=True)
class _Sizes:
    """Parameters of a rank at one tensor size: of a layer, and of what stages at the ends have beside layers."""

    layer: int
    first: int
    last: int
    both: int


class Bounds:
    """Least seconds and bytes of candidates, from parts that many share."""

    def __init__(self, job: JobSpec, cluster: Cluster, software: Software):
        self.job, self.cluster, self.software = job, cluster, software
        self._passes: dict[tuple[int, int, str, int, int], Passes] = {}
        self._sizes: dict[int, _Sizes] = {}
        self._layer_bytes: dict[tuple[int, int, str], int] = {}
        self._stages: dict[tuple[int, int, str, int, int, int, bool, bool], StageTimes] = {}

    def passes(self, candidate: Candidate) -> Passes:
        """The times of the parts of the model."""
        threads, counted = self._threads(candidate), self._counted(candidate)
        key = candidate.tensor, candidate.micro_batch, candidate.recompute, threads, counted
        if key not in self._passes:
            spec, cluster = (
                self._alone(candidate, candidate.data if counted else 1),
                with_threads(self.cluster, threads),
            )
            self._passes[key] = layer_time(spec, groups_of(spec.layout, cluster, self.software), self.software).passes()
        return self._passes[key]

    def _counted(self, candidate: Candidate) -> int:
        """Micro-batches, where a pass takes longer with more of them; else 0."""
        return candidate.micro_batches(self.job) if self.software.counts_kernels else 0

    def _threads(self, candidate: Candidate) -> int:
        return 1 if self.cluster.machine.core is None else threads_in(candidate.spec(self.job), self.cluster)

    def _alone(self, candidate: Candidate, data: int = 1) -> JobSpec:
        """A job whose layers are those of `candidate`, on one stage."""
        return replace(candidate, pipeline=1, data=data, virtual_stages=1, schedule="1f1b").spec(self.job)

    def _sizes_of(self, tensor: int) -> _Sizes:
        if tensor not in self._sizes:
            job, one = self.job, ParallelConfig(tensor=tensor)

            def of(layers: int, pipeline: int) -> tuple[int, ...]:
                model = job.model.model_copy(update={"layers": layers})
                layout = one.model_copy(update={"pipeline": pipeline})
                return rank_parameters(job.model_copy(update={"model": model, "parallel": layout}))

            alone, two, (first, last) = of(1, 1)[0], of(2, 1)[0], of(2, 2)
            layer = two - alone
            self._sizes[tensor] = _Sizes(layer, first - layer, last - layer, alone - layer)
        return self._sizes[tensor]

    def parameters(self, candidate: Candidate) -> int:
        """Most parameters of a rank."""
        sizes, p = self._sizes_of(candidate.tensor), candidate.pipeline
        if p == 1:
            return self.job.model.layers * sizes.layer + sizes.both
        ranks = self._totals(candidate)
        if candidate.schedule == "zb-v":
            return max(ranks[0] * sizes.layer + sizes.both, max(ranks) * sizes.layer)
        ends = ranks[0] * sizes.layer + sizes.first, ranks[-1] * sizes.layer + sizes.last
        return max(*ends, max(ranks) * sizes.layer)

    def least_bytes(self, candidate: Candidate) -> float:
        """Less than the rank needs that needs most: state, and activations of what it has in flight at least."""
        count, data, width = self.parameters(candidate), candidate.data, self._width
        state = count * (width + 4 + (8 + (4 if width == 2 else 0)) / data)
        p, v = candidate.pipeline, candidate.virtual_stages
        # Under zb-v, of few micro-batches the last chunk's may be gone before the first chunk's have all come.
        layers = self.job.model.layers // (p * v) * (1 if candidate.schedule == "zb-v" else v)
        m = candidate.micro_batches(self.job)
        return state + min(m, p) * layers * self._bytes_of_layer(candidate)

    @property
    def _width(self) -> int:
        return 4 if self.job.train.precision == "fp32" else 2

    def _bytes_of_layer(self, candidate: Candidate) -> int:
        key = candidate.tensor, candidate.micro_batch, candidate.recompute
        if key not in self._layer_bytes:
            spec = self._alone(candidate)
            if self.job.train.frozen:
                size = 0  # which layers keep what depends on the layer
            elif candidate.recompute == "full":
                size = layer_input_bytes(spec)
            else:
                modules = spec.layout.recompute_modules if candidate.recompute == "selective" else ()
                size = layer_bytes(spec, modules)
            self._layer_bytes[key] = size
        return self._layer_bytes[key]

    def model(self, candidate: Candidate) -> StepModel:
        """The candidate's step."""
        parameters = self.parameters(candidate)
        return StepModel(candidate.spec(self.job), self.cluster, self.software, self.passes(candidate), parameters)

    def _stage(self, candidate: Candidate, layers: int, first: bool = False, last: bool = False) -> StageTimes:
        threads, counted = self._threads(candidate), self._counted(candidate)
        key = (candidate.tensor, candidate.micro_batch, candidate.recompute, threads, counted, layers, first, last)
        if key not in self._stages:
            self._stages[key] = self.passes(candidate).of_stage(layers, first, last, self.cluster.machine)
        return self._stages[key]

    def least_seconds(self, candidate: Candidate) -> float:
        """No more than its step takes: the pipeline at least, and what comes behind it."""
        model = self.model(candidate)
        pipeline, backward = self._least_pipeline(candidate, model)
        if self.cluster.machine.core is not None:  # where ranks share cores these may have more to do than any rank
            pipeline = max(pipeline, model.pipeline().work(candidate.micro_batches(self.job)))
        rest = model.gradient_seconds(backward) + model.tied_seconds() + model.optimizer_seconds()
        return (pipeline + rest) * slowest_of(candidate.data, self.cluster)

    def _least_pipeline(self, candidate: Candidate, model: StepModel) -> tuple[float, float]:
        """Seconds of the pipeline at least, and of the shortest backward of a virtual stage.

        The first rank computes all of its passes. The last one begins when the first micro-batch has gone through all
        stages before it, and when it is done the last gradient has to go back through them; where the weights' half is
        apart, that of as many micro-batches as stages need not be done by then.
        """
        p, v, m = candidate.pipeline, candidate.virtual_stages, candidate.micro_batches(self.job)
        counts = even_counts(self.job.model.layers, p * v)
        if p == 1:
            only = self._stage(candidate, counts[0], True, True)
            return m * only.seconds, only.backward
        first, last = self._stage(candidate, counts[0], first=True), self._stage(candidate, counts[-1], last=True)
        inner = self._stage(candidate, min(counts))
        backward = min(first.backward, last.backward, inner.backward if p * v > 2 else last.backward)
        message = model.message(0) if not model.groups.stages_share_node(0) and p * candidate.tensor >= 16 else 0.0
        there = first.forward + (p - 2) * inner.forward + (p - 1) * message
        back = first.backward_input + (p - 2) * inner.backward_input + (p - 1) * message
        late = 0.0
        if candidate.schedule == "zb-v":
            busy_first, busy_last = m * (first.seconds + last.seconds), m * 2 * inner.seconds
            late = min(m, p) * 2 * inner.backward_weight
        else:
            busy_first = m * (first.seconds + (v - 1) * inner.seconds)
            busy_last = m * (last.seconds + (v - 1) * inner.seconds)
            if candidate.schedule == "zb-h1":
                late = min(m, p) * last.backward_weight
            else:
                back += first.backward_weight + (p - 2) * inner.backward_weight
        fullest = max(self._totals(candidate)[1:-1], default=0)
        # The first of the ranks with most layers is the one behind the first rank.
        busy = m * self._stage(candidate, fullest).seconds + first.forward
        return max(busy_first, busy, there + busy_last, there + busy_last - late + back), backward

    def _totals(self, candidate: Candidate) -> tuple[int, ...]:
        """Layers of each rank."""
        p, v = candidate.pipeline, candidate.virtual_stages
        if candidate.schedule != "zb-v":
            return stage_totals(self.job.model.layers, p, v)
        counts = even_counts(self.job.model.layers, 2 * p)
        return tuple(counts[rank] + counts[2 * p - 1 - rank] for rank in range(p))
