"""Reports of every kind survive the way through JSON."""

import json

import pytest

from manta.workers.liveness.flight_record import FlightOperation, FlightRecord, FlightSequence
from manta.workers.liveness.progress import DeviceRecord
from manta.workers.protocol.json_codec import MalformedMessage
from manta.workers.protocol.reports import (
    PAYLOADS,
    Event,
    Exited,
    Failure,
    Finished,
    KillReason,
    Metrics,
    Position,
    Prepared,
    Printed,
    ProcessUse,
    Profiled,
    Report,
    Resting,
    Started,
    TraceBegan,
    Traced,
    TrainerStatus,
)
from manta.workers.timing.recording import PackedRecording

FAILURE = Failure("spike", 4, "SpikeError", "too high", "Traceback", 12.5)
DEVICE = DeviceRecord("forward", 3, None, 5, True, 2, 7, None, False, {"data": 7}, fresh=False)
EXAMPLES = [
    Prepared(),
    Started(7, 1.5),
    Metrics(({"step": 1, "loss": float("inf"), "seconds": {"wall": 0.1}},)),
    Event("straggler", "rank 1 holds up the others", 3, {"straggler": 1}),
    TrainerStatus(7, True, False, 1.5, True, Position(7, 2, "backward", counts={"data": 3}), ProcessUse("S", 1.0)),
    TrainerStatus(7, True, record=Position(7, 2, "backward", device=DEVICE)),
    FlightRecord(
        (FlightSequence("world", "collectives", 9, (FlightOperation(9, "all_reduce", "", "started"),)),), False
    ),
    Printed("stderr", ("one line", "another")),
    TraceBegan(3, 7),
    Traced(3, 7, PackedRecording("packed", 5, "clock", True, 0.5, "too much", 1e12)),
    Profiled(3, 7, "a profile"),
    Resting(None, "a peer is gone"),
    Finished(9, {"wall": 0.5}),
    FAILURE,
    Exited(1, None, ("bye",), FAILURE, KillReason("hung", "stood still")),
]


@pytest.mark.parametrize("payload", EXAMPLES, ids=lambda payload: type(payload).__name__)
def test_report_survives_a_json_round_trip(payload):
    report = Report(payload, 2, 1, 99.5, 4)
    document = json.loads(json.dumps(report.to_json()))
    assert Report.from_json(document) == report
    assert document["kind"] == report.kind


def test_every_report_kind_has_an_example():
    assert {type(payload) for payload in EXAMPLES} == set(PAYLOADS.values())


def test_report_of_an_unknown_kind_is_malformed():
    with pytest.raises(MalformedMessage, match="no reports of kind 'song'"):
        Report.from_json({"kind": "song", "generation": 1, "rank": 0, "time": 1.0, "data": {}})
