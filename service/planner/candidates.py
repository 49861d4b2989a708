"""The layouts that the search looks at. Pure Python.

A layout is left out if another one of the same search is never worse: schedules that keep all micro-batches in flight
(1f1b takes as long and keeps less); `zero: 0`; layouts without sequence parallelism where it is possible. With many
GPUs or layers (above `COMPLETE`) layouts that are hardly ever best are left out too: more stages than the layers of the
fullest one need, except for up to two more, which make the ends of the model lighter; chunks whose rounding gives a
rank more layers, or of too many stages to be simulated quickly; fewer replicas than there is room for, unless the batch
divides evenly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from manta.service.planner.hardware import Cluster
from manta.workers.accounting.activation_bytes import saved_terms
from manta.workers.config import JobSpec, ParallelConfig
from manta.workers.schedules import RUN_BY_ENGINE, SCHEDULES
from manta.workers.schedules.one_forward_one_backward import INTERLEAVED, ONE_FORWARD_ONE_BACKWARD
from manta.workers.schedules.stages import even_counts, stages_of_rank
from manta.workers.spec.batch_rules import smallest_batch
from manta.workers.spec.divisors import divisors
from manta.workers.spec.rules import broken_keys

RECOMPUTE = ("none", "selective", "full")
MAX_STAGES = 256
"""Most pipeline stages; with more a simulation would take too long."""
COMPLETE = 2048
"""GPUs times layers up to which every size is looked at."""
MAX_SIMULATED = 2**15
"""Most stages times stages times chunks of each, which is how the number of passes grows. Beyond it chunks are left
out, since one simulation of them takes seconds; zero-bubble schedules of so many stages have little waiting anyway."""
SIMPLEST = ONE_FORWARD_ONE_BACKWARD.name
_PROPOSED = sorted(
    ((name, SCHEDULES[name]) for name in RUN_BY_ENGINE if not SCHEDULES[name].all_in_flight),
    key=lambda entry: entry[1].virtual_stages or MAX_SIMULATED,
)
"""Schedules, the simplest first."""
MAX_MICRO_BATCH, MAX_TOKENS = 64, 65_536
"""Most sequences of a micro-batch, or more of short ones up to so many tokens; beyond them products gain nothing."""

METHODS: tuple[str, ...] = ("all_gather", "all_to_all", "ring")
"""Ways in which context ranks exchange keys and values, the simplest first."""
MIN_CONTEXT_TOKENS = 8192
"""Shortest sequences that are split over context ranks; fewer tokens a rank can be had by smaller micro-batches."""
MIN_KEPT = 0.5
"""Least part of a device's memory that one sequence's activations take, without recomputation, where a rank with fewer
tokens than a sequence has may be faster."""


class Candidate(NamedTuple):
    """A layout and a micro-batch size. The order is by simplicity, which decides between equal times."""

    pipeline: int
    tensor: int
    data: int
    virtual_stages: int
    schedule: str
    micro_batch: int
    recompute: str
    stage_layers: tuple[int, ...] = ()
    """Layers of each virtual stage; empty: shared out evenly."""
    context: int = 1
    method: str | None = None
    """How attention exchanges keys and values; None: the engine's default."""
    zero: int = 1
    expert: int = 1
    """Ranks that the experts of a layer are spread over."""
    whole_experts: bool = False
    """Whether tensor ranks are among these, and each expert is whole on one."""

    @property
    def experts(self) -> tuple[int, int]:
        """Number of ranks that experts are spread over, and of tensor ranks that share each."""
        return self.expert, 1 if self.whole_experts else self.tensor

    @property
    def expert_holders(self) -> int:
        """Ranks that hold the same experts."""
        return self.ranks // self.pipeline // (self.expert * self.experts[1])

    @property
    def holders(self) -> int:
        """Ranks that hold the same parameters."""
        return self.data * self.context

    @property
    def ranks(self) -> int:
        """Ranks of the whole job."""
        return self.pipeline * self.tensor * self.holders

    @property
    def even(self) -> Candidate:
        """This candidate with layers shared out evenly."""
        return self._replace(stage_layers=())

    @property
    def size(self) -> Candidate:
        """This candidate without what is only a matter of time: where its layers are, and how keys are exchanged."""
        return self._replace(stage_layers=(), method=None)

    @property
    def sharded_further(self) -> tuple[Candidate, ...]:
        """This candidate under ZeRO 2 and 3, if these would shard more. They communicate for each micro-batch, so they
        are worth it where ZeRO 1 does not fit."""
        if self.zero > 1 or self.pipeline > 1 or self.holders == 1 or self.expert > 1:
            return ()
        return self._replace(zero=2), self._replace(zero=3)

    def on_one_stage(self, data: int = 1) -> Candidate:
        """This candidate with `data` replicas and without a pipeline."""
        return self._replace(pipeline=1, data=data, virtual_stages=1, schedule=SIMPLEST, stage_layers=())

    @property
    def recomputing_nothing(self) -> tuple[Candidate, bool]:
        """This candidate without recomputation and with layers shared out evenly, and whether they already are."""
        return self._replace(recompute="none", stage_layers=()), not self.stage_layers

    def micro_batches(self, job: JobSpec) -> int:
        """Micro-batches of a replica in a step."""
        share = -(-job.train.global_batch_size // self.data)
        return -(-share // self.micro_batch)

    def spec(self, job: JobSpec) -> JobSpec:
        """`job` under this layout, with the fields of its own one that the search does not choose."""
        wish = ParallelConfig() if isinstance(job.parallel, str) else job.layout
        names = ("tensor", "pipeline", "data", "context", "virtual_stages", "schedule", "recompute", "zero")
        chosen = {name: getattr(self, name) for name in names} | {"stage_layers": self.stage_layers or None}
        order = wish.context_order if self.context > 1 else None
        chosen |= {"context_method": self.method, "context_order": order, "sequence_parallel": None}
        chosen |= {"expert": self.expert if self.expert > 1 else None, "expert_dispatch": None}
        chosen["expert_tensor"] = 1 if self.whole_experts else None
        layout = wish.model_copy(update=chosen)
        train = job.train.model_copy(update={"micro_batch_size": self.micro_batch})
        return job.model_copy(update={"parallel": layout, "train": train})


def candidates(job: JobSpec, cluster: Cluster) -> Iterator[Candidate]:
    """All candidates, in no particular order."""
    batch, every = job.train.global_batch_size, is_complete(job, cluster)
    for tensor, pipeline, data, context in axes(job, cluster):
        share = -(-batch // data)
        sizes = micro_batch_sizes(job, share)
        for micro_batch in sizes if context == 1 else sizes[:1]:
            m = -(-share // micro_batch)
            whole = batch % (data * pipeline * micro_batch) == 0
            for schedule, virtual_stages in schedules(job.model.layers, pipeline, whole and m % pipeline == 0, every):
                methods = METHODS if context > 1 else (None,)
                spreads = [(size, False) for size in expert_sizes(job, data * context)]
                spreads += [(size, True) for size in whole_expert_sizes(job, data * context, tensor)]
                for recompute, method, spread in product(RECOMPUTE, methods, spreads):
                    shape = pipeline, tensor, data, virtual_stages, schedule, micro_batch, recompute, ()
                    yield Candidate(*shape, context, method, 1, *spread)


def expert_sizes(job: JobSpec, holders: int) -> list[int]:
    """Expert-parallel sizes: those that divide the experts of a layer and the ranks that would hold the same. All may
    be best: larger ones hold fewer weights and have more rows for each product, smaller ones communicate less."""
    moe = job.model.moe
    return [1] if moe is None else divisors(math.gcd(moe.experts, holders))


def whole_expert_sizes(job: JobSpec, holders: int, tensor: int) -> list[int]:
    """Expert-parallel sizes with whole experts on tensor ranks, whose products are wider than parts of experts."""
    moe = job.model.moe
    if moe is None or tensor == 1 or moe.experts % tensor:
        return []
    return [tensor * size for size in divisors(math.gcd(moe.experts // tensor, holders))]


def micro_batch_sizes(job: JobSpec, share: int) -> list[int]:
    """Micro-batch sizes that divide a replica's `share` of the batch; if the job sets one, only that."""
    if "micro_batch_size" in job.train.model_fields_set:
        return [job.train.micro_batch_size]
    most = max(MAX_MICRO_BATCH, MAX_TOKENS // job.model.sequence_length)
    return [size for size in divisors(share) if size <= most]


def is_complete(job: JobSpec, cluster: Cluster) -> bool:
    """Whether every size is looked at."""
    return cluster.gpus * job.model.layers <= COMPLETE


def axes(job: JobSpec, cluster: Cluster) -> Iterator[tuple[int, int, int, int]]:
    """Tensor, pipeline, data and context sizes that there is room for and that the rules about single sizes allow; a
    tensor group is always within one node."""
    batch, layers, complete = job.train.global_batch_size, job.model.layers, is_complete(job, cluster)
    fewest, allowed = replicas_allowed(job)
    for tensor in _tensor_sizes(job, cluster.gpus_per_node):
        groups, contexts = cluster.nodes * (cluster.gpus_per_node // tensor), _context_sizes(job, cluster, tensor)
        for pipeline in range(1, layers + 1) if complete else _pipeline_sizes(layers):
            if pipeline > min(groups, max_stages(job)):
                break
            for context in contexts:
                most = min(groups // (pipeline * context), allowed)
                for data in range(fewest, most + 1) if complete else _data_sizes(fewest, most, batch, pipeline):
                    yield tensor, pipeline, data, context


def _context_sizes(job: JobSpec, cluster: Cluster, tensor: int) -> list[int]:
    """Context sizes that may be best beside one of 1: powers of two, for long sequences, if there are more GPUs than
    the batch has sequences for, or if a good part of a device's memory is taken by what is kept of one sequence."""
    groups, (_, allowed) = cluster.nodes * (cluster.gpus_per_node // tensor), replicas_allowed(job)
    if job.model.sequence_length < MIN_CONTEXT_TOKENS or groups == 1:
        return [1]
    alone = Candidate(1, tensor, 1, 1, SIMPLEST, 1, "none")
    kept = job.model.layers * sum(saved_terms(alone.spec(job), 0, "none").values())
    if groups <= allowed and kept < MIN_KEPT * cluster.machine.accelerator.memory_bytes:
        return [1]
    broken = broken_keys(alone.spec(job))
    sizes = (2**power for power in range(groups.bit_length()))
    return [size for size in sizes if broken_keys(alone._replace(context=size).spec(job)) <= broken]


def _tensor_sizes(job: JobSpec, most: int) -> list[int]:
    """Tensor sizes up to `most` that divide what they split."""
    broken = {size: broken_keys(Candidate(1, size, 1, 1, SIMPLEST, 1, "none").spec(job)) for size in range(1, most + 1)}
    return [size for size, keys in broken.items() if keys <= broken[1]]


def max_stages(job: JobSpec) -> int:
    """Most pipeline stages that are looked at."""
    return 1 if job.train.cuda_graphs else MAX_STAGES


def replicas_allowed(job: JobSpec) -> tuple[int, int]:
    """Fewest and most replicas that the batch, where a ramp begins, and `elastic`, `train.deterministic` and
    `train.cuda_graphs` allow."""
    train, elastic, (_, smallest) = job.train, job.elastic, smallest_batch(job)
    size, most = min(micro_batch_sizes(job, train.global_batch_size)), smallest
    if train.deterministic == "elastic":  # micro-batches are not split between replicas
        most = -(-smallest // size)
    elif train.cuda_graphs:  # three micro-batches, if there are replicas
        most = min(most, max(1, (train.global_batch_size - 1) // (2 * size)))
    return elastic.min_data or 1, min(most, elastic.max_data or most)


@lru_cache(maxsize=256)
def _pipeline_sizes(layers: int) -> tuple[int, ...]:
    """For each number of layers of the fullest stage, the fewest stages that it takes, and up to two more."""
    fewest = {-(-layers // each) for each in range(1, layers + 1)}
    return tuple(sorted({size + more for size in fewest for more in range(3) if size + more <= layers}))


def _data_sizes(fewest: int, most: int, batch: int, pipeline: int) -> list[int]:
    """The largest number of replicas, and the largest that divides the batch evenly, also into groups of micro-batches
    for interleaving."""
    if most < fewest:
        return []
    even = [size for size in divisors(batch) if fewest <= size <= most]
    whole = [size for size in even if batch // size % pipeline == 0]
    return sorted({most, *even[-1:], *whole[-1:]})


def schedules(layers: int, pipeline: int, whole: bool, every: bool) -> Iterator[tuple[str, int]]:
    """Schedules and virtual stages per rank. `whole`: whether micro-batches come in groups as interleaving needs them;
    `every`: also those that give stages unequal numbers of layers."""
    if pipeline == 1:
        yield SIMPLEST, 1
        return
    for name, schedule in _PROPOSED:
        fixed = schedule.virtual_stages
        if schedule.in_groups and not whole:
            continue
        if fixed is None:
            numbers = range(2, layers // pipeline + 1) if every else _chunk_numbers(layers, pipeline)
            yield from ((name, virtual_stages) for virtual_stages in numbers)
        elif fixed == 1 or (layers >= fixed * pipeline and (every or fixed * pipeline**2 <= MAX_SIMULATED)):
            yield name, fixed


@lru_cache(maxsize=4096)
def _chunk_numbers(layers: int, pipeline: int) -> tuple[int, ...]:
    """Numbers of chunks per rank that give no rank more layers than it has without chunks and can be simulated
    quickly."""
    return tuple(
        virtual_stages
        for virtual_stages in range(2, min(layers // pipeline, MAX_SIMULATED // pipeline**2) + 1)
        if max(rank_totals(even_counts(layers, pipeline * virtual_stages), pipeline, INTERLEAVED.name))
        == -(-layers // pipeline)
    )


@lru_cache(maxsize=4096)
def rank_totals(counts: tuple[int, ...], pipeline: int, schedule: str) -> tuple[int, ...]:
    """Layers of each rank."""
    chunks = len(counts) // pipeline
    return tuple(sum(counts[i] for i in stages_of_rank(schedule, pipeline, chunks, rank)) for rank in range(pipeline))
