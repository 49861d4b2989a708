"""Long runs: every second is accounted for, failures are as many as they should be, and formulas agree."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from manta.service.planner.long_run import (
    LLAMA_3,
    MANTA,
    RESTARTS,
    NeverFinishes,
    Reliability,
    Run,
    _Clock,
    advise,
    best_spares,
    daly,
    seconds_between_restores,
    simulate,
)

DAY = 86400.0
LLAMA = Run(
    gpus=16384, gpus_per_node=8, replicas=64, step_seconds=5.0, steps=round(54 * DAY / 5), checkpoint_seconds=1800.0,
    spares=16,
)  # fmt: skip
NEVER = Reliability(1e15, 1e15, 1e15)


@pytest.mark.parametrize("recovery", [MANTA, RESTARTS])
@pytest.mark.parametrize("fewest", [1, LLAMA.replicas])
@pytest.mark.parametrize("spares", [4, 40])
def test_simulated_run_accounts_for_every_second(recovery, fewest, spares):
    outcome = simulate(replace(LLAMA, fewest=fewest, spares=spares, beside_seconds=0.1), recovery)
    parts = (outcome.redone, outcome.recovering, outcome.checkpoints, outcome.waiting, outcome.slower)
    parts += (outcome.beside_steps,)
    assert outcome.beside_steps == pytest.approx(0.1 * LLAMA.steps)
    assert outcome.training + sum(parts) == pytest.approx(outcome.seconds, rel=0.01)
    assert all(part >= 0 for part in parts)
    assert fewest > 1 or outcome.waiting == 0
    assert fewest == 1 or outcome.slower == 0


def test_run_without_failures_takes_its_steps_and_checkpoints():
    outcome = simulate(LLAMA, RESTARTS, NEVER)
    assert (outcome.failures, outcome.redone, outcome.recovering) == (0, 0, 0)
    assert outcome.checkpoints == pytest.approx(LLAMA.seconds / 1800 * 10)
    assert outcome.seconds == pytest.approx(LLAMA.seconds + outcome.checkpoints)


def test_a_run_uses_whole_nodes_and_its_hours_include_work_outside_steps_and_spares():
    run = Run(17, 8, 1, step_seconds=2.0, steps=1800, checkpoint_seconds=1e9, spares=2, beside_seconds=1.0)
    outcome = simulate(run, MANTA, NEVER)
    assert (run.nodes, run.seconds, outcome.beside_steps) == (3, 5400.0, pytest.approx(1800.0))
    assert outcome.gpu_hours == pytest.approx(5 * 8 * 1.5)


def test_simulated_part_of_a_very_long_run_stands_for_the_whole():
    decade = simulate(replace(LLAMA, steps=67 * LLAMA.steps), MANTA)
    longest = simulate(replace(LLAMA, steps=2**53), MANTA)
    assert longest.goodput == pytest.approx(decade.goodput, rel=0.01)
    assert longest.seconds == pytest.approx(2**53 * LLAMA.step_seconds / longest.goodput)


def test_run_whose_steps_exceed_the_time_between_failures_never_ends():
    run = Run(800_000, 8, 1000, step_seconds=1000.0, steps=10_000, checkpoint_seconds=1000.0)
    with pytest.raises(NeverFinishes, match="one of 800000 GPUs fails every 228 s, and a step takes 1000 s"):
        advise(run)


def test_simulated_llama_3_run_has_the_published_failures_and_goodput():
    """arXiv:2407.21783: 419 unexpected interruptions in 54 days, more than 90% of the time effective."""
    outcome = simulate(LLAMA, MANTA, seeds=20)
    of_all = outcome.seconds / 3600 / LLAMA_3.hours_of_all
    assert (outcome.failures - of_all) / (outcome.seconds / DAY) * 54 == pytest.approx(419, rel=0.03)
    often = daly(RESTARTS.checkpoint, seconds_between_restores(LLAMA, RESTARTS))
    assert 0.90 < simulate(replace(LLAMA, checkpoint_seconds=often), RESTARTS).goodput < 0.96


def test_state_in_memory_saves_most_of_the_cost_of_failures():
    kept, restarted = simulate(LLAMA, MANTA), simulate(LLAMA, RESTARTS)
    assert kept.redone < 0.2 * restarted.redone and kept.recovering < 0.2 * restarted.recovering
    assert kept.goodput > 0.98 > restarted.goodput


def young(checkpoint, between):
    """Seconds between two checkpoints that cost `checkpoint` seconds, where failures come every `between`: sqrt(2 C M)
    (Young, CACM 17, 1974)."""
    return math.sqrt(2 * checkpoint * between)


@pytest.mark.parametrize("cost", [10.0, 60.0])
def test_checkpoint_interval_of_young_and_daly_is_optimal_in_the_simulation(cost):
    recovery = replace(RESTARTS, checkpoint=cost)
    between = seconds_between_restores(LLAMA, recovery)
    best = young(cost, between)
    assert daly(cost, between) == pytest.approx(best, rel=0.1)
    run = replace(LLAMA, spares=60)
    at_best = simulate(replace(run, checkpoint_seconds=best), recovery).seconds
    for factor in (0.25, 4.0):
        assert simulate(replace(run, checkpoint_seconds=factor * best), recovery).seconds > at_best


def test_checkpoint_interval_of_daly_follows_his_equation_37():
    first, second = math.sqrt(10.0 / 2000.0) / 3, 10.0 / 2000.0 / 9
    assert daly(10.0, 1000.0) == pytest.approx(young(10.0, 1000.0) * (1 + first + second) - 10.0)


def test_checkpoint_interval_of_daly_is_capped_by_the_time_between_failures():
    assert daly(100.0, 40.0) == 40.0


@pytest.mark.parametrize("gpus", [16384, 131072])
def test_simulated_run_with_restarts_takes_what_dalys_formula_gives(gpus):
    """T = M e^(R/M) (e^((tau + delta)/M) - 1) Ts/tau: failures also come during recoveries and checkpoints (Daly, FGCS
    22, 2006)."""
    run = replace(LLAMA, gpus=gpus, spares=5000)
    between = seconds_between_restores(run, RESTARTS)
    every, cost, restart = daly(RESTARTS.checkpoint, between), RESTARTS.checkpoint, RESTARTS.all
    whole = between * math.exp(restart / between) * math.expm1((every + cost) / between) * run.seconds / every
    assert simulate(replace(run, checkpoint_seconds=every), RESTARTS).seconds == pytest.approx(whole, rel=0.02)


def test_simulated_state_is_lost_if_both_nodes_fail_before_a_new_copy():
    run = Run(
        gpus=16, gpus_per_node=8, replicas=2, step_seconds=1.0, steps=200_000, checkpoint_seconds=1000.0, spares=900
    )
    often, kept = Reliability(1e15, 16 / 6, 1e15), replace(MANTA, lost_steps=0.0)  # a node every ten minutes
    assert simulate(run, kept, often).redone > 0
    assert simulate(run, replace(kept, node=0.0), often).redone == 0


def test_simulated_nodes_in_repair_do_not_fail_again():
    run = Run(gpus=8, gpus_per_node=8, replicas=1, step_seconds=1.0, steps=10_000, checkpoint_seconds=1000.0)
    often = Reliability(1e15, 8.0, 1e15)
    outcome = simulate(replace(run, repair_hours=10.0), replace(MANTA, lost_steps=0.0), often)
    assert outcome.failures * 36_000 == pytest.approx(outcome.waiting + outcome.recovering, rel=0.01)


def test_states_in_memory_need_checkpoints_for_failures_of_everything_alone():
    hours = seconds_between_restores(LLAMA, MANTA) / 3600
    assert hours == pytest.approx(LLAMA_3.hours_of_all, rel=0.05)
    assert seconds_between_restores(LLAMA, RESTARTS) / 3600 == pytest.approx(54 * 24 / 419, rel=0.02)


def test_spare_nodes_are_advised_only_if_nodes_are_lost():
    small = Run(
        gpus=64, gpus_per_node=8, replicas=2, step_seconds=1.0, steps=round(30 * DAY), checkpoint_seconds=1800.0
    )
    assert best_spares(small, MANTA, NEVER) == 0
    often = Reliability(gpu_hours_a_node=2000.0)
    assert best_spares(replace(small, fewest=2), MANTA, often) >= 1
    spared = simulate(replace(small, fewest=2, spares=2), MANTA, often)
    assert spared.waiting < simulate(replace(small, fewest=2), MANTA, often).waiting


def test_replicas_shrink_by_the_nodes_that_are_missing():
    run = Run(gpus=64, gpus_per_node=8, replicas=4, step_seconds=1.0, steps=100_000, checkpoint_seconds=1000.0)
    lost = Reliability(1e15, 64 * 10.0, 1e15)
    outcome = simulate(
        replace(run, repair_hours=1e6), replace(MANTA, node=0.0, checkpoint=100.0, lost_steps=0.0), lost, 1
    )
    assert outcome.failures >= 1 and outcome.slower > 0
    assert outcome.checkpoints == pytest.approx(0.1 * (run.seconds + outcome.slower)), "by time, not by steps"
    assert outcome.seconds == pytest.approx(run.seconds + outcome.slower + outcome.checkpoints)


SMALL = Run(16, 8, 2, step_seconds=1.0, steps=10_000, checkpoint_seconds=0.1, spares=2)


def test_failure_during_a_recovery_repeats_no_steps_and_does_not_shorten_it():
    clock = _Clock(SMALL, MANTA, Reliability(1e15, 1.0, 1e15), random.Random(0))
    clock.done = 100.0
    clock.fail()
    clock.reliability = Reliability(1.0, 1e15, 1e15)
    clock.fail()
    assert (clock.failures, clock.redone, clock.ready) == (2, MANTA.lost_steps, MANTA.node)


def test_simulated_run_at_a_checkpoint_repeats_nothing_despite_rounding():
    clock = _Clock(SMALL, RESTARTS, NEVER, random.Random(0))
    clock.done = 0.7
    assert math.floor(clock.done / SMALL.checkpoint_seconds) == 6
    clock.fail()
    assert (clock.failures, clock.redone) == (1, 0.0)


def test_state_in_memory_is_lost_if_a_second_node_fails_before_it_is_copied():
    """A node every ten minutes, of two, and copies take one."""
    assert seconds_between_restores(SMALL, MANTA, Reliability(1e15, 16 / 6, 1e15)) == pytest.approx(6000)


def test_run_that_cannot_shrink_is_advised_more_spares_than_are_in_repair():
    run = replace(LLAMA, fewest=LLAMA.replicas, steps=LLAMA.steps // 9)
    advice = advise(run)
    assert advice.spares > 8 > run.gpus / LLAMA_3.gpu_hours_a_node * run.repair_hours
    often = daly(RESTARTS.checkpoint, seconds_between_restores(run, RESTARTS))
    assert advice.restarted == simulate(replace(run, checkpoint_seconds=often, spares=advice.spares), RESTARTS)
