"""All checks, one after another. A check that fails is a finding too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from manta.service.doctor import Finding, machine, packages, stores
from manta.service.settings import Settings
from manta.workers.config import JobSpec
from manta.workers.paths import Paths

Check = Callable[[], Iterable[Finding]]


def checks(settings: Settings, job: JobSpec | None) -> dict[str, Check]:
    """By subject, the checks for a service with these `settings`, and for `job`."""
    paths = Paths.of(settings.home)
    return {
        "Python": machine.python,
        "packages": packages.requirements,
        "torch": packages.torch,
        "Ray": packages.ray,
        "shared memory": lambda: machine.shared_memory(job),
        "host memory": lambda: machine.offloaded(job),
        "limits": machine.limits,
        "disk": lambda: machine.disk(paths.home, job, settings.checkpoints is not None),
        "folders": lambda: machine.folders(paths),
        "network": machine.network,
        "database": lambda: stores.database(settings),
        "checkpoints": lambda: stores.checkpoints(settings.checkpoints),
        "logs": lambda: stores.logs(settings),
        "data": lambda: _data(job, settings.data_roots),
    }


def findings(these: dict[str, Check]) -> Iterator[Finding]:
    """The findings of each check, as soon as it has them."""
    for subject, check in these.items():
        try:
            yield from check()
        except Exception as error:  # noqa: BLE001 - whatever prevents a check is what its user has to know
            yield Finding(subject, "problem", f"could not be looked at: {type(error).__name__}: {error}")


def _data(job: JobSpec | None, roots: tuple[Path, ...] | None) -> Iterator[Finding]:
    """Whether the files that the job reads are here."""
    data = job.data if job is not None else None
    names = () if data is None else (*data.paths, *(name for each in data.validation for name in each.paths))
    weights = (job.model.from_,) if job is not None and job.model.from_ is not None else ()
    for name in (*names, *weights):
        path = Path(name)
        if roots is not None and not any(path.resolve().is_relative_to(root) for root in roots):
            yield Finding("data", "problem", f"{path} is outside of the roots for data", "see MANTA_DATA_ROOTS")
        elif not path.exists():
            yield Finding("data", "problem", f"{path} is not there", "each node has to have it at that path")
        else:
            yield Finding("data", "ok", f"{path} is there")
