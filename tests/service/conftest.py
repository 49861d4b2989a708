"""One Ray for all tests that need one: started once, by the code under test, and ended with the session."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from service.gangs import Gangs
from service.ray_head import RayHead
from workers.paths import Paths

TESTS = Path(__file__).parents[1] / "workers"
ZYGOTE_OPTIONS = (
    "--entry=trainer=zygote_entries:trainer",
    "--entry=store=workers.rendezvous:run",
    "--entry=peak=workers.device_peak:run",
)
ZYGOTE_ENVIRONMENT = {"PYTHONPATH": f"{TESTS.parents[1]}:{TESTS}"}


@dataclass
class RunningRay:
    """The Ray of the test session, with sixteen slots."""

    head: RayHead
    home: Path
    ray: Any
    gangs: Gangs
    zygote_options: tuple[str, ...]
    """Arguments of `ensure_node_daemons` that put a stand-in in the place of the trainer."""
    zygote_environment: dict[str, str]


@pytest.fixture(scope="session")
def ray_head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningRay]:
    """Our Ray head, connected, with a daemon on its node."""
    home = tmp_path_factory.mktemp("home")
    head = RayHead(home, slots=16)
    head.ensure()
    try:
        ray = head.connect()
        gangs = Gangs(ray, str(home))
        yield RunningRay(head, home, ray, gangs, ZYGOTE_OPTIONS, ZYGOTE_ENVIRONMENT)
        asyncio.run(gangs.end_node_daemons())
        ray.shutdown()
    finally:
        head.stop()
        Paths.of(home).remove_runtime_folder()
