"""Who holds whose backup, and what memory still reaches when a node is gone."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from manta.service.backups.partners import Reachable, partners, reachable

nodes = st.lists(st.sampled_from("abcd"), min_size=1, max_size=24)
steps = st.sets(st.integers(0, 5), max_size=2)


@given(nodes)
def test_backup_partner_of_every_rank_is_on_another_node_if_there_is_one(node_of_rank):
    partner_of = partners(node_of_rank)
    if len(set(node_of_rank)) == 1:
        assert partner_of == {}
        return
    assert partner_of.keys() == set(range(len(node_of_rank)))
    assert all(node_of_rank[rank] != node_of_rank[partner] for rank, partner in partner_of.items())


@given(nodes)
def test_backups_are_spread_evenly_over_the_ranks_of_other_nodes(node_of_rank):
    partner_of = partners(node_of_rank)
    if partner_of:
        largest = max(Counter(node_of_rank).values())
        others = len(node_of_rank) - largest
        assert max(Counter(partner_of.values()).values()) == max(1, -(-largest // others))


@given(nodes)
def test_backup_partners_depend_on_the_nodes_of_ranks_only(node_of_rank):
    assert partners(node_of_rank) == partners(tuple(node_of_rank))


@given(st.lists(st.tuples(steps, steps), min_size=1, max_size=5))
def test_memory_reaches_the_newest_step_that_every_rank_has_or_can_fetch(held):
    own, backups = [mine for mine, _ in held], {rank: kept for rank, (_, kept) in enumerate(held)}
    start = reachable(own, backups)
    common = set.intersection(*(mine | kept for mine, kept in held))
    assert (start.step if start else None) == max(common, default=None)
    if start:
        assert set(start.fetched) == {rank for rank, mine in enumerate(own) if start.step not in mine}
        assert all(start.step in backups[rank] for rank in start.fetched)


def test_backups_of_a_lost_node_set_the_step_to_resume_from():
    assert reachable([[8, 9], [8, 9], []], {2: [7, 8]}) == Reachable(8, (2,))
    assert reachable([[8, 9], [8, 9], []], {2: [6, 7]}) is None
    assert reachable([[8, 9], [8, 9], []], {}) is None
    assert reachable([], {}) is None
