"""The machine that a benchmark plans for: measured now, or as it was."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from manta.service.planner.hardware import Core
from manta.service.planner.machines import Calibrated
from manta.service.planner.machines import measure as measure_machine


def add_options(options: argparse.ArgumentParser) -> None:
    """Where predictions go before anything runs, and which machine they are for."""
    options.add_argument(
        "--predictions", type=Path, metavar="FILE", help="where predictions are stored before the runs"
    )
    options.add_argument("--machine", type=Path, metavar="FILE", help="a stored calibration, instead of a new one")


def calibration(file: Path | None) -> Calibrated:
    """The calibration in `file`, else a new one, of cores. Raises what a measurement does."""
    if file is not None:
        return Calibrated.from_json(json.loads(file.read_text(encoding="utf-8")))
    return measure_machine("cpu", lambda line: print(line, file=sys.stderr))


def core_of(calibrated: Calibrated) -> Core:
    """What a core reaches. Raises ValueError where a GPU was measured."""
    if calibrated.core is None:
        raise ValueError(f"{calibrated.name} is the calibration of a GPU")
    return calibrated.core
