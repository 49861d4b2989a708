"""The life of a trainer process under an agent that is the test, with a communication and a trainer that only note what
is asked of them."""

import errno
import json
import os
import socket
import threading
from unittest.mock import Mock

import pytest
from trainer_rig import SECONDS, finish, lose_peer, order

from manta.workers.checkpoint.checksums import UnreadableCheckpoint
from manta.workers.errors import (
    CheckpointError,
    CheckpointNotSaved,
    DataError,
    DataNotStored,
    DataUnreadable,
    DeviceLost,
    ModelError,
    NodeExhausted,
    NonFiniteError,
    PeerLost,
    ReplicaDiffers,
    RestRequested,
    SharedMemoryError,
    SpikeError,
    WeightsError,
    WeightsUnreadable,
)
from manta.workers.liveness.flight_record import FlightRecord
from manta.workers.protocol.json_codec import to_json
from manta.workers.protocol.messages import Resume, TrainerArgument
from manta.workers.protocol.reports import EXIT_SAVED, Event, Failure, Finished, Metrics, Prepared, Resting, Started
from manta.workers.protocol.requests import Asked, DumpFlightRecord, Go, Rest, SaveAndEnd
from manta.workers.rank import trainer_process
from manta.workers.rank.trainer_process import EXIT_FAILED, EXIT_PEER_LOST, formatted


def at_rest(rig):
    """A process whose trainer rests after generation 1, and is at its last step in the next."""
    run = rig(lose_peer, finish)
    run.start(order(1, in_place=True))
    run.hear(1)
    return run


def test_a_job_that_ends_well_is_started_finished_and_exits_with_0(rig):
    run = rig(finish)
    resume, roll_back = Resume("snapshot", 7), {"bad_step": 3, "back_to": 2, "samples": []}
    run.start(order(2, resume=resume, roll_backs=(roll_back,)))
    started, finished = run.hear(), run.hear()
    assert isinstance(started.payload, Started) and started.payload.pid == os.getpid()
    assert finished.payload == Finished(10, {"wall": 0.5})
    assert [(report.generation, report.rank) for report in (started, finished)] == [(2, 3), (2, 3)]
    assert run.ended() == 0
    (trainer,) = run.built
    assert trainer.restored == [(resume, (roll_back,))]
    assert trainer.comm.generation == 2


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("of  the\nuser"), "exception"),
        (SharedMemoryError("m"), "no_shared_memory"),
        (DataError("m"), "bad_data"),
        (ModelError("m"), "bad_model"),
        (DataNotStored("m"), "not_saved"),
        (DataUnreadable("m"), "unreadable_data"),
        (WeightsError("m"), "bad_data"),
        (WeightsUnreadable("m"), "unreadable_data"),
        (NonFiniteError("m"), "not_finite"),
        (SpikeError("m"), "spike"),
        (ReplicaDiffers("m"), "corrupt"),
        (DeviceLost("m"), "device_lost"),
        (NodeExhausted("m"), "node_exhausted"),
        (CheckpointError("m"), "bad_checkpoint"),
        (UnreadableCheckpoint("m"), "unreadable_checkpoint"),
        (CheckpointNotSaved("m"), "not_saved"),
        (PeerLost("m"), "peer_lost"),
    ],
)
def test_trainer_failure_is_reported_by_its_kind(rig, capfd, error, kind):
    def fail(trainer):
        trainer.step = 4
        raise error

    run = rig(fail)
    run.start(order())
    assert isinstance(run.hear().payload, Started)
    failure = run.hear().payload
    assert isinstance(failure, Failure)
    assert (failure.kind, failure.step, failure.exception) == (kind, 5, type(error).__name__)
    assert failure.message == ("of the user" if kind == "exception" else "m")
    assert "Traceback" in failure.traceback
    assert run.ended() == (EXIT_PEER_LOST if kind == "peer_lost" else EXIT_FAILED)
    printed = capfd.readouterr().err
    assert ("Traceback" in printed) == (kind in ("exception", "corrupt")) and failure.exception in printed


def test_traceback_of_a_custom_model_shows_the_frames_of_its_package_alone(tmp_path, monkeypatch):
    package = tmp_path / "theirs_that_fails"
    package.mkdir()
    (package / "__init__.py").write_text("def build():\n    return json.loads('{')\nimport json\n")
    monkeypatch.syspath_prepend(tmp_path)
    from theirs_that_fails import build

    with pytest.raises(ValueError, match="Expecting") as caught:
        build()
    text = formatted(caught.value, "theirs_that_fails:build")
    assert "in build" in text and "JSONDecodeError: Expecting" in text and text.count('File "') == 1
    assert formatted(caught.value, None).count('File "') > 3


NO_MORE = "the node gives no more threads, processes, open files or memory: "
ECC = "CUDA error: uncorrectable ECC error encountered"


@pytest.mark.parametrize(
    ("error", "kind", "exception", "message"),
    [
        *(
            (error, "node_exhausted", "NodeExhausted", f"{NO_MORE}{error}")
            for error in (
                RuntimeError("can't start new thread"),
                OSError(errno.EMFILE, "Too many open files"),
                BlockingIOError(11, "again"),
            )
        ),
        (RuntimeError(f"{ECC}\nCUDA kernel errors may be asynchronous"), "device_lost", "DeviceLost",
         f"the GPU has failed: {ECC}"),
        (SystemExit(0), "exception", "RuntimeError", "something in this process asked for its end (status 0)"),
    ],
)  # fmt: skip
def test_error_of_the_node_or_an_exit_is_reported_as_what_it_is(rig, error, kind, exception, message):
    def fail(trainer):
        trainer.step = 4
        raise error

    run = rig(fail)
    run.start(order())
    failure = run.hear(1).payload
    assert (failure.kind, failure.exception, failure.message) == (kind, exception, message)
    assert failure.step == 5 and "in fail" in failure.traceback
    assert ("may be asynchronous" in failure.traceback) == (kind == "device_lost")
    assert run.ended() == EXIT_FAILED


def test_failure_before_training_has_the_step_to_resume_at(rig):
    run = rig()
    run.build = Mock(side_effect=DataError("no corpus"))
    run.start(order(resume=Resume("snapshot", 7)))
    failure = run.hear().payload
    assert (failure.kind, failure.step) == ("bad_data", 8)
    assert run.ended() == EXIT_FAILED


def test_trainer_with_in_place_repair_rests_after_a_lost_peer_until_its_next_order(rig):
    run = rig(lose_peer, finish)
    run.start(order(1, in_place=True))
    assert isinstance(run.hear().payload, Started)
    resting = run.hear()
    assert (resting.payload, resting.generation) == (Resting(4, "rank 1 is gone"), 1)
    (trainer,) = run.built
    assert (trainer.rests, trainer.comm.closed) == (1, 1)
    run.say(Go(order(1, in_place=True)))  # it has been there
    run.say(Go(order(3, in_place=True, resume=Resume("snapshot", 4))))
    started, finished = run.hear(), run.hear()
    assert (started.generation, finished.generation) == (3, 3)
    assert run.ended() == 0
    assert run.built == [trainer], "the same one goes on"
    assert [resume.step for resume, _ in trainer.restored] == [0, 4]


@pytest.mark.parametrize(("change", "keeps_record"), [({"rank": 1}, False), ({"spec": {"other": 1}}, True)])
def test_order_for_another_rank_or_layout_rebuilds_the_trainer(rig, change, keeps_record):
    run = at_rest(rig)
    run.say(Go(order(2, in_place=True, **change)))
    run.hear(1)
    assert [trainer.comm.forgotten for trainer in run.built] == [1, 0]
    assert run.ended() == 0
    before, after = run.built
    assert before.closed
    assert (after.comm.progress is before.comm.progress) == keeps_record, "the agent watches the record of one rank"


def test_prepared_trainer_process_builds_its_trainer_and_waits_for_an_order(rig):
    run = rig(finish)
    run.start(order(5), prepare=True)
    ready = run.hear()
    assert (ready.payload, ready.generation) == (Prepared(), 0)
    assert len(run.built) == 1
    assert run.built[0].restored == []
    run.say(Go(order(6)))
    assert run.hear().generation == 6
    run.hear()
    assert run.ended() == 0
    assert len(run.built) == 1


def test_end_of_a_generation_reaches_computing_and_joining_ranks(rig):
    def wait_for_the_end(trainer):
        trainer.comm.until_asked(rest=1)
        assert [trainer.comm.ends.get(timeout=SECONDS) for _ in range(2)] == [-1, 1]
        raise PeerLost("was ordered to rest")

    run = rig(wait_for_the_end, finish)
    run.start(order(1, in_place=True))
    run.hear()
    run.say(Rest(1, after_step=True))
    run.say(Rest(1))
    (trainer,) = run.built
    assert run.hear().payload == Resting(None, "was ordered to rest")
    run.say(Go(order(2, in_place=True)))
    run.hear(1)
    assert trainer.comm.ended == [-1, 1, 1], "and what is over stays so when it joins the next generation"


def test_trainer_asked_to_rest_does_so_without_in_place_repair_too(rig):
    run = rig(Mock(side_effect=RestRequested("it was asked to stop there")), finish)
    run.start(order(1, in_place=False))
    run.hear()
    assert run.hear().payload == Resting(None, "it was asked to stop there")
    run.say(Go(order(2, in_place=False)))
    run.hear(1)
    assert run.ended() == 0
    assert len(run.built) == 1, "its model is that of before"


def test_trainer_is_not_reopened_by_late_commands_of_older_generations(rig):
    run = at_rest(rig)
    for command in (Rest(3), Rest(2), SaveAndEnd(5), SaveAndEnd(4), Go(order(6, in_place=True))):
        run.say(command)
    run.hear(1)
    comm = run.built[0].comm
    assert comm.ended == [-1, 3, 2, 3]
    assert comm.requests.of(5) == Asked(end=1)


def test_trainer_reports_when_it_connected_in_each_generation(rig, monkeypatch):
    """What a recovery took is measured by that."""
    now = [100.0]
    monkeypatch.setattr(trainer_process.time, "time", lambda: now[0])
    run = rig(lose_peer, finish)
    run.start(order(1, in_place=True))
    assert run.hear().payload.connected_at == 100.0
    run.hear()
    now[0] = 200.0
    run.say(Go(order(2, in_place=True)))
    assert run.hear().payload.connected_at == 200.0
    run.hear()


@pytest.mark.parametrize("change", [{"spec": {"world": 1}}, {"rank": 4}, {"snapshot_folder": "/dev/shm/other"}])
def test_built_trainer_is_reused_only_for_the_same_rank_spec_and_folder(change):
    assert trainer_process._has_same_position(order(1), order(2, resume=Resume("snapshot", 4), roll_backs=({},)))
    assert not trainer_process._has_same_position(order(1), order(2, **change))


def test_rank_told_to_save_and_end_exits_with_the_saved_status(rig):
    def end_early(trainer):
        trainer.comm.until_asked(end=1)
        trainer.reporter.metrics({"step": 4})
        trainer.step, trainer.ends_early = 4, True

    run = rig(end_early)
    run.start(order(1))
    run.hear()
    run.say(SaveAndEnd(1))
    assert run.hear().payload == Metrics(({"step": 4},)), "what it had to say before is heard"
    assert run.ended() == EXIT_SAVED


def test_trainer_asked_to_save_before_it_connects_remembers(rig):
    run = at_rest(rig)
    run.say(SaveAndEnd(2))
    run.say(Go(order(2, in_place=True)))
    run.hear(1)
    assert run.built[0].comm.requests.of(2) == Asked(end=1)


def test_trainer_connects_at_the_store_and_a_silent_store_is_a_lost_peer(rig, monkeypatch):
    monkeypatch.setattr(trainer_process.dist, "TCPStore", lambda host, port, is_master, timeout: (host, port))
    run = rig(finish)
    run.start(order(2, spec={"world": 4}, store_host="h", store_port=7, secret="s"))
    assert run.hear().payload.connected_at > 0
    assert run.ended() == 0
    assert run.built[0].comm.connected == [(("h", 7), 2, "h", "s")]
    monkeypatch.setattr(trainer_process.dist, "TCPStore", Mock(side_effect=RuntimeError("timed out\nlong story")))
    run = rig(finish)
    run.start(order(2, spec={"world": 4}, store_host="h", store_port=7, secret="s"))
    failure = run.hear().payload
    where = f"h:7 from {socket.gethostname()}"
    assert (failure.kind, failure.message) == ("peer_lost", f"no rendezvous store answers at {where}: timed out")
    assert run.ended() == EXIT_PEER_LOST


@pytest.mark.parametrize("given", [{}, {"store_host": "h", "store_port": 7}, {"secret": "s"}], ids=str)
def test_an_order_for_several_ranks_without_a_store_or_a_secret_is_an_error(rig, given):
    run = rig(finish)
    run.start(order(spec={"world": 4}, **given))
    assert "needs a rendezvous store and a secret" in run.hear().payload.message
    assert run.ended() == EXIT_FAILED


def test_trainer_metrics_and_events_are_reported_in_order(rig):
    def train(trainer):
        for step in (1, 2):
            trainer.reporter.metrics({"step": step})
        trainer.reporter.event("spike", 2, "too high", {"policy": "skip"})
        trainer.reporter.metrics({"step": 3})
        trainer.step = 3

    run = rig(train)
    run.start(order())
    payloads = [run.hear().payload]
    while not isinstance(payloads[-1], Finished):
        payloads.append(run.hear().payload)
    rows = [row["step"] for payload in payloads if isinstance(payload, Metrics) for row in payload.rows]
    assert rows == [1, 2, 3]
    (event,) = [payload for payload in payloads if isinstance(payload, Event)]
    assert event == Event("spike", "too high", 2, {"policy": "skip"})
    at = payloads.index(event)
    assert {row["step"] for payload in payloads[at:] if isinstance(payload, Metrics) for row in payload.rows} == {3}


def test_trainer_process_ends_when_its_agent_hangs_up(rig):
    run = rig(lose_peer)
    run.start(order(in_place=True))
    run.hear(1)
    assert not run.hung_up.is_set()
    run.hang_up()
    assert run.hung_up.wait(SECONDS)


def test_trainer_entry_takes_its_order_as_json(monkeypatch):
    """As the zygote hands it on."""
    taken = []

    class Process:
        def __init__(self, order, control):
            taken.append(order)

        def run(self, prepare):
            return 40 + prepare

    monkeypatch.setattr(trainer_process, "TrainerProcess", Process)
    argument = json.loads(json.dumps(to_json(TrainerArgument(order(2), prepare=True))))
    assert trainer_process.run(argument, None) == 41
    assert taken == [order(2)]


@pytest.mark.parametrize(("device", "gives_way"), [("cpu", 1), ("cuda:0", 0)])
def test_trainer_on_a_cpu_lowers_its_priority_and_one_on_a_gpu_does_not(rig, monkeypatch, device, gives_way):
    given = []
    monkeypatch.setattr(trainer_process, "lower_priority", lambda: given.append(1))
    run = rig(finish)
    run.start(order(device=device))
    assert run.ended() == 0
    assert len(given) == gives_way


@pytest.mark.parametrize("taken", [FlightRecord(whole=False), None])
def test_flight_record_is_reported_during_training_without_delaying_commands(rig, monkeypatch, taken):
    asked, go_on = threading.Event(), threading.Event()

    def take():
        asked.set()
        assert go_on.wait(SECONDS)
        return taken

    monkeypatch.setattr(trainer_process, "capture_flight_record", take)

    def wait_for_the_end(trainer):
        while trainer.comm.ends.get(timeout=SECONDS) < 1:
            continue  # of no generation before
        go_on.set()
        trainer.comm.ends.get(timeout=SECONDS)
        trainer.step = 10

    run = rig(wait_for_the_end)
    run.start(order(2))
    assert isinstance(run.hear().payload, Started)
    run.say(DumpFlightRecord())
    assert asked.wait(SECONDS)
    run.say(Rest(1))
    answer = run.hear()
    assert (answer.payload, answer.generation, answer.rank) == (taken or FlightRecord(), 2, 3)
    run.say(Rest(1))
    assert isinstance(run.hear().payload, Finished)
