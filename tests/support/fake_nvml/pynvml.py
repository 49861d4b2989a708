"""Stands for NVIDIA's library on a machine with two GPUs, of which the second has no ECC and has just had error 31.
In a folder of its own: a process with that folder on its path takes it for the real one."""

import threading
from types import SimpleNamespace

NVML_TEMPERATURE_GPU = 0
NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED = 0, 1
NVML_VOLATILE_ECC = 0
NVML_CLOCK_SM = 1
NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_TIMEOUT, NVML_ERROR_GPU_IS_LOST = 3, 10, 15
nvmlEventTypeXidCriticalError = 8
GIBIBYTE = 2**30


class NVMLError(Exception):
    """As the library raises it."""

    def __init__(self, value):
        self.value = value
        super().__init__(f"error {value}")


def nvmlInit():
    pass


def nvmlShutdown():
    pass


def nvmlDeviceGetCount():
    return 2


def nvmlDeviceGetHandleByIndex(index):
    return f"GPU {index}"


def nvmlDeviceGetIndex(gpu):
    return int(gpu.removeprefix("GPU "))


def nvmlDeviceGetMemoryInfo(gpu):
    return SimpleNamespace(used=(1 + nvmlDeviceGetIndex(gpu)) * GIBIBYTE, total=80 * GIBIBYTE)


def nvmlDeviceGetUtilizationRates(gpu):
    return SimpleNamespace(gpu=90 - nvmlDeviceGetIndex(gpu), memory=40)


def nvmlDeviceGetTemperature(gpu, sensor):
    return 60 + nvmlDeviceGetIndex(gpu)


def nvmlDeviceGetClockInfo(gpu, clock):
    return 1980 if clock == NVML_CLOCK_SM else 0


def nvmlDeviceGetPowerUsage(gpu):
    return 350_500


def nvmlDeviceGetTotalEccErrors(gpu, kind, counter):
    if gpu == "GPU 1":
        raise NVMLError(NVML_ERROR_NOT_SUPPORTED)
    return 7 if kind == NVML_MEMORY_ERROR_TYPE_CORRECTED else 0


def nvmlEventSetCreate():
    return [SimpleNamespace(device="GPU 1", eventData=31)]


def nvmlDeviceRegisterEvents(gpu, kinds, events):
    pass


def nvmlEventSetWait_v2(events, milliseconds):
    if events:
        return events.pop()
    threading.Event().wait(milliseconds / 1000)
    raise NVMLError(NVML_ERROR_TIMEOUT)
