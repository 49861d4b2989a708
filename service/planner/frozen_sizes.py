"""Parameters and bytes of the ranks of a partly frozen model (`train.frozen`), from prefix sums over its layers that
many layouts share. Pure Python."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate, pairwise

from service.planner.candidates import Candidate
from service.planner.stage_shares import Counts, chunks_of
from workers.accounting.activation_bytes import kept_terms
from workers.accounting.flops import frozen_of_layers, rank_parameters, trained_parameters
from workers.config import JobSpec, ParallelConfig
from workers.parallel.pipeline.stages import even_counts
from workers.spec.parameters import first_trained_layer

Sums = tuple[int, ...]
"""Prefix sums over layers: of none, of the model's first, of its first two, and so on."""


@dataclass(frozen=True)
class _Parameters:
    """Parameters on one tensor rank: prefix sums of the layers, and what the stages at the ends, or a stage that is
    both ends, have besides layers."""

    before: Sums
    first: int
    last: int
    both: int


class FrozenSizes:
    """Sizes of one job under many layouts."""

    def __init__(self, job: JobSpec):
        self._job = job
        self._known: dict[int, tuple[_Parameters, _Parameters]] = {}
        self._kept: dict[tuple[int, int, str], Sums] = {}

    def whole(self, tensor: int) -> int:
        """Parameters with gradients of the whole model on one of `tensor` tensor ranks."""
        _, trained = self._parameters(tensor)
        return trained.before[-1] + trained.both

    def most_trained(self, candidate: Candidate, counts: Counts) -> int:
        """Parameters with gradients of the rank that has most; at least one. `counts`: layers of each virtual stage."""
        _, trained = self._parameters(candidate.tensor)
        return max(1, *_of_ranks(candidate, counts, trained))

    def least_bytes(self, candidate: Candidate, counts: Counts, frozen: float, trained: float) -> float:
        """Lower bound for the bytes of the rank that needs most, with `frozen` and `trained` bytes per parameter: its
        state, and activations of the fewest micro-batches in flight. The first rank has as many micro-batches in flight
        as there are ranks, each later one has one less. For schedules with several chunks only the first rank is looked
        at, and under zb-v only its first chunk, since the last chunk's may be released before all of the first chunk's
        have come."""
        held, with_gradients = self._parameters(candidate.tensor)
        kept = _of_ranks(candidate, counts, _Parameters(self._kept_before(candidate), 0, 0, 0))
        if candidate.schedule == "zb-v":
            kept[0] = self._kept_before(candidate)[counts[0]]
        if candidate.virtual_stages > 1:
            kept[1:] = [0] * (candidate.pipeline - 1)
        m, p = candidate.micro_batches(self._job), candidate.pipeline
        ranks = zip(_of_ranks(candidate, counts, held), _of_ranks(candidate, counts, with_gradients), kept, strict=True)
        return max(
            frozen * own + trained * moved + min(m, p - rank) * bytes_kept
            for rank, (own, moved, bytes_kept) in enumerate(ranks)
        )

    def _parameters(self, tensor: int) -> tuple[_Parameters, _Parameters]:
        """All parameters, and those with gradients."""
        if tensor not in self._known:
            frozen = frozen_of_layers(self._with(tensor, 1))
            layer = rank_parameters(self._with(tensor, 1, layers=2))[0] - rank_parameters(self._with(tensor, 1, 1))[0]
            held = self._split(tensor, [layer] * len(frozen), rank_parameters)
            self._known[tensor] = held, self._split(tensor, [layer - each for each in frozen], trained_parameters)
        return self._known[tensor]

    def _split(self, tensor: int, layers: list[int], of: Callable[[JobSpec], tuple[int, ...]]) -> _Parameters:
        before = tuple(accumulate(layers, initial=0))

        def ends(pipeline: int) -> list[int]:
            behind = [before[end] for end in accumulate(even_counts(len(layers), pipeline), initial=0)]
            ranks = of(self._with(tensor, pipeline))
            return [rank - (b - a) for rank, (a, b) in zip(ranks, pairwise(behind), strict=True)]

        return _Parameters(before, *(ends(2) if len(layers) > 1 else (0, 0)), *ends(1))

    def _with(self, tensor: int, pipeline: int, layers: int | None = None) -> JobSpec:
        model, layout = self._job.model, ParallelConfig(tensor=tensor, pipeline=pipeline)
        if layers is not None:
            model = model.model_copy(update={"layers": layers})
        return self._job.model_copy(update={"model": model, "parallel": layout})

    def _kept_before(self, candidate: Candidate) -> Sums:
        """Prefix sums of the bytes that layers keep of one full micro-batch."""
        key = candidate.tensor, candidate.micro_batch, candidate.recompute
        if key not in self._kept:
            alone = candidate._replace(pipeline=1, data=1, virtual_stages=1, schedule="1f1b", stage_layers=())
            spec = alone.spec(self._job)
            first = first_trained_layer(spec.model, spec.train.frozen)
            modules = spec.layout.recompute_modules if candidate.recompute == "selective" else ()
            layers = (
                sum(kept_terms(spec, layer, candidate.recompute, modules).values()) if layer >= first else 0
                for layer in range(spec.model.layers)
            )
            self._kept[key] = tuple(accumulate(layers, initial=0))
        return self._kept[key]


def _of_ranks(candidate: Candidate, counts: Counts, of: _Parameters) -> list[int]:
    """Parameters `of` on each pipeline rank."""
    stages = [b - a for a, b in pairwise(of.before[end] for end in accumulate(counts, initial=0))]
    chunks = chunks_of(candidate.schedule, candidate.pipeline, candidate.virtual_stages)
    ranks = [sum(stages[index] for index in own) for own in chunks]
    if candidate.pipeline == 1 or candidate.schedule == "zb-v":
        ranks[0] += of.both
    else:
        ranks[0], ranks[-1] = ranks[0] + of.first, ranks[-1] + of.last
    return ranks
