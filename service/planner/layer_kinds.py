"""Layers of different kinds: the passes of virtual stages that have them, and with `train.frozen` the parameters and
bytes of ranks. Pure Python.

Layers differ by which of their parameters are frozen. Backward ends in the first layer that a gradient reaches; the
layers below only run forward. Above, frozen weights need no gradient products, sums or casts of their own; gradients
still pass through them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from functools import cached_property
from itertools import accumulate, pairwise

from manta.service.planner.candidates import Candidate
from manta.service.planner.layer_time import LayerTime
from manta.service.planner.operations import Budget, Passes, host_wait
from manta.service.planner.pipeline import StageTimes
from manta.service.planner.stage_shares import Counts, chunks_of
from manta.workers.accounting.activation_bytes import saved_terms
from manta.workers.accounting.flops import ParameterCounts, parameter_counts
from manta.workers.config import JobSpec
from manta.workers.schedules import SCHEDULES
from manta.workers.spec.parameters import first_trained_layer, frozen_by_layer, frozen_names, output_weight, padded_rows

Budgets = tuple[Budget, Budget, Budget]
"""Forward, and both halves of backward."""
Sums = tuple[int, ...]
"""Prefix sums over layers: of none, of the model's first, of its first two, and so on."""


class StagePasses:
    """Times of one job's virtual stages."""

    def __init__(self, layer: LayerTime, parts: Passes | None = None):
        """`parts`: times of the parts of the model with everything trained, if they are not those of `layer`."""
        self.layer, self.parts, spec = layer, parts or layer.passes(), layer.spec
        self.is_frozen = bool(spec.train.frozen)
        """Whether a part of the model is not trained."""
        self._first = first_trained_layer(spec.model, spec.train.frozen)
        self._frozen = frozen_by_layer(spec) if self.is_frozen else ()
        whole = self.parts.backward_input, self.parts.backward_weight
        self._known: dict[frozenset[str], tuple[Budget, Budget]] = {} if self.is_frozen else {frozenset(): whole}
        self._times: dict[object, StageTimes] = {}

    def times(self, layers: range, first: bool = False, last: bool = False) -> StageTimes:
        """Times of a virtual stage with these `layers` of the model, at one end of it or both."""
        kinds = frozenset(self._kinds(layers).items()) if self.is_frozen else None
        key = len(layers), kinds, first, last
        if key not in self._times:
            self._times[key] = StageTimes(*(budget.seconds for budget in self.budgets(layers, first, last)))
        return self._times[key]

    def times_of(self, layers: int, first: bool = False, last: bool = False) -> StageTimes:
        """Times of a virtual stage with so many layers. With `train.frozen` only those of its forward: the others
        depend on which layers it has."""
        if not self.is_frozen:
            return self.times(range(layers), first, last)
        key = layers, first, last
        if key not in self._times:
            forward = self._forward(layers, first, last).wait_for_host(self.layer.machine)
            self._times[key] = StageTimes(forward.seconds, 0.0, 0.0)
        return self._times[key]

    def seconds(self, counts: Collection[int]) -> float:
        """Seconds of inner virtual stages with these numbers of layers, in total."""
        known = {layers: self.times_of(layers).seconds for layers in set(counts)}
        return sum(map(known.__getitem__, counts))

    def budgets(self, layers: range, first: bool, last: bool) -> Budgets:
        """Times of a virtual stage, as in `times`, broken down by what the time goes to."""
        machine, forward = self.layer.machine, self._forward(len(layers), first, last)
        backward, weight = Budget(), Budget()
        for kind, times in self._kinds(layers).items():
            of_input, of_weight = self._backward(kind)
            backward, weight = backward.plus(of_input, times), weight.plus(of_weight, times)
        if first and self._first < 0:
            backward = backward.plus(self.parts.first_backward)
        if last:
            backward = backward.plus(self._last_backward)
        if machine.gpu is not None and first and last:
            forward.host = host_wait(machine, forward, backward, weight)
            return forward, backward, weight
        return forward.wait_for_host(machine), backward.wait_for_host(machine), weight.wait_for_host(machine)

    def _forward(self, layers: int, first: bool, last: bool) -> Budget:
        """The stage's forward, without waiting for the host."""
        forward = Budget().plus(self.parts.forward, layers)
        if first:
            forward = forward.plus(self.parts.first_forward)
        return forward.plus(self.parts.last_forward) if last else forward

    def _kinds(self, layers: range) -> Mapping[frozenset[str], int]:
        """Of these layers that have a backward, how many have the same parameters frozen."""
        if not self.is_frozen:
            return {frozenset(): len(layers)}
        return Counter(self._frozen[max(layers.start, self._first) : layers.stop])

    def _backward(self, frozen: frozenset[str]) -> tuple[Budget, Budget]:
        """Both halves of the backward of a layer in which the parameters `frozen` are not trained."""
        if frozen not in self._known:
            layer = self.layer.without(frozen)
            self._known[frozen] = layer.backward_input(), layer.backward_weight()
        return self._known[frozen]

    @cached_property
    def _last_backward(self) -> Budget:
        spec = self.layer.spec
        if not self.is_frozen:
            return self.parts.last_backward
        return self.layer.without(frozenset({output_weight(spec.model)} & frozen_names(spec))).output_backward()


class FrozenSizes:
    """Sizes of one job under many layouts."""

    def __init__(self, job: JobSpec):
        self._job = job
        self._known: dict[int, tuple[ParameterCounts, ParameterCounts]] = {}
        self._kept: dict[tuple[int, int, str], Sums] = {}

    def whole(self, tensor: int) -> int:
        """Parameters with gradients of the whole model on one of `tensor` tensor ranks."""
        _, trained = self._parameters(tensor)
        return trained.before[-1] + trained.both

    def max_trained_parameters(self, candidate: Candidate, counts: Counts) -> int:
        """Parameters with gradients of the rank that has most; at least one. `counts`: layers of each virtual stage."""
        _, trained = self._parameters(candidate.tensor)
        return max(1, *_of_ranks(candidate, counts, trained))

    def min_bytes(self, candidate: Candidate, counts: Counts, frozen: float, trained: float) -> float:
        """Lower bound for the bytes of the rank that needs most, with `frozen` and `trained` bytes per parameter: its
        state, and activations of the fewest micro-batches in flight. The first rank has as many micro-batches in flight
        as there are ranks, each later one has one less. For schedules with several chunks only the first rank is looked
        at, and if chunks turn back only its first one, since the last chunk's may be released before all of the first
        chunk's have come."""
        held, with_gradients = self._parameters(candidate.tensor)
        kept = _of_ranks(candidate, counts, ParameterCounts(self._kept_before(candidate), 0, 0, 0))
        if SCHEDULES[candidate.schedule].turns_back:
            kept[0] = self._kept_before(candidate)[counts[0]]
        if candidate.virtual_stages > 1:
            kept[1:] = [0] * (candidate.pipeline - 1)
        m, p = candidate.micro_batches(self._job), candidate.pipeline
        ranks = zip(_of_ranks(candidate, counts, held), _of_ranks(candidate, counts, with_gradients), kept, strict=True)
        return max(
            frozen * own + trained * moved + min(m, p - rank) * bytes_kept
            for rank, (own, moved, bytes_kept) in enumerate(ranks)
        )

    def _parameters(self, tensor: int) -> tuple[ParameterCounts, ParameterCounts]:
        """All parameters, and those with gradients."""
        if tensor not in self._known:
            model, rows = self._job.model, padded_rows(self._job.vocabulary_size, tensor) // tensor
            held, frozen = (parameter_counts(model, tensor, rows, names) for names in (None, frozen_names(self._job)))
            self._known[tensor] = held, held.minus(frozen)
        return self._known[tensor]

    def _kept_before(self, candidate: Candidate) -> Sums:
        """Prefix sums of the bytes that layers keep of one full micro-batch."""
        key = candidate.tensor, candidate.micro_batch, candidate.recompute
        if key not in self._kept:
            spec = candidate.on_one_stage().spec(self._job)
            first = first_trained_layer(spec.model, spec.train.frozen)
            layers = (
                sum(saved_terms(spec, layer, candidate.recompute).values()) if layer >= first else 0
                for layer in range(spec.model.layers)
            )
            self._kept[key] = tuple(accumulate(layers, initial=0))
        return self._kept[key]


def _of_ranks(candidate: Candidate, counts: Counts, of: ParameterCounts) -> list[int]:
    """Parameters `of` on each pipeline rank."""
    stages = [b - a for a, b in pairwise(of.before[end] for end in accumulate(counts, initial=0))]
    chunks = chunks_of(candidate.schedule, candidate.pipeline, candidate.virtual_stages)
    ranks = [sum(stages[index] for index in own) for own in chunks]
    if candidate.pipeline == 1 or SCHEDULES[candidate.schedule].turns_back:
        ranks[0] += of.both
    else:
        ranks[0], ranks[-1] = ranks[0] + of.first, ranks[-1] + of.last
    return ranks
