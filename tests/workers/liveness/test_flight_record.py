"""What is kept of torch's flight recorder is what ranks are compared by."""

import json
from argparse import Namespace

import pytest
import torch
from flight_dumps import FlightDump

from manta.workers.comm import flight_recorder
from manta.workers.comm.flight_recorder import capture_flight_record
from manta.workers.config import ParallelConfig
from manta.workers.liveness.flight_record import AFTER, BEFORE, FlightOperation, FlightRecord, read_flight_record
from manta.workers.protocol.json_codec import from_json, to_json

WORLD = ("default_pg", (0, 1, 2))


def read(dump):
    """Sequences by (group, what)."""
    return {(each.group, each.what): each for each in read_flight_record(dump.text).sequences}


def test_flight_record_keeps_number_kind_size_and_first_open_operation():
    dump = FlightDump()
    dump.collective(*WORLD, sizes=(4, 2))
    dump.collective("data", (0, 2), "_all_gather_base", (3,), dtype="BFloat16")
    dump.collective(*WORLD, state="started")
    dump.collective(*WORLD, state="scheduled")
    world = read(dump)["world", "collectives"]
    assert (world.last, world.open.number) == (4, 3), "numbers are NCCL's, which has one count for this group"
    assert world.operations[0] == FlightOperation(1, "all_reduce", "Float[4, 2] -> Float[4, 2]", "completed")
    data = read(dump)["data", "collectives"]
    assert (data.operations[0].kind, data.operations[0].sizes) == ("_all_gather_base", "BFloat16[3] -> BFloat16[3]")
    assert data.open is None


def test_flight_record_keeps_the_operations_around_the_first_open_one():
    dump = FlightDump()
    for number in range(1, 101):
        dump.collective(*WORLD, state="completed" if number < 40 else "scheduled")
    kept = read(dump)["world", "collectives"]
    assert [each.number for each in kept.operations] == list(range(40 - BEFORE, 40 + AFTER))
    assert kept.last == 100


def test_flight_record_uses_the_newest_group_of_a_name():
    dump = FlightDump()
    for _ in range(5):
        dump.collective(*WORLD, state="scheduled", made=0)
    dump.collective(*WORLD, made=7)
    kept = read(dump)["world", "collectives"]
    assert (kept.last, kept.open) == (1, None)


def test_flight_record_keeps_only_unfinished_messages_and_names_their_peers():
    dump = FlightDump()
    dump.message("pipeline_up", (0, 2, 4), "send", 1, 2, (5,), "completed")
    dump.message("pipeline_up", (0, 2, 4), "recv", 0, 1, (5,), "scheduled")
    dump.message("pipeline_up", (0, 2, 4), "send", 1, 2, (6,), "scheduled")
    kept = read(dump)["pipeline_up", "messages"]
    assert [(each.kind, each.peer, each.sizes) for each in kept.operations] == [
        ("recv", 0, "Float[5]"),
        ("send", 2, "Float[6]"),
    ]


def test_flight_record_of_batched_messages_keeps_the_batch_only():
    """Its parts have no events, and would look as if they never ended."""
    dump = FlightDump()
    dump.batch("data", (0, 1, 2), [1, 2], "completed")
    dump.batch("data", (0, 1, 2), [1, 2], "scheduled")
    sequences = read(dump)
    assert set(sequences) == {("data", "batches")}
    assert (sequences["data", "batches"].last, sequences["data", "batches"].open.number) == (2, 2)


def test_flight_record_ignores_backends_whose_groups_outlive_a_generation():
    dump = FlightDump()
    dump.collective(*WORLD)
    dump.entries[0]["profiling_name"] = "nccl2:all_reduce"
    assert read(dump) == {}


def test_flight_record_says_whether_it_is_whole():
    whole, cut = FlightDump(), FlightDump(forgotten=9)
    for dump in (whole, cut):
        dump.collective(*WORLD)
    assert read_flight_record(whole.text).whole
    assert not read_flight_record(cut.text).whole
    assert read_flight_record(FlightDump().text) == FlightRecord((), True)


@pytest.mark.parametrize("text", [b"", b"[]", b'{"entries": [{}]}', b'{"entries": {"a": 1}}', b'{"entries": 7}'])
def test_flight_record_of_an_unknown_format_is_refused(text):
    with pytest.raises(ValueError, match="dump is not of a format that is known"):
        read_flight_record(text)


def test_flight_record_survives_json():
    dump = FlightDump()
    dump.collective(*WORLD, state="scheduled")
    dump.message("pipeline_up", (0, 1), "send", 0, 1, (5,), "scheduled")
    record = read_flight_record(dump.text)
    assert from_json(FlightRecord, json.loads(json.dumps(to_json(record)))) == record


def test_torchs_flight_analysis_agrees_with_ours():
    builder = pytest.importorskip("torch.distributed.flight_recorder.components.builder")
    details = {}
    for rank in range(3):
        dump = FlightDump()
        dump.collective(*WORLD)
        if rank != 1:
            dump.collective(*WORLD, state="scheduled")
        details[f"dump {rank}"] = {**dump.document, "rank": rank, "host_name": f"host {rank}"}
    arguments = Namespace(verbose=False, just_print_entries=False, allow_incomplete_ranks=False, mismatch_cap=10)
    database = builder.build_db(details, arguments, "2.10")
    assert [collective.missing_ranks for collective in database.collectives] == [None, {1}]


def two_sums_and_what_was_recorded(comm):
    """What torch has kept of it."""
    for _ in range(2):
        comm.all_reduce("world", torch.ones(3))
    return capture_flight_record()


def test_flight_record_of_this_torch_version_can_be_read(ranks):
    """Of gloo, which is recorded in the same format from torch 2.13 on."""
    for record in ranks.run(ParallelConfig(data=2), two_sums_and_what_was_recorded, backend="process_groups"):
        (world,) = [each for each in record.sequences if each.group == "world"]
        assert (world.what, world.last >= 2) == ("collectives", True)
        assert {each.kind for each in world.operations} == {"all_reduce"}
        assert world.operations[-1].sizes == "Float[3] -> Float[3]"


def test_flight_record_asks_nccls_recorder_first_and_ignores_unknown_dumps(monkeypatch):
    dump = FlightDump()
    dump.collective(*WORLD)
    names = dict(zip(flight_recorder._DUMPS, (b"{}", dump.text), strict=True))

    def offer(**dumps):
        for name in flight_recorder._DUMPS:
            monkeypatch.delattr(flight_recorder._distributed_c10d, name, raising=False)
        for name, text in dumps.items():
            monkeypatch.setattr(flight_recorder._distributed_c10d, name, lambda text=text: text, raising=False)
        return capture_flight_record()

    expected = read_flight_record(dump.text)
    first, second = names
    assert offer(**{first: dump.text, second: b"{}"}) == expected
    assert offer(**names) == expected
    assert offer(**{first: b"nonsense", second: dump.text}) == expected
    assert offer(**{second: b"{}"}) is None
    assert offer() is None
