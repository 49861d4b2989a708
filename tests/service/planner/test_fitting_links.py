"""What lies between GPUs comes out of rows that were made with it, and of noisy ones nearly."""

from __future__ import annotations

import random
from dataclasses import asdict, replace

import pytest

from manta.service.planner.communication import Group, gather_seconds, message_seconds, reduce_seconds
from manta.service.planner.fitting import exchange_seconds, fit_links
from manta.service.planner.hardware import MACHINES, Cluster, Links, linked
from manta.workers.calibration.collectives import GPU_SIZES
from manta.workers.calibration.measurements import CollectiveTime

KINDS = ("all_gather", "reduce_scatter", "all_reduce", "message")


def rows(links, ranks=(2, 8), machine="h100-80gb", noise=lambda: 1.0):
    """As such links would give them."""
    known = linked(MACHINES[machine], links)
    made = [CollectiveTime(kind, count, size, 1.0) for count in ranks for size in GPU_SIZES for kind in KINDS]
    return [replace(row, seconds=exchange_seconds(row, known) * noise()) for row in made]


@pytest.mark.parametrize("links", [Links(3.6e11, 3e-6), Links(2e10, 2e-5), Links(8e11, 8e-7)])
@pytest.mark.parametrize("ranks", [(2,), (2, 3), (2, 8)])
def test_fit_of_links_recovers_the_constants_their_rows_were_made_with(links, ranks):
    fitted = fit_links(rows(links, ranks), MACHINES["h100-80gb"])
    assert asdict(fitted) == pytest.approx(asdict(links), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_fit_of_links_recovers_drawn_constants_from_noisy_rows(seed):
    draw = random.Random(seed)
    links = Links(10 ** draw.uniform(9.7, 12), 10 ** draw.uniform(-6.3, -4.3))
    name = draw.choice([*MACHINES])
    fitted = fit_links(rows(links, machine=name, noise=lambda: draw.lognormvariate(0.0, 0.05)), MACHINES[name])
    assert fitted.bandwidth == pytest.approx(links.bandwidth, rel=0.1)
    assert fitted.hop_seconds == pytest.approx(links.hop_seconds, rel=0.1)
    assert 0.01 < fitted.error < 0.08


def test_fit_of_links_is_robust_to_one_delayed_row():
    made = rows(Links(3.6e11, 3e-6))
    made[5] = replace(made[5], seconds=20 * made[5].seconds)
    fitted = fit_links(made, MACHINES["h100-80gb"])
    assert (fitted.bandwidth, fitted.hop_seconds) == (pytest.approx(3.6e11, rel=0.1), pytest.approx(3e-6, rel=0.1))


def test_fit_of_unlike_links_follows_the_larger_groups_and_reports_a_large_error():
    """Pairs with a bridge, and one switch for all: the larger groups are told as they are."""
    pairs = [row for row in rows(Links(1e11, 3e-6), (2,)) if row.kind != "message"]
    fitted = fit_links([*pairs, *rows(Links(1e10, 3e-6), (8,))], MACHINES["l40s-48gb"])
    assert fitted.bandwidth == pytest.approx(1e10, rel=0.1) and fitted.hop_seconds == pytest.approx(3e-6, rel=0.1)
    assert fitted.error > 0.3


def test_fit_of_links_without_rows_is_refused():
    with pytest.raises(ValueError, match="too few rows"):
        fit_links([], MACHINES["h100-80gb"])


def test_plan_uses_the_fitted_link_in_a_node_and_the_lower_bandwidth_across_nodes():
    known, size = linked(MACHINES["h100-80gb"], Links(1e11, 1e-3)), 1e9
    one, two = Cluster(known, 1, 8), Cluster(known, 2, 8)
    assert gather_seconds(Group(4, 4), one, size) == pytest.approx(0.75 * size / 1e11 + 4e-3)
    assert reduce_seconds(Group(4, 4), one, size) == pytest.approx(1.5 * size / 1e11 + 6e-3)
    assert message_seconds(one, size, True) == pytest.approx(size / 1e11 + 1e-3)
    assert message_seconds(two, size, False) == message_seconds(Cluster(MACHINES["h100-80gb"], 2, 8), size, False)
    assert gather_seconds(Group(16, 8), two, size) == pytest.approx(15 / 16 * size / 1e11 + 14e-3, rel=0.01)
