"""CUDA survives no fork, and a process sees the GPUs that the environment names when it initialises CUDA: so the zygote
asks CUDA for nothing, and a trainer does only once its environment names its own device."""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from engine_specs import document

from manta.workers.node.host import visible
from manta.workers.protocol.json_codec import to_json
from manta.workers.protocol.messages import LaunchOrder, StoreArgument, TrainerArgument
from manta.workers.zygote.client import fork
from manta.workers.zygote.server import DEFAULT_ENTRIES

ROOT = Path(__file__).parents[3]
STUB = ROOT / "tests/workers/support/stub_libcuda.c"
WARMED_UP = """
import importlib, torch
asked = []
def noted(name, function):
    return lambda *arguments, **named: (asked.append(name), function(*arguments, **named))[1]
for name in ("is_available", "device_count", "current_device", "init", "_lazy_init"):
    setattr(torch.cuda, name, noted(name, getattr(torch.cuda, name)))
from manta.workers.zygote import server
for item in server.DEFAULT_WARM:
    importlib.import_module(item.partition(":")[0])
server._resolve([f"{name}={target}" for name, target in server.DEFAULT_ENTRIES.items()])
print(asked, torch.cuda.is_initialized())
"""


def test_zygote_imports_do_not_query_gpus():
    done = subprocess.run([sys.executable, "-c", WARMED_UP], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[] False\n", done.stderr


@dataclass(frozen=True)
class Call:
    """Of the driver."""

    pid: int
    name: str
    gpus: str
    """CUDA_VISIBLE_DEVICES of the process then."""


@dataclass
class Driver:
    """The stub of it."""

    folder: Path

    @property
    def environment(self) -> dict[str, str]:
        """Of processes that are to find it."""
        return {"LD_LIBRARY_PATH": str(self.folder), "STUB_CUDA_LOG": str(self.folder / "calls")}

    @property
    def calls(self) -> list[Call]:
        """All so far."""
        log = self.folder / "calls"
        lines = [line.split(" ") for line in log.read_text().splitlines()] if log.exists() else []
        return [Call(int(pid), name, gpus) for pid, name, gpus in lines]


@pytest.fixture
def driver(tmp_path):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler")
    options = ["-shared", "-fPIC", "-Wall", "-o", str(tmp_path / "libcuda.so.1")]
    subprocess.run([compiler, *options, str(STUB)], check=True, timeout=60)
    return Driver(tmp_path)


@pytest.fixture
def start(request, driver, tmp_path, start_zygote):
    """Starts a zygote over the stub, with the entries of a node and a torch that is built for CUDA."""
    python = request.config.getoption("--cuda-python")
    version = "import torch; print(torch.version.cuda or '')"
    if not subprocess.run([python, "-c", version], capture_output=True, text=True, timeout=120).stdout.strip():
        pytest.skip("there is no torch that is built for CUDA (--cuda-python)")
    entries = [f"--entry={name}={target}" for name, target in DEFAULT_ENTRIES.items()]
    return lambda *options: start_zygote(
        tmp_path, *entries, *options, python=python, environment=driver.environment, test_entries=False
    )


def trainer(corpus, device):
    """What a trainer of one rank gets, for two steps."""
    spec = document(data={"paths": [corpus]}, train={"steps": 2})
    return to_json(TrainerArgument(LaunchOrder("job-1", 1, 0, spec, device=device)))


async def ended(process):
    """(How it ended, what it printed.)"""
    printed = await process.stdout.read() + await process.stderr.read()
    how = await process.wait()
    process.close()
    return how, printed.decode()


@pytest.mark.soak
def test_only_gpu_trainers_query_cuda_and_each_sees_its_own_devices(start, driver, go, corpus):
    zygote = start()

    async def body():
        store = await fork(zygote.socket, "store", to_json(StoreArgument("127.0.0.1")), timeout=120.0)
        assert await store.control.readline()
        store.kill()
        peak = await fork(zygote.socket, "peak", {"device": "cpu"}, visible(()))
        assert await peak.control.readline()
        on_cpu = await fork(zygote.socket, "trainer", trainer(corpus, "cpu"), visible(()))
        how, printed = await ended(on_cpu)
        assert how.code == 0, printed
        # Autograd counts the devices at the first backward.
        without = {(on_cpu.pid, "")}
        assert {(call.pid, call.gpus) for call in driver.calls} <= without, "and nobody else asks for anything"
        on_gpus = {
            gpu: await fork(zygote.socket, "trainer", trainer(corpus, "cuda:0"), visible((gpu,))) for gpu in "20"
        }
        for process in on_gpus.values():
            assert "cuda" in (await ended(process))[1].lower(), "the stub is no driver to compute with"
        initialised = {(call.pid, call.gpus) for call in driver.calls if call.name == "cuInit"}
        each_its_own = {(process.pid, gpu) for gpu, process in on_gpus.items()}
        assert initialised - without == each_its_own
        assert {(call.pid, call.gpus) for call in driver.calls} - without == each_its_own
        assert {call.pid for call in driver.calls if call.name == "cuDeviceGetCount"} >= {
            pid for pid, _ in each_its_own
        }

    go(body, 240.0)


@pytest.mark.soak
def test_cuda_call_of_a_zygote_would_be_noticed(start, driver, go, corpus):
    zygote = start("--warm=torch", "--warm=torch.cuda:is_available")

    async def body():
        await ended(await fork(zygote.socket, "peak", {"device": "cpu"}, timeout=120.0))

    go(body, 180.0)
    assert zygote.process.pid in {call.pid for call in driver.calls}
