"""Constants come out of rows that were made with them, and of no others."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from manta.service.planner.communication import Group, gather_seconds
from manta.service.planner.fitting import fit_core, least_squares
from manta.service.planner.hardware import Cluster, Core, cpu_machine
from manta.service.planner.pipeline import SharedCores
from manta.service.planner.software import MANTA_ON_CPU
from manta.service.planner.step_time import StepModel
from manta.workers.calibration.measurements import (
    AttentionTime,
    BusyTime,
    CollectiveTime,
    Measurements,
    ProductTime,
    StepSeconds,
)
from manta.workers.config import JobSpec

CORE = Core(9e10, 1.8e11, 30.0, 2e10, 2e-5, 2e9, 4e-5, 0.9)


def document(hidden: int, sequence: int, vocabulary: int = 512) -> dict:
    model = {"layers": 2, "hidden_size": hidden, "heads": hidden // 32, "sequence_length": sequence}
    train = {"steps": 1, "global_batch_size": 2, "micro_batch_size": 1, "precision": "fp32"}
    data = {"source": "megatron", "paths": ["corpus.bin"]}
    return {"model": model | {"vocabulary_size": vocabulary}, "train": train, "data": data}


def measured(core: Core, noise: float = 0.0) -> Measurements:
    """Rows as such a core would give them, every second one by `noise` longer."""
    one, two = (Cluster(cpu_machine(slots, slots, 1e12, core), 1, slots) for slots in (1, 2))
    measurements = Measurements("made up", 2)
    for precision, rate in (("float32", core.product_fp32), ("bfloat16", core.product_16bit)):
        measurements.products.append(ProductTime("forward", precision, 64, 64, 64, 2 * 64**3 / rate))
    for sequence, size in ((128, 32), (256, 64)):
        work = 3.5 * 4 * 2 * sequence**2 * (size + core.attention_width)
        measurements.attention.append(AttentionTime(1, 2, sequence, size, work / core.product_fp32))
    for number, shape in enumerate(((32, 8), (64, 64), (512, 16), (256, 128), (128, 256, 8192))):
        spec = JobSpec.model_validate(document(*shape))
        seconds = StepModel(spec, one, MANTA_ON_CPU).time().seconds
        measurements.steps.append(StepSeconds(document(*shape), seconds * (1 + noise * (number % 2))))
    for ranks in (2, 4, 8):
        for size in (4096, 1 << 20):
            alike = SharedCores(2, ranks, 1.0).speed(1)
            seconds = gather_seconds(Group(ranks, ranks), two, size) / alike
            measurements.collectives.append(CollectiveTime("all_gather", ranks, size, seconds))
    measurements.busy.extend([BusyTime(1, 0.9), BusyTime(2, 1.0), BusyTime(8, 1.0)])
    return measurements


def test_fit_of_a_core_recovers_the_constants_its_rows_were_made_with():
    assert asdict(fit_core(measured(CORE))) == pytest.approx(asdict(CORE), rel=0.02)


@pytest.mark.parametrize("name", ["memory", "operation_seconds", "link", "message_seconds"])
def test_fit_of_a_core_follows_a_change_of_each_constant(name):
    changed = replace(CORE, **{name: 2 * getattr(CORE, name)})
    assert asdict(fit_core(measured(changed))) == pytest.approx(asdict(changed), rel=0.02)


def test_fit_of_a_core_is_robust_to_little_noise():
    assert fit_core(measured(CORE, 0.02)).operation_seconds == pytest.approx(CORE.operation_seconds, rel=0.25)


def test_core_measurements_survive_json():
    measurements = measured(CORE)
    assert Measurements.from_json(asdict(measurements)) == measurements


def test_least_squares_fit_solves_two_unknowns():
    rows = [(a, b, 2.0 * a + 3.0 * b, 1.0) for a, b in ((1, 0), (1, 1), (2, 5))]
    assert least_squares(rows) == pytest.approx((2.0, 3.0))


def test_least_squares_fit_has_no_negative_share():
    """A fit that would be best with a negative share has next to none of it."""
    x, y = least_squares([(1.0, 1.0, 1.0, 1.0), (1.0, 2.0, 3.0, 1.0)])
    assert 0 < x < 0.05 and y > 0


def test_least_squares_fit_with_too_few_rows_is_refused():
    with pytest.raises(ValueError, match="too few rows"):
        least_squares([(1.0, 2.0, 3.0, 1.0)])
