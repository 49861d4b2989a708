"""What experts add to a step: where their groups are, how many rows they get and send, and which sizes are best."""

from __future__ import annotations

from itertools import combinations

import pytest

from manta.service.planner.answer import to_json
from manta.service.planner.candidates import candidates, expert_sizes
from manta.service.planner.communication import exchange_seconds, gather_seconds, groups_of
from manta.service.planner.explain import explain, what_ifs
from manta.service.planner.hardware import Cluster, machine_of
from manta.service.planner.memory import fits, usable_bytes, worst_rank
from manta.service.planner.request import PlanRequest
from manta.service.planner.search import plan_of, search
from manta.service.planner.software import MANTA
from manta.service.planner.step_time import StagePasses, StepModel
from manta.workers.accounting.activation_bytes import planned_rows, ranks_per_token, worst_rows
from manta.workers.comm.grid import RankGrid
from manta.workers.config import JobSpec, MoeConfig, ParallelConfig
from manta.workers.spec.rules import find_problems
from tests.service.support.planned import a100s, job

MOE = {"experts": 8, "per_token": 2, "ffn_hidden_size": 1024}


def with_experts(layers: int = 8, hidden: int = 1024, moe: dict | None = None, **sections) -> JobSpec:
    model = {"family": "llama", "kv_heads": 4, "ffn_hidden_size": 4096, "moe": MOE | (moe or {})}
    return job(layers, hidden, 16, model=model | sections.pop("model", {}), **sections)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "data", "context", "expert", "whole"),
    [
        *((1, 1, 16, 1, 4, None), (2, 1, 8, 1, 8, None), (1, 4, 8, 1, 4, None), (2, 2, 4, 2, 4, None)),
        *((1, 1, 4, 4, 2, None), (1, 1, 6, 1, 3, None), (2, 2, 4, 2, 8, 1), (4, 1, 4, 1, 4, 1)),
    ],
)
def test_expert_groups_are_on_the_nodes_that_the_grid_puts_them_on(tensor, pipeline, data, context, expert, whole):
    sizes = {"tensor": tensor, "pipeline": pipeline, "data": data, "context": context, "expert": expert}
    sizes["expert_tensor"] = whole
    layout = ParallelConfig(**sizes)
    groups, grid = groups_of(layout, a100s(4), MANTA), RankGrid(layout)
    for axis, group in (("expert", groups.expert), ("expert_holders", groups.expert_holders)):
        ranks = grid.group(axis, 0)
        assert (group.size, group.nodes) == (len(ranks), len({rank // 8 for rank in ranks}))


def test_ranks_of_a_token_are_those_counted_choice_by_choice():
    choices = list(combinations(range(8), 3))
    for size in (1, 2, 4, 8):
        ranks = [len({expert * size // 8 for expert in choice}) for choice in choices]
        moe = MoeConfig(experts=8, per_token=3, ffn_hidden_size=8)
        assert ranks_per_token(moe, size) == pytest.approx(sum(ranks) / len(ranks))


def test_planned_rows_are_exact_on_one_rank_and_have_a_margin_in_a_group():
    alone, spread = with_experts(), with_experts(data=4, expert=4)
    tokens = 512
    assert planned_rows(alone) == (2 * tokens, 1.25 * 2 * tokens / 8, 0)
    assert planned_rows(spread)[::2] == (1.25 * 2 * tokens, round(1.25 * tokens * ranks_per_token(spread.model.moe, 4)))
    assert worst_rows(spread) == (4 * tokens * 2, 4 * tokens, 4 * tokens)


def test_exchanges_take_the_bytes_of_all_tokens_or_of_those_that_are_sent():
    cluster = a100s(2)
    layout = ParallelConfig(data=16, expert=8)
    group, links = groups_of(layout, cluster, MANTA).expert, 300e9 * cluster.machine.constants.inside
    size = 1e9
    assert gather_seconds(group, cluster, 8 * size) == pytest.approx(7 * size / links, rel=0.01)
    assert exchange_seconds(group, cluster, size) == pytest.approx(7 / 8 * size / links, rel=0.01)
    across = groups_of(ParallelConfig(data=16, expert=16), cluster, MANTA).expert
    adapter = 25e9 * cluster.machine.constants.message
    assert exchange_seconds(across, cluster, size) == pytest.approx(size / 2 / adapter, rel=0.01)


def test_stages_of_dense_layers_and_of_experts_take_the_times_of_their_layers():
    mixed = with_experts(6, moe={"first_dense": 2}, pipeline=3)
    passes = StepModel(mixed, a100s()).passes
    dense, experts, both = (passes.times(range(*ends)).seconds for ends in ((0, 2), (2, 4), (1, 3)))
    assert both == pytest.approx((dense + experts) / 2)
    assert passes.times_of(6).seconds == pytest.approx(dense + 2 * experts)
    alone = StagePasses(StepModel(with_experts(6, pipeline=3), a100s()).layer)
    assert experts == pytest.approx(alone.times(range(2)).seconds)
    assert dense != pytest.approx(experts)


def test_gradients_and_state_of_experts_are_shared_by_the_ranks_that_hold_them():
    """A rank of four has a quarter of the experts, which a fourth as many ranks reduce."""
    alone, spread = (StepModel(with_experts(data=8, expert=size), a100s()) for size in (None, 4))
    dense = alone.parameters - 8 * 8 * 3 * 1024 * 1024
    assert spread.parameters - dense == (alone.parameters - dense) / 4
    assert spread.gradient_seconds(0.0) < alone.gradient_seconds(0.0)
    assert spread.optimizer_seconds() < alone.optimizer_seconds()


def test_search_finds_the_fastest_of_all_layouts_with_experts():
    """Those under ZeRO 1, all of which are tried."""
    auto, cluster = with_experts(4, 512, moe={"first_dense": 1}, train={"global_batch_size": 8}), a100s(1, 4)
    auto = auto.model_copy(update={"parallel": "auto"})
    known = {}
    for candidate in candidates(auto, cluster):
        spec = candidate.spec(auto)
        if not find_problems(spec) and worst_rank(spec, cluster.machine).total <= usable_bytes(cluster):
            known[candidate] = StepModel(spec, cluster).time().seconds
    best = search(auto, cluster, MANTA, 1).plans[0]
    assert best.time.seconds <= min(known.values()) * (1 + 1e-9)
    assert {candidate.expert for candidate in known} == {1, 2, 4}
    assert expert_sizes(auto, 12) == [1, 2, 4] and expert_sizes(job(), 12) == [1]


def test_experts_stay_whole_on_tensor_ranks_where_their_parts_would_be_narrow():
    """Where they are wide, as many multiplications take as long either way, and nothing is gained."""

    def seconds(inner: int, **layout: object) -> float:
        spec = with_experts(moe={"experts": 64, "ffn_hidden_size": inner}, data=2, tensor=8, **layout)
        assert find_problems(spec) == []
        return StepModel(spec, a100s(2)).time().seconds

    narrow, wide = ([seconds(inner, expert=2), seconds(inner, expert=16, expert_tensor=1)] for inner in (768, 16384))
    assert narrow[1] < narrow[0] and wide[1] / wide[0] > narrow[1] / narrow[0]
    auto = with_experts(moe={"experts": 64, "ffn_hidden_size": 768}).model_copy(update={"parallel": "auto"})
    assert any(candidate.spec(auto).layout.expert_tensor for candidate in candidates(auto, a100s(1)))


def test_experts_are_spread_where_a_job_does_not_fit_otherwise():
    large = with_experts(24, 4096, moe={"ffn_hidden_size": 14336}, data=8, model={"sequence_length": 2048})
    cluster = Cluster(machine_of("h200-141gb"), 1, 8)
    assert fits(large, cluster).change == "parallel.expert: 4"
    auto = large.model_copy(update={"parallel": "auto"})
    assert search(auto, cluster, MANTA, 1).plans


def test_plan_with_spread_experts_is_explained_with_what_they_send():
    spread, cluster = with_experts(data=8, expert=4), a100s()
    plan = plan_of(spread, cluster)
    explanation = explain(plan, cluster)
    shares = {share.name: share for share in explanation.shares}
    assert sum(share.seconds for share in explanation.shares) == pytest.approx(plan.time.seconds)
    assert "the 4 ranks of their experts" in shares["expert"].what and "all_to_all" in shares["expert"].what
    changes = {each.change for each in what_ifs(spread, cluster)}
    assert {"expert: 2", "expert: 8", "expert_dispatch: all_gather"} <= changes
    request = PlanRequest(spread, cluster)
    document = to_json(request, request.answer())
    assert document["plans"][0]["worst_memory_bytes"] > document["plans"][0]["memory_bytes"]["total"]
    alone = PlanRequest(with_experts(data=8), cluster)
    assert to_json(alone, alone.answer())["plans"][0]["worst_memory_bytes"] is None
