"""Fixtures of the workers' tests: one thread, some text, a real zygote with test entries in place of the trainer."""

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

ROOT = Path(__file__).parents[2]
ENTRIES = ("echo", "fail", "leave", "wait", "compute", "train", "trainer")


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """As every rank has: bits depend on it, and several that share two cores with others wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Some text."""
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text("".join(f"{n} and {n * n}\n" for n in range(500)))
    return str(path)


@dataclass
class RunningZygote:
    """A zygote of a test."""

    process: subprocess.Popen
    socket: Path
    owner: int

    def disown(self) -> None:
        """Close the owner's end of the pipe, as its death would."""
        if self.owner >= 0:
            os.close(self.owner)
            self.owner = -1

    def end(self) -> None:
        """Have it gone."""
        self.disown()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(10)
        self.process.kill()
        self.process.wait()


def _start(
    folder: Path,
    *options: str,
    python: str = sys.executable,
    environment: Mapping[str, str] | None = None,
    test_entries: bool = True,
) -> RunningZygote:
    """A zygote with the test entries, listening in `folder`. `environment`: beside this process's."""
    read, write = os.pipe()
    entries = [f"--entry={name}=zygote_entries:{name}" for name in ENTRIES if test_entries]
    path = folder / "zygote.sock"
    process = subprocess.Popen(
        [python, "-m", "manta.workers.zygote", "--socket", str(path), "--owner-pipe", str(read), *entries, *options],
        pass_fds=[read],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT}/tests/workers/support", **(environment or {})},
    )
    os.close(read)
    return RunningZygote(process, path, write)


@pytest.fixture
def start_zygote() -> Iterator[Callable[..., RunningZygote]]:
    """Starts zygotes with the test entries, and ends them with the test."""
    started: list[RunningZygote] = []

    def start(folder: Path, *options: str, **more: Any) -> RunningZygote:
        started.append(_start(folder, *options, **more))
        return started[-1]

    yield start
    for running in started:
        running.end()


@pytest.fixture(scope="session")
def warm_zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningZygote]:
    """A zygote that has imported all that a trainer needs, as those of nodes have; with the test entries."""
    running = _start(tmp_path_factory.mktemp("zygote"))
    yield running
    running.end()


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningZygote]:
    """A zygote without torch, which the tests of a file share: what is tested is how it forks."""
    running = _start(tmp_path_factory.mktemp("zygote"), "--warm=json")
    yield running
    running.end()


@pytest.fixture
def zygote_to_end(tmp_path: Path, start_zygote: Callable[..., RunningZygote]) -> RunningZygote:
    """One of its own for a test that ends it."""
    return start_zygote(tmp_path, "--warm=json")


@pytest.fixture(autouse=True)
def outside_of_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """Agents of these tests live in this process, which a test before them may have connected to a Ray."""
    monkeypatch.delitem(sys.modules, "ray", raising=False)


def run_async(body: Callable[[], Coroutine[Any, Any, Any]], seconds: float = 60.0) -> Any:
    """Run a test's coroutine to its end, or fail after `seconds`."""

    async def bounded() -> Any:
        async with asyncio.timeout(seconds):
            return await body()

    return asyncio.run(bounded())


@pytest.fixture
def go() -> Callable[..., Any]:
    """`run_async`, for tests whose body is a coroutine function."""
    return run_async


@pytest.fixture
def each_save_at_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the disk is; otherwise a save waits while another one is under way for longer than a moment."""
    monkeypatch.setattr("manta.workers.checkpoint.checkpointer.PATIENCE_SECONDS", 60.0)


@pytest.fixture
def gone() -> Callable[[int], bool]:
    """Whether a process ends within ten seconds."""

    def check(pid: int) -> bool:
        try:
            psutil.Process(pid).wait(10)
        except psutil.NoSuchProcess:
            return True
        except psutil.TimeoutExpired:
            return False
        return True

    return check
