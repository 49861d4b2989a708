"""The trainer process: what the zygote's child runs for one rank.

It reports over its control socket and dies with it: when the agent goes away, so does the trainer. It may live through
several generations: the first order comes with the fork, the others as commands (`control_socket.py`).
"""

from __future__ import annotations

import errno
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from manta.workers.accounting.device_peak import peak_of_rank
from manta.workers.comm.comm import BackendKind, Comm
from manta.workers.comm.flight_recorder import capture_flight_record
from manta.workers.comm.grid import RankGrid
from manta.workers.config import TrainConfig
from manta.workers.data.corpus_record import FILE_NAME as CORPUS_RECORD
from manta.workers.errors import MantaError, NodeExhausted, PeerLost, RestRequested, failure_kind
from manta.workers.liveness.flight_record import FlightRecord
from manta.workers.liveness.progress import Progress
from manta.workers.liveness.stacks import answer_with_stacks
from manta.workers.protocol.json_codec import JsonObject, from_json
from manta.workers.protocol.messages import FAULT_STRUCK, Fault, LaunchOrder, TrainerArgument
from manta.workers.protocol.reports import (
    EXIT_SAVED,
    REPAIR_SELF_TEST,
    Event,
    Failure,
    Finished,
    Message,
    Prepared,
    Report,
    Resting,
    Started,
)
from manta.workers.protocol.requests import Arm, Command, DumpFlightRecord, Requests, Rest
from manta.workers.rank.control_socket import CommandReader, exit_orphaned, report_lines, reports_of
from manta.workers.rank.faults import Faults, InjectedError, hang, kill_node, kill_store, run_out_of_memory, signal_self
from manta.workers.settings import read_backend, read_computes_on_cpu, read_visible_gpus
from manta.workers.snapshot.node_memory import SnapshotMemory
from manta.workers.spec.reading import parse_job_spec
from manta.workers.storage.locations import parse_location
from manta.workers.system import gpu
from manta.workers.system.priority import lower_priority
from manta.workers.system.sockets import host_and_port
from manta.workers.system.threads import threads_of
from manta.workers.trainer import StatePaths, Trainer
from manta.workers.training.log_lines import LogLines
from manta.workers.training.reporter import Reporter

EXIT_FAILED, EXIT_PEER_LOST = 1, 75
STORE_TIMEOUT = timedelta(seconds=20)
_EXHAUSTED = (errno.EAGAIN, errno.EMFILE, errno.ENFILE, errno.ENOMEM)

Build = Callable[[LaunchOrder, Progress | None, Reporter], tuple[Comm, Trainer]]
"""Creates the communication and the trainer for an order, with an existing progress record, if any."""


def run(argument: JsonObject, control: socket.socket) -> int:
    """Train according to `argument`, a TrainerArgument; returns the exit status.

    For errors see `TrainerProcess.run`.
    """
    task = from_json(TrainerArgument, argument)
    process = TrainerProcess(task.order, control)
    return process.run(task.prepare)


class TrainerProcess:
    """One rank in one process, through the generations that the process survives."""

    def __init__(
        self,
        order: LaunchOrder,
        control: socket.socket,
        build: Build | None = None,
        orphaned: Callable[[], object] = exit_orphaned,
    ):
        """`build`: creates communication and trainer for an order (default: `build_rank`); `orphaned`: called when the
        agent has disconnected."""
        self.order = order
        self._build_rank = build if build is not None else build_rank
        self.reporter = Reporter(self._sink)
        self._control = control
        self._comm: Comm | None = None
        self._trainer: Trainer | None = None
        self._built: LaunchOrder | None = None
        self._connected_at = 0.0
        self._lost_peer = ""
        self._ended_generation = -1
        self._sending = threading.Lock()
        self._faults = Faults(self._strike)
        self._requests = Requests()
        self._commands = CommandReader(control, self._take, orphaned)

    def run(self, prepare: bool = False) -> int:
        """Carry out the order, or with `prepare` get ready for one like it and carry that out; returns the exit status.

        Any error becomes a `failure` report, except for the loss of a peer if the order is to repair in place. The
        process then comes to rest and continues in the next generation, as it does when it is asked to rest.
        """
        try:
            if prepare:
                self._prepare()
            while not self._train():
                self._rest()
        except SystemExit as request:
            # From a user's code: with its status, perhaps 0, it would look like a completed job.
            error = RuntimeError(f"something in this process asked for its end (status {request.code})")
            error.__cause__ = request
            return self._fail(error)
        except Exception as error:  # noqa: BLE001 - the border of the process: everything is reported, nothing continues
            return self._fail(error)
        return self._finish()

    def _prepare(self) -> None:
        """Get ready for an order like this one, then wait for it."""
        self.order = replace(self.order, generation=0)
        self._build()
        self.reporter.send(Prepared())
        self.order = self._commands.next_order(after=0)

    def _train(self) -> bool:
        """Train in the order's generation until the job's last step; False if it is to rest before that."""
        try:
            self._join()
            trainer = self._trainer
            assert trainer is not None
            self.reporter.send(Started(os.getpid(), self._connected_at, trainer.step))
            if self.order.device == "cpu":
                lower_priority()
            trainer.train()
        except PeerLost as error:
            if not (self.order.in_place or isinstance(error, RestRequested)):
                raise
            self._lost_peer = str(error)  # not the error, whose frames hold the aborted step's activations
            return False
        return True

    def _rest(self) -> None:
        """Leave the generation at once, so that ranks that wait for this one are released; then wait for the next
        order."""
        if self._comm is not None:
            self._comm.close()
        step = None
        if self._trainer is not None:
            self._trainer.rest()
            step = self._trainer.settled_step
        self.reporter.send(Resting(step, self._lost_peer))
        self.order = self._commands.next_order(self.order.generation)

    def _finish(self) -> int:
        """Report that the job's last step is committed, unless the process ends first."""
        assert self._trainer is not None
        early, step = self._trainer.ends_early, self._trainer.step
        if not early:
            self.reporter.send(Finished(step, self._trainer.clock.lap()))
        self.reporter.close()
        if self.order.rank == 0:
            how = f"stopped after step {step}; its state is saved" if early else f"finished all {step} steps"
            print(f"generation {self.order.generation}: {how}", flush=True)
        return EXIT_SAVED if early else 0

    def _fail(self, error: Exception) -> int:
        """Report the failure."""
        error = _as_exhausted(gpu.as_lost(error))
        kind = error.failure_kind if isinstance(error, MantaError) else "exception"
        step = self._trainer.step if self._trainer is not None else self.order.resume.step
        message = " ".join(str(error).split()) or type(error).__name__
        text = formatted(error, self.order.spec.get("model", {}).get("entrypoint"))
        is_enough = failure_kind(kind).is_sentence or kind == "peer_lost"
        print(f"{type(error).__name__}: {message}" if is_enough else text, file=sys.stderr, flush=True)
        self.reporter.send(Failure(kind, step + 1, type(error).__name__, message, text))
        self.reporter.close()
        return EXIT_PEER_LOST if kind == "peer_lost" else EXIT_FAILED

    def _join(self) -> None:
        """Connect to the ranks of the order's generation and restore the state that they resume from."""
        order = self.order
        self._build()
        assert self._comm is not None and self._trainer is not None
        self._faults.arm(order.faults)
        self._watch_for_faults()
        self._comm.end(self._ended_generation)
        if self._comm.size("world") > 1:
            if order.store_host is None or order.store_port is None or order.secret is None:
                raise ValueError("a job of several ranks needs a rendezvous store and a secret in its launch order")
            try:
                store = dist.TCPStore(order.store_host, order.store_port, is_master=False, timeout=STORE_TIMEOUT)
            except RuntimeError as error:
                where = f"{host_and_port(order.store_host, order.store_port)} from {socket.gethostname()}"
                raise PeerLost(f"no rendezvous store answers at {where}: {str(error).splitlines()[0]}") from error
            if order.tries_repair:
                self._try_repair(store)
            self._comm.connect(store, order.generation, order.store_host, order.secret)
        self._connected_at = time.time()
        self._comm.generation = order.generation
        self._trainer.restore(order.resume, order.roll_backs)

    def _try_repair(self, store: dist.Store) -> None:
        """Test together with the other ranks whether a lost peer can be repaired in place. Raises PeerLost if this
        process cannot be used any more after that."""
        assert self._comm is not None
        result = self._comm.try_repair(store, self.order.generation)
        if self.order.rank == 0:
            self.reporter.event(REPAIR_SELF_TEST, self.order.resume.step, result.sentence, result.to_json())
        if not result.usable:
            raise PeerLost(f"the self-test of repair in place went wrong: {result.problem}")
        self.order = replace(self.order, in_place=result.passed)

    def _build(self) -> None:
        """Create what the order needs, unless it exists: another layout needs another rank's model."""
        order = self.order
        if self._built is not None and _has_same_position(self._built, order):
            return
        if self._trainer is not None:
            self._trainer.close()
        # The agent watches this rank's record, so the same one is used again.
        before = self._comm
        progress = before.progress if before is not None and before.rank == order.rank else None
        if before is not None:
            before.forget()
        self._comm = self._trainer = before = None  # before the new ones, so that memory never holds both
        self._comm, self._trainer = self._build_rank(order, progress, self.reporter)
        self._comm.requests = self._requests
        self._built = order

    def _take(self, command: Command) -> None:
        """Begin to carry out a command of the agent. Called by the thread that reads them."""
        match command:
            case Rest(generation, after_step=False):
                self._ended_generation = max(self._ended_generation, generation)
                if self._comm is not None:
                    self._comm.end(generation)
            case Arm(fault):
                self._faults.arm([fault])
                self._watch_for_faults()
            case DumpFlightRecord():
                self._send_flight_record()
            case _:
                self._requests.add(command)

    def _sink(self, messages: list[Message]) -> None:
        """Print what people read of it before it is sent: then the agent may answer with another order."""
        lines = log_lines_of(self.order)
        for line in (line for message in messages for line in lines.of(message.payload)):
            print(line, flush=True)
        self._send(reports_of(self.order, messages))

    def _send(self, reports: list[Report]) -> None:
        with self._sending:
            self._control.sendall(report_lines(reports))

    def _send_flight_record(self) -> None:
        """On a separate thread: commands that may release this rank must not wait for NCCL's recorder."""

        def send_record() -> None:
            record = capture_flight_record() or FlightRecord()
            self._send([Report(record, self.order.generation, self.order.rank, time.time())])

        threading.Thread(target=send_record, name="flight record", daemon=True).start()

    def _watch_for_faults(self) -> None:
        if self._comm is not None and self._faults.armed:
            self._comm.step.on_phase = self._faults.reached

    def _strike(self, fault: Fault, step: int) -> None:
        """Report it, before anything that the reporter has not sent yet, and carry it out. Raises InjectedError."""
        report = Event(FAULT_STRUCK, f"{fault.kind} in {fault.phase}", step, {"fault": fault.id})
        self._send([Report(report, self.order.generation, self.order.rank, time.time())])
        match fault.kind:
            case "kill":
                signal_self(signal.SIGKILL, fault.delay)
            case "stop":
                signal_self(signal.SIGSTOP, fault.delay)
            case "hang":
                hang(fault.hold_gil)
            case "oom":
                run_out_of_memory()
            case "exception":
                raise InjectedError(f"fault {fault.id} was requested")
            case "slow":
                self._faults.slow_down(fault.seconds)
            case "node":
                kill_node()
            case "store" if self.order.store_port is not None:
                kill_store(self.order.store_port)
            case "partition" if self._comm is not None:
                self._faults.cut_off(fault.seconds)
                self._comm.break_connections()


def _has_same_position(one: LaunchOrder, other: LaunchOrder) -> bool:
    """Whether what was built for `one` can be used for `other`."""
    return (one.spec, one.rank, one.snapshot_folder) == (other.spec, other.rank, other.snapshot_folder)


def _as_exhausted(error: Exception) -> Exception:
    """`error`, or NodeExhausted if it says that the node gives this process no more of something."""
    no_thread = isinstance(error, RuntimeError) and str(error) == "can't start new thread"
    if not (no_thread or (isinstance(error, OSError) and error.errno in _EXHAUSTED)):
        return error
    exhausted = NodeExhausted(f"the node gives no more threads, processes, open files or memory: {error}")
    exhausted.__cause__ = error
    return exhausted


def formatted(error: Exception, entrypoint: str | None) -> str:
    """The traceback of `error`. If code of the custom model at `entrypoint` was involved, only that code's frames."""
    shown = traceback.TracebackException.from_exception(error)
    module = sys.modules.get((entrypoint or "").partition(":")[0].partition(".")[0])
    for folder in getattr(module, "__path__", [getattr(module, "__file__", None)]):
        theirs = [frame for frame in shown.stack if folder is not None and frame.filename.startswith(folder)]
        if theirs:
            shown.stack = traceback.StackSummary.from_list(theirs)
    return "".join(shown.format())


def log_lines_of(order: LaunchOrder) -> LogLines:
    """The lines of the rank that carries out `order`."""
    train = order.spec.get("train", {})
    every = train.get("log_every", TrainConfig.model_fields["log_every"].default)
    return LogLines(train.get("steps", 0), every, order.rank, order.generation, order.cause)


def build_rank(order: LaunchOrder, progress: Progress | None, reporter: Reporter) -> tuple[Comm, Trainer]:
    """Communication and trainer of the order's rank. `progress`: an existing record; None: a new one."""
    spec = parse_job_spec(order.spec)
    torch.set_num_threads(threads_of(spec))
    device, backend = _device_of(order)
    gpu.use_for(spec, device)
    if progress is None and order.snapshot_folder is not None:
        answer_with_stacks(order.snapshot_folder, order.rank)
        progress = Progress.shared(order.snapshot_folder, order.rank)
    in_place = order.in_place or order.tries_repair
    if backend is None and (backend := read_backend()) is not None:
        print(f"rank {order.rank} communicates over process groups, since a test wants that", flush=True)
    comm = Comm(RankGrid(spec.layout), order.rank, device, backend, progress, order.ports, in_place)
    comm.step.enter("preparing")  # memory for the state and its snapshots is allocated at some GB/s
    peak = peak_of_rank(device, spec, order.peak_flops)
    record = parse_location(order.checkpoint_folder).parent / CORPUS_RECORD if order.checkpoint_folder else None
    cache = Path(order.token_cache) if order.token_cache else None
    keeps = spec.checkpoint.snapshots
    snapshots, keeper = (None, None) if keeps == "off" else (order.snapshot_folder, order.memory_keeper)
    memory = SnapshotMemory("auto" if keeps == "off" else keeps, Path(keeper) if keeper else None)
    places = StatePaths(order.job, snapshots, order.checkpoint_folder, record, cache, memory=memory)
    return comm, Trainer(spec, comm, reporter, peak, places)


def _device_of(order: LaunchOrder) -> tuple[torch.device, BackendKind | None]:
    """The rank's device, and its communication backend; None: the usual one for the device."""
    device = torch.device(order.device)
    if device.type == "cpu" or not read_computes_on_cpu():
        return device, None
    print(f"rank {order.rank} computes on the CPU, as if on GPU {read_visible_gpus()}", flush=True)
    return torch.device("cpu"), "process_groups"
