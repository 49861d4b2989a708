"""Ranks that ought to hold the same bits are compared, and the odd one out is named."""

import pytest
import torch
from engine_specs import axes, document
from hypothesis import given
from hypothesis import strategies as st
from made_tensors import MadeTensors
from number_programs import flip, train

from manta.workers.config import ParallelConfig
from manta.workers.parallel.data import replica_check
from manta.workers.parallel.data.replica_check import (
    BLOCK_WORDS,
    SOUND,
    UNKNOWN,
    UNSOUND,
    hash_of,
    multipliers,
    outliers,
    same_bits,
)
from manta.workers.protocol.messages import Resume

WEIGHTS = multipliers(torch.device("cpu"))
STEP = 3


def whole(values):
    return int(hash_of([values], WEIGHTS))


@given(st.integers(0, 1023), st.integers(0, 31))
def test_any_flipped_bit_changes_the_replica_hash(place, bit):
    values = torch.arange(1024, dtype=torch.float32)
    before = whole(values)
    values.view(torch.int32)[place] ^= torch.tensor(1 << bit, dtype=torch.int64).to(torch.int32)
    assert whole(values) != before


def test_replica_hash_depends_on_order_within_and_across_blocks():
    values = torch.randint(-(2**62), 2**62, (2 * BLOCK_WORDS + 64,)).view(torch.float64)
    words = values.view(torch.int64)
    for first, second in ((0, 1), (5, BLOCK_WORDS + 5), (BLOCK_WORDS, 2 * BLOCK_WORDS)):
        swapped = words.clone()
        swapped[first], swapped[second] = words[second], words[first]
        assert whole(swapped.view(torch.float64)) != whole(values)
    assert whole(values) == whole(values.clone())


def test_replica_hash_is_the_weighted_sum_of_its_bits():
    values = torch.tensor([3, 5], dtype=torch.int64).view(torch.bfloat16)
    first, second = (int(WEIGHTS[place]) for place in (0, 1))
    assert (whole(values) - (3 * first + 5 * second)) % 2**64 == 0


@pytest.mark.parametrize(("hashes", "sound", "odd", "certain"), [
    ({0: 7, 1: 7}, {}, set(), True),
    ({0: 7, 1: 8, 2: 7}, {}, {1}, True),
    ({0: 7, 1: 8}, {}, {0, 1}, False),
    ({0: 7, 1: 8}, {0: UNKNOWN}, {0, 1}, False),
    ({0: 7, 1: 8}, {0: SOUND}, {1}, True),
    ({0: 7, 1: 8}, {0: UNSOUND}, {0}, True),
    ({0: 7, 1: 8, 2: 8}, {0: SOUND}, {1, 2}, True),
    ({0: 7, 1: 8, 2: 9}, {}, {0, 1, 2}, False),
    ({0: 7, 1: 8}, {0: SOUND, 1: SOUND}, {0, 1}, False),
])  # fmt: skip
def test_replica_check_names_odd_replicas_and_whether_that_is_certain(hashes, sound, odd, certain):
    assert outliers(hashes, sound) == (odd, certain)


@pytest.mark.parametrize("place", [None, 0, 150, 299])
def test_weights_are_compared_a_few_at_a_time(monkeypatch, place):
    """Beside a large state a GPU has no memory for another copy of it."""
    monkeypatch.setattr(replica_check, "BLOCK_ELEMENTS", 64)
    masters = torch.linspace(-1.0, 1.0, 300)
    published = masters.bfloat16()
    if place is not None:
        published.view(torch.int16)[place] ^= 1
    with MadeTensors() as made:
        assert same_bits(published, masters) == (place is None)
    assert 0 < made.most <= 64


def test_bitwise_comparison_equates_nans_and_tells_signed_zeros_apart():
    nan = torch.tensor([float("nan")])
    assert same_bits(nan, nan.clone())
    assert not same_bits(torch.zeros(1), -torch.zeros(1))
    assert same_bits(torch.zeros(0), torch.zeros(0))


def job(corpus, layout, every=1, **train):
    return document(
        data={"paths": [corpus]},
        train={"steps": 5, **train},
        parallel=axes(layout),
        recovery={"check_replicas_every": every},
        checkpoint={"snapshot_every_steps": 1},
    )


@pytest.mark.parametrize(("layout", "precision"), [((2, 2, 2), "fp32"), ((1, 2, 2), "bf16"), ((2, 1, 1), "fp32")])
def test_replica_check_names_nobody_in_an_undisturbed_run(ranks, corpus, tmp_path, layout, precision):
    spec = job(corpus, layout, precision=precision)
    by_rank = ranks.run(ParallelConfig(**axes(layout)), train, spec, None, None, Resume(), (), str(tmp_path))
    assert by_rank[0].steps == [1, 2, 3, 4, 5]
    assert by_rank[0].events == []


FLIPS = [
    # layout, precision, snapshots, culprit, named, certain
    ((1, 1, 2), "fp32", True, 0, [0], True),  # one of these two owns the part, the other was given a copy of it
    ((1, 1, 2), "fp32", True, 1, [1], True),
    ((1, 1, 2), "fp32", False, 1, [0, 1], False),
    ((1, 1, 3), "fp32", False, 2, [2], True),
    ((1, 1, 2), "bf16", False, 0, [0], True),  # the master weights tell
    ((1, 1, 2), "bf16", False, 1, [1], True),
    ((2, 1, 2), "fp32", True, 3, [3], True),
    ((2, 1, 1), "fp32", True, 1, [1], True),
    ((2, 1, 1), "fp32", False, 1, [0, 1], False),
]


@pytest.mark.parametrize(("layout", "precision", "kept", "culprit", "named", "certain"), FLIPS)
def test_replica_check_names_the_rank_with_a_flipped_bit(
    ranks, corpus, tmp_path, layout, precision, kept, culprit, named, certain
):
    spec = job(corpus, layout, precision=precision, global_batch_size=12)
    snapshots = str(tmp_path) if kept else None
    by_rank = ranks.run(ParallelConfig(**axes(layout)), flip, spec, culprit, "final_norm.weight", STEP, snapshots)
    (event,) = by_rank[0][1]
    assert (event["type"], event["step"], event["ranks"], event["certain"]) == (
        "replica_differs", STEP - 1, named, certain,
    )  # fmt: skip
    for rank, (raised, _, step, settled) in enumerate(by_rank):
        assert raised[0] == ("ReplicaDiffers" if rank in named else "PeerLost")
        assert "since step 2 parameters of rank" in raised[1]
        assert (step, settled) == (STEP - 1, STEP - 1), "the step was given up before it changed anything"


def test_replica_check_of_sharded_weights_names_the_rank_whose_part_has_changed(ranks, corpus):
    """Nobody else holds it; the master weights tell."""
    spec = job(corpus, (1, 1, 3), precision="bf16", global_batch_size=12)
    spec["parallel"]["zero"] = 3
    by_rank = ranks.run(ParallelConfig(data=3), flip, spec, 1, "layers.1.mlp.up.weight", STEP, None)
    (event,) = by_rank[0][1]
    assert (event["type"], event["ranks"], event["certain"]) == ("replica_differs", [1], True)


@pytest.mark.parametrize(
    ("data", "kept", "named", "certain"),
    [(4, False, [1, 3], False), (4, True, [1], True), (6, False, [1], True), (2, True, [1], True)],
)
@pytest.mark.parametrize("frozen", [[], ["*.experts"]], ids=["trained", "frozen"])
def test_replica_check_compares_spread_experts_among_the_ranks_that_have_them(
    ranks, corpus, tmp_path, data, kept, named, certain, frozen
):
    moe = {"experts": 4, "per_token": 2, "ffn_hidden_size": 8}
    spec = job(corpus, (1, 1, data), global_batch_size=12, frozen=frozen)
    spec["model"] |= {"family": "llama", "moe": moe}
    spec["parallel"]["expert"] = 2
    layout, name = ParallelConfig(data=data, expert=2), "layers.1.mlp.experts.3.up.weight"
    by_rank = ranks.run(layout, flip, spec, 1, name, STEP, str(tmp_path) if kept else None)
    (event,) = [each for each in by_rank[0][1] if each["type"] == "replica_differs"]
    assert (event["ranks"], event["certain"]) == (named, certain)


FROZEN_FLIPS = [
    ((1, 1, 2), "fp32", True, 0, [0], True),
    ((1, 1, 2), "bf16", True, 1, [1], True),
    ((1, 1, 2), "bf16", False, 0, [0, 1], False),  # there are no master weights of what is frozen
    ((2, 1, 1), "fp32", True, 1, [1], True),
]


@pytest.mark.parametrize(("layout", "precision", "kept", "culprit", "named", "certain"), FROZEN_FLIPS)
def test_replica_check_finds_a_flipped_bit_of_a_frozen_parameter(
    ranks, corpus, tmp_path, layout, precision, kept, culprit, named, certain
):
    spec = job(corpus, layout, precision=precision, global_batch_size=12, frozen=["final_norm"])
    snapshots = str(tmp_path) if kept else None
    by_rank = ranks.run(ParallelConfig(**axes(layout)), flip, spec, culprit, "final_norm.weight", STEP, snapshots)
    (event,) = by_rank[0][1]
    assert (event["type"], event["ranks"], event["certain"]) == ("replica_differs", named, certain)


def test_replica_check_finds_nothing_between_two_comparisons(ranks, corpus):
    spec = job(corpus, (1, 1, 2), every=2)
    by_rank = ranks.run(ParallelConfig(data=2), flip, spec, 1, "final_norm.weight", STEP, None)
    assert [(raised, step) for raised, _, step, _ in by_rank] == [(None, 5)] * 2
