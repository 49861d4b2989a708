"""Passes of virtual stages of a model that is trained in part (`train.frozen`). Pure Python.

Backward ends in the first layer that a gradient reaches; below it there are forwards alone. Above, frozen weights have
no products, sums and casts of their own; gradients still go through them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

from service.planner.layer_time import LayerTime, Passes, host_wait
from service.planner.operations import Budget
from workers.spec.parameters import TOKEN_EMBEDDING, first_trained_layer, frozen_names

Budgets = tuple[Budget, Budget, Budget]
"""Forward, and both halves of backward."""


class FrozenPasses:
    """Of one job, whose layers differ in what of them is trained."""

    def __init__(self, layer: LayerTime, passes: Passes):
        """`layer`, `passes`: times of the job's parts, as if all were trained."""
        self._layer, self._passes, spec = layer, passes, layer.spec
        self._frozen, self._first = frozen_names(spec), first_trained_layer(spec.model, spec.train.frozen)
        self._known: dict[frozenset[str], tuple[Budget, Budget]] = {}

    def budgets(self, layers: Sequence[int], first: bool, last: bool) -> Budgets:
        """Of a virtual stage with `layers` of the model, at one end of it or both."""
        passes, machine = self._passes, self._layer.machine
        forward, backward, weight = passes.forward_of_stage(len(layers), first, last), Budget(), Budget()
        kinds = Counter(self._frozen_of(number) for number in layers if number >= self._first)
        for kind, times in kinds.items():
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

    def _frozen_of(self, number: int) -> frozenset[str]:
        """Names within a layer of what is not trained of it."""
        prefix = f"layers.{number}."
        return frozenset(name.removeprefix(prefix) for name in self._frozen if name.startswith(prefix))

    def _backward(self, frozen: frozenset[str]) -> tuple[Budget, Budget]:
        """Both halves of a layer's backward in which these are not trained."""
        if frozen not in self._known:
            layer = self._layer.without(frozen)
            self._known[frozen] = layer.backward_input(), layer.backward_weight()
        return self._known[frozen]

    @cached_property
    def _last_backward(self) -> Budget:
        tied = self._layer.spec.model.tie_embeddings
        output = TOKEN_EMBEDDING if tied else "output.weight"
        return self._layer.without(frozenset({output} & self._frozen)).output_backward()
