"""What calibrations have found, by type of node: a small JSON file for each in the service's home, where the service
and a `manta plan` without one look."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from service.planner.fitting import fit_core
from service.planner.fitting_gpu import fit_gpu, machine_measured
from service.planner.hardware import MACHINES, Core, CpuNode, Gpu
from workers.calibration.measurements import Measurements
from workers.errors import MantaError
from workers.paths import safe_name
from workers.system.cores import usable_cores
from workers.system.processor import node_type

_COMMAND = (sys.executable, "-m", "workers.calibration")


class CalibrationFailed(MantaError):
    """This machine could not be measured."""


class BadCalibration(MantaError):
    """A file of a calibration is none."""


@dataclass(frozen=True)
class Calibrated:
    """A type of node that was measured."""

    name: str
    """Of the type: that of its GPUs in the planner's MACHINES, or without any `workers.system.processor.node_type`."""
    device: str
    """Its GPU, or its processor."""
    cores: int
    core: Core | None = None
    gpu: Gpu | None = None
    """One of both is there."""

    @property
    def constants(self) -> dict[str, float]:
        """The eight."""
        found = dataclasses.asdict(self.core or self.gpu)  # type: ignore[arg-type]
        return {name: value for name, value in found.items() if not isinstance(value, bool)}

    def to_json(self) -> dict[str, Any]:
        """As it is kept."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, document: Any) -> Calibrated:
        """What `to_json` made. Raises KeyError, TypeError, ValueError."""
        core, gpu = document.get("core"), document.get("gpu")
        if (core is None) == (gpu is None):
            raise ValueError("a core's constants, or a GPU's")
        found = cls(
            str(document["name"]),
            str(document["device"]),
            int(document["cores"]),
            None if core is None else Core(**{name: float(value) for name, value in core.items()}),
            None if gpu is None else Gpu(**{name: _number(value) for name, value in gpu.items()}),
        )
        if any(not 0 < value < math.inf for name, value in found.constants.items() if name != "attention_width"):
            raise ValueError("constants are positive")
        return found


def _number(value: Any) -> Any:
    return value if isinstance(value, bool) else float(value)


def load(folder: Path, name: str) -> Calibrated | None:
    """What is known of nodes of type `name`; None without a calibration. Raises BadCalibration."""
    path = folder / f"{safe_name(name)}.json"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise BadCalibration(f"{path} cannot be read ({error}): calibrate again, or remove it") from error
    try:
        return Calibrated.from_json(document)
    except (KeyError, TypeError, ValueError) as error:
        raise BadCalibration(f"{path} is no calibration of this release: calibrate again, or remove it") from error


@dataclass(frozen=True)
class KeptCalibration:
    """A file of a calibration."""

    name: str
    """Of the type of node."""
    measured_at: float
    """Unix seconds."""
    calibrated: Calibrated | None
    problem: str | None
    """Why it cannot be used."""


def kept(folder: Path) -> list[KeptCalibration]:
    """All that is kept there, by name."""
    found = []
    for path in sorted(folder.glob("*.json")):
        try:
            calibrated, problem = load(folder, path.stem), None
        except BadCalibration as error:
            calibrated, problem = None, str(error)
        with contextlib.suppress(FileNotFoundError):
            name = path.stem if calibrated is None else calibrated.name
            found.append(KeptCalibration(name, path.stat().st_mtime, calibrated, problem))
    return found


def save(folder: Path, calibrated: Calibrated) -> Path:
    """Keep it, there as a whole or not at all; returns the file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{safe_name(calibrated.name)}.json"
    new = path.with_name(f".{path.name}.{os.getpid()}")
    new.write_text(json.dumps(calibrated.to_json(), indent=1) + "\n", encoding="utf-8")
    new.replace(path)
    return path


def this_node(folder: Path) -> CpuNode:
    """This machine without GPUs, as it was calibrated, if it was. Raises BadCalibration."""
    known = load(folder, node_type())
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    core = None if known is None else known.core
    return CpuNode(usable_cores(), memory) if core is None else CpuNode(usable_cores(), memory, core)


def measured_gpus(folder: Path) -> dict[str, Gpu]:
    """The GPUs that were calibrated, by their name in the planner's MACHINES. Raises BadCalibration."""
    found = {name: load(folder, name) for name in MACHINES}
    return {name: each.gpu for name, each in found.items() if each is not None and each.gpu is not None}


def measure(device: str, say: Callable[[str], None]) -> Calibrated:
    """Measure this machine in a process of its own: this one has no torch. `device`: auto (a GPU where there is one),
    cpu or cuda. `say` is told what is measured next. Raises CalibrationFailed, UnknownMachine."""
    return calibrated(Measurements.from_json(_measurements(device, say)))


def calibrated(found: Measurements) -> Calibrated:
    """What plans go by after such measurements. Raises UnknownMachine."""
    if found.gpu_memory_bytes is None:
        return Calibrated(node_type(), found.device, found.cores, core=fit_core(found))
    name = machine_measured(found)
    return Calibrated(name, found.device, found.cores, gpu=fit_gpu(found, MACHINES[name]))


def _measurements(device: str, say: Callable[[str], None]) -> Any:
    with subprocess.Popen(
        (*_COMMAND, "--device", device), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        last = ""
        for line in process.stderr:
            last = line.strip() or last
            if line.startswith("measuring: "):
                say(last)
        text = process.stdout.read()
    if process.returncode:
        raise CalibrationFailed(f"this machine could not be measured: {last}")
    return json.loads(text)
