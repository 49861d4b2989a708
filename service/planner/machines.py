"""Results of calibrations, by type of node: a small JSON file for each in the service's home, where the service, and
`manta plan` without a service, look for them."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manta.service.planner.fitting import fit_core, fit_gpu, fit_links, machine_measured, planned_as
from manta.service.planner.hardware import MACHINES, Core, CpuNode, Gpu, Links, Machine, form_factor, measured
from manta.service.planner.torch_facts import TorchFailed, torch_facts
from manta.workers.calibration.measurements import Measurements
from manta.workers.errors import MantaError
from manta.workers.paths import safe_name
from manta.workers.system.regular_files import MAX_SETTINGS_BYTES, read_regular
from manta.workers.system.resources import node_type, usable_cores

OTHER_CORES, SPREAD = 0.25, 0.1
"""Cores that other processes keep busy during a calibration, and the spread of its repetitions, above which it counts
as disturbed."""
_MAY_BE_NOTHING = ("attention_width", "error")
_JOBS_SINCE = "jobs_since"
_COMMAND = (sys.executable, "-P", "-m", "manta.workers.calibration")


class CalibrationFailed(MantaError):
    """This machine could not be measured."""


class CalibrationNotStored(MantaError):
    """Nothing can be written where calibrations are stored; the message says where and why."""


class InvalidCalibration(MantaError):
    """A calibration file is invalid."""


@dataclass(frozen=True)
class Calibrated:
    """A type of node that was measured."""

    name: str
    """Name of the type: of its GPUs in the planner's MACHINES, or for a node without any from
    `manta.workers.system.resources.node_type`."""
    device: str
    """Name of the node's GPU, or of its processor."""
    cores: int
    core: Core | None = None
    gpu: Gpu | None = None
    """One of `core` and `gpu` is set."""
    other_cores: float | None = None
    """Mean number of cores that other processes kept busy meanwhile; None: not known."""
    spread: float | None = None
    """How far apart repetitions were, relative to their median; None: not known."""
    links: Links | None = None
    """The links between GPUs, if they were ever measured."""
    links_problem: str | None = None
    """Why the links were not measured this time; None if they were, or if nobody tried."""

    @property
    def warning(self) -> str | None:
        """Why these constants may be wrong; None if nothing suggests that."""
        disturbances = []
        if self.other_cores is not None and self.other_cores > OTHER_CORES:
            disturbances.append(f"other processes kept {self.other_cores:.1f} of its cores busy")
        if self.spread is not None and self.spread > SPREAD:
            disturbances.append(f"half of the repetitions were {self.spread:.0%} apart or more")
        return f"{' and '.join(disturbances)}: calibrate again while nothing else runs" if disturbances else None

    @property
    def links_note(self) -> str | None:
        """A note about the links between its GPUs if they were not measured this time; otherwise None."""
        if self.links_problem is None:
            return None
        then = "plans use assumed values" if self.links is None else "the earlier measurement stays"
        return f"the links between its GPUs were not measured ({self.links_problem}): {then}"

    @property
    def constants(self) -> dict[str, float]:
        """The eight constants."""
        fields = dataclasses.asdict(self.core or self.gpu)  # type: ignore[arg-type]
        return {name: value for name, value in fields.items() if not isinstance(value, bool)}

    @property
    def between(self) -> dict[str, float]:
        """Constants of the links between its GPUs; empty if they were not measured."""
        return {} if self.links is None else dataclasses.asdict(self.links)

    def applied(self, machine: Machine) -> Machine:
        """`machine` with what was measured of its GPUs; unchanged if none were measured."""
        if self.gpu is None:
            return machine
        other = self.device if form_factor(self.device) else None
        return dataclasses.replace(measured(machine, self.gpu, self.links), measured_on=other)

    def to_json(self) -> dict[str, Any]:
        """The stored form."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, document: Any) -> Calibrated:
        """The inverse of `to_json`. Raises KeyError, TypeError, ValueError."""
        if not isinstance(document, dict):
            raise TypeError("a calibration is an object")
        core, gpu, links = (document.get(name) for name in ("core", "gpu", "links"))
        if (core is None) == (gpu is None):
            raise ValueError("a core's constants, or a GPU's")
        calibration = cls(
            str(document["name"]),
            str(document["device"]),
            int(document["cores"]),
            None if core is None else Core(**_numbers(core)),
            None if gpu is None else Gpu(**_numbers(gpu)),
            _number_or_none(document.get("other_cores")),
            _number_or_none(document.get("spread")),
            None if links is None else Links(**_numbers(links)),
            document.get("links_problem"),
        )
        known = [*calibration.constants.items(), *calibration.between.items()]
        if any(not (0 < value < math.inf or (value == 0 and name in _MAY_BE_NOTHING)) for name, value in known):
            raise ValueError("constants are positive")
        return calibration


def _numbers(document: Any) -> dict[str, Any]:
    return {name: value if isinstance(value, bool) else float(value) for name, value in dict(document).items()}


def _number_or_none(value: Any) -> float | None:
    return None if value is None else float(value)


def load(folder: Path, name: str) -> Calibrated | None:
    """The calibration of nodes of type `name`; None if there is none. Raises InvalidCalibration."""
    path = folder / f"{safe_name(name)}.json"
    try:
        document = json.loads(read_regular(path, MAX_SETTINGS_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise InvalidCalibration(f"{path} cannot be read ({error}): calibrate again, or remove it") from error
    try:
        return Calibrated.from_json(document)
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidCalibration(
            f"{path} is not a calibration of this release: calibrate again, or remove it"
        ) from error


@dataclass(frozen=True)
class StoredCalibration:
    """A calibration file."""

    name: str
    """Type of the node."""
    measured_at: float
    """Unix seconds."""
    calibrated: Calibrated | None
    problem: str | None
    """Why it cannot be used."""


def kept(folder: Path) -> list[StoredCalibration]:
    """All stored calibrations, by name."""
    calibrations = []
    for path in sorted(folder.glob("*.json")):
        try:
            calibrated, problem = load(folder, path.stem), None
        except InvalidCalibration as error:
            calibrated, problem = None, str(error)
        with contextlib.suppress(FileNotFoundError):
            name = path.stem if calibrated is None else calibrated.name
            calibrations.append(StoredCalibration(name, path.stat().st_mtime, calibrated, problem))
    return calibrations


@contextlib.contextmanager
def _keeping(path: Path) -> Iterator[None]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise CalibrationNotStored(
            f"{path} cannot be written ({error}): calibrations are kept in MANTA_HOME"
        ) from error


def save(folder: Path, calibrated: Calibrated) -> Path:
    """Store it atomically; returns the file. Raises CalibrationNotStored."""
    path = folder / f"{safe_name(calibrated.name)}.json"
    new = path.with_name(f".{path.name}.{os.getpid()}")
    with _keeping(path):
        try:
            new.write_text(json.dumps(calibrated.to_json(), indent=1) + "\n", encoding="utf-8")
            new.replace(path)
        except OSError:
            new.unlink(missing_ok=True)
            raise
    return path


def refuse_unwritable(folder: Path) -> None:
    """To be called before spending a minute on results that could not be stored. Raises CalibrationNotStored."""
    path = folder / f".{os.getpid()}"
    with _keeping(path):
        path.touch()
        path.unlink()


def with_links_of_before(folder: Path, calibrated: Calibrated) -> Calibrated:
    """If the links between GPUs were not measured this time, add those of the last calibration of such machines:
    another node of this type may have more GPUs. GPUs of another form (PCIe, SXM) have other links."""
    if calibrated.links_problem is None:
        return calibrated
    with contextlib.suppress(InvalidCalibration):
        before = load(folder, calibrated.name)
        if before is not None and form_factor(before.device) == form_factor(calibrated.device):
            return dataclasses.replace(calibrated, links=before.links)
    return calibrated


def this_node(folder: Path) -> CpuNode:
    """This machine without GPUs, as calibrated if it was. Raises InvalidCalibration."""
    known = load(folder, node_type())
    memory = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    core = None if known is None else known.core
    return CpuNode(usable_cores(), memory) if core is None else CpuNode(usable_cores(), memory, core)


def measured_machines(folder: Path) -> dict[str, Machine]:
    """The machines whose GPUs were calibrated, by their name in the planner's MACHINES. Raises InvalidCalibration."""
    calibrations = {name: load(folder, name) for name in MACHINES}
    return {name: each.applied(MACHINES[name]) for name, each in calibrations.items() if each is not None}


def machine_of_type(folder: Path, name: str) -> Machine | None:
    """A machine of that type, as calibrated if it was; None if it is neither a known GPU nor a GPU-less machine like
    this one. Raises InvalidCalibration."""
    if name in MACHINES:
        known = load(folder, name)
        return MACHINES[name] if known is None else known.applied(MACHINES[name])
    return this_node(folder).machine(1) if name == node_type() else None


def type_of(machine: Machine) -> str:
    """The name of a machine's type, under which it would be calibrated here."""
    return machine.accelerator.name if machine.has_gpus else node_type()


def ignore_earlier_jobs(folder: Path) -> Path:
    """From now on, what jobs that began earlier say about machines does not count; returns the file whose modification
    time records this. Without the file all jobs count. Raises CalibrationNotStored."""
    path = folder / _JOBS_SINCE
    with _keeping(path):
        path.touch()
    return path


def jobs_since(folder: Path) -> float:
    """Unix seconds: only the steps of jobs that began later say something about machines."""
    try:
        return (folder / _JOBS_SINCE).stat().st_mtime
    except OSError:
        return 0.0


def measure(device: str, say: Callable[[str], None]) -> Calibrated:
    """Measure this machine in a separate process, since this one has no torch. `device`: auto (a GPU if there is one),
    cpu or cuda. `say` is called with what is measured next. Raises CalibrationFailed, UnknownMachine."""
    if device != "cpu":
        _refuse_unknown_gpu()
    return calibrated(Measurements.from_json(_measurements(device, say)))


def _refuse_unknown_gpu() -> None:
    """Before a minute is spent on a GPU of which no plans are made. Raises UnknownMachine."""
    with contextlib.suppress(TorchFailed):  # the measurement says why
        for first in torch_facts()["devices"][:1]:
            planned_as(first, math.inf)


def calibrated(measurements: Measurements) -> Calibrated:
    """The constants that plans use after such measurements. Raises UnknownMachine."""
    if measurements.gpu_memory_bytes is None:
        made = Calibrated(node_type(), measurements.device, measurements.cores, core=fit_core(measurements))
    else:
        name = machine_measured(measurements)
        made = Calibrated(name, measurements.device, measurements.cores, gpu=fit_gpu(measurements, MACHINES[name]))
        if measurements.collectives:
            made = dataclasses.replace(made, links=fit_links(measurements.collectives, MACHINES[name]))
        made = dataclasses.replace(made, links_problem=measurements.links_problem)
    return dataclasses.replace(made, other_cores=measurements.other_cores, spread=measurements.spread)


def _measurements(device: str, say: Callable[[str], None]) -> Any:
    """The last line that the process printed. Its output goes to a file: a pipe would block it while nobody reads."""
    last = ""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out:
        with subprocess.Popen(
            (*_COMMAND, "--device", device), stdout=out, stderr=subprocess.PIPE, text=True, errors="replace"
        ) as process:
            assert process.stderr is not None
            for line in process.stderr:
                last = line.strip() or last
                if line.startswith("measuring: "):
                    say(last)
        out.seek(0)
        printed = out.read().splitlines()
    if process.returncode:
        raise CalibrationFailed(f"this machine could not be measured: {last}")
    try:
        return json.loads(printed[-1])  # libraries print too: NCCL prints its version
    except (IndexError, ValueError) as error:
        raise CalibrationFailed("this machine could not be measured: its output is not a measurement") from error
