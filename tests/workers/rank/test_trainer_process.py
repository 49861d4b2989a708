"""The life of a trainer process under an agent that is the test, with a communication and a trainer that only note what
is asked of them."""

import json
import os
import queue
import signal
import socket
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from engine_specs import document

from workers.checkpoint.checksums import UnreadableCheckpoint
from workers.comm.repair_self_test import RepairSelfTest
from workers.data.corpus_record import FILE_NAME as CORPUS_RECORD
from workers.errors import (
    AskedToRest,
    CheckpointError,
    CheckpointNotSaved,
    DataError,
    DeviceLost,
    NonFiniteError,
    PeerLost,
    ReplicaDiffers,
    SharedMemoryError,
    SpikeError,
)
from workers.liveness.flight_record import FlightRecord
from workers.liveness.progress import Progress, ProgressReader, progress_path
from workers.protocol.json_codec import to_json
from workers.protocol.messages import Fault, LaunchOrder, Resume, TrainerArgument
from workers.protocol.reports import EXIT_SAVED, Event, Failure, Finished, Metrics, Prepared, Report, Resting, Started
from workers.rank import trainer_process
from workers.rank.commands import Arm, Go, Rest, SaveAndEnd, TellFlight, command_line
from workers.rank.trainer_process import EXIT_FAILED, EXIT_PEER_LOST, TrainerProcess, build_rank
from workers.trainer import Places

SECONDS = 20.0


class FakeComm:
    """Notes what it is told; the size of the world is that of the order's spec."""

    def __init__(self, order, progress):
        self.rank, self.progress = order.rank, progress if progress is not None else Progress()
        self.world, self.generation = order.spec.get("world", 1), 0
        self.ended, self.closed, self.forgotten, self.connected, self.cuts = [], 0, 0, [], []
        self.repair = order.spec.get("repair") and RepairSelfTest(**order.spec["repair"])
        self.ends, self.after_step = queue.SimpleQueue(), queue.SimpleQueue()
        self.asked = queue.SimpleQueue()
        self.step = SimpleNamespace(on_phase=None)

    def size(self, axis):
        return self.world

    def connect(self, store, generation, host, secret):
        self.connected.append((store, generation, host, secret))

    def end(self, generation):
        self.ended.append(generation)
        self.ends.put(generation)

    def ask_to_rest(self, generation):
        self.after_step.put(generation)

    def ask_to_end(self, generation):
        self.asked.put(generation)

    def close(self):
        self.closed += 1

    def forget(self):
        self.forgotten += 1

    def try_repair(self, store, generation):
        self.connected.append(("tries repair", store, generation))
        return self.repair

    def cut(self, seconds):
        self.cuts.append(seconds)


class FakeTrainer:
    """Each call of `train` is one of `acts`."""

    def __init__(self, comm, reporter, acts):
        self.comm, self.reporter, self._acts = comm, reporter, acts
        self.step, self.settled_step, self.ends_early = 0, None, False
        self.restored, self.rests, self.closed = [], 0, False
        self.clock = SimpleNamespace(lap=lambda: {"wall": 0.5})

    def restore(self, resume, roll_backs):
        self.restored.append((resume, roll_backs))
        self.step = resume.step

    def train(self):
        self._acts.pop(0)(self)

    def rest(self):
        self.rests += 1

    def close(self):
        self.closed = True


def finish(trainer):
    trainer.step = 10


def lose_peer(trainer):
    trainer.step = trainer.settled_step = 4
    raise PeerLost("rank 1 is gone")


class Rig:
    """A trainer process on a thread, and the agent's end of its control socket."""

    def __init__(self, *acts):
        self.acts, self.built = list(acts), []
        self.hung_up = threading.Event()
        self._ours, self._theirs = socket.socketpair()
        self._ours.settimeout(SECONDS)
        self._lines = self._ours.makefile("rb")

    def build(self, order, progress, reporter):
        """In place of the engine."""
        comm = FakeComm(order, progress)
        self.built.append(FakeTrainer(comm, reporter, self.acts))
        return comm, self.built[-1]

    def start(self, order, prepare=False):
        """Let it run beside the test."""
        self.process = TrainerProcess(order, self._theirs, self.build, self.hung_up.set)
        self.status = None

        def run():
            self.status = self.process.run(prepare)

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    def say(self, command):
        """As the agent."""
        self._ours.sendall(command_line(command))

    def hear(self):
        """The next report."""
        return Report.from_json(json.loads(self._lines.readline()))

    def ended(self):
        """Its exit status."""
        self._thread.join(SECONDS)
        return self.status

    def hang_up(self):
        """As the agent's death does."""
        self._lines.close()
        self._ours.close()

    def close(self):
        self.hang_up()
        assert self.hung_up.wait(SECONDS)
        self._theirs.close()


@pytest.fixture
def rig(monkeypatch):
    """Makes one whose trainer does these acts."""
    made = []
    monkeypatch.setattr(trainer_process, "give_way", lambda: None)

    def make(*acts):
        made.append(Rig(*acts))
        return made[-1]

    yield make
    for each in made:
        each.close()


def order(generation=1, rank=3, **changes):
    return LaunchOrder("job-1", generation, rank, **{"spec": {}, **changes})


def test_a_job_that_ends_well_is_started_finished_and_exits_with_0(rig):
    run = rig(finish)
    resume, roll_back = Resume("snapshot", 7), {"bad_step": 3, "back_to": 2, "samples": []}
    run.start(order(2, resume=resume, roll_backs=(roll_back,)))
    started, finished = run.hear(), run.hear()
    assert isinstance(started.payload, Started)
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
        (NonFiniteError("m"), "not_finite"),
        (SpikeError("m"), "spike"),
        (ReplicaDiffers("m"), "corrupt"),
        (DeviceLost("m"), "device_lost"),
        (CheckpointError("m"), "bad_checkpoint"),
        (UnreadableCheckpoint("m"), "unreadable_checkpoint"),
        (CheckpointNotSaved("m"), "not_saved"),
        (PeerLost("m"), "peer_lost"),
    ],
)
def test_whatever_ends_it_is_told_by_its_kind(rig, capfd, error, kind):
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
    assert failure.exception in capfd.readouterr().err


def test_a_failure_before_there_is_a_trainer_counts_from_the_step_that_it_should_resume_at(rig):
    def fail(*_):
        raise DataError("no corpus")

    run = rig()
    run.build = fail
    run.start(order(resume=Resume("snapshot", 7)))
    failure = run.hear().payload
    assert (failure.kind, failure.step) == ("bad_data", 8)
    assert run.ended() == EXIT_FAILED


def test_where_repair_is_in_place_a_lost_peer_brings_it_to_rest_until_the_next_order(rig):
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
def test_an_order_for_another_rank_or_layout_builds_anew_and_closes_what_was(rig, change, keeps_record):
    run = rig(lose_peer, finish)
    run.start(order(1, in_place=True))
    run.hear()
    run.hear()
    run.say(Go(order(2, in_place=True, **change)))
    run.hear()
    run.hear()
    assert [trainer.comm.forgotten for trainer in run.built] == [1, 0]
    assert run.ended() == 0
    before, after = run.built
    assert before.closed
    assert (after.comm.progress is before.comm.progress) == keeps_record, "the agent watches the record of one rank"


def test_a_prepared_process_is_built_and_waits_for_its_order(rig):
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


def test_the_end_of_a_generation_reaches_who_computes_and_who_has_not_begun_yet(rig):
    def wait_for_the_end(trainer):
        assert trainer.comm.after_step.get(timeout=SECONDS) == 1
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
    run.hear()
    run.hear()
    assert trainer.comm.ended == [-1, 1, 1], "and what is over stays so when it joins the next generation"


def test_one_that_was_asked_to_rest_does_so_where_the_loss_of_a_peer_would_be_its_end(rig):
    def leave(trainer):
        raise AskedToRest("was asked to rest after the step")

    run = rig(leave, finish)
    run.start(order(1, in_place=False))
    run.hear()
    assert run.hear().payload == Resting(None, "was asked to rest after the step")
    run.say(Go(order(2, in_place=False)))
    run.hear()
    run.hear()
    assert run.ended() == 0
    assert len(run.built) == 1, "its model is that of before"


def test_a_late_word_about_an_older_generation_takes_nothing_back(rig):
    run = rig(lose_peer, finish)
    run.start(order(1, in_place=True))
    run.hear()
    run.hear()
    for command in (Rest(3), Rest(2), SaveAndEnd(5), SaveAndEnd(4), Go(order(6, in_place=True))):
        run.say(command)
    run.hear()
    run.hear()
    comm = run.built[0].comm
    assert comm.ended == [-1, 3, 2, 3]
    assert [comm.asked.get(timeout=SECONDS) for _ in range(comm.asked.qsize())] == [-1, 5, 4, 5]


def test_a_rank_says_for_each_generation_when_it_met_the_others(rig, monkeypatch):
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
def test_what_was_built_serves_the_same_place_only(change):
    assert trainer_process._same_place(order(1), order(2, resume=Resume("snapshot", 4), roll_backs=({},)))
    assert not trainer_process._same_place(order(1), order(2, **change))


def test_a_rank_that_is_asked_ends_early_and_says_so_by_its_status_alone(rig):
    def end_early(trainer):
        assert [trainer.comm.asked.get(timeout=SECONDS) for _ in range(2)] == [-1, 1]
        trainer.reporter.metrics({"step": 4})
        trainer.step, trainer.ends_early = 4, True

    run = rig(end_early)
    run.start(order(1))
    run.hear()
    run.say(SaveAndEnd(1))
    assert run.hear().payload == Metrics(({"step": 4},)), "what it had to say before is heard"
    assert run.ended() == EXIT_SAVED


def test_one_that_is_asked_before_it_has_met_the_others_remembers(rig):
    run = rig(lose_peer, finish)
    run.start(order(1, in_place=True))
    run.hear()
    run.hear()
    run.say(SaveAndEnd(2))
    run.say(Go(order(2, in_place=True)))
    run.hear()
    run.hear()
    asked = run.built[0].comm.asked
    assert [asked.get(timeout=SECONDS) for _ in range(asked.qsize())] == [-1, 2, 2]


def test_several_ranks_meet_at_the_store_and_one_that_does_not_answer_is_a_lost_peer(rig, monkeypatch):
    monkeypatch.setattr(trainer_process.dist, "TCPStore", lambda host, port, is_master, timeout: (host, port))
    run = rig(finish)
    run.start(order(2, spec={"world": 4}, store_host="h", store_port=7, secret="s"))
    assert run.hear().payload.connected_at > 0
    assert run.ended() == 0
    assert run.built[0].comm.connected == [(("h", 7), 2, "h", "s")]

    def refuse(*_, **__):
        raise RuntimeError("timed out\nlong story")

    monkeypatch.setattr(trainer_process.dist, "TCPStore", refuse)
    run = rig(finish)
    run.start(order(2, spec={"world": 4}, store_host="h", store_port=7, secret="s"))
    failure = run.hear().payload
    where = f"h:7 from {socket.gethostname()}"
    assert (failure.kind, failure.message) == ("peer_lost", f"no rendezvous store answers at {where}: timed out")
    assert run.ended() == EXIT_PEER_LOST


REPAIR = {"seconds": 0.5, "way": "by hand", "torch_version": "2.13.0", "nccl_version": None}
WORKS = {**REPAIR, "passed": True, "problem": ""}
FAILS = {**REPAIR, "passed": False, "problem": "rank 2: no"}


def tries_repair(monkeypatch, found, rank=0):
    """An order to try repair in place, with what its ranks find out."""
    monkeypatch.setattr(trainer_process.dist, "TCPStore", lambda host, port, is_master, timeout: (host, port))
    meeting = {"store_host": "h", "store_port": 7, "secret": "s"}
    return order(1, rank, spec={"world": 4, "repair": found}, tries_repair=True, **meeting)


def test_where_repair_was_tried_and_works_a_lost_peer_brings_it_to_rest(rig, monkeypatch):
    run = rig(lose_peer, finish)
    run.start(tries_repair(monkeypatch, WORKS))
    event, started, resting = (run.hear().payload for _ in range(3))
    assert (event.type, event.data, event.step) == ("repair_self_test", WORKS, 0)
    assert event.message == "repair in place works here (by hand, tried in 0.5 s)"
    assert isinstance(started, Started) and resting == Resting(4, "rank 1 is gone")
    (trainer,) = run.built
    assert trainer.comm.connected == [("tries repair", ("h", 7), 1), (("h", 7), 1, "h", "s")], "in that order"
    run.say(Go(replace(run.process.order, generation=2, in_place=True, tries_repair=False)))
    assert [type(run.hear().payload) for _ in range(2)] == [Started, Finished]
    assert run.built == [trainer] and len(trainer.comm.connected) == 3, "and is not tried again"


def test_where_it_does_not_work_the_job_goes_on_and_a_lost_peer_ends_the_process(rig, monkeypatch):
    run = rig(lose_peer)
    run.start(tries_repair(monkeypatch, FAILS))
    event, started, failure = (run.hear().payload for _ in range(3))
    assert event.data == FAILS
    assert event.message == "no repair in place: rank 2: no; after a failure all ranks are started again"
    assert isinstance(started, Started) and failure.kind == "peer_lost"
    assert run.ended() == EXIT_PEER_LOST


def test_a_process_that_can_not_be_used_after_it_ends_before_it_trains(rig, monkeypatch):
    run = rig(finish)
    run.start(tries_repair(monkeypatch, {**FAILS, "usable": False}))
    assert run.hear().payload.type == "repair_self_test"
    failure = run.hear().payload
    assert (failure.kind, failure.message) == ("peer_lost", "the self-test of repair in place went wrong: rank 2: no")
    assert run.ended() == EXIT_PEER_LOST


def test_one_rank_tells_for_all(rig, monkeypatch):
    run = rig(finish)
    run.start(tries_repair(monkeypatch, WORKS, rank=3))
    assert isinstance(run.hear().payload, Started)


@pytest.mark.parametrize("given", [{}, {"store_host": "h", "store_port": 7}, {"secret": "s"}], ids=str)
def test_an_order_for_several_ranks_without_a_store_or_a_secret_is_an_error(rig, given):
    run = rig(finish)
    run.start(order(spec={"world": 4}, **given))
    assert "needs a rendezvous store and a secret" in run.hear().payload.message
    assert run.ended() == EXIT_FAILED


def test_rows_and_events_arrive_in_order_as_reports(rig):
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


def test_a_fault_strikes_in_its_phase_after_it_was_told(rig):
    def train(trainer):
        trainer.comm.step.on_phase(4, "data")
        trainer.comm.step.on_phase(5, "forward")

    run = rig(train)
    run.start(order(faults=(Fault("f", "exception", 3, 5, "forward"),)))
    payloads = [run.hear().payload for _ in range(3)]
    assert Event("fault_struck", "exception in forward", 5, {"fault": "f"}) in payloads
    assert (payloads[-1].kind, payloads[-1].exception) == ("exception", "InjectedError")
    assert run.ended() == EXIT_FAILED


def test_a_fault_that_is_armed_while_it_trains_strikes_too(rig):
    """Commands are taken in order: when the end of a generation has come, what was said before it is armed."""

    def train(trainer):
        assert trainer.comm.after_step.get(timeout=SECONDS) == 1
        trainer.comm.step.on_phase(7, "backward")

    run = rig(train)
    run.start(order())
    run.hear()
    run.say(Arm(Fault("f", "exception", 3, 5, "backward")))
    run.say(Rest(1, after_step=True))
    assert run.hear().payload == Event("fault_struck", "exception in backward", 7, {"fault": "f"})
    assert run.hear().payload.exception == "InjectedError"


def test_a_partition_cuts_the_connections_for_its_time(rig):
    def train(trainer):
        trainer.comm.step.on_phase(1, "data")

    run = rig(train)
    run.start(order(faults=(Fault("f", "partition", 3, 1, seconds=2.5),)))
    assert run.ended() == 0
    assert run.built[0].comm.cuts == [2.5]


def test_when_the_agent_hangs_up_the_process_does_not_live_on(rig):
    run = rig(lose_peer)
    run.start(order(in_place=True))
    run.hear()
    run.hear()
    assert not run.hung_up.is_set()
    run.hang_up()
    assert run.hung_up.wait(SECONDS)


def test_the_entry_takes_its_order_as_json(monkeypatch):
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


HARMS = ("signal_self", "hang", "run_out_of_memory", "kill_node", "kill_store")


@pytest.mark.parametrize(
    ("fault", "harm"),
    [
        (Fault("f", "kill", 3, delay=0.5), ("signal_self", signal.SIGKILL, 0.5)),
        (Fault("f", "stop", 3), ("signal_self", signal.SIGSTOP, 0.0)),
        (Fault("f", "hang", 3, hold_gil=True), ("hang", True)),
        (Fault("f", "hang", 3), ("hang", False)),
        (Fault("f", "oom", 3), ("run_out_of_memory",)),
        (Fault("f", "node", 3), ("kill_node",)),
        (Fault("f", "store", 3), ("kill_store", 7)),
    ],
)
def test_each_fault_does_its_own_harm(rig, monkeypatch, fault, harm):
    done = []
    for name in HARMS:
        monkeypatch.setattr(trainer_process, name, lambda *arguments, name=name: done.append((name, *arguments)))

    def train(trainer):
        trainer.comm.step.on_phase(1, "data")

    run = rig(train)
    run.start(order(faults=(fault,), store_port=7))
    assert run.ended() == 0
    assert done == [harm]


def test_a_fault_that_slows_down_stays(rig):
    def train(trainer):
        trainer.comm.step.on_phase(1, "data")

    run = rig(train)
    run.start(order(faults=(Fault("f", "slow", 3, seconds=0.001),)))
    assert run.ended() == 0
    assert run.process._faults.armed


@pytest.mark.parametrize(("device", "gives_way"), [("cpu", 1), ("cuda:0", 0)])
def test_only_who_computes_on_the_cores_gives_way_to_who_watches(rig, monkeypatch, device, gives_way):
    given = []
    monkeypatch.setattr(trainer_process, "give_way", lambda: given.append(1))
    run = rig(finish)
    run.start(order(device=device))
    assert run.ended() == 0
    assert len(given) == gives_way


def test_a_rank_that_is_ready_again_says_which_process_it_is(rig):
    run = rig(finish)
    run.start(order())
    assert run.hear().payload.pid == os.getpid()
    assert run.ended() == 0


@pytest.fixture
def build(monkeypatch, tmp_path):
    """Builds a rank of a job of two without its model; (communication, what the trainer was made of, answers)."""
    made, threads = [], torch.get_num_threads()
    monkeypatch.setattr(trainer_process, "Trainer", lambda *arguments: made.append(arguments))
    monkeypatch.setattr(trainer_process, "answer_with_stacks", lambda *where: made.append(("stacks", *where)))
    spec = document(parallel={"data": 2})

    def build(progress=None, **changes):
        made.clear()
        comm, _ = build_rank(order(rank=1, **{"spec": spec, **changes}), progress, "reporter")
        return comm, made

    yield build
    torch.set_num_threads(threads)


def test_a_rank_is_built_with_its_places_and_the_record_that_its_agent_reads(build, tmp_path):
    torch.set_num_threads(2)
    shared, durable = str(tmp_path / "shared"), str(tmp_path / "job" / "checkpoints")
    comm, (stacks, trainer) = build(snapshot_folder=shared, checkpoint_folder=durable, peak_flops=5e9)
    assert torch.get_num_threads() == 1, "as before a job could say it"
    assert (comm.rank, comm.size("data"), comm.device.type) == (1, 2, "cpu")
    assert stacks == ("stacks", shared, 1)
    record = tmp_path / "job" / CORPUS_RECORD
    assert trainer[1:] == (comm, "reporter", 5e9, Places("job-1", shared, durable, record))
    comm.progress.begin_step(7)
    reader = ProgressReader(progress_path(shared, 1))
    assert reader.read().step == 7
    reader.close()


def test_a_rank_computes_with_as_many_threads_as_its_job_says(build):
    torch.set_num_threads(1)
    spec = document(parallel={"data": 2}, resources={"threads": 3})
    _, ((_, _, _, peak, _),) = build(spec=spec, peak_flops=5e9)
    assert (torch.get_num_threads(), peak) == (3, 15e9), "what one thread can do, times threads"


def test_a_rank_with_a_gpu_computes_on_the_cpu_where_a_test_says_so_over_what_it_would_use_on_the_gpu(
    build, monkeypatch, capsys
):
    monkeypatch.setenv("MANTA_COMPUTE_ON_CPU_FOR_TESTS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    comm, ((_, _, _, peak, _),) = build(device="cuda:0")
    assert (comm.device.type, comm._kind, peak > 0) == ("cpu", "process_groups", True)
    assert capsys.readouterr().out == "rank 1 computes on the CPU, as if on GPU 3\n"
    comm, _ = build(device="cpu")
    assert (comm._kind, capsys.readouterr().out) == ("links", "")


@pytest.mark.parametrize(("said", "kind"), [(None, "links"), ("0", "links"), ("1", "process_groups")])
def test_ranks_on_slots_talk_over_links_unless_a_test_wants_it_otherwise(build, monkeypatch, capsys, said, kind):
    monkeypatch.delenv("MANTA_PROCESS_GROUPS_FOR_TESTS", raising=False)
    if said is not None:
        monkeypatch.setenv("MANTA_PROCESS_GROUPS_FOR_TESTS", said)
    comm, _ = build()
    assert comm._kind == kind
    assert ("communicates over process groups" in capsys.readouterr().out) == (kind == "process_groups")


def test_one_that_goes_on_keeps_its_record_and_one_without_shared_memory_has_a_private_one(build, tmp_path):
    shared, own = str(tmp_path / "shared"), Progress()
    comm, made = build(own, snapshot_folder=shared)
    assert comm.progress is own
    assert len(made) == 1, "it answers with its stacks already"
    assert not (tmp_path / "shared").exists()
    _, ((_, _, _, peak, places),) = build()
    assert places == Places("job-1")
    assert peak > 0, "measured, since nobody has said it"


@pytest.mark.parametrize("taken", [FlightRecord(whole=False), None])
def test_the_flight_record_is_told_while_it_trains_and_keeps_no_command_waiting(rig, monkeypatch, taken):
    asked, go_on = threading.Event(), threading.Event()

    def take():
        asked.set()
        assert go_on.wait(SECONDS)
        return taken

    monkeypatch.setattr(trainer_process, "take_flight_record", take)

    def wait_for_the_end(trainer):
        while trainer.comm.ends.get(timeout=SECONDS) < 1:
            continue  # of no generation before
        go_on.set()
        trainer.comm.ends.get(timeout=SECONDS)
        trainer.step = 10

    run = rig(wait_for_the_end)
    run.start(order(2))
    assert isinstance(run.hear().payload, Started)
    run.say(TellFlight())
    assert asked.wait(SECONDS)
    run.say(Rest(1))
    told = run.hear()
    assert (told.payload, told.generation, told.rank) == (taken or FlightRecord(), 2, 3)
    run.say(Rest(1))
    assert isinstance(run.hear().payload, Finished)
