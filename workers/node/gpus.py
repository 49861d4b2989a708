"""What NVIDIA's management library (NVML) says about a machine's GPUs: utilisation, memory, temperature and errors. It
creates no CUDA context, and sees all GPUs of the machine, whatever CUDA_VISIBLE_DEVICES says."""

from __future__ import annotations

import importlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from manta.workers.protocol.messages import GpuReading

log = logging.getLogger(__name__)

SAMPLE_SECONDS = 5.0
EVENT_MILLISECONDS = 500
"""How long one request to the library waits for new errors, and thus the longest that `stop` waits."""


class GpuWatch:
    """Reads all GPUs every few seconds, on a separate thread: a driver in trouble may take long to answer."""

    def __init__(self, on_reading: Callable[[tuple[GpuReading, ...]], None], library: Any = None):
        """`on_reading`: called with each reading, on that thread; `library`: replaces the module `pynvml`."""
        self._on_reading, self._library = on_reading, library
        self._xids: Counter[tuple[int, int]] = Counter()  # by GPU and code
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gpus", daemon=True)

    def start(self) -> None:
        """Start reading; does nothing if there is no library, driver or GPU."""
        self._thread.start()

    def stop(self) -> None:
        """Stop reading. Does not wait for a driver that does not answer."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(4 * EVENT_MILLISECONDS / 1000)

    def _run(self) -> None:
        library = self._library or _library()
        if library is None:
            return
        try:
            library.nvmlInit()
        except library.NVMLError as error:
            log.info("the GPUs of this machine are not watched: %s", error)
            return
        try:
            self._watch(library)
        except library.NVMLError as error:
            log.warning("the GPUs of this machine are not watched any more: %s", error)
        finally:
            library.nvmlShutdown()

    def _watch(self, library: Any) -> None:
        gpus = [library.nvmlDeviceGetHandleByIndex(index) for index in range(library.nvmlDeviceGetCount())]
        errors = _errors_of(library, gpus) if gpus else None
        while gpus and not self._stopped.is_set():
            self._on_reading(tuple(self._reading(library, index, gpu) for index, gpu in enumerate(gpus)))
            due = time.monotonic() + SAMPLE_SECONDS
            while not self._stopped.is_set() and time.monotonic() < due:
                if errors is None:
                    self._stopped.wait(due - time.monotonic())
                elif self._count_error(library, errors):
                    break  # it is reported at once

    def _count_error(self, library: Any, errors: Any) -> bool:
        """Whether an error arrived within a moment."""
        try:
            event = library.nvmlEventSetWait_v2(errors, EVENT_MILLISECONDS)
            self._xids[library.nvmlDeviceGetIndex(event.device), int(event.eventData)] += 1
        except library.NVMLError as error:
            if error.value != library.NVML_ERROR_TIMEOUT:
                log.warning("the driver did not report what is wrong with a GPU: %s", error)
                self._stopped.wait(EVENT_MILLISECONDS / 1000)
            return False
        return True

    def _reading(self, library: Any, index: int, gpu: Any) -> GpuReading:
        query = _GpuQuery(library, gpu)
        memory, busy = query("nvmlDeviceGetMemoryInfo"), query("nvmlDeviceGetUtilizationRates")
        milliwatts, clock = query("nvmlDeviceGetPowerUsage"), query("nvmlDeviceGetClockInfo", library.NVML_CLOCK_SM)
        errors = (library.NVML_MEMORY_ERROR_TYPE_CORRECTED, library.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
        corrected, uncorrected = (
            query("nvmlDeviceGetTotalEccErrors", kind, library.NVML_VOLATILE_ECC) for kind in errors
        )
        return GpuReading(
            index=index,
            busy_ratio=None if busy is None else busy.gpu / 100,
            memory_used_bytes=None if memory is None else int(memory.used),
            memory_total_bytes=None if memory is None else int(memory.total),
            temperature_celsius=query("nvmlDeviceGetTemperature", library.NVML_TEMPERATURE_GPU),
            power_watts=None if milliwatts is None else milliwatts / 1000,
            ecc_corrected=corrected,
            ecc_uncorrected=uncorrected,
            xids={str(code): count for (of, code), count in self._xids.items() if of == index},
            answers=not query.is_lost,
            clock_mhz=clock,
        )


class _GpuQuery:
    """Asks the library about one GPU."""

    def __init__(self, library: Any, gpu: Any):
        self._library, self._gpu = library, gpu
        self.is_lost = False
        """Whether an answer was that the driver does not reach the GPU any more."""

    def __call__(self, function: str, *arguments: int) -> Any:
        """None: this GPU does not have that property, or is lost."""
        try:
            return getattr(self._library, function)(self._gpu, *arguments)
        except self._library.NVMLError as error:
            self.is_lost |= error.value == self._library.NVML_ERROR_GPU_IS_LOST
            return None


def _library() -> Any:
    """The module `pynvml` of nvidia-ml-py; None if it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def _errors_of(library: Any, gpus: list[Any]) -> Any:
    """The event set on which the driver reports GPU errors (XID); None if it does not report any."""
    try:
        errors = library.nvmlEventSetCreate()
        for gpu in gpus:
            library.nvmlDeviceRegisterEvents(gpu, library.nvmlEventTypeXidCriticalError, errors)
    except library.NVMLError as error:
        log.info("this driver does not report errors of GPUs: %s", error)
        return None
    return errors
