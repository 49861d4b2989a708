"""Fixtures and options of more than one folder."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import examples
from tests.support.own_network import enter_own_network


def pytest_addoption(parser: pytest.Parser) -> None:
    """Options of the whole suite."""
    parser.addoption("--soak", action="store_true", help="run what is exhaustive (marked soak) instead of the rest")
    parser.addoption(
        "--cuda-python",
        default=sys.executable,
        help="a Python with our requirements and a torch that is built for CUDA",
    )
    parser.addoption("--record-curves", action="store_true", help="record test_golden_curves.py's curves anew")
    parser.addoption("--other-torch", help="a Python with another torch, whose process groups are tested with --soak")
    parser.addoption(
        "--allowed-skips",
        type=Path,
        help="a file with the beginning of a reason in each line: fail when a test is skipped for any other",
    )


_FOR_SERVICES, _FOR_ENGINE, _FOR_MACHINES = "gw0", "gw1", "gw2"
"""Which of several processes tests whole services, which the engine, and which first of all services on machines of
their own."""


_OF_TERMINALS = ("COLUMNS", "FORCE_COLOR", "GITHUB_ACTIONS", "PY_COLORS")
"""Variables by which commands print in colours, or in lines of another length, though nobody sees a terminal."""


def pytest_configure(config: pytest.Config) -> None:
    """Remember what is skipped. Several processes have a network each, and the one that takes longest goes before the
    others."""
    for name in _OF_TERMINALS:
        os.environ.pop(name, None)
    examples.begin(config.getoption("--soak"))
    gc.disable()  # until all is collected, of which nothing is garbage: to look for some takes a quarter of the time
    config.pluginmanager.register(_Skips(config), "manta-skips")
    process = getattr(config, "workerinput", {}).get("workerid")
    if process is None:
        return
    enter_own_network()
    if process != _FOR_SERVICES:
        os.nice(5)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what runs on a Ray cluster, and leave out what is exhaustive, or with --soak everything else but properties,
    of which more examples are drawn."""
    for item in items:
        if "e2e" in item.path.parts or "ray_head" in getattr(item, "fixturenames", ()):
            item.add_marker("cluster")
    soak = bool(config.getoption("--soak"))
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    properties: list[pytest.Item] = []
    for item in items:
        is_exhaustive = item.get_closest_marker("soak") is not None
        if soak and not is_exhaustive and examples.is_property(item):
            properties.append(item)
            kept.append(item)
        else:
            (kept if is_exhaustive == soak else left_out).append(item)
    examples.draw_more(properties)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


ASYNC_SECONDS = 120.0


def pytest_collection_finish() -> None:
    """What was imported and collected stays until the end."""
    _keep_what_is_there()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test that is a coroutine function runs in an event loop of its own, for ASYNC_SECONDS at most; what a fixture
    made by `asynccontextmanager` is entered there."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None

    async def bounded() -> None:
        async with asyncio.timeout(ASYNC_SECONDS), contextlib.AsyncExitStack() as entered:
            given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
            for name, value in given.items():
                if isinstance(value, contextlib._AsyncGeneratorContextManager):
                    given[name] = await entered.enter_async_context(value)
            await pyfuncitem.obj(**given)

    asyncio.run(bounded())
    return True


def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """So does what the tests of a file leave behind, such as prepared statements and what they imported."""
    if nextitem is not None and nextitem.path != item.path:
        _keep_what_is_there()


def _keep_what_is_there() -> None:
    """Looking through it for garbage, again and again, would take a quarter of the time."""
    gc.collect()
    gc.freeze()


_ON_BOTH = (
    "tests/api/test_fuzz.py",
    "tests/api/test_jobs.py",
    "tests/api/test_job_lists.py",
    "tests/service/store",
    "tests/service/scheduler",
    "tests/api/test_all_events.py",
    "tests/api/test_edits.py",
)
"""Tests of the job database that run on SQLite and on PostgreSQL."""
_ON_BOTH_IN_SOAK = ("tests/service", "tests/api")
_ON_SQLITE = ("tests/api/ui", "tests/service/store/test_sqlite.py")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """What uses the job database runs on PostgreSQL too: some of it always, the rest with --soak."""
    chosen = any("kind_of_database" in mark.args[0] for mark in metafunc.definition.iter_markers("parametrize"))
    if "kind_of_database" not in metafunc.fixturenames or chosen:
        return
    file = metafunc.definition.path.relative_to(metafunc.config.rootpath).as_posix()
    if file.startswith(_ON_BOTH_IN_SOAK) and not file.startswith(_ON_SQLITE):
        marks = () if file.startswith(_ON_BOTH) else (pytest.mark.soak,)
        kinds = ["sqlite", pytest.param("postgresql", marks=marks)]
        metafunc.parametrize("kind_of_database", kinds, indirect=True, scope="function")


_SERVICES, _MACHINES, _ENGINE = "tests/e2e", "tests/e2e on machines", "tests/workers/"
_ON_MACHINES = ("tests/e2e/test_cluster_apart.py", "tests/e2e/test_compose.py")
"""Services on machines, or in containers, of their own: they need none of what the others share."""
_RAY, _ON_RAY = "tests on one Ray", ("tests/service/cluster/test_cluster.py", "tests/service/cluster/test_ray_head.py")
"""Who share the Ray of `ray_head`, whose start takes longer than they do."""


def _scope(file: str) -> str:
    """What one process runs as a whole: a file, all of the services, or what needs a Ray."""
    if file in _ON_RAY:
        return _RAY
    if not file.startswith(f"{_SERVICES}/"):
        return file
    return _MACHINES if file in _ON_MACHINES else _SERVICES


def _turn(scope: str, process: str) -> int:
    """When a process takes a scope, those of the lowest number first."""
    if scope in (_SERVICES, _MACHINES):  # nothing else takes so long
        return 0 if process == (_FOR_SERVICES if scope == _SERVICES else _FOR_MACHINES) else 3
    return 1 if scope.startswith(_ENGINE) == (process == _FOR_ENGINE) else 2


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With several processes, two take the tests of whole services, one after the other, and one those of the engine,
    which share eight ranks; whoever has none of its own any more takes what is left."""
    from xdist.scheduler import LoadFileScheduling

    class ServicesApart(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _scope(str(super()._split_scope(nodeid)))

        def _assign_work_unit(self, node: Any) -> None:
            first = min(self.workqueue, key=lambda scope: _turn(scope, node.gateway.id))
            self.workqueue.move_to_end(first, last=False)
            super()._assign_work_unit(node)

    return ServicesApart(config, log)


class _Skips:
    """Fails the run when a test was skipped that ought to have run."""

    def __init__(self, config: pytest.Config):
        self._config = config
        self._skips: list[tuple[str, str]] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a skip; with several processes the first one gets all reports."""
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._skips.append((report.nodeid, reason.removeprefix("Skipped: ")))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """Note a file that was skipped as a whole."""
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            self._skips.append((report.nodeid, reason.removeprefix("Skipped: ")))

    def _unexpected(self) -> list[tuple[str, str]]:
        file: Path | None = self._config.getoption("--allowed-skips")
        if file is None or hasattr(self._config, "workerinput"):
            return []
        lines = [line.strip() for line in file.read_text(encoding="utf-8").splitlines()]
        allowed = tuple(line for line in lines if line and not line.startswith("#"))
        return [(test, reason) for test, reason in self._skips if not reason.startswith(allowed or ("\0",))]

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A skip that is not on the list is a failure."""
        if self._unexpected() and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        """Say which they were."""
        for test, reason in self._unexpected():
            terminalreporter.write_line(f"UNEXPECTED SKIP {test}: {reason}", red=True)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Any]:
    """Eight processes that run programs as the ranks of a layout; see tests/workers/support/rank_processes.py."""
    from rank_processes import RankProcesses

    processes = RankProcesses()
    yield processes
    processes.close()


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated database, to be copied: a migration takes longer than most tests."""
    path = tmp_path_factory.mktemp("database") / "manta.db"
    from manta.service.store import Store

    store = Store(f"sqlite:///{path}")
    store.migrate()
    store.close()
    return path


@pytest.fixture(scope="session")
def postgres() -> Iterator[Any]:
    """A PostgreSQL server; see tests/service/support/postgresql_server.py."""
    from tests.service.support.postgresql_server import NOT_FOUND, PostgresServer, programs

    server_programs = programs()
    if server_programs is None:
        pytest.skip(NOT_FOUND)
    server = PostgresServer(server_programs)
    yield server
    server.close()


@pytest.fixture
def kind_of_database(request: pytest.FixtureRequest) -> str:
    """Where the job database of a test is: sqlite or postgresql. `pytest_generate_tests` says which tests run on
    both."""
    return str(getattr(request, "param", "sqlite"))


@pytest.fixture
def database_url(kind_of_database: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A migrated database without jobs."""
    if kind_of_database == "sqlite":
        shutil.copy(request.getfixturevalue("empty_database"), tmp_path / "manta.db")
        return f"sqlite:///{tmp_path}/manta.db"
    server = request.getfixturevalue("postgres")
    return str(server.url(server.shared()))


@pytest.fixture
def store(database_url: str, kind_of_database: str, request: pytest.FixtureRequest) -> Iterator[Any]:
    """An empty job database."""
    from manta.service.store import Store

    with contextlib.ExitStack() as stack:
        if kind_of_database == "postgresql":
            stack.enter_context(request.getfixturevalue("postgres").connections_kept())
        made = Store(database_url)
        yield made
        made.close()
