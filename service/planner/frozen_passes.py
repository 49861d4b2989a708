"""Passes of virtual stages of a partly frozen model (`train.frozen`). Pure Python.

Backward ends in the first layer that a gradient reaches; the layers below only run forward. Above, frozen weights need
no gradient products, sums or casts of their own; gradients still pass through them.
"""

from __future__ import annotations

from collections import Counter
from functools import cached_property

from service.planner.layer_time import LayerTime
from service.planner.operations import Budget
from service.planner.passes import Passes, host_wait
from service.planner.pipeline import StageTimes
from workers.spec.parameters import TOKEN_EMBEDDING, first_trained_layer, frozen_by_layer, frozen_names

Budgets = tuple[Budget, Budget, Budget]
"""Forward, and both halves of backward."""


class FrozenPasses:
    """Times of one job's virtual stages, whose layers may have different parts frozen."""

    def __init__(self, layer: LayerTime, passes: Passes):
        """`layer`, `passes`: times of the job's parts with everything trained."""
        self._layer, self._passes, spec = layer, passes, layer.spec
        self._frozen, self._first = frozen_by_layer(spec), first_trained_layer(spec.model, spec.train.frozen)
        self._known: dict[frozenset[str], tuple[Budget, Budget]] = {}
        self._times: dict[tuple[int, frozenset[tuple[frozenset[str], int]], bool, bool], StageTimes] = {}

    def times(self, layers: range, first: bool, last: bool) -> StageTimes:
        """Times of a virtual stage with these `layers` of the model, at one end of it or both."""
        key = len(layers), frozenset(self._kinds(layers).items()), first, last
        if key not in self._times:
            self._times[key] = StageTimes(*(each.seconds for each in self.budgets(layers, first, last)))
        return self._times[key]

    def budgets(self, layers: range, first: bool, last: bool) -> Budgets:
        """Times of a virtual stage, as in `times`, broken down by what the time goes to."""
        passes, machine = self._passes, self._layer.machine
        forward, backward, weight = passes.forward_of_stage(len(layers), first, last), Budget(), Budget()
        for kind, times in self._kinds(layers).items():
            of_input, of_weight = self._backward(kind)
            backward, weight = backward.plus(of_input, times), weight.plus(of_weight, times)
        if first and self._first < 0:
            backward = backward.plus(passes.first_backward)
        if last:
            backward = backward.plus(self._last_backward)
        if machine.gpu is not None and first and last:
            forward.host = host_wait(machine, forward, backward, weight)
            return forward, backward, weight
        return forward.wait_for_host(machine), backward.wait_for_host(machine), weight.wait_for_host(machine)

    def _kinds(self, layers: range) -> Counter[frozenset[str]]:
        """Of these layers that have a backward, how many have the same parameters frozen."""
        return Counter(self._frozen[max(layers.start, self._first) : layers.stop])

    def _backward(self, frozen: frozenset[str]) -> tuple[Budget, Budget]:
        """Both halves of the backward of a layer in which the parameters `frozen` are not trained."""
        if frozen not in self._known:
            layer = self._layer.without(frozen)
            self._known[frozen] = layer.backward_input(), layer.backward_weight()
        return self._known[frozen]

    @cached_property
    def _last_backward(self) -> Budget:
        tied = self._layer.spec.model.tie_embeddings
        output = TOKEN_EMBEDDING if tied else "output.weight"
        return self._layer.without(frozenset({output} & frozen_names(self._layer.spec))).output_backward()
