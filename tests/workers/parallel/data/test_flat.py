"""Where parameters lie in the flat buffers, what happens to each kind of them, and which rank counts and saves them."""

from __future__ import annotations

import pytest
import torch
from engine_specs import spec
from one_layer import lone_rank
from torch import nn

from manta.workers.engine import Engine
from manta.workers.parallel.data.flat import ALIGNMENT, FlatParameters, answers_for, merged, overlap
from manta.workers.parallel.tensor.shards import NamedShard, ParameterShard

CPU = torch.device("cpu")
SPLIT = ParameterShard((8, 4), 0, std=0.02)
TIED = ParameterShard((8, 4), 0, std=0.02, tied_across_stages=True)
COPIED = ParameterShard((8, 4), 0, std=0.02, copies=2)
WHOLE = ParameterShard((4,), std=0.02)
BIAS = ParameterShard((8,), 0, group="bias")
NORM = ParameterShard((4,), group="norm", constant=1.0)
TABLE = ParameterShard((8, 4), 0, group="embedding", std=0.02)


def entry(name: str, shard: ParameterShard, size: int = 100) -> NamedShard:
    return NamedShard(name, nn.Parameter(torch.zeros(size)), shard, by_autograd=False)


def flat_of(replicas: int = 2, bucket_bytes: float = 25e6, **shards: ParameterShard) -> FlatParameters:
    return FlatParameters(
        [entry(name, shard) for name, shard in shards.items()], replicas, CPU, bucket_bytes=bucket_bytes
    )


def names(slots) -> list[str]:
    return [slot.entry.name for slot in slots]


def test_flat_parameters_are_ordered_by_gradient_handling():
    flat = flat_of(norm=NORM, first=SPLIT, bias=BIAS, copied=COPIED, tied=TIED, position=WHOLE, second=SPLIT)
    assert names(flat.slots) == ["first", "second", "tied", "copied", "position", "norm", "bias"]
    assert names(flat.head()) == ["first", "second"]
    assert names(flat.replicated()) == ["position", "norm"]
    assert names(flat.copied()) == ["copied"]
    assert names(flat.tied()) == ["tied"]
    starts = {slot.entry.name: slot.start for slot in flat.slots}
    assert flat.decayed == [(0, starts["norm"])]
    assert all(start % ALIGNMENT == 0 for start in starts.values())
    assert flat.buckets == [(0, starts["tied"]), (starts["tied"], flat.size)]
    assert flat.size % (2 * ALIGNMENT) == 0


@pytest.mark.parametrize(
    ("groups", "order", "decayed"),
    [
        (["linear", "embedding"], "first table second position norm bias", ["first..norm"]),
        (["linear"], "first second table position norm bias", ["first..table", "position..norm"]),
        (["embedding", "bias"], "table first second position bias norm", ["table..first", "bias..norm"]),
        (["norm"], "first table second position norm bias", ["norm..bias"]),
        (["linear", "embedding", "norm", "bias"], "first table second position norm bias", ["first..end"]),
        ([], "first table second position norm bias", []),
    ],
    ids=["matrices", "linear layers", "two of them", "norms", "all", "none"],
)
def test_decayed_parameters_lie_together_within_each_kind_in_the_flat_buffer(groups, order, decayed):
    """So that the optimizer has few ranges; what has to be reduced last stays last."""
    shards = {"first": SPLIT, "norm": NORM, "table": TABLE, "bias": BIAS, "position": WHOLE, "second": SPLIT}
    entries = [entry(name, shard) for name, shard in shards.items()]
    flat = FlatParameters(entries, 2, CPU, decayed_groups=groups)
    assert names(flat.slots) == order.split()
    starts = {slot.entry.name: slot.start for slot in flat.slots} | {"end": flat.size}
    assert flat.decayed == [tuple(starts[name] for name in each.split("..")) for each in decayed]


def test_frozen_parameters_lie_last_and_have_no_gradient():
    entries = [entry(name, shard) for name, shard in (("a", SPLIT), ("table", TABLE), ("norm", NORM), ("b", SPLIT))]
    for each in entries[1:3]:
        each.parameter.requires_grad_(False)
    flat = FlatParameters(entries, 3, CPU)
    assert (names(flat.slots), names(flat.frozen)) == (["a", "b"], ["table", "norm"])
    assert (len(flat.parameters), len(flat.gradients)) == (flat.total_size, flat.size)
    assert flat.frozen[0].start == flat.size
    assert not any(hasattr(slot.entry.parameter, "main_grad") for slot in flat.frozen)
    parts = [part for replica in range(3) for part in flat.frozen_parts(replica)]
    assert [start for start, _ in parts] == [flat.size, *(end for _, end in parts[:-1])]
    assert parts[-1][1] == flat.total_size
    assert all((end - start) % ALIGNMENT == 0 for start, end in parts)
    assert flat.replicated() == [], "nothing of it is summed"
    assert flat.same_on_tensor_ranks() == [(flat.frozen[1].start, flat.frozen[1].start + 2 * ALIGNMENT)]


def test_flat_parameters_of_a_stage_may_all_be_frozen():
    only = entry("a", SPLIT)
    only.parameter.requires_grad_(False)
    flat = FlatParameters([only], 2, CPU)
    assert (flat.slots, names(flat.frozen), flat.decayed) == ([], ["a"], [])
    assert flat.size == 2 * ALIGNMENT


def test_parameters_and_their_gradients_are_views_of_the_buffers():
    flat = flat_of(first=SPLIT, norm=NORM)
    for slot in flat.slots:
        parameter = slot.entry.parameter
        flat.parameters[slot.start] = 3.0
        flat.gradients[slot.end - 1] = 5.0
        assert (parameter[0].item(), parameter.main_grad[-1].item()) == (3.0, 5.0)
        assert parameter.grad.data_ptr() == parameter.main_grad.data_ptr(), "autograd adds there"


def test_each_element_is_one_replicas_and_of_one_bucket():
    shards = {f"weight {number}": SPLIT for number in range(8)}
    flat = flat_of(3, bucket_bytes=1000 * 4, **shards, norm=NORM)
    assert [start for start, _ in flat.buckets] == [0, 960, 1152], "five times 3 x 64, the rest, the tail"
    for start, end in (*flat.buckets, (0, flat.size)):
        assert start % (3 * ALIGNMENT) == end % (3 * ALIGNMENT) == 0
    owned = sorted(part for replica in range(3) for part in flat.parts(replica))
    assert [end for _, end in owned[:-1]] == [start for start, _ in owned[1:]]
    assert (owned[0][0], owned[-1][1]) == (0, flat.size)
    smallest = flat_of(3, 4.0, **shards, norm=NORM).buckets
    assert {end - start for start, end in smallest[:-1]} == {3 * ALIGNMENT}, "a row of each replica at least"
    assert len({end - start for start, end in (flat.parts(replica)[0] for replica in range(3))}) == 1


def test_flat_buffer_of_one_replica_or_a_headless_stage_has_one_bucket():
    assert len(flat_of(1, 4.0, first=SPLIT, norm=NORM).buckets) == 1
    flat = flat_of(2, 4.0, norm=NORM)
    assert [end - start for start, end in flat.buckets if end > start] == [flat.size]


@pytest.mark.parametrize(
    ("shard", "answering"),
    [
        (SPLIT, [0, 1, 2, 3]),
        (COPIED, [0, 2]),
        (WHOLE, [0]),
        (NORM, [0]),
        (TIED, [0, 1, 2, 3]),
        (ParameterShard((8, 4), 0, tied_across_stages=True, shared_copy=True), []),
    ],
    ids=["split", "copied", "whole", "norm", "tied", "the last stage's copy"],
)
def test_flat_buffer_counts_each_parameter_once_over_the_tensor_ranks(shard, answering):
    assert [index for index in range(4) if answers_for(entry("it", shard), index)] == answering
    flat = flat_of(1, other=SPLIT, it=shard)
    slot = next(slot for slot in flat.slots if slot.entry.name == "it")
    for index in range(4):
        elsewhere = [] if index in answering else [(slot.start, slot.start + 2 * ALIGNMENT)]
        assert flat.not_answered_for(index) == elsewhere, "its alignment included"


def test_ranges_of_neighbouring_parameters_are_merged():
    flat = flat_of(1, a=SPLIT, b=SPLIT, c=SPLIT, norm=NORM)
    a, b, _, norm = flat.slots
    assert merged([a, b]) == [(0, 256)]
    assert merged([a, norm]) == [(0, 128), (384, 512)]
    assert merged([]) == []


@pytest.mark.parametrize(
    ("first", "second", "both"),
    [((0, 5), (3, 9), (3, 5)), ((3, 9), (0, 5), (3, 5)), ((0, 9), (3, 5), (3, 5)), ((0, 3), (5, 9), (5, 5))],
)
def test_overlap_of_two_ranges(first, second, both):
    assert overlap(first, second) == both


def test_bf16_gradients_of_autograd_are_added_once_to_the_fp32_sum():
    job = spec(model={"layers": 2, "hidden_size": 16}, train={"precision": "bf16"})
    flat = Engine(job, lone_rank(job)).flat
    slot = next(slot for slot in flat.slots if slot.entry.by_autograd)
    parameter = slot.entry.parameter
    for _ in range(2):
        (parameter * 3.0).sum().backward()
        assert parameter.grad is None
    assert (flat.gradients.dtype, flat.parameters.dtype) == (torch.float32, torch.bfloat16)
    assert (flat.gradients[slot.start : slot.end] == 6.0).all()


EXPERT = ParameterShard((8, 4), 0, std=0.02, of_expert=True)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("holders", "expert"), [(2, 2), (4, 2), (6, 3), (6, 2)])
def test_spread_experts_have_buckets_that_only_their_own_holders_divide(holders, expert, frozen):
    shards = {"first": SPLIT, "a": EXPERT, "norm": NORM, "b": EXPERT, "second": SPLIT, "c": EXPERT}
    entries = [entry(name, shard, ALIGNMENT * holders) for name, shard in shards.items()]
    for each in entries:
        each.parameter.requires_grad_(not frozen)
    entries.append(entry("trained", SPLIT, ALIGNMENT * holders))
    flat = FlatParameters(entries, holders, CPU, bucket_bytes=4.0, expert=expert)
    slots, buckets = (flat.frozen, flat.frozen_buckets) if frozen else (flat.slots, flat.buckets)
    of_experts = [bucket for bucket in buckets if flat.has_experts(bucket)]
    first, end = of_experts[0][0], of_experts[-1][1]
    for slot in slots:
        assert (first <= slot.start and slot.end <= end) == slot.entry.shard.of_expert, slot.entry.name
    assert [end for _, end in buckets[:-1]] == [start for start, _ in buckets[1:]]
    for bucket in buckets:
        share = expert if flat.has_experts(bucket) else 1
        parts = [flat.part(bucket, holder) for holder in range(holders)]
        assert parts == [part for part in parts[::share] for _ in range(share)], "the same for each rank of a group"
        assert [*parts[::share]] == sorted(parts[::share]) and sum(b - a for a, b in parts) == share * (
            bucket[1] - bucket[0]
        )
        assert all(start % ALIGNMENT == 0 for start, _ in parts)
    if not frozen:
        assert names(flat.head()) == ["first", "second", "trained", "a", "b", "c"]
        in_order = [buckets[number] for number in flat.bucket_order]
        firsts = [next(s.entry.name for s in slots if s.start < end and start < s.end) for start, end in in_order]
        assert list(dict.fromkeys(firsts)) == ["first", "a", "b", "second", "c", "trained"], "in the model's order"


def test_experts_that_are_not_spread_lie_in_the_head():
    flat = flat_of(first=SPLIT, a=EXPERT, norm=NORM, second=SPLIT)
    assert names(flat.slots) == ["first", "a", "second", "norm"] and not any(map(flat.has_experts, flat.buckets))
