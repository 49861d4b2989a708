"""What context parallelism adds to attention: the busiest rank's scores, and communication that hops may hide."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manta.service.planner import candidates as candidates_module
from manta.service.planner.communication import bus_bandwidth, groups_of
from manta.service.planner.context_time import ContextTime, scores_computed
from manta.service.planner.explain import what_ifs
from manta.service.planner.hardware import Cluster, machine_of
from manta.service.planner.memory import fits
from manta.service.planner.search import search
from manta.service.planner.software import MANTA
from manta.service.planner.step_time import StepModel
from manta.service.planner.submission import decide
from manta.workers.config import JobSpec
from manta.workers.spec.layer_table import layer_table
from tests.service.support.planned import a100s, job

LONG = {"sequence_length": 131_072, "family": "llama", "kv_heads": 8}


def long_job(**parallel) -> JobSpec:
    """A model of 8 billion parameters with sequences of 131,072 tokens."""
    return job(32, 4096, 32, model=LONG | {"vocabulary_size": 128_256}, train={"global_batch_size": 16}, **parallel)


def h100s(nodes: int) -> Cluster:
    return Cluster(machine_of("h100-80gb"), nodes, 8)


def time_of(spec: JobSpec, nodes: int = 1) -> ContextTime:
    attention = layer_table(spec.model, spec.layout.tensor).attention
    return ContextTime(spec, groups_of(spec.layout, a100s(nodes), MANTA), attention)


@pytest.mark.parametrize("order", ["zigzag", "contiguous"])
@pytest.mark.parametrize("context", [1, 2, 4, 8])
def test_scores_of_the_busiest_rank_are_those_counted_token_by_token(context, order):
    tokens, runs = 64, 64 // (2 * context)
    spec = job(model={"sequence_length": tokens}, context=context, context_order=order)
    ranks = []
    for rank in range(context):
        pairs = (2 * rank, 2 * rank + 1) if order == "contiguous" else (rank, 2 * context - 1 - rank)
        queries = [run * runs + at for run in pairs for at in range(runs)]
        ranks.append(sum(query + 0.5 for query in queries))  # half of the score with itself, as for all that is causal
    assert scores_computed(spec) * tokens**2 == max(ranks)
    assert order == "contiguous" or len(set(ranks)) == 1


@given(st.sampled_from([2, 4, 8]), st.sampled_from([1, 4, 32]), st.integers(10, 17))
def test_ring_hops_are_hidden_from_the_tokens_on_that_arithmetic_gives(context, groups, power):
    """2 (F/B) (g/a) tokens a rank, in 16 bits."""
    model = {"sequence_length": 2**power, "family": "llama", "kv_heads": groups}
    spec = job(1, 4096, 32, model=model, context=context, context_method="ring")
    time = time_of(spec, nodes=context)
    rows, bandwidth = 2**power // context, bus_bandwidth(time.groups.context, time.groups.cluster)
    rate = 2e14
    work = context * 2 * rows**2 * 4096 / rate  # of all blocks, under zigzag
    least = 2 * rate / bandwidth * groups / 32
    latency = context * time.groups.cluster.machine.hop_seconds
    exposed = time.seconds(work, backward=False)
    assert exposed <= latency if rows >= least else exposed > 0


@pytest.mark.parametrize(("method", "columns"), [("all_gather", 2 * 1024), ("all_to_all", 2 * 1024 + 2 * 4096)])
def test_exchange_takes_the_bytes_of_keys_and_values_or_of_heads(method, columns):
    spec = job(1, 4096, 32, model=LONG, context=8, context_method=method)
    time = time_of(spec)
    size = 2 * columns * 131_072 * 7 / 8 / (1 if method == "all_gather" else 8)
    forward, backward = (time.seconds(0.0, backward) for backward in (False, True))
    assert forward == pytest.approx(size / bus_bandwidth(time.groups.context, time.groups.cluster), rel=0.03)
    # Keys and values again, and their gradients in fp32.
    assert backward == pytest.approx((3 if method == "all_gather" else 1) * forward, rel=0.03)


def test_contiguous_order_takes_longer_by_the_last_ranks_share_of_attention():
    zigzag, contiguous = (
        StepModel(long_job(tensor=4, context=2, context_order=order), h100s(1)) for order in ("zigzag", "contiguous")
    )
    times = [model.passes.parts.forward.attention for model in (zigzag, contiguous)]
    assert times[1] / times[0] == pytest.approx(1.5, rel=0.01)


def test_search_splits_long_sequences_and_no_short_ones(monkeypatch):
    plans = search(long_job(), h100s(2)).plans
    assert {plan.spec.layout.context > 1 for plan in plans} == {True}
    assert len({plan.spec.layout.model_copy(update={"context_method": None}) for plan in plans}) == len(plans)
    monkeypatch.setattr(candidates_module, "MIN_CONTEXT_TOKENS", 131_073)
    whole = search(long_job(), h100s(2)).plans
    assert not whole or plans[0].time.seconds < whole[0].time.seconds
    monkeypatch.undo()
    short = job(32, 4096, 32, train={"global_batch_size": 16})
    assert {each.context for each in candidates_module.candidates(short, h100s(2))} == {1}


def test_submitted_job_says_which_context_size_was_chosen():
    document = long_job().model_dump(mode="json", exclude={"parallel"}) | {"parallel": "auto"}
    (note,) = decide(long_job(), document, h100s(2), None).notes
    assert "(tensor x pipeline x data), context " in note


def test_changes_of_a_long_job_include_context_and_its_methods():
    changes = {each.change for each in what_ifs(long_job(tensor=2, context=4, zero=1), h100s(1))}
    assert {"context_method: ring", "context_method: all_to_all", "context_order: contiguous"} <= changes
    assert {"context: 8, tensor: 1", "tensor: 4, context: 2", "zero: 0", "zero: 3"} <= changes
    fit = fits(long_job(tensor=8, recompute="full", offload_layers=32), a100s(1))
    assert fit.fits or fit.change is not None
