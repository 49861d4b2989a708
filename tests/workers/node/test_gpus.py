"""GPUs are read by NVIDIA's library, which stands here for what it says; what it does not say is left out."""

import importlib
import queue
from types import SimpleNamespace

import pytest

from manta.workers.node import gpus
from manta.workers.node.gpus import GpuWatch
from manta.workers.protocol.messages import GpuReading
from tests.support.fake_nvml import pynvml


def library(**changes):
    """The fake, with some functions replaced."""
    return SimpleNamespace(**{**vars(pynvml), **changes})


@pytest.fixture
def readings():
    """Starts a watch on a library, and yields its readings as they come."""
    watches = []

    def start(of):
        queued = queue.Queue()
        watches.append(GpuWatch(queued.put, of))
        watches[-1].start()
        return queued

    yield start
    for watch in watches:
        watch.stop()


def refuse(*_):
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def test_gpu_readings_are_in_base_units(readings):
    first, second = readings(pynvml).get(timeout=20)
    assert first == GpuReading(0, True, 0.9, 2**30, 80 * 2**30, 60, 350.5, 7, 0, {}, 1980)
    assert (second.index, second.ecc_corrected, second.ecc_uncorrected) == (1, None, None)


def test_gpu_error_is_reported_as_soon_as_the_driver_reports_it(readings, monkeypatch):
    monkeypatch.setattr(gpus, "SAMPLE_SECONDS", 10_000.0)
    queued = readings(pynvml)
    queued.get(timeout=20)
    assert [gpu.xids for gpu in queued.get(timeout=20)] == [{}, {"31": 1}]


@pytest.mark.parametrize(("error", "answers"), [("NVML_ERROR_GPU_IS_LOST", False), ("NVML_ERROR_NOT_SUPPORTED", True)])
def test_gpu_that_is_lost_is_told_from_one_that_has_no_memory_of_its_own(readings, error, answers):
    def memory(gpu):
        if gpu == "GPU 1":
            raise pynvml.NVMLError(getattr(pynvml, error))
        return pynvml.nvmlDeviceGetMemoryInfo(gpu)

    first, second = readings(library(nvmlDeviceGetMemoryInfo=memory)).get(timeout=20)
    assert (first.answers, second.answers, second.memory_total_bytes) == (True, answers, None)


def test_gpu_driver_without_error_events_still_gives_readings(readings):
    assert len(readings(library(nvmlDeviceRegisterEvents=refuse)).get(timeout=20)) == 2


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetCount"])
def test_gpu_watch_without_a_driver_ends_without_readings(function):
    queued = queue.Queue()
    watch = GpuWatch(queued.put, library(**{function: refuse}))
    watch.start()
    watch._thread.join(20)
    assert queued.empty() and not watch._thread.is_alive()


def test_gpu_watch_that_was_never_started_can_be_stopped():
    GpuWatch(lambda _: None, pynvml).stop()


def test_fake_nvml_has_only_names_and_constants_of_the_real_library():
    theirs = importlib.import_module("pynvml")
    names = [name for name in vars(pynvml) if name.startswith(("nvml", "NVML"))]
    assert [name for name in names if not hasattr(theirs, name)] == []
    constants = [name for name in names if isinstance(getattr(pynvml, name), int)]
    assert [name for name in constants if getattr(theirs, name) != getattr(pynvml, name)] == []
