"""Which rank waits for which, what the flight recorders of all ranks say together, and the times of a recovery."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manta.service.recovery.timeline import PHASES, RecoveryTimeline
from manta.service.recovery.waits import Verdict, find_disagreement, refined, waits_now
from manta.workers.comm.grid import RankGrid
from manta.workers.config import ParallelConfig
from manta.workers.liveness.flight_record import FlightRecord, read_flight_record
from manta.workers.liveness.progress import CONNECTING_CHANNEL, DeviceRecord
from manta.workers.protocol.reports import Position, TrainerStatus
from tests.service.support.drawn_hangs import LAYOUTS, grid_of, hang
from tests.workers.support.flight_dumps import FlightDump

TENSOR, PIPELINE, DATA = 0, 1, 2
COUNTS = dict.fromkeys(("tensor", "pipeline", "data", "embedding", "world", "sent", "received"), 5)
WORLD = ("default_pg", (0, 1, 2, 3))


def at(phase="backward", waits_for=None, channel=None, overdue=False, seconds=0.1, micro_batch=None, **more):
    position = Position(1, 1, phase, 7, micro_batch, waits_for, channel, more.pop("sending", False), COUNTS, 6, 6, 9)
    return TrainerStatus(100, overdue, standing_seconds=seconds, record=position, **more)


def seen(*answers, silent=()):
    grid = RankGrid(ParallelConfig(data=len(answers)))
    return waits_now(answers, frozenset(silent), grid.group)


def test_waits_name_the_stalled_rank_that_the_others_wait_for():
    waits = seen(
        at("forward", overdue=True, seconds=9.0, micro_batch=3),
        at("reduction", 0, DATA, seconds=8.5),
        at("data", 1, DATA),
    )
    assert waits.culprits == (0,)
    assert waits.sentence == ("the job is stuck because of rank 0: others wait for it, and it waits for no rank")
    first, second, third = waits.ranks
    assert (first.phase, first.doing, first.since_seconds) == ("forward", "forward of micro-batch 3", 9.0)
    assert (first.waits_for, first.step, second.waits_for, third.waits_for) == ((), 7, (0,), (1,))
    assert second.doing == "reduction, in a collective along data, waiting for rank 0"


def test_waits_of_a_running_job_name_whom_most_ranks_wait_for():
    waits = seen(at("optimizer"), at("agreement", 0, DATA), at("agreement", 0, DATA), at("data", 1, DATA))
    assert waits.culprits == ()
    assert waits.sentence == "3 of 4 ranks wait, in the end for rank 0, which is in optimizer"
    split = seen(at("data"), at("agreement", 0, DATA), at("agreement", 0, DATA), at("data"), at("data", 3, DATA))
    assert split.sentence == "3 of 5 ranks wait, most of them in the end for rank 0, which is in data"
    assert seen(at(), at()).sentence == "no rank is waiting for another one"
    assert "1 of 2 ranks waits, " in seen(at(), at("data", 0, DATA)).sentence
    assert "for each other" in seen(at("agreement", 1, DATA), at("agreement", 0, DATA)).sentence


def test_waits_name_no_culprit_if_it_may_continue_or_all_wait_for_each_other():
    waits = seen(at("checkpoint"), at("agreement", 0, DATA, overdue=True))
    assert (waits.culprits, waits.sentence.endswith("; rank 0 may still continue")) == ((), True)
    waits = seen(at("agreement", 1, DATA, overdue=True), at("agreement", 0, DATA, overdue=True))
    assert waits.culprits == ()
    assert waits.sentence.startswith("the job is stuck because of no rank in particular: ")


def test_waits_describe_silent_agents_and_missing_trainers():
    waits = seen(None, None, at("data", 0, DATA, overdue=True), silent=[0])
    assert (waits.ranks[0].phase, waits.ranks[0].doing) == ("unknown", "unknown: its agent does not answer")
    assert (waits.ranks[1].phase, waits.ranks[1].since_seconds) == ("exited", None)
    assert waits.culprits == (0,)


@pytest.mark.parametrize(
    ("status", "doing"),
    [
        (at("forward", 3, PIPELINE), "forward, waiting for rank 3 to send a message"),
        (at("forward", 3, PIPELINE, sending=True), "forward, waiting for rank 3 to take its message"),
        (at("connecting", 3, CONNECTING_CHANNEL), "connecting, waiting for rank 3 to connect"),
        (at("forward", 1, TENSOR, micro_batch=0),
         "forward of micro-batch 0, in a collective along tensor, waiting for rank 1"),
        (at("forward", 1), "forward, waiting for rank 1"),
        (at("forward", stopped=True), "forward, stopped by a signal"),
        (TrainerStatus(100), "starting"),
    ],
)  # fmt: skip
def test_waits_say_in_words_what_a_rank_does(status, doing):
    assert seen(status, at(), at(), at()).ranks[0].doing == doing


def test_waits_describe_the_device_of_a_rank_whose_device_is_behind():
    device = DeviceRecord("backward", 7, 2, 5, True, DATA, 9, None, False, COUNTS)
    status = at("optimizer")
    position = Position(**{**vars(status.record), "device": device})
    (first, _) = seen(TrainerStatus(100, record=position), at()).ranks
    assert (first.phase, first.doing) == (
        "backward", "backward of micro-batch 2, in a collective along data, waiting for its peers",
    )  # fmt: skip


@pytest.mark.parametrize(("timeline", "phases", "total"), [
    (RecoveryTimeline(11, 10, 11.5, 11.6, 12, 14, 15), (1, 0.5, 0.5, 2, 1), 5),
    (RecoveryTimeline(11, 10, 11.5), (1, 0.5, None, None, None), None),
    (RecoveryTimeline(11, None, 12, restored_at=15, first_step_at=16), (0, 1, 0, 3, 1), 5),
])  # fmt: skip
def test_recovery_phases_follow_one_another_and_one_without_an_end_counts_with_the_next(timeline, phases, total):
    assert (timeline.phases(), timeline.total_seconds) == (dict(zip(PHASES, phases, strict=True)), total)


times = st.one_of(st.none(), st.floats(0, 100))


@given(st.floats(0, 100), times, times, times, times, times, st.floats(0, 200))
def test_recovery_phases_sum_to_the_whole_and_none_is_negative(
    noticed, failed, rested, launched, connected, restored, first
):
    timeline = RecoveryTimeline(noticed, failed, rested, launched, connected, restored, first)
    phases = timeline.phases()
    assert tuple(phases) == PHASES
    assert all(seconds >= 0 for seconds in phases.values())
    assert sum(phases.values()) == pytest.approx(timeline.total_seconds)
    assert RecoveryTimeline(**timeline.to_json()) == timeline


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


AXES_MADE = {"world": 0, "tensor": 1, "data": 2, "context": 5, "holders": 6, "expert": 7, "expert_holders": 8}


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


@pytest.mark.parametrize(("calls", "ranks", "why"), [
    ((SUM, SUM, None, SUM), (2,), "did not come to all_reduce 3 of world (Float[8] -> Float[8]), where others wait"),
    ((None, SUM, None, SUM), (0, 2), "did not come to all_reduce 3 of world"),
    ((SUM, GATHER, SUM, SUM), (1,), "at number 3 of world all_gather meets all_reduce"),
    ((SUM, SUM, SUM, LONGER), (3,), "at number 3 of world Float[9] -> Float[9] meets Float[8] -> Float[8]"),
    ((SUM, GATHER, GATHER, SUM), (), "at number 3 of world all_gather meets all_reduce"),
    ((GATHER, None, SUM, SUM), (0,), "all_gather meets all_reduce"),
])  # fmt: skip
def test_flight_records_name_the_rank_with_a_missing_or_different_collective(calls, ranks, why):
    difference = find_disagreement(gang_of(*calls), everybody)
    assert difference.ranks == ranks
    assert why in difference.why


def test_flight_records_that_agree_or_are_silent_blame_nobody():
    records = gang_of(SUM, SUM, None, SUM)
    del records[2]
    for agreeing in (gang_of(*(SUM,) * 4), gang_of(*(None,) * 4), records, {}):
        assert find_disagreement(agreeing, everybody) is None


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
