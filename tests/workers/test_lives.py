"""Jobs in drawn layouts, schedules and precisions live through drawn cuts, deaths, drains, pauses and changes of
layout, and each again while they recover: bits, redone steps and processes are as promised."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from life_programs import Lived, live
from lives import FACTORS, FEW, MOST_RANKS, STEPS, Generation, Life, covering_lives, drawn_life, world_size

from workers.config import ParallelConfig

DRAWN = 150


@pytest.fixture(scope="module")
def clean() -> dict[str, list[Lived]]:
    """What undisturbed jobs came to."""
    return {}


def run(ranks: Any, life: Life, folder: Path) -> list[Lived]:
    """By rank of the last generation."""
    folder.mkdir(parents=True)
    by_process = ranks.run(ParallelConfig(data=life.processes), live, life, str(folder), ranks.port)
    return sorted(by_process, key=lambda each: MOST_RANKS if each.rank is None else each.rank)


def in_which_layout(lived: Lived) -> list[tuple[dict[str, Any], int]]:
    """The layouts in which the steps that count were computed, each with the last of these steps."""
    by_step: list[dict[str, Any]] = []
    for parallel, _, step in lived.resumed:
        by_step = [*by_step[:step], *[parallel] * (STEPS - step)]
    groups = [(parallel, len(list(steps))) for parallel, steps in itertools.groupby(by_step)]
    ends = itertools.accumulate(count for _, count in groups)
    last = lived.resumed[-1][0]
    changes = [(parallel, end) for (parallel, _), end in zip(groups, ends, strict=True)]
    return changes if changes[-1][0] == last else [*changes, (last, STEPS)]


def undisturbed(life: Life, lived: Lived) -> Life:
    """The life whose bits the job must have: the same layouts for the same steps; with elastic sums, in which the
    number of replicas changes no bit, only the last number of them."""
    changes = in_which_layout(lived)
    if life.document["train"]["deterministic"] == "elastic":
        data = changes[-1][0]["data"]
        replaced = [({**parallel, "data": data}, end) for parallel, end in changes]
        if all(world_size(parallel) <= MOST_RANKS for parallel, _ in replaced):
            changes = replaced
    merged = [each for each, after in itertools.pairwise([*changes, ({}, 0)]) if each[0] != after[0]]
    generations = [Generation(parallel, until=end) for parallel, end in merged[:-1]]
    generations.append(Generation(merged[-1][0]))
    return replace(life, generations=tuple(generations), saves=False, has_snapshots=True)


def numbers(by_rank: list[Lived]) -> dict[int, list[Any]]:
    """Of each step, by the generation that committed it last."""
    newest: dict[int, tuple[int, list[Any]]] = {}
    for lived in by_rank:
        for step, row in lived.rows.items():
            newest[step] = max(newest.get(step, (0, [])), row, key=lambda each: each[0])
    return {step: row[1] for step, row in sorted(newest.items())}


def check(ranks: Any, life: Life, folder: Path, clean: dict[str, list[Lived]]) -> list[Lived]:
    """Run a life and what it must come to."""
    by_rank = run(ranks, life, folder / "struck")
    expected = undisturbed(life, by_rank[0])
    key = repr(expected)
    if key not in clean:
        clean[key] = run(ranks, expected, folder / "clean")
    about = f"{life}\n{by_rank[0].resumed} {[each.struck for each in by_rank]} {[each.rows for each in by_rank]}"
    assert sorted(numbers(by_rank)) == list(range(1, STEPS + 1)), about
    assert numbers(by_rank) == numbers(clean[key]), about
    assert [each.state for each in by_rank if each.state] == [each.state for each in clean[key] if each.state], about
    assert all(redone <= most for redone, most in by_rank[0].redone), f"{by_rank[0].redone}: {about}"
    return by_rank


def test_few_lives_have_every_value_of_every_factor():
    rows = [drawn[0] for seed in FEW if (drawn := drawn_life(seed, "corpus.txt")) is not None]
    met = {(name, row[name]) for row in rows for name in row}
    assert len(rows) == len(FEW) and met == {(name, value) for name, values in FACTORS.items() for value in values}


@pytest.mark.parametrize("seed", FEW)
def test_what_befalls_a_job_changes_no_bit(ranks, corpus, tmp_path, clean, seed):
    _, life = drawn_life(seed, corpus)
    by_rank = check(ranks, life, tmp_path, clean)
    assert any(each.struck for each in by_rank)


@pytest.mark.soak
def test_every_pair_of_troubles_changes_no_bit(ranks, corpus, tmp_path, clean):
    for number, (_, life) in enumerate(covering_lives(corpus)):
        check(ranks, life, tmp_path / str(number), clean)


@pytest.mark.soak
@pytest.mark.parametrize("number", range(DRAWN))
def test_drawn_lives(ranks, corpus, tmp_path, clean, number):
    drawn = drawn_life(str(number), corpus)
    if drawn is not None:
        check(ranks, drawn[1], tmp_path, clean)
