"""What is installed: Manta's requirements, torch and the GPUs that it sees, Ray."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.version import Version

from manta.service.cluster.ray_head import count_gpus
from manta.service.cluster.ray_private import TRIED_WITH
from manta.service.doctor import Finding
from manta.service.torch_facts import TorchFailed, torch_facts

DISTRIBUTION = "manta-train"
DRIVER = Path("/proc/driver/nvidia/version")


def requirements() -> Iterator[Finding]:
    """Whether each package that Manta needs is installed in a suitable version."""
    try:
        wanted = [Requirement(line) for line in importlib.metadata.requires(DISTRIBUTION) or ()]
    except importlib.metadata.PackageNotFoundError:
        yield Finding("packages", "warning", f"{DISTRIBUTION} is not installed here", "pip install it, or `make setup`")
        return
    needed = [each for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
    if not _has_torch():  # a separate control plane has none, see `torch`
        needed = [each for each in needed if each.name != "torch"]
    wrong = list(filter(None, map(_wrong, needed)))
    for problem in wrong:
        yield Finding("packages", "problem", problem, f"pip install --upgrade {DISTRIBUTION}")
    if not wrong:
        version = importlib.metadata.version(DISTRIBUTION)
        yield Finding("packages", "ok", f"{DISTRIBUTION} {version} and the {len(needed)} packages that it needs")


def _has_torch() -> bool:
    try:
        importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _wrong(wanted: Requirement) -> str | None:
    try:
        version = importlib.metadata.version(wanted.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{wanted.name} is not installed"
    return None if wanted.specifier.contains(version, True) else f"{wanted.name} is {version}, not {wanted.specifier}"


def torch(gpus: int | None = None) -> Iterator[Finding]:
    """Whether torch starts, and uses the GPUs that the machine has. `gpus`: their number; None: look."""
    if not _has_torch():
        said = "torch is not installed: this machine will do for a control plane, but no ranks can run on it"
        yield Finding("torch", "warning", said, "pip install torch, where ranks are to run")
        return
    gpus = count_gpus() if gpus is None else gpus
    try:
        facts = torch_facts()
    except TorchFailed as error:
        yield Finding("torch", "problem", str(error), error.advice)
        return
    yield judge_torch(facts, gpus, driver_version())


def judge_torch(about: dict[str, Any], gpus: int, driver: str | None) -> Finding:
    """The finding from what torch reports about itself (`version`, `cuda`, `nccl`, `devices`) and the number of the
    machine's `gpus`."""
    text = f"torch {about['version']}"
    if not gpus:
        return Finding("torch", "ok", f"{text}; this machine has no GPU, so ranks take CPU slots")
    seen = len(about["devices"])
    if about["cuda"] is None:
        advice = "install a CUDA build of torch, or jobs run on CPU slots (resources.accelerator: cpu)"
        return Finding("torch", "problem", f"{text} is a CPU build, and this machine has {gpus} GPUs", advice)
    text += f", CUDA {about['cuda']}, driver {driver or 'unknown'}, NCCL {about['nccl'] or 'unknown'}"
    if seen < gpus:
        advice = "see nvidia-smi: the driver may be too old for this CUDA, or CUDA_VISIBLE_DEVICES hides some"
        return Finding("torch", "problem", f"{text}: it sees {seen} of {gpus} GPUs", advice)
    return Finding("torch", "ok", f"{text}; GPUs: {', '.join(about['devices'])}")


def driver_version(file: Path = DRIVER) -> str | None:
    """Version of NVIDIA's kernel driver, according to the driver; None if there is none."""
    try:
        words = file.read_text().split()
    except OSError:
        return None
    return next((word for word in words if word[:1].isdigit() and "." in word), None)


def ray() -> Iterator[Finding]:
    """Which Ray is installed."""
    try:
        version = importlib.metadata.version("ray")
    except importlib.metadata.PackageNotFoundError:
        yield Finding("Ray", "problem", "ray is not installed", "pip install ray")
        return
    oldest, newest = TRIED_WITH
    if Version(oldest) <= Version(version) <= Version(newest):
        yield Finding("Ray", "ok", f"ray {version}")
    else:
        yield Finding("Ray", "warning", f"ray {version}", f"Manta was tried with {oldest} and {newest}")
