"""How each way of a schedule is carried out against a running job. Every function returns once it has happened."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks.support import own_processes
from benchmarks.support.chaos_schedule import Strike
from benchmarks.support.own_service import POLL_SECONDS, UNHURRIED_SECONDS, JobWentWrong, OwnService
from manta.api.client import ApiError
from manta.service.states import is_final
from manta.workers.paths import rank_stem
from manta.workers.snapshot.snapshot_file import SLOTS, SnapshotFile

WAIT_SECONDS = 240.0
FLIPPED_BYTES = 64


@dataclass
class Target:
    """The job that is struck."""

    service: OwnService
    job_id: str
    ranks: int
    injected: set[str] = field(default_factory=set)
    """Faults that must strike."""

    def until(self, what: str, condition: Callable[[], Any], every: float = POLL_SECONDS) -> Any:
        """Ask `condition` until it holds, and return what it said. Raises JobWentWrong."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not (answer := condition()):
            job = self.service.client.job(self.job_id)
            if time.monotonic() > deadline or is_final(job.state):
                raise JobWentWrong(f"no {what}: the job is {job.state} at step {job.step} ({job.message})")
            time.sleep(every)
        return answer

    def recoveries(self) -> int:
        """Recoveries of the job so far: generations after its first. A control plane that takes over in the middle of
        one writes no record of it."""
        return max(0, self.service.client.job(self.job_id).generation - 1)

    def inject(self, kind: Any, rank: int, reported: bool = True, **more: Any) -> str:
        """Ask for a fault until the job's agents take it; its id. `reported`: it must say that it has struck."""

        def ask() -> str | None:
            try:
                return self.service.client.inject(self.job_id, kind, rank, **more).id
            except ApiError as error:
                if error.problem.code != "fault_not_possible":
                    raise
                return None

        fault = str(self.until(f"fault {kind}", ask))
        if reported:
            self.injected.add(fault)
        return fault

    def pid(self, rank: int) -> int:
        """The process of a rank, as soon as there is one."""
        return int(
            self.until(f"process of rank {rank}", lambda: self.service.processes(self.job_id).get(rank, (0,))[0])
        )

    def send(self, rank: int, number: signal.Signals) -> psutil.Process:
        """A signal to the process of a rank; to the next one where it has just ended."""
        while True:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(self.pid(rank))
                process.send_signal(number)
                return process


def strike(target: Target, what: Strike) -> None:
    """Carry `what` out, once the job has committed the step; a lethal one must make a recovery begin."""
    if what.way != "control_starting":
        job_id = target.job_id
        target.until(
            f"step {what.step}", lambda: target.service.client.job(job_id).step >= what.step, UNHURRIED_SECONDS
        )
    before = target.recoveries() if what.lethal else 0
    CARRIED_OUT[what.way](target, what)
    if what.lethal:
        target.until(f"recovery from {what.way}", lambda: target.recoveries() > before)


def _inject(target: Target, what: Strike) -> None:
    more: dict[str, Any] = {"phase": what.phase}
    if what.way == "kill":
        more["delay"] = what.seconds
    elif what.way in ("partition", "slow"):
        more["seconds"] = what.seconds
    elif what.way == "hang":
        more["hold_gil"] = what.salt % 2 == 0
    # A node takes the agent along, and with it the word that the fault has struck.
    target.inject(what.way, what.rank, reported=what.way != "node", at_step=what.step, **more)


def _kill_starting(target: Target, what: Strike) -> None:
    """A rank is killed, and the process that replaces it too, while it meets the others."""
    target.inject("kill", what.rank, phase="start")
    target.send(what.rank, signal.SIGKILL)


def _kill_recovering(target: Target, what: Strike) -> None:
    """A rank is killed, and another one (or its replacement) while state is restored."""
    target.inject("kill", what.rank, phase="recovery")
    target.send(what.other, signal.SIGKILL)


def _store(target: Target, what: Strike) -> None:
    """The rendezvous store is killed, and then a rank, so that the next generation needs it."""
    fault = target.inject("store", what.rank, at_step=what.step)
    target.until("store killed", lambda: fault in struck(target))
    target.send(what.other, signal.SIGKILL)


def _stop(target: Target, what: Strike) -> None:
    target.send(what.rank, signal.SIGSTOP)


def _stop_and_go_on(target: Target, what: Strike) -> None:
    """A pause: either it is too short to be noticed, or the rank is dead when it is to go on."""
    process = target.send(what.rank, signal.SIGSTOP)
    time.sleep(what.seconds)
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(signal.SIGCONT)


def _agent(target: Target, what: Strike) -> None:
    agents = target.until("agents", lambda: own_processes.agents(target.service.paths))
    with contextlib.suppress(psutil.NoSuchProcess):
        agents[what.salt % len(agents)].kill()


def _zygote(target: Target, what: Strike) -> None:
    target.until("zygote", lambda: own_processes.zygotes(target.service.paths))[0].kill()


def _daemon(target: Target, what: Strike) -> None:
    target.until("zygote", lambda: own_processes.zygotes(target.service.paths))[0].parent().kill()


def _snapshot_flipped(target: Target, what: Strike) -> None:
    """A rank is killed, and bytes of its snapshots were changed before: of all that had sums by then, since a copy that
    was not summed in time is used as it is (decision 0005). It stands still meanwhile."""
    rank = target.send(what.rank, signal.SIGSTOP)
    target.until(f"stop of rank {what.rank}", lambda: _stands_still(rank))
    folder = target.service.paths.snapshot_folder(target.job_id)
    for path in folder.glob(f"{rank_stem(what.rank)}.*snapshot*"):
        _flip(path, what.salt, _summed(path))
    rank.kill()


def _stands_still(process: psutil.Process) -> bool:
    try:
        return bool(process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE))
    except psutil.NoSuchProcess:
        return True


def _summed(path: Path) -> list[range]:
    """Places of the bytes of a snapshot file in which a change is noticed."""
    file = SnapshotFile.open(path)
    try:
        sealed = [slot for slot in range(SLOTS) if file.sealed_sums(slot) is not None]
        slots = [range(file.form.payload_at(slot), file.form.payload_at(slot) + file.form.payload) for slot in sealed]
        return [range(len(file.form.head)), *slots]
    finally:
        file.close()


def _checkpoint_damaged(target: Target, what: Strike) -> None:
    """The newest checkpoint is damaged, all snapshots are lost, and then a rank."""

    def newest() -> str | None:
        whole = [row for row in target.service.client.checkpoints(target.job_id).items if row.state == "complete"]
        return max(whole, key=lambda row: row.step).path if whole else None

    path = Path(target.until("checkpoint", newest))
    files = sorted(file for file in path.iterdir() if file.is_file())
    victim = files[what.salt % len(files)]
    if what.way == "checkpoint_cut":
        os.truncate(victim, victim.stat().st_size // 2)
    else:
        _flip(victim, what.salt, [range(victim.stat().st_size)])
    shutil.rmtree(target.service.paths.snapshot_folder(target.job_id), ignore_errors=True)
    target.send(what.rank, signal.SIGKILL)


def _flip(path: Path, salt: int, places: Sequence[range]) -> None:
    """Change bytes of a file in some of these `places`."""
    draw = random.Random(salt)
    with contextlib.suppress(FileNotFoundError), path.open("r+b") as file:
        for _ in range(FLIPPED_BYTES):
            (place,) = draw.choices(places, [len(place) for place in places])
            at = draw.choice(place)
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 0xFF]))


def _control(target: Target, what: Strike) -> None:
    """The control plane is killed, and is back a little later."""
    target.service.kill()
    time.sleep(what.seconds)
    target.service.start()


def _control_recovering(target: Target, what: Strike) -> None:
    """The control plane is killed while the job recovers from a kill."""
    generation = target.service.client.job(target.job_id).generation
    target.send(what.rank, signal.SIGKILL)
    target.until("recovery", lambda: _recovers(target, generation))
    _control(target, what)


def _recovers(target: Target, generation: int) -> bool:
    job = target.service.client.job(target.job_id)
    return job.state == "RECOVERING" or job.generation > generation


def struck(target: Target) -> set[str]:
    """Faults that have said that they strike."""
    return {str(event.data["fault"]) for event in target.service.events(target.job_id, "fault_struck")}


CARRIED_OUT: dict[str, Callable[[Target, Strike], None]] = {
    **dict.fromkeys(("kill", "hang", "exception", "oom", "partition", "node", "slow"), _inject),
    "kill_starting": _kill_starting,
    "kill_recovering": _kill_recovering,
    "store": _store,
    "agent": _agent,
    "daemon": _daemon,
    "zygote": _zygote,
    "stop": _stop,
    "stop_and_go_on": _stop_and_go_on,
    "snapshot_flipped": _snapshot_flipped,
    "checkpoint_flipped": _checkpoint_damaged,
    "checkpoint_cut": _checkpoint_damaged,
    "control": _control,
    "control_starting": _control,
    "control_recovering": _control_recovering,
}
