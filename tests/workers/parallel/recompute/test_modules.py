"""What is recomputed: which layers, and which of their modules."""

from __future__ import annotations

import weakref

import pytest
import torch
from engine_specs import spec
from one_layer import lone_rank
from rank_processes import begin_process

from manta.workers.parallel.pipeline.schedules.action import Action
from manta.workers.parallel.recompute import NOTHING, Recompute, recomputed
from manta.workers.parallel.recompute.modules import checkpointed


@pytest.fixture(scope="module")
def comm():
    return lone_rank(spec())


class Product:
    """tanh(x w) twice over, which counts its runs."""

    def __init__(self):
        self.weight = torch.randn(8, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
        self.runs = 0
        self.middle = None

    def __call__(self, x, scale=1.0):
        self.runs += 1
        hidden = torch.tanh(x @ self.weight) * scale
        self.middle = weakref.ref(hidden.untyped_storage())
        return torch.tanh(hidden @ self.weight).sum()


def _input():
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(2), requires_grad=True)


def test_gradients_have_the_bits_of_a_forward_that_keeps_everything(comm):
    plain, again = Product(), Product()
    x, y = _input(), _input()
    expected, result = plain(x, 0.5), checkpointed(comm, again, y, 0.5)
    expected.backward()
    result.backward()
    assert torch.equal(result, expected)
    assert torch.equal(y.grad, x.grad) and torch.equal(again.weight.grad, plain.weight.grad)
    assert (plain.runs, again.runs) == (1, 2)


def test_checkpointed_module_keeps_no_intermediate_tensors(comm):
    product = Product()
    result = checkpointed(comm, product, _input())
    assert product.middle() is None
    del result
    kept = Product()
    kept_result = kept(_input())
    assert kept_result.grad_fn is not None and kept.middle() is not None


def test_recomputed_forward_stops_after_the_last_saved_tensor(comm):
    steps = []

    def function(x):
        result = torch.tanh(x)
        steps.append("tanh")
        result = result + 1
        steps.append("sum")
        return result

    x = _input()
    checkpointed(comm, function, x).sum().backward()
    assert steps == ["tanh", "sum"], "tanh was the last that kept anything: nothing after it ran again"


def test_checkpointed_graph_is_recomputed_for_each_backward(comm):
    product, x = Product(), _input()
    result = checkpointed(comm, product, x)
    (first,) = torch.autograd.grad(result, x, retain_graph=True)
    (second,) = torch.autograd.grad(result, x)
    assert torch.equal(first, second) and product.runs == 3


def test_nested_checkpointed_modules_give_the_same_gradients(comm):
    plain, inner = Product(), Product()
    x, y = _input(), _input()
    torch.tanh(plain(x)).backward()
    checkpointed(comm, lambda z: torch.tanh(checkpointed(comm, inner, z)), y).backward()
    assert torch.equal(y.grad, x.grad) and torch.equal(inner.weight.grad, plain.weight.grad)


def test_checkpointed_module_runs_once_without_gradients(comm):
    product = Product()
    with torch.no_grad():
        result = checkpointed(comm, product, _input())
    assert result.grad_fn is None and product.runs == 1


def test_checkpointed_forward_that_keeps_less_when_rerun_is_an_error(comm):
    runs = []

    def function(x):
        runs.append(x)
        return torch.tanh(x).sum() if len(runs) > 1 else torch.tanh(torch.tanh(x)).sum()

    with pytest.raises(RuntimeError, match="forward saved 2 tensors, but 1 when it was recomputed"):
        checkpointed(comm, function, _input()).backward()


WITHOUT_COMPILER = """
import contextlib, sys, types
import torch
from manta.workers.parallel.recompute.modules import checkpointed
comm = types.SimpleNamespace(step=types.SimpleNamespace(forward_work=contextlib.nullcontext))
checkpointed(comm, torch.tanh, torch.ones(3, requires_grad=True)).sum().backward()
sys.exit("torch._dynamo" in sys.modules)
"""


def test_recompute_module_imports_no_compiler():
    """It would take a second in every process that trains. The process has imported what those have."""
    process = begin_process(exec, WITHOUT_COMPILER)
    process.join()
    assert process.exitcode == 0


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
