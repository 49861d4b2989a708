"""The program of one process in a scenario. In each generation it is the rank that its position and the generation's
shift give it. It keeps its model and weights where a rank's process would survive, and otherwise starts anew."""

from __future__ import annotations

import hashlib
import json
import math
import sys
import threading
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from fault_scenarios import Generation, PlannedFault, Scenario, world_size
from number_programs import harm
from rank_processes import HOST, SECRET
from repair_programs import PeersToTell, on_each_message
from reported import events_of, rows_of

from manta.service.job.rank_backups import complete_states
from manta.service.recovery.decisions import choose_resume
from manta.workers.checkpoint.catalog import complete_checkpoints
from manta.workers.comm.comm import Comm
from manta.workers.comm.grid import RankGrid, state_groups, state_peers
from manta.workers.config import ParallelConfig
from manta.workers.errors import PeerLost, RestRequested
from manta.workers.parallel.data.state import tensors_of
from manta.workers.protocol.messages import Resume, StoredSnapshot
from manta.workers.protocol.reports import Message
from manta.workers.protocol.requests import Rest, SaveAndEnd
from manta.workers.snapshot.files import layout_tag, snapshot_files, snapshot_path, stored_steps
from manta.workers.snapshot.snapshot_file import committed_steps
from manta.workers.spec.reading import parse_job_spec
from manta.workers.trainer import StatePaths, Trainer
from manta.workers.training.reporter import Reporter

NOT_SENT = 3
"""Steps whose rows a killed rank may not have sent."""
MAX_GENERATIONS = 12
ANY = 10**6


class Interrupted(PeerLost):
    """A rank's own connections were cut, or it is to end as if it was killed."""


@dataclass
class Record:
    """What one process records in all generations."""

    resumed: list[tuple[dict[str, Any], str, int]] = field(default_factory=list)
    """Of each generation its layout, the source of its state, and the step of that."""
    faults: list[tuple[int, str]] = field(default_factory=list)
    """(Generation, kind) of the faults of this process's ranks."""
    redone: list[tuple[int, int]] = field(default_factory=list)
    """After each generation: committed steps that are done again, and how many that may be."""
    rows: dict[int, tuple[int, list[Any]]] = field(default_factory=dict)
    """By step the generation that committed it, and its numbers."""
    rolled_back: list[dict[str, Any]] = field(default_factory=list)
    """Events of this process's ranks."""
    built: list[int] = field(default_factory=list)
    """Generations for which this process built its rank's model."""
    rank: int | None = None
    """In the last generation; None: none."""
    state: str = ""
    """Hash of that rank's state at the end."""


def run_scenario(comm: Comm, scenario: Scenario, folder: str, port: int) -> Record:
    """Train the job of `scenario` to its end, through all its generations. `comm`: of all processes."""
    process = _Process(comm, scenario, Path(folder), port)
    try:
        process.run()
        return process.record
    finally:
        process.end()


@dataclass(frozen=True)
class _Outcome:
    """How a generation has ended for a process."""

    rank: int | None
    parallel: dict[str, Any] | None
    committed: int = 0
    held: int | None = None
    """The step that the process holds; None if it holds none, or ends."""
    done: bool = False
    may_redo: int = 0
    rolled_back: list[dict[str, Any]] = field(default_factory=list)


class _Process:
    def __init__(self, comm: Comm, scenario: Scenario, folder: Path, port: int):
        self.record = Record()
        self._who, self._processes, self._first = comm.rank, comm.size("world"), comm.generation * 1000
        self._scenario, self._port = scenario, port
        self._snapshots, self._saved = folder / "snapshots", folder / "checkpoints"
        self._store = dist.TCPStore(HOST, port, is_master=False)
        self._taking = threading.Lock()
        self._reporter = Reporter(self._take)
        self._comm: Comm | None = None
        self._trainer: Trainer | None = None
        self._peers: PeersToTell | None = None
        self._built: tuple[dict[str, Any], int] | None = None
        self._pending: list[PlannedFault] = []
        self._resumed_from: int | None = None
        """Step that the generation began with, once its state is restored."""
        self._messages = (0, 0)
        """Part of the generation, and messages in it so far."""
        self._killed = False
        self._rolled_back: list[dict[str, Any]] = []
        """What is known to all processes."""

    def run(self) -> None:
        resume, began = Resume(), 1
        for number in range(1, MAX_GENERATIONS):
            generation = self._generation(number)
            outcomes = self._everybodys(number, self._run_generation(number, generation, replace(resume, began=began)))
            self.record.resumed.append((generation.parallel, resume.source, resume.step))
            ranks = [each for each in outcomes if each.rank is not None]
            self._rolled_back = [event for each in outcomes for event in each.rolled_back]
            if all(each.done for each in ranks):
                self._be_hashed()
                return
            resume = self._agreed(number, outcomes)
            began = number + 1 if resume.source == "start" else began
            redone = max(each.committed for each in ranks) - resume.step
            self.record.redone.append((redone, max(each.may_redo for each in ranks)))
        raise AssertionError(f"the job does not end: {self.record}")

    def end(self) -> None:
        """Stop everything."""
        self._put_away()
        self._reporter.close()

    def _generation(self, number: int) -> Generation:
        if number <= len(self._scenario.generations):
            return self._scenario.generations[number - 1]
        return replace(self._scenario.generations[-1], faults=(), until=None)

    def _rank(self, generation: Generation) -> int | None:
        rank = (self._who + generation.shift) % self._processes
        return rank if rank < world_size(generation.parallel) else None

    def _run_generation(self, number: int, generation: Generation, resume: Resume) -> _Outcome:
        """Be a rank of a generation until that is over."""
        rank = self._rank(generation)
        if rank is None:
            self._put_away()
            return _Outcome(None, None)
        if self._built != (generation.parallel, rank):
            self._build(generation.parallel, rank)
            self.record.built.append(number)
        comm, trainer = self._comm, self._trainer
        assert comm is not None and trainer is not None
        self._pending = [fault for fault in generation.faults if fault.rank == rank]
        self._resumed_from, self._messages, self._killed = None, (0, 0), False
        done = ends = False
        may_redo = 0 if self._scenario.has_snapshots else ANY
        try:
            # A connection of its own, as a trainer has: groups that are broken off as they meet take it along.
            comm.connect(dist.TCPStore(HOST, self._port, is_master=False), self._first + number, HOST, SECRET)
            on_each_message(comm, lambda: self._count(number))
            trainer.restore(resume, self._rolled_back if self._scenario.heard else ())
            self._resumed_from = trainer.step
            trainer.train(generation.until)
            done = generation.until is None and not trainer.ends_early
            ends = not done and generation.until is None
        except RestRequested:
            ends = self._leaves(generation, rank)
        except PeerLost:
            may_redo = self._may_redo()
            if self._killed or self._killed_too(number, rank):
                return self._as_killed(number, generation, rank)
            assert self._peers is not None
            self._peers.tell()
        comm.close()
        if not done and not ends:
            trainer.rest()
        outcome = _Outcome(rank, generation.parallel, trainer.step, trainer.settled_step, done, may_redo)
        if ends:
            self._put_away()
            outcome = replace(outcome, held=None)
        return outcome

    def _as_killed(self, number: int, generation: Generation, rank: int) -> _Outcome:
        """Act as if the process were gone: its shared memory stays as it is now, unless the node is lost too."""
        assert self._trainer is not None and self._peers is not None and self._comm is not None
        path, step = snapshot_path(self._snapshots, rank, _tag(self._scenario, generation.parallel)), self._trainer.step
        image = path.read_bytes() if path.exists() else b""
        may_redo = self._may_redo()
        self._peers.tell()
        self._comm.close()
        self._put_away()
        if any(fault.loses_memory for fault in generation.faults):
            path.unlink(missing_ok=True)
            may_redo = ANY
        elif image:
            with path.open("r+b") as file:  # what was done since then is undone
                file.write(image)
            if rank == 0:  # its snapshot has them
                with self._taking:
                    rows = self.record.rows.items()
                    kept = {at: row for at, row in rows if at <= step - NOT_SENT or row[0] != number}
                    self.record.rows = kept
        return _Outcome(rank, generation.parallel, step, None, may_redo=may_redo)

    def _may_redo(self) -> int:
        """How many committed steps a death may cost now."""
        assert self._trainer is not None
        return int(self._trainer.state.snapshot_figures().get("snapshot_every_steps", ANY))

    def _killed_too(self, number: int, rank: int) -> bool:
        key = f"{self._first}-killed-{number}"
        return self._store.check([key]) and rank in json.loads(self._store.get(key))

    def _leaves(self, generation: Generation, rank: int) -> bool:
        """Whether the rank's node is left."""
        return any(fault.kind == "rest" and rank in fault.others for fault in generation.faults)

    def _build(self, parallel: dict[str, Any], rank: int) -> None:
        self._put_away()
        spec = parse_job_spec({**self._scenario.document, "parallel": parallel})
        grid = RankGrid(spec.layout)
        self._comm = Comm(grid, rank, torch.device("cpu"), self._scenario.backend, in_place=True)  # type: ignore[arg-type]
        self._peers = PeersToTell(self._comm, self._port)
        kept = str(self._snapshots) if self._scenario.has_snapshots else None
        saved = str(self._saved) if self._scenario.saves else None
        self._trainer = Trainer(spec, self._comm, self._reporter, 1e12, StatePaths("test", kept, saved))
        if self._scenario.bad_sample is not None:
            harm(self._trainer, {self._scenario.bad_sample: math.nan})
        self._built = (parallel, rank)

    def _put_away(self) -> None:
        """The process of the present rank ends."""
        if self._trainer is not None:
            assert self._comm is not None and self._peers is not None
            self._peers.end()
            self._comm.close()
            self._trainer.close()
            self._comm.forget()
        self._trainer = self._comm = self._peers = self._built = None

    def _count(self, number: int) -> None:
        """The rank waits for one more message; faults that are due happen now."""
        assert self._trainer is not None and self._comm is not None
        part = 0 if self._resumed_from is None else self._trainer.step - self._resumed_from + 1
        before, count = self._messages
        self._messages = part, count + 1 if part == before else 1
        exchanging = _exchanging() if any(each.during for each in self._pending) else None
        due = [each for each in self._pending if self._messages >= (each.part, each.message)]
        for fault in [each for each in due if each.during in (None, exchanging)]:
            self._pending.remove(fault)
            self.record.faults.append((number, fault.kind))
            match fault.kind:
                case "rest":
                    self._comm.requests.add(Rest(self._comm.generation))
                case "pause":
                    self._comm.requests.add(SaveAndEnd(self._comm.generation))
                case "cut":
                    raise Interrupted("the test has cut the connection")
                case "kill":
                    self._killed = True
                    self._store.set(f"{self._first}-killed-{number}", json.dumps(fault.others))
                    raise Interrupted("the test has killed the process")

    def _everybodys(self, number: int, mine: _Outcome) -> list[_Outcome]:
        """How the generation has ended for each process, once it has for all."""
        keys = [f"{self._first}-{number}-{who}" for who in range(self._processes)]
        self._store.set(keys[self._who], json.dumps(asdict(replace(mine, rolled_back=self.record.rolled_back))))
        return [_Outcome(**json.loads(self._store.get(key))) for key in keys]

    def _agreed(self, number: int, outcomes: list[_Outcome]) -> Resume:
        """What the next generation goes on from, as its control plane chooses it."""
        key = f"{self._first}-{number}-resume"
        if self._who == 0:
            self._store.set(key, json.dumps(asdict(self._chosen(self._generation(number + 1), outcomes))))
        chosen = json.loads(self._store.get(key))
        return Resume(**{**chosen, "paths": tuple(chosen["paths"])})

    def _chosen(self, following: Generation, outcomes: list[_Outcome]) -> Resume:
        parallel, tag = following.parallel, _tag(self._scenario, following.parallel)
        layout = _layout(self._scenario, parallel)
        self._bring_back(layout, tag)
        held = []
        for rank in range(layout.world_size):
            stays = outcomes[(rank - following.shift) % self._processes]
            mine = stays.held if (stays.rank, stays.parallel) == (rank, parallel) else None
            held.append({*stored_steps(self._snapshots, rank, tag), *({mine} - {None})})
        groups = {}
        for each in self._scenario.generations:
            other = _tag(self._scenario, each.parallel)
            if other != tag:
                groups[other] = state_groups(_layout(self._scenario, each.parallel))
        files = [
            StoredSnapshot(str(each.path), each.rank, each.layout, each.is_backup, tuple(committed_steps(each.path)))
            for each in snapshot_files(self._snapshots)
        ]
        foreign = [(state.step, state.paths) for state in complete_states({"host": files}, groups)]
        saved = [(manifest.step, str(path)) for path, manifest in complete_checkpoints(self._saved)]
        return choose_resume(held, saved, (), foreign)

    def _bring_back(self, layout: ParallelConfig, tag: str) -> None:
        """Files that were lost with their node, from ranks with the same state."""
        for rank in range(layout.world_size):
            path = snapshot_path(self._snapshots, rank, tag)
            peers = [snapshot_path(self._snapshots, peer, tag) for peer in state_peers(layout, rank)]
            there = [peer for peer in peers if peer.exists()]
            if there and not path.exists():
                path.write_bytes(there[0].read_bytes())

    def _take(self, messages: list[Message]) -> None:
        """On the reporter's thread."""
        with self._taking:
            self.record.rolled_back += [event for event in events_of(messages) if event["type"] == "rolled_back"]
            for row in rows_of(messages):
                keys = ("loss", "grad_norm", "learning_rate", "tokens", "validation_loss")
                known = self.record.rows.get(row["step"], (0, []))
                numbers = [repr(row.get(key)) for key in keys]  # for those that are not a number too
                if row["generation"] >= known[0]:
                    self.record.rows[row["step"]] = (row["generation"], numbers)

    def _be_hashed(self) -> None:
        if self._trainer is None or self._built is None:
            return
        state, engine = hashlib.sha256(), self._trainer.engine
        for tensor in (*tensors_of(engine.parts()), engine.flat.parameters):
            state.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())  # of any type
        self.record.rank, self.record.state = self._built[1], state.hexdigest()
        self._reporter.close()


def _exchanging() -> tuple[str, str] | None:
    """The pass in which rows of experts are being exchanged, and the exchange's function; None outside of these."""
    frame: FrameType | None = sys._getframe(1)
    function, around = "", "forward"
    while frame is not None:
        code = frame.f_code
        if code.co_filename.endswith("experts/dispatch.py"):
            function = code.co_name
        elif code.co_name == "_recompute":
            return (function and ("recompute", function)) or None
        elif code.co_name == "backward":
            around = "backward"
        frame = frame.f_back
    return (around, function) if function else None


def _layout(scenario: Scenario, parallel: dict[str, Any]) -> ParallelConfig:
    return parse_job_spec({**scenario.document, "parallel": parallel}).layout


def _tag(scenario: Scenario, parallel: dict[str, Any]) -> str:
    return layout_tag(_layout(scenario, parallel))
