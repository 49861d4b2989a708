"""A layout's policy says which modules and layers are recomputed, and the window of which micro-batches."""

from __future__ import annotations

from engine_specs import spec

from manta.workers.parallel.recompute import NOTHING, Recompute, recomputed
from manta.workers.schedules.schedule import Action


def layout(**parallel):
    return spec(parallel=parallel).layout


def test_recompute_policy_drops_what_its_name_says():
    assert Recompute.of(layout()) == NOTHING == Recompute()
    assert Recompute.of(layout(recompute="selective")) == Recompute(core_attention=True)
    modules = ["norm", "mlp_activation"]
    assert Recompute.of(layout(recompute="selective", recompute_modules=modules)) == Recompute(
        norm=True, mlp_activation=True
    )
    assert Recompute.of(layout(recompute="full", recompute_every=3)) == Recompute(every=3)


def test_recompute_every_k_counts_layers_from_the_first():
    every_third = Recompute(every=3)
    assert [index for index in range(8) if every_third.full_layer(index)] == [0, 3, 6]
    assert not any(NOTHING.full_layer(index) for index in range(8))


def test_rank_recomputes_micro_batches_beyond_its_window():
    """arXiv:2205.05198, appendix C: two in flight, one of which is kept as a whole."""
    actions = [Action("forward", 0), Action("forward", 1)]
    for number in range(2, 5):
        actions += [Action("backward", number - 2), Action("forward", number)]
    actions += [Action("backward", 3), Action("backward", 4)]
    policy = {"recompute": "full", "recompute_keep": 1}
    assert recomputed(actions, layout(**policy)) == {(1, 0), (3, 0)}
    assert recomputed(actions, layout(recompute="full")) == {(number, 0) for number in range(5)}
    assert recomputed(actions, layout()) == frozenset()


def test_a_micro_batch_that_is_kept_is_kept_in_all_chunks_of_the_rank():
    interleaved = {"pipeline": 2, "schedule": "interleaved", "virtual_stages": 2}
    forwards = [Action("forward", number, chunk) for chunk in range(2) for number in range(3)]
    window = layout(recompute="full", recompute_keep=1, **interleaved)
    assert recomputed(forwards, window) == {(2, 0), (0, 1), (1, 1), (2, 1)}, "as many as one has pairs, in any order"


def test_a_micro_batch_leaves_the_window_when_its_weights_gradients_are_done_and_not_before():
    """Where the backward is in two halves, what the layers kept is held from the first to the second."""
    first = [Action("forward", 0), Action("forward", 1), Action("backward_input", 0)]
    actions = [*first, Action("forward", 2), Action("backward_weight", 0), Action("forward", 3)]
    assert recomputed(actions, layout(recompute="full", recompute_keep=1)) == {(1, 0), (2, 0)}
