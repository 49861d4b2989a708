"""The envelope of every benchmark: its figures with units and targets, and what they were measured on.

`python -m benchmarks.NAME` prints a small table, `--json` the report as JSON and nothing else, `--out FILE` also
writes that JSON to a file. Figures are compared on the machine that they name; nothing here fails when one misses
its target.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from manta.workers.errors import MantaError
from manta.workers.spec.problems import SpecError

ROOT = Path(__file__).resolve().parents[2]
SEED = 1234
VERSIONS_OF = {"torch": "torch", "ray": "ray", "manta": "manta-train"}


@dataclass(frozen=True)
class Figure:
    """One number."""

    value: float | int | bool
    """The number; a bool is a yes or no."""
    unit: str
    """Unit of the number, such as s, ms, ratio, steps, nats/token; `bool` for a yes or no."""
    target: float | int | bool | None = None
    """Most that it should be; for a bool what it should be. None: there is no target."""

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None where there is none."""
        if self.target is None:
            return None
        return self.value is self.target if isinstance(self.target, bool) else self.value <= self.target

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        target = {} if self.target is None else {"target": self.target, "met": self.met}
        return {"value": self.value, "unit": self.unit, **target}


@dataclass
class Report:
    """What one run of a benchmark found. Make it before measuring: it notes the load that it started under."""

    name: str
    seed: int
    figures: dict[str, Figure] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    """What was run."""
    samples: dict[str, list[Any]] = field(default_factory=dict)
    """The single measurements behind figures, where there are few."""
    load_average: tuple[float, float, float] = field(default_factory=os.getloadavg)
    """Of the machine over 1, 5 and 15 minutes, before the benchmark."""

    def add(self, name: str, value: float | int | bool, unit: str, target: float | int | bool | None = None) -> None:
        """Note a figure."""
        self.figures[name] = Figure(value, unit, target)

    def add_spread(
        self, name: str, values: Sequence[float], unit: str, target: float | None = None, most: float | None = None
    ) -> None:
        """Note median, 95th percentile and maximum of `values`; `target` is for the maximum, `most` for the 95th
        percentile."""
        self.add(f"{name}_median", round(statistics.median(values), 4), unit)
        self.add(f"{name}_p95", round(percentile(values, 0.95), 4), unit, most)
        self.add(f"{name}_max", round(max(values), 4), unit, target)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {
            "benchmark": self.name,
            "figures": {name: figure.to_json() for name, figure in self.figures.items()},
            "settings": self.settings,
            "samples": self.samples,
            "seed": self.seed,
            "machine": machine(),
            "versions": versions(),
            "load_average_at_start": [round(load, 2) for load in self.load_average],
        }

    def to_table(self) -> str:
        """For people."""
        lines = [f"{self.name}: {machine()['cpu']}, {machine()['cores']} cores, seed {self.seed}"]
        width = max((len(name) for name in self.figures), default=0)
        for name, figure in self.figures.items():
            value = f"{figure.value:.6g}" if isinstance(figure.value, float) else str(figure.value)
            verdict = f"  target {figure.target}: {'met' if figure.met else 'MISSED'}" if figure.met is not None else ""
            lines.append(f"  {name:<{width}}  {value:>12} {figure.unit}{verdict}")
        return "\n".join(lines)


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of `values` that at least `share` of them do not exceed. Raises ValueError without any."""
    if not values:
        raise ValueError("no values to take a percentile of")
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def machine() -> dict[str, Any]:
    """The machine, without its name: processor, cores that this process may use, memory in bytes."""
    return {
        "cpu": _cpu_model(),
        "architecture": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    }


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def versions() -> dict[str, str | None]:
    """Versions of what the figures depend on; None for what is not installed."""
    return {"python": platform.python_version(), **{name: _version(package) for name, package in VERSIONS_OF.items()}}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Arguments that every benchmark takes."""
    options = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    options.add_argument("--json", action="store_true", help="print the report as JSON and nothing else")
    options.add_argument("--out", type=Path, metavar="FILE", help="also write the report as JSON to FILE")
    options.add_argument("--seed", type=int, default=SEED, help=f"seed of data order and weights (default: {SEED})")
    return options


def deliver(measure: Callable[[argparse.Namespace], Report], options: argparse.Namespace) -> int:
    """Run the benchmark and print its report as asked; returns the exit status, 1 when it could not be run."""
    try:
        report = measure(options)
    except (MantaError, SpecError) as error:
        print(error, file=sys.stderr)
        return 1
    text = json.dumps(report.to_json(), indent=1)
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(text + "\n", encoding="utf-8")
    print(text if options.json else report.to_table())
    return 0
