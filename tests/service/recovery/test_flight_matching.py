"""What the flight recorders of all ranks say together, from dumps of gangs that hang."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manta.service.recovery.flight_matching import find_disagreement, refined
from manta.service.recovery.waits import Verdict
from manta.workers.liveness.flight_record import FlightRecord, read_flight_record
from tests.service.support.drawn_hangs import LAYOUTS, grid_of, hang
from tests.workers.support.flight_dumps import FlightDump

WORLD = ("default_pg", (0, 1, 2, 3))


def recorded(gang):
    """What each rank's recorder has, by what was queued on its device and what of that is over."""
    records, everybody = {}, range(gang.grid.world_size)
    for device in gang.devices:
        dump = FlightDump()
        dump.collective("default_pg", everybody)  # with which its communicator was made
        for meeting in device.queued:
            state = "completed" if gang.network.over_at(meeting) is not None else "scheduled"
            if meeting[0] == "message":
                _, source, to, _ = meeting
                ranks = gang.grid.group("pipeline", device.rank)
                ends = ranks.index(source), ranks.index(to)
                name = "pipeline_up" if source < to else "pipeline_down"
                dump.message(name, ranks, "send" if source == device.rank else "recv", *ends, (8,), state)
            else:
                axis, ranks, _ = meeting
                if len(ranks) > 1:
                    name = "default_pg" if axis == "world" else axis
                    dump.collective(name, ranks, state=state, made=AXES_MADE[axis])
        records[device.rank] = read_flight_record(dump.text)
    return records


AXES_MADE = {"world": 0, "tensor": 1, "data": 2}


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(LAYOUTS), st.integers(0, 2**32))
def test_flight_records_reveal_the_rank_that_stopped_queueing(layout, seed):
    gang, hung = hang(layout, seed, "host")
    waits = any(gang.network.over_at(meeting) is None for device in gang.devices for meeting in device.queued)
    difference = find_disagreement(recorded(gang), gang.grid.group)
    assert (difference.ranks if difference else ()) == ((hung,) if waits else ())


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(LAYOUTS), st.integers(0, 2**32), st.booleans())
def test_flight_records_blame_no_rank_if_all_hosts_queued_the_same(layout, seed, network):
    """A network that stops, and a device that stands: of that recorders know nothing."""
    last = random.Random(seed).randrange(1, 4)
    broken = (lambda meeting: meeting[-1] >= last) if network else (lambda meeting: False)
    gang, _ = hang(layout, seed, "nobody" if network else "device", broken)
    assert find_disagreement(recorded(gang), gang.grid.group) is None


def gang_of(*calls):
    """Records of ranks, from what each calls last in the world after two sums that are over: (kind, sizes), or None
    for nothing."""
    records = {}
    for rank, call in enumerate(calls):
        dump = FlightDump()
        for _ in range(2):
            dump.collective(*WORLD)
        if call is not None:
            dump.collective(*WORLD, *call, state="scheduled")
        records[rank] = read_flight_record(dump.text)
    return records


def everybody(axis, rank):
    return range(4)


SUM, GATHER, LONGER = ("all_reduce", (8,)), ("all_gather", (8,)), ("all_reduce", (9,))


@pytest.mark.parametrize(
    ("calls", "ranks", "why"),
    [
        (
            (SUM, SUM, None, SUM),
            (2,),
            "did not come to all_reduce 3 of world (Float[8] -> Float[8]), where others wait",
        ),
        ((None, SUM, None, SUM), (0, 2), "did not come to all_reduce 3 of world"),
        ((SUM, GATHER, SUM, SUM), (1,), "at number 3 of world all_gather meets all_reduce"),
        (
            (SUM, SUM, SUM, LONGER),
            (3,),
            "at number 3 of world Float[9] -> Float[9] meets Float[8] -> Float[8]",
        ),
        ((SUM, GATHER, GATHER, SUM), (), "at number 3 of world all_gather meets all_reduce"),
        ((GATHER, None, SUM, SUM), (0,), "all_gather meets all_reduce"),
    ],
)
def test_flight_records_name_the_rank_with_a_missing_or_different_collective(calls, ranks, why):
    difference = find_disagreement(gang_of(*calls), everybody)
    assert difference.ranks == ranks
    assert why in difference.why


@pytest.mark.parametrize("calls", [(SUM,) * 4, (None,) * 4])
def test_flight_records_that_agree_reveal_nothing(calls):
    assert find_disagreement(gang_of(*calls), everybody) is None


def test_flight_records_do_not_blame_silent_ranks():
    records = gang_of(SUM, SUM, None, SUM)
    del records[2]
    assert find_disagreement(records, everybody) is None
    assert find_disagreement({}, everybody) is None


def test_flight_records_do_not_blame_a_rank_that_waits_itself():
    """0 waits for 1 in a sum of the world, which waits for 2 in one along data."""
    records = {}
    for rank, (world, data) in enumerate([(3, 0), (2, 3), (2, 2)]):
        dump = FlightDump()
        for number in range(world):
            dump.collective(*WORLD, state="scheduled" if number == 2 else "completed")
        for number in range(data):
            dump.collective("data", (1, 2), state="scheduled" if number == 2 else "completed", made=1)
        records[rank] = read_flight_record(dump.text)
    difference = find_disagreement(records, lambda axis, rank: (0, 1, 2) if axis == "world" else (1, 2))
    assert difference.ranks == (2,)


def test_flight_records_blame_no_rank_whose_sequence_may_be_truncated():
    records = gang_of(SUM, SUM, SUM, SUM)
    other = FlightDump()
    other.collective("tensor", (1, 2))
    records[1] = replace(read_flight_record(other.text), whole=False)
    assert find_disagreement(records, everybody) is None
    records[1] = read_flight_record(other.text)
    assert find_disagreement(records, everybody).ranks == (1,)


@pytest.mark.parametrize("kind", ["send", "recv"])
def test_flight_records_do_not_blame_a_rank_with_an_empty_record(kind):
    """Its recorder may be off, or its torch may write another format."""
    records = gang_of(SUM, SUM, SUM, SUM)
    records[1] = FlightRecord()
    assert find_disagreement(records, everybody) is None
    waiting = FlightDump()
    waiting.message("pipeline_up", (0, 1), kind, *((0, 1) if kind == "send" else (1, 0)), (5,), "scheduled")
    records = {0: read_flight_record(waiting.text), 1: FlightRecord()}
    assert find_disagreement(records, lambda axis, rank: (0, 1)) is None


@pytest.mark.parametrize(("kind", "other"), [("send", "recv"), ("recv", "send")])
def test_flight_records_name_the_rank_that_misses_a_message(kind, other):
    waiting, idle = FlightDump(), FlightDump()
    ends = (0, 1) if kind == "send" else (1, 0)
    waiting.message("pipeline_up", (0, 1), kind, *ends, (5,), "scheduled")
    idle.message("pipeline_up", (0, 1), other, *ends, (5,), "completed")
    records = {0: read_flight_record(waiting.text), 1: read_flight_record(idle.text)}
    difference = find_disagreement(records, lambda axis, rank: (0, 1))
    assert difference.ranks == (1,)
    assert difference.why == f"has not begun its {other} of pipeline_up (Float[5]) for which rank 0 waits"


def test_flight_record_search_visits_each_group_once():
    grid, seen = grid_of((8, 8, 16)), []
    dump = FlightDump()
    for made, (name, axis) in enumerate([("default_pg", "world"), ("data", "data")]):
        dump.collective(name, grid.group(axis, 0), state="scheduled", made=made)
    idle = FlightDump()
    idle.collective("tensor", grid.group("tensor", 700))
    record, absent = read_flight_record(dump.text), read_flight_record(idle.text)
    records = {rank: absent if rank == 700 else record for rank in range(grid.world_size)}

    def group(axis, rank):
        seen.append(len(grid.group(axis, rank)))
        return grid.group(axis, rank)

    assert find_disagreement(records, group).ranks == (700,)
    assert sum(seen) == 2 * grid.world_size + 8


def test_flight_records_refine_only_verdicts_about_the_whole_gang():
    records = gang_of(SUM, SUM, None, SUM)
    gang = Verdict("gang", (0, 1, 2, 3), "the network")
    assert refined(gang, records, everybody).ranks == (2,)
    assert refined(gang, records, everybody).kind == "ranks"
    for verdict in (Verdict("ranks", (1,), "waits for no rank"), Verdict("nobody")):
        assert refined(verdict, records, everybody) == verdict
    assert refined(gang, gang_of(SUM, SUM, SUM, SUM), everybody) == gang
    torn = refined(gang, gang_of(SUM, GATHER, GATHER, SUM), everybody)
    assert (torn.kind, torn.ranks) == ("gang", gang.ranks)
    assert "all_gather meets all_reduce" in torn.why
