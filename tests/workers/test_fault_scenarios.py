"""Jobs in drawn layouts, schedules and precisions recover from drawn cuts, kills, drains, pauses and changes of layout,
also during a recovery: their bits are those of undisturbed jobs, and as few steps are redone as promised."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fault_scenarios import (
    EXPERT_FACTORS,
    FACTORS,
    FEW,
    MAX_RANKS,
    STEPS,
    Generation,
    PlannedFault,
    Scenario,
    covering_scenarios,
    drawn_scenario,
    scenario_of,
    world_size,
)
from scenario_programs import Record, run_scenario

from manta.workers.config import ParallelConfig

DRAWN = 150


@pytest.fixture(scope="module")
def clean() -> dict[str, list[Record]]:
    """Results of undisturbed jobs."""
    return {}


def run(ranks: Any, scenario: Scenario, folder: Path) -> list[Record]:
    """By rank of the last generation."""
    folder.mkdir(parents=True)
    by_process = ranks.run(ParallelConfig(data=scenario.processes), run_scenario, scenario, str(folder), ranks.port)
    return sorted(by_process, key=lambda each: MAX_RANKS if each.rank is None else each.rank)


def in_which_layout(record: Record) -> list[tuple[dict[str, Any], int]]:
    """The layouts in which the steps that count were computed, each with the last of these steps."""
    by_step: list[dict[str, Any]] = []
    for parallel, _, step in record.resumed:
        by_step = [*by_step[:step], *[parallel] * (STEPS - step)]
    groups = [(parallel, len(list(steps))) for parallel, steps in itertools.groupby(by_step)]
    ends = itertools.accumulate(count for _, count in groups)
    last = record.resumed[-1][0]
    changes = [(parallel, end) for (parallel, _), end in zip(groups, ends, strict=True)]
    return changes if changes[-1][0] == last else [*changes, (last, STEPS)]


def undisturbed(scenario: Scenario, record: Record) -> Scenario:
    """The scenario whose bits the job must have: the same layouts for the same steps; with elastic sums, in which the
    number of replicas changes no bit, only the last number of them."""
    changes = in_which_layout(record)
    if scenario.document["train"]["deterministic"] == "elastic":
        data = changes[-1][0]["data"]
        replaced = [({**parallel, "data": data}, end) for parallel, end in changes]
        if all(world_size(parallel) <= MAX_RANKS for parallel, _ in replaced):
            changes = replaced
    merged = [each for each, after in itertools.pairwise([*changes, ({}, 0)]) if each[0] != after[0]]
    generations = [Generation(parallel, until=end) for parallel, end in merged[:-1]]
    generations.append(Generation(merged[-1][0]))
    return replace(scenario, generations=tuple(generations), saves=False, has_snapshots=True)


def numbers(by_rank: list[Record]) -> dict[int, list[Any]]:
    """Of each step, by the generation that committed it last."""
    newest: dict[int, tuple[int, list[Any]]] = {}
    for record in by_rank:
        for step, row in record.rows.items():
            newest[step] = max(newest.get(step, (0, [])), row, key=lambda each: each[0])
    return {step: row[1] for step, row in sorted(newest.items())}


def check(ranks: Any, scenario: Scenario, folder: Path, clean: dict[str, list[Record]]) -> list[Record]:
    """Run a scenario, and compare it with an undisturbed run."""
    by_rank = run(ranks, scenario, folder / "faults")
    expected = undisturbed(scenario, by_rank[0])
    key = repr(expected)
    if key not in clean:
        clean[key] = run(ranks, expected, folder / "clean")
    about = f"{scenario}\n{by_rank[0].resumed} {[each.faults for each in by_rank]} {[each.rows for each in by_rank]}"
    assert sorted(numbers(by_rank)) == list(range(1, STEPS + 1)), about
    assert numbers(by_rank) == numbers(clean[key]), about
    assert [each.state for each in by_rank if each.state] == [each.state for each in clean[key] if each.state], about
    assert all(redone <= most for redone, most in by_rank[0].redone), f"{by_rank[0].redone}: {about}"
    return by_rank


def test_short_list_of_fault_scenarios_covers_every_value_of_every_factor():
    rows = [drawn[0] for seed in FEW if (drawn := drawn_scenario(seed, "corpus.txt")) is not None]
    met = {(name, row[name]) for row in rows for name in row}
    assert len(rows) == len(FEW) and met == {(name, value) for name, values in FACTORS.items() for value in values}


@pytest.mark.parametrize("seed", FEW)
def test_fault_scenarios_of_the_short_list_change_no_bit(ranks, corpus, tmp_path, clean, seed):
    _, scenario = drawn_scenario(seed, corpus)
    by_rank = check(ranks, scenario, tmp_path, clean)
    assert any(each.faults for each in by_rank)


@pytest.mark.soak
def test_fault_scenarios_with_every_pair_of_factors_keep_the_same_bits(ranks, corpus, tmp_path, clean):
    for number, (_, scenario) in enumerate(covering_scenarios(corpus)):
        check(ranks, scenario, tmp_path / str(number), clean)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(DRAWN))
def test_drawn_fault_scenarios_change_no_bit(ranks, corpus, tmp_path, clean, number):
    drawn = drawn_scenario(str(number), corpus)
    if drawn is not None:
        check(ranks, drawn[1], tmp_path, clean)


FEW_WITH_EXPERTS = ("118584", "220104")
"""One over process groups with fewer ranks from its second generation on, one over links that rolls back with experts
that each one rank has."""


@pytest.mark.parametrize("seed", FEW_WITH_EXPERTS)
def test_faults_in_jobs_with_spread_experts_change_no_bit(ranks, corpus, tmp_path, clean, seed):
    drawn = drawn_scenario(seed, corpus, EXPERT_FACTORS)
    assert drawn is not None
    check(ranks, drawn[1], tmp_path, clean)


@pytest.mark.soak
def test_faults_with_spread_experts_and_every_pair_of_factors_keep_the_bits(ranks, corpus, tmp_path, clean):
    for number, (_, scenario) in enumerate(covering_scenarios(corpus, EXPERT_FACTORS)):
        check(ranks, scenario, tmp_path / str(number), clean)


PLACES = [("forward", "outward"), ("forward", "back"), ("backward", "outward"), ("backward", "back")]
PLACES += [("recompute", "outward"), ("forward", "finished"), ("backward", "weights_back")]


@pytest.mark.parametrize(
    ("experts", "backend"),
    [
        ("all_gather", "links"),
        ("all_to_all", "links"),
        pytest.param("all_gather", "process_groups", marks=pytest.mark.soak),
        pytest.param("all_to_all", "process_groups", marks=pytest.mark.soak),
    ],
)
def test_cuts_and_kills_in_each_part_of_an_exchange_change_no_bit(ranks, corpus, tmp_path, clean, experts, backend):
    """With ZeRO 0 each of two replicas alone holds its experts, so that nobody else's memory brings them back."""
    row = {name: values[0] for name, values in EXPERT_FACTORS.items()}
    row |= {"experts": experts, "backend": backend, "layout": (1, 1, 2), "zero": 0, "recompute": "full", "saves": False}
    scenario = scenario_of(row | {"schedule": "1f1b"}, "places", corpus)
    for number, place in enumerate(PLACES):
        kind, rank = ("cut", "kill")[number % 2], number // 2 % 2
        fault = PlannedFault(kind, rank, 1 + number % 3, 1, during=place)
        parallel = scenario.generations[0].parallel
        struck = replace(scenario, generations=(Generation(parallel, (fault,)), Generation(parallel)))
        by_rank = check(ranks, struck, tmp_path / str(number), clean)
        assert [each for record in by_rank for each in record.faults] == [(1, kind)], place
        assert by_rank[0].resumed[1][1] in ("memory", "snapshot"), by_rank[0].resumed
