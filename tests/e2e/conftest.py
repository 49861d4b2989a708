"""One real service for all end-to-end tests: its own processes, its own home, a free port, real trainers."""

import os
import random
import shutil
import signal
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from s3_server import S3Server, Wire, environment_of

from manta.api.cli.service import stop_service
from tests.e2e.manta import FAKE_NVML, PAIR, Manta
from tests.e2e.network import Network
from tests.e2e.small_file_system import small_where_allowed
from tests.service.support.otlp_collector import Collector
from tests.support.users_packages import make_packages

DISK_KILOBYTES = 256 * 1024


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some text that is the same every time."""
    path = tmp_path_factory.mktemp("corpus") / "words.txt"
    words = random.Random(7)
    vocabulary = ["".join(words.choices("abcdefghijklm", k=words.randint(2, 9))) for _ in range(300)]
    path.write_text(" ".join(words.choices(vocabulary, k=30_000)))
    return path


@pytest.fixture(scope="session")
def disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Where the home of the shared service is: a small file system, where one can be mounted."""
    folder = tmp_path_factory.mktemp("disk")
    with small_where_allowed(folder, DISK_KILOBYTES):
        yield folder


@pytest.fixture(scope="session")
def collector() -> Iterator[Collector]:
    """Is sent the traces of the shared service."""
    made = Collector()
    yield made
    made.close()


OF_OTHERS = {
    **dict.fromkeys(("HTTP_PROXY", "http_proxy", "https_proxy"), "http://127.0.0.1:9"),
    "ALL_PROXY": "socks5://127.0.0.1:9", "NO_PROXY": "fd00::/8",
    "RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "3", "MASTER_ADDR": "192.0.2.9", "MASTER_PORT": "1",
    "TORCHELASTIC_USE_AGENT_STORE": "True", "OMPI_COMM_WORLD_RANK": "3", "PMI_RANK": "3", "SLURM_PROCID": "3",
    "RAY_ADDRESS": "192.0.2.9:6379", "RAY_NAMESPACE": "other", "RAY_RUNTIME_ENV_HOOK": "no.such.hook",
    "RAY_TMPDIR": "/nonexistent", "TMPDIR": "/nonexistent", "MKL_NUM_THREADS": "many", "OMP_NUM_THREADS": "3",
    "LC_ALL": "C", "NO_COLOR": "1", "COLUMNS": "1", "PYTHONDONTWRITEBYTECODE": "1",
}  # fmt: skip
"""What other programs have set in the environment of the shared service, for which it makes no difference."""


@pytest.fixture(scope="session")
def users_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder, on the path of all processes of the shared service, of packages that none may import; the file
    `imported` says which were."""
    folder = tmp_path_factory.mktemp("users-packages")
    make_packages(folder, folder / "imported")
    return folder


@pytest.fixture(scope="session")
def manta(disk: Path, corpus: Path, collector: Collector, users_packages: Path) -> Iterator[Manta]:
    """The service that these tests share. Its node has GPUs to look at, and none to train on."""
    python_path = os.pathsep.join(filter(None, (str(FAKE_NVML), str(users_packages), os.environ.get("PYTHONPATH"))))
    environment = {**OF_OTHERS, "PYTHONPATH": python_path, "MANTA_TRACES": collector.url}
    running = Manta(disk / "home", corpus, environment=environment)
    yield running
    stop_service(running.home)


@pytest.fixture(scope="session")
def object_store() -> Iterator[Wire]:
    """The way to an S3 server, in whose bucket `checkpoints` a service can keep those of its jobs."""
    server = S3Server()
    server.make_bucket("checkpoints")
    yield Wire(server)
    server.close()


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    """A network of namespaces with firewalls."""
    made = Network(uuid.uuid4().hex)
    if not made.usable:
        pytest.skip("a network namespace cannot be made here")
    if shutil.which("nft") is None:
        pytest.skip("there is no nft (Debian: apt-get install nftables)")
    yield made
    made.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the disks of machines are; their users may pass through."""
    made = tmp_path_factory.mktemp("machines")
    for each in (made, *made.parents[:2]):
        each.chmod(0o755)
    return made


@pytest.fixture(scope="session")
def on_postgres(
    postgres: Any, object_store: Wire, tmp_path_factory: pytest.TempPathFactory, corpus: Path
) -> Iterator[Manta]:
    """A service whose jobs are in PostgreSQL and whose checkpoints are in an object store, and the one without a
    dashboard."""
    home, database = tmp_path_factory.mktemp("on-postgres"), postgres.url(postgres.make_empty())
    environment = {**environment_of(object_store.url), "MANTA_CHECKPOINTS": "s3://checkpoints/manta"}
    running = Manta(home, corpus, slots=3, database=database, dashboard=False, environment=environment)
    yield running
    stop_service(home)


@pytest.fixture(autouse=True)
def no_job_outlives_its_test(request: pytest.FixtureRequest) -> Iterator[None]:
    """A test that fails leaves its job running; it would be in the way of all that follow."""
    # Asked for beforehand: what is set up first is taken down last.
    used = [request.getfixturevalue(name) for name in ("manta", "on_postgres") if name in request.fixturenames]
    for manta in used:
        manta.end_with(request.node.getparent(pytest.Dir))
    yield
    for manta in used:
        manta.end_all_jobs()


@pytest.fixture(scope="session")
def undisturbed(manta: Manta) -> list[tuple[int, float, float]]:
    """The curve of the usual job when nothing happens to it."""
    job = manta.submit(manta.spec())
    manta.until_state(job, "SUCCEEDED")
    return manta.curve(job)


@pytest.fixture(scope="session")
def clean_pair(manta: Manta) -> str:
    """A job of PAIR's ranks to which nothing happened; it validated, and wrote checkpoints."""
    job = manta.submit(manta.spec(layout=PAIR, checkpoint={"every_steps": 20}, train={"validate_every": 15}))
    manta.until_state(job, "SUCCEEDED")
    return job


@pytest.fixture(scope="session")
def pair_undisturbed(manta: Manta, clean_pair: str) -> list[tuple[int, float, float]]:
    """The curve of a job of PAIR's ranks when nothing happens to it."""
    return manta.curve(clean_pair)


@pytest.fixture
def kill() -> Callable[[int], None]:
    """kill -9."""
    return lambda pid: os.kill(pid, signal.SIGKILL)
