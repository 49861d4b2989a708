"""A real service as its users reach it, and what tests of whole services ask of it, do to it and wait for."""

import contextlib
import copy
import functools
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.support import own_processes
from manta.api.cli.service import start_service, stop_service
from manta.api.client import ApiError, Client, ServiceUnreachable
from manta.api.serving.local_service import running_service
from manta.service.own_files import read_key
from manta.service.settings import Settings
from manta.service.states import is_final
from manta.workers.liveness.progress import progress_path
from manta.workers.paths import Paths

SECONDS = 60.0
POLL_SECONDS = 0.2
"""Each look costs 6 ms of the cores that the job runs on."""
WAIT_SECONDS = 10.0
"""How long the service is asked at a time to say when a job is over."""
OFTEN_SECONDS = 0.02
"""How often it is looked for what lasts for a moment only."""
STEPS = 60
SLOTS = 8
MIDDLE = 20
PAIR = (1, 1, 2)
"""Layout of a job that needs no more than two ranks."""
EVERY_STEP = {"every_steps": 0, "snapshot_every_steps": 1}
"""`checkpoint` of a job of which a death costs one step at most; without, the interval grows on a slow machine."""
SLOW_SECONDS = 0.1
LASTING = pytest.mark.parametrize("seconds", [0.0, pytest.param(60.0, marks=pytest.mark.soak)])
"""How long a bad day lasts at least; see `Manta.endure`."""
FAKE_NVML = Path(__file__).parents[1] / "support" / "fake_nvml"
HOLD_SECONDS = 0.5
"""How long each step of a job that is held takes: longer than anything that a test does meanwhile."""
LONG_HOLD_SECONDS = 1.0
"""The same where a service is started again meanwhile, or few steps are left to be held, and the process that is held
is replaced in the end. A step that took 1.5 s more than those before would count as hung."""
NO_SECONDS = 1e-9
"""As few as a fault can have."""


class Manta:
    """A running service as its users see it, and what tests do behind its back."""

    _ends = False
    """Whether it goes with the last test of a folder."""

    def __init__(
        self,
        home: Path,
        corpus: Path,
        slots: int | None = SLOTS,
        database: str | None = None,
        ray: str | None = None,
        dashboard: bool = True,
        environment: Mapping[str, str] | None = None,
    ):
        """`database`: its URL, where it is not in the home; `ray`: address of the Ray, where it is not its own;
        `dashboard`: whether it has one; `environment`: of the service beside this process's."""
        self.database, self._ray, self._dashboard = database, ray, dashboard
        self._environment = environment or {}
        self.home, self.paths, self._corpus, self._slots = home, Paths.of(home), corpus, slots
        self.url = ""
        self.start()

    def start(self) -> None:
        """`manta up`."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MANTA_NO_DASHBOARD", "0" if self._dashboard else "1")
            for name, value in self._environment.items():
                patch.setenv(name, value)
            settings = Settings(self.home, allow_faults=True, database_url=self.database)
            self.url = start_service(settings, "127.0.0.1", 0, self._slots, self._ray)
        self.client = Client.of_home(self.home)

    @property
    def key(self) -> str:
        """The automatic key."""
        return str(read_key(self.home))

    def kill_service(self, with_signal: int = signal.SIGKILL) -> None:
        """Send the service's process this signal, and nobody else; return when it has ended."""
        process = psutil.Process(int(str(running_service(self.home)["pid"])))
        process.send_signal(with_signal)
        process.wait(30)

    def answers(self) -> bool:
        """Whether the service answers at its address and can run jobs."""
        try:
            return bool(self.client.ready())
        except (ServiceUnreachable, ApiError):
            return False

    def spec(self, steps: int = STEPS, layout: tuple[int, int, int] = (2, 1, 2), **sections: Any) -> dict:
        """A tiny job of tensor x pipeline x data ranks; `sections` are merged into the spec's."""
        tensor, pipeline, data = layout
        document: dict[str, Any] = {
            "name": "tiny",
            "model": {"layers": 2, "hidden_size": 32, "heads": 4, "sequence_length": 32},
            "data": {"source": "text", "paths": [str(self._corpus)]},
            "train": {"steps": steps, "global_batch_size": 8, "micro_batch_size": min(4, 8 // data)},
            "parallel": {"tensor": tensor, "pipeline": pipeline, "data": data},
            "checkpoint": {"every_steps": 0},
        }
        for name, section in sections.items():
            document[name] = {**document.get(name, {}), **section} if isinstance(section, dict) else section
        return document

    def submit(self, document: dict) -> str:
        """Submit over REST; the job's id."""
        return self.client.submit(copy.deepcopy(document)).id

    def until(
        self, what: str, condition: Callable[[], Any], seconds: float = SECONDS, every: float = POLL_SECONDS
    ) -> Any:
        """Ask `condition` until it holds, and return what it said."""
        deadline = time.monotonic() + seconds
        while not (answer := condition()):
            assert time.monotonic() < deadline, f"{what} did not happen within {seconds:g} s"
            time.sleep(every)
        return answer

    def endure(self, seconds: float) -> None:
        """Let a bad day last for so long."""
        end = time.monotonic() + seconds
        self.until("the end of a bad day", lambda: time.monotonic() >= end, seconds + SECONDS)

    def until_step(self, job: str, step: int, every: float = POLL_SECONDS) -> None:
        """Wait until the job has committed `step`."""

        def reached() -> bool:
            seen = self.client.job(job)
            assert seen.step >= step or not is_final(seen.state), self.story(job)
            return seen.step >= step

        self.until(f"step {step} of {job}", reached, every=every)

    def inject(self, job: str, kind: Any, rank: int, **more: Any) -> Any:
        """Ask for a fault as soon as the job has processes. How many steps it has made by then is not known: what is
        to strike in a certain step of a short job is asked for while it is `starting`."""
        self.pids(job)  # an agent that still starts would take a fault without saying so in time
        return self._inject(job, kind, rank, **more)

    def _inject(self, job: str, kind: Any, rank: int, **more: Any) -> Any:
        def taken() -> Any:
            try:
                return self.client.inject(job, kind, rank, **more)
            except ApiError as error:
                assert error.problem.status == 409 and not is_final(self.client.job(job).state), self.story(job)
                return None

        return self.until("the fault being taken", taken, every=OFTEN_SECONDS)

    @contextlib.contextmanager
    def starting(
        self, document: dict, submit: Callable[[dict], str] | None = None
    ) -> Iterator[tuple[str, Callable[..., Any]]]:
        """Submit a job that has agents, and no processes before the end of the block; the job, and what asks for its
        faults meanwhile. They strike where they are to, however fast the job and however slow the test is. `submit`:
        how it is submitted; None: over REST."""
        with self.zygote_stopped():
            job = (submit or self.submit)(document)
            # This is decided when all agents have said where they are: none is so new that it takes a fault too late.
            self.until("its agents", lambda: self.client.job(job).spec["resources"]["threads"] != "auto")
            yield job, functools.partial(self._inject, job)

    def submit_held(self, document: dict, rank: int, step: int = MIDDLE, seconds: float = HOLD_SECONDS) -> str:
        """Submit a job, and wait until it has committed `step`; from then on each step takes `seconds`, until the
        process of `rank` is replaced. So what the test does next happens in the middle of the run."""
        with self.starting(document) as (job, inject):
            inject("slow", rank, at_step=step + 1, seconds=seconds)
        self.until_step(job, step)
        return job

    def hold(self, job: str, rank: int, step: int = MIDDLE, seconds: float = HOLD_SECONDS) -> None:
        """The same for a job that runs: one of which another rank is held already, or that has steps to spare. Any
        other may be past `step`, or over: `starting` and `hold_from_the_next` are for those."""
        self.inject(job, "slow", rank, at_step=step + 1, seconds=seconds)
        self.until_step(job, step)

    def resume_held(self, job: str, rank: int, step: int, seconds: float = HOLD_SECONDS) -> None:
        """Resume a job that is paused; after `step` each step takes `seconds`."""
        with self.zygote_stopped():
            self.client.resume(job)
            self._inject(job, "slow", rank, at_step=step + 1, seconds=seconds)

    def hold_from_the_next(self, job: str, rank: int, seconds: float = HOLD_SECONDS) -> None:
        """From the beginning of its next generation on each step takes `seconds`, until the process that `rank` has
        then is replaced."""
        self.inject(job, "slow", rank, phase="recovery", seconds=seconds)

    def release_job(self, job: str, rank: int) -> None:
        """The opposite of `hold`: steps take as long as they do."""
        self.inject(job, "slow", rank, seconds=NO_SECONDS)

    def leave_room(self, job: str) -> None:
        """Make each step take a little longer, until the process of rank 0 is replaced: a job that runs on and on then
        leaves the cores to whatever else happens."""
        self.inject(job, "slow", 0, seconds=SLOW_SECONDS)

    @contextlib.contextmanager
    def zygote_stopped(self) -> Iterator[None]:
        """Nothing can be forked meanwhile: a job that starts goes on starting, one that recovers recovering."""
        with suspended(self.zygotes()):
            yield

    def until_ended(self, *pids: int) -> None:
        """Wait until these processes of a job have ended, though nobody may be there who notices."""
        self.until("their end", lambda: all(_has_ended(pid) for pid in pids), every=OFTEN_SECONDS)

    def succeeded(self, job: str, curve: Any) -> Any:
        """Wait until the job has succeeded, with this curve; the job."""
        ended = self.until_state(job, "SUCCEEDED")
        assert (found := self.curve(job)) == curve, (found, curve)
        return ended

    def cancel(self, job: str) -> None:
        """Cancel the job and wait for its end."""
        self.client.cancel(job)
        self.until_state(job, "CANCELLED")

    def until_state(self, job: str, *states: str, seconds: float = SECONDS) -> Any:
        """Wait until the job is in one of `states`; the job."""

        at_the_end = all(is_final(state) for state in states)

        def reached() -> Any:
            seen = self.client.job(job, wait=WAIT_SECONDS if at_the_end else None)
            assert seen.state in states or not is_final(seen.state), self.story(job)
            return seen if seen.state in states else None

        every = POLL_SECONDS if at_the_end else OFTEN_SECONDS
        try:
            return self.until(f"{job} being {' or '.join(states)}", reached, seconds, every)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.story(job)}") from None

    def until_generation(self, job: str, generation: int) -> None:
        """Wait until generation number `generation` has been started."""
        self.until(f"generation {generation}", lambda: self.client.job(job).generation >= generation)

    def until_recovered(self, job: str, times: int) -> None:
        """Wait until the job has recovered so often: its newest generation has committed a step of its own, whatever
        the ones before had committed."""
        self.until(f"recovery {times}", lambda: len(self.events(job, "recovered")) == times, every=OFTEN_SECONDS)

    def pids(self, job: str) -> list[int]:
        """Process ids of the trainers by rank, as `/ranks` tells them; all of them are there."""
        return self.until("all ranks", lambda: self._all_pids(job), every=OFTEN_SECONDS)

    def _all_pids(self, job: str) -> list[int] | None:
        pids = [rank.pid for rank in self.client.ranks(job).items]
        if pids and all(pids):
            return pids
        assert not is_final(self.client.job(job).state), self.story(job)
        return None

    def curve(self, job: str) -> list[tuple[int, float, float]]:
        """(step, loss, gradient norm) of each step."""
        metrics = self.client.metrics(job, names=["loss", "grad_norm"], max_points=10_000)
        return list(zip(metrics.steps, metrics.series["loss"], metrics.series["grad_norm"], strict=True))

    def events(self, job: str, kind: str | None = None) -> list[Any]:
        """The job's events, oldest first, or those of one type."""
        items, cursor = [], None
        while True:
            page = self.client.events(job, cursor)
            items += page.items
            if page.next_cursor is None:
                return [event for event in items if kind in (None, event.type)]
            cursor = page.next_cursor

    def story(self, job: str) -> str:
        """Everything that happened to the job, for messages of failed tests."""
        seen = self.client.job(job)
        lines = [f"{event.type}: {event.message}" for event in self.events(job)]
        return "\n".join([f"{job} is {seen.state} ({seen.reason}: {seen.message}), step {seen.step}", *lines])

    def trainers(self) -> list[psutil.Process]:
        """Processes that the zygote forked: trainers and rendezvous stores."""
        return own_processes.forked(self.paths)

    def zygote(self) -> psutil.Process:
        """The node's zygote, which is there some moments after the service is."""
        zygote: psutil.Process = self.until("a zygote", lambda: own_processes.zygotes(self.paths))[0]
        return zygote

    def zygotes(self) -> list[psutil.Process]:
        """Those of all nodes that ranks can be on."""
        return [self.zygote()]

    def agents(self) -> list[psutil.Process]:
        """The processes of all agents."""
        return own_processes.agents(self.paths)

    def agent_of(self, job: str, rank: int) -> psutil.Process:
        """The process of a rank's agent, by the record of its trainer's progress, which it maps."""
        record = str(progress_path(self.paths.snapshot_folder(job), rank))
        readers: list[psutil.Process] = self.until(
            "its agent", lambda: [each for each in self.agents() if _has_mapped(each, record)]
        )
        (agent,) = readers
        return agent

    def leftovers(self, job: str) -> list[str]:
        """What a job that is over still holds: files in shared memory, processes."""
        return own_processes.leftovers(self.paths, job)

    def keeps_only_snapshots(self, job: str) -> bool:
        """Whether a job that failed holds its snapshots, for a retry, and no process."""
        return bool(self.leftovers(job)) and not own_processes.forked(self.paths)

    def end_with(self, folder: pytest.Dir) -> None:
        """`manta down` after the last test of the folder: idle, a service takes 7% of a core from other tests."""
        if not self._ends:
            self._ends = True
            folder.addfinalizer(lambda: stop_service(self.home))

    def end_all_jobs(self) -> None:
        """Cancel what still runs, and wait until its processes are gone and nothing is left to be done for it; start
        the service if it does not answer."""
        if not self.answers():
            self.start()
        running = [job.id for job in self.client.jobs(limit=200).items if not is_final(job.state)]
        for job in running:
            try:
                self.client.cancel(job)
            except ApiError as error:  # it has come to its end by itself
                assert error.problem.status == 409, error
        if running:
            self.until("the end of their processes", lambda: not self.trainers() and not self.agents())
            self.until("their end", lambda: all(is_final(self.client.job(job).state) for job in running))


@contextlib.contextmanager
def suspended(processes: Sequence[psutil.Process]) -> Iterator[None]:
    """They stand still meanwhile."""
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()


def _has_ended(pid: int) -> bool:
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def _has_mapped(process: psutil.Process, path: str) -> bool:
    try:
        return path in [each.path for each in process.memory_maps()]
    except psutil.NoSuchProcess:  # an agent of an earlier job, which has ended meanwhile
        return False
