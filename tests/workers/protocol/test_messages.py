"""Messages and reports between processes, of this release and others."""

import json

import pytest

from manta.workers.liveness.flight_record import FlightOperation, FlightRecord, FlightSequence
from manta.workers.liveness.progress import DeviceRecord
from manta.workers.protocol import messages
from manta.workers.protocol.json_codec import MalformedMessage
from manta.workers.protocol.messages import PROTOCOL, SPOKEN, Fault, LaunchOrder, ProtocolMismatch, check_protocol
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


def test_unsupported_protocol_is_refused_with_both_numbers():
    check_protocol("the agent", PROTOCOL)
    with pytest.raises(ProtocolMismatch, match=f"the agent speaks protocol {PROTOCOL + 1} and this process {PROTOCOL}"):
        check_protocol("the agent", PROTOCOL + 1)


def test_own_protocol_version_is_among_the_supported():
    assert PROTOCOL in SPOKEN


def test_protocol_mismatch_names_spoken_versions_and_the_remedy(monkeypatch):
    monkeypatch.setattr(messages, "SPOKEN", (2, 3))
    check_protocol("the agent", 2)
    check_protocol("the agent", 3)
    with pytest.raises(ProtocolMismatch, match=r"^it speaks protocol 1 and this process 2 and 3: wait$") as caught:
        check_protocol("it", 1, "wait")
    assert caught.value.theirs == 1


def test_secret_of_a_launch_order_is_not_in_its_repr():
    assert "hidden" not in repr(LaunchOrder("job-1", 1, 0, {}, secret="hidden"))


def test_launch_order_knows_layout_sizes_and_defaults_missing_ones_to_one():
    assert LaunchOrder("job-1", 1, 0, {"parallel": {"data": 4, "tensor": 2}}).sizes == (2, 1, 4)
    assert LaunchOrder("job-1", 1, 0, {"parallel": None}).sizes == LaunchOrder("job-1", 1, 0, {}).sizes == (1, 1, 1)


def test_fault_sentence_says_where_and_at_which_step_it_strikes():
    assert Fault("f", "kill", 3, 7, "reduction").sentence == (
        "kill of rank 3 in step 7 (reduction), or as soon as possible after it"
    )
    assert Fault("f", "kill", 3, 7, "start").sentence == "kill of rank 3 at start, or as soon as possible after it"


def test_launch_order_without_optional_fields_gets_safe_defaults():
    """What a control plane of before a field does not send."""
    order = LaunchOrder("job-1", 1, 0, {})
    assert (order.resume.source, order.resume.step, order.resume.began) == ("start", 0, 0)
    assert (order.in_place, order.device, order.faults, order.roll_backs) == (False, "cpu", (), ())
    assert (order.snapshot_folder, order.checkpoint_folder, order.peak_flops) == (None, None, None)


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
