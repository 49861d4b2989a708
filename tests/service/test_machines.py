"""Calibrations are kept by type of node, found again, and refused where they are none."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from manta.service.planner import machines
from manta.service.planner.hardware import ASSUMED_CORE, MACHINES, Core, Gpu, Links, UnknownMachine, measured
from manta.service.planner.machines import (
    Calibrated,
    CalibrationFailed,
    CalibrationNotStored,
    InvalidCalibration,
    load,
    measured_machines,
    save,
    this_node,
    with_links_of_before,
)
from manta.workers.system.resources import node_type
from tests.service.planner.test_fitting import gpu_rows as measurements_of
from tests.service.planner.test_fitting import link_rows as links_rows

CORE = Core(9e10, 1.8e11, 30.0, 2e10, 2e-5, 2e9, 4e-5, 0.9)


OF_GPU = Calibrated("h100-80gb", "NVIDIA H100", 16, gpu=Gpu(6.8e14, 5e13, 5e14, 2.7e12, 2e12, 2e-6, 7e-6, 5e10, True))
LINKS = Links(3.6e11, 3e-6, 0.1)


def calibrated(name: str = "abacus-4") -> Calibrated:
    return Calibrated(name, "Abacus", 4, CORE)


def test_calibration_is_loaded_by_node_type(tmp_path):
    path = save(tmp_path / "machines", calibrated())
    assert load(tmp_path / "machines", "abacus-4") == calibrated()
    assert load(tmp_path / "machines", "abacus-8") is None
    assert list(path.parent.iterdir()) == [path]


def test_failed_save_of_a_calibration_leaves_the_former_one(tmp_path, monkeypatch):
    save(tmp_path, calibrated())
    with (
        monkeypatch.context() as patch,
        pytest.raises(CalibrationNotStored, match=r"abacus-4.json cannot be written \(.*full"),
    ):
        patch.setattr(Path, "replace", Mock(side_effect=OSError("the disk is full")))
        save(tmp_path, replace(calibrated(), device="Another"))
    assert load(tmp_path, "abacus-4") == calibrated()
    assert [path.name for path in tmp_path.iterdir()] == ["abacus-4.json"]


@pytest.mark.parametrize(
    ("other_cores", "spread", "warning"),
    [
        (None, None, None),
        (0.1, 0.02, None),
        (0.4, 0.02, "other processes kept 0.4 of its cores busy: calibrate again while nothing else runs"),
        (0.1, 0.3, "half of the repetitions were 30% apart or more: calibrate again while nothing else runs"),
        (0.4, 0.3, "other processes kept 0.4 of its cores busy and half of the repetitions were 30% apart or more: "),
    ],
)
def test_calibration_with_disturbances_has_a_warning(tmp_path, other_cores, spread, warning):
    save(tmp_path, replace(calibrated(), other_cores=other_cores, spread=spread))
    calibration = load(tmp_path, "abacus-4")
    assert (calibration.other_cores, calibration.spread) == (other_cores, spread)
    assert calibration.warning is None if warning is None else calibration.warning.startswith(warning)


def test_a_calibration_of_an_earlier_release_has_no_warning(tmp_path):
    document = calibrated().to_json()
    del document["other_cores"], document["spread"]
    save(tmp_path, calibrated()).write_text(json.dumps(document))
    assert load(tmp_path, "abacus-4") == calibrated()


def test_this_node_has_assumed_constants_until_it_is_calibrated(tmp_path):
    assert this_node(tmp_path).core == ASSUMED_CORE
    assert this_node(tmp_path).machine(8).is_assumed
    save(tmp_path, calibrated(node_type()))
    assert this_node(tmp_path).core == CORE
    assert not this_node(tmp_path).machine(8).is_assumed


@pytest.mark.parametrize(
    "change",
    [
        lambda document: "no JSON",
        lambda document: json.dumps({}),
        lambda document: json.dumps([]),
        lambda document: json.dumps(document | {"core": document["core"] | {"memory": 0.0}}),
        lambda document: json.dumps(document | {"core": document["core"] | {"speed": 1.0}}),
    ],
)
def test_malformed_calibration_file_is_refused_with_advice(tmp_path, change):
    path = save(tmp_path, calibrated())
    path.write_text(change(calibrated().to_json()))
    with pytest.raises(InvalidCalibration, match="calibrate again, or remove it"):
        load(tmp_path, "abacus-4")


def test_calibration_of_a_gpu_is_stored_by_type_apart_from_cpu_nodes(tmp_path):
    save(tmp_path, OF_GPU)
    save(tmp_path, calibrated())
    assert measured_machines(tmp_path) == {"h100-80gb": measured(MACHINES["h100-80gb"], OF_GPU.gpu)}
    assert load(tmp_path, "h100-80gb") == OF_GPU and len(OF_GPU.constants) == 8
    (tmp_path / "h100-80gb.json").write_text(json.dumps(OF_GPU.to_json() | {"core": vars(CORE)}))
    with pytest.raises(InvalidCalibration, match="calibrate again, or remove it"):
        measured_machines(tmp_path)


def test_measured_links_are_stored_with_their_gpu(tmp_path):
    save(tmp_path, linked := replace(OF_GPU, links=LINKS))
    assert load(tmp_path, "h100-80gb") == linked and linked.links_note is None
    assert measured_machines(tmp_path)["h100-80gb"] == measured(MACHINES["h100-80gb"], OF_GPU.gpu, LINKS)


def test_a_calibration_of_before_links_were_measured_is_read(tmp_path):
    document = OF_GPU.to_json()
    del document["links"], document["links_problem"]
    save(tmp_path, OF_GPU).write_text(json.dumps(document))
    assert load(tmp_path, "h100-80gb") == OF_GPU


@pytest.mark.parametrize("links", [[], {"bandwidth": 1e11}, {"bandwidth": 1e11, "hop_seconds": 0.0}, {"speed": 1.0}])
def test_calibration_with_invalid_links_is_refused(tmp_path, links):
    save(tmp_path, OF_GPU).write_text(json.dumps(OF_GPU.to_json() | {"links": links}))
    with pytest.raises(InvalidCalibration, match="calibrate again, or remove it"):
        load(tmp_path, "h100-80gb")


ONE = replace(OF_GPU, device="Another", links_problem="there is one GPU")


@pytest.mark.parametrize(
    ("before", "note"),
    [(None, "plans use assumed values"), (LINKS, "the earlier measurement stays")],
)
def test_links_that_could_not_be_measured_again_stay(tmp_path, before, note):
    """Another node of this type has one GPU, or NCCL failed."""
    save(tmp_path, replace(OF_GPU, links=before))
    made = with_links_of_before(tmp_path, ONE)
    assert made == replace(ONE, links=before)
    assert made.links_note.startswith(f"the links between its GPUs were not measured (there is one GPU): {note}")


def test_links_of_an_earlier_calibration_are_unused_if_missing_or_measured_again(tmp_path):
    assert with_links_of_before(tmp_path, ONE) is ONE
    save(tmp_path, OF_GPU).write_text("[")
    assert with_links_of_before(tmp_path, ONE) is ONE
    save(tmp_path, replace(OF_GPU, links=LINKS))
    again = replace(OF_GPU, links=replace(LINKS, bandwidth=1e11))
    assert with_links_of_before(tmp_path, again) is again


def test_a_gpu_is_calibrated_whether_its_links_could_be_measured_or_not():
    rows = measurements_of(OF_GPU.gpu)
    alone = machines.calibrated(replace(rows, links_problem="rank 1: NCCL error"))
    assert (alone.links, alone.links_problem) == (None, "rank 1: NCCL error") and alone.gpu is not None
    both = machines.calibrated(replace(rows, collectives=links_rows(LINKS)))
    assert (both.gpu, both.links_problem) == (alone.gpu, None)
    assert both.links.bandwidth == pytest.approx(LINKS.bandwidth)


PCIE = replace(OF_GPU, device="NVIDIA H100 PCIe", links=LINKS)


def test_calibration_of_another_gpu_form_factor_has_its_own_links(tmp_path):
    save(tmp_path, PCIE)
    assert with_links_of_before(tmp_path, ONE) is ONE
    again = replace(PCIE, links=None, links_problem="there is one GPU")
    assert with_links_of_before(tmp_path, again).links == LINKS
    machine = PCIE.applied(MACHINES["h100-80gb"])
    assert machine == replace(measured(MACHINES["h100-80gb"], PCIE.gpu, LINKS), measured_on="NVIDIA H100 PCIe")


def sees(monkeypatch, *devices):
    """What torch finds on this machine."""
    monkeypatch.setattr(machines, "torch_facts", lambda: {"devices": list(devices)})


def test_calibration_of_an_unplannable_gpu_is_refused_before_it_starts(monkeypatch):
    measures_by(monkeypatch, "raise SystemExit('measured')")
    sees(monkeypatch, "NVIDIA GeForce RTX 4090", "NVIDIA H100 80GB HBM3")
    for device in ("auto", "cuda"):
        with pytest.raises(UnknownMachine, match=r"no plans .* RTX 4090\); known .* --device cpu` measures"):
            machines.measure(device, print)
    with pytest.raises(CalibrationFailed, match="measured"):
        machines.measure("cpu", print)
    sees(monkeypatch, "NVIDIA H100 80GB HBM3")
    with pytest.raises(CalibrationFailed, match="measured"):
        machines.measure("auto", print)


def measures_by(monkeypatch, program):
    """This machine is measured by another program."""
    monkeypatch.setattr(machines, "_COMMAND", (sys.executable, "-S", "-c", program))


@pytest.mark.parametrize(
    ("program", "why"),
    [("raise SystemExit('no memory left')", "no memory left"), ("print('NCCL')", "its output is not a measurement")],
)
def test_calibration_that_fails_says_why(monkeypatch, program, why):
    measures_by(monkeypatch, program)
    sees(monkeypatch)
    with pytest.raises(CalibrationFailed, match=f"could not be measured: {why}"):
        machines.measure("auto", print)


def test_calibration_result_is_the_last_line_of_the_program(monkeypatch):
    """More than a pipe holds, while what is said is read first."""
    measures_by(monkeypatch, "import sys; print('NCCL'); print([0] * 10**5); print('measuring: all', file=sys.stderr)")
    said = []
    assert machines._measurements("auto", said.append) == [0] * 10**5 and said == ["measuring: all"]
