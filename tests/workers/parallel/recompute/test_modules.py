"""A forward of which only the inputs are kept, and what runs again in backward."""

import weakref

import pytest
import torch
from engine_specs import spec
from one_layer import lone_rank
from rank_processes import begin_process

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
