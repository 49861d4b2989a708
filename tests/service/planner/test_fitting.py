"""Constants come out of rows that were made with them, and of no others."""

from __future__ import annotations

import random
from dataclasses import asdict, replace

import pytest

from manta.service.planner.communication import Group, gather_seconds, message_seconds, reduce_seconds
from manta.service.planner.fitting import (
    exchange_seconds,
    fit_core,
    fit_gpu,
    fit_links,
    least_squares,
    machine_measured,
    product_time,
    step_seconds,
)
from manta.service.planner.hardware import (
    MACHINES,
    Cluster,
    Core,
    Gpu,
    Links,
    UnknownMachine,
    cpu_machine,
    linked,
    measured,
    named_by_driver,
)
from manta.service.planner.operations import attention_seconds, product_seconds
from manta.service.planner.pipeline import SharedCores
from manta.service.planner.software import MANTA_ON_CPU
from manta.service.planner.step_time import StepModel
from manta.workers.calibration.collectives import GPU_SIZES
from manta.workers.calibration.device import ON_GPU, document_of
from manta.workers.calibration.measurements import (
    AttentionTime,
    BusyTime,
    CollectiveTime,
    CopyTime,
    ElementTime,
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


def core_rows(core: Core, noise: float = 0.0) -> Measurements:
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
    assert asdict(fit_core(core_rows(CORE))) == pytest.approx(asdict(CORE), rel=0.02)


@pytest.mark.parametrize("name", ["memory", "operation_seconds", "link", "message_seconds"])
def test_fit_of_a_core_follows_a_change_of_each_constant(name):
    changed = replace(CORE, **{name: 2 * getattr(CORE, name)})
    assert asdict(fit_core(core_rows(changed))) == pytest.approx(asdict(changed), rel=0.02)


def test_fit_of_a_core_is_robust_to_little_noise():
    assert fit_core(core_rows(CORE, 0.02)).operation_seconds == pytest.approx(CORE.operation_seconds, rel=0.25)


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


ASSUMED = MACHINES["h100-80gb"]
GPU = Gpu(6.8e14, 5e13, 5.5e14, 2.7e12, 2e12, 2.3e-6, 7e-6, 5e10)


def gpu_rows(gpu: Gpu) -> Measurements:
    """Rows as such a GPU would give them."""
    machine = measured(ASSUMED, gpu)
    measurements = Measurements(
        "NVIDIA H100 80GB HBM3", 16, gpu_memory_bytes=int(79.2 * 2**30), adds_wider=gpu.adds_wider
    )
    for precision, shapes in (("bfloat16", ON_GPU.products), ("float32", ON_GPU.wide_products)):
        for n, i, o in shapes:
            for name in ("forward", "input", "weight"):
                row = ProductTime(name, precision, n, i, o, 1.0)
                measurements.products.append(replace(row, seconds=product_time(row, machine)))
    for b, a, s, d in ON_GPU.attention:
        forward, backward = attention_seconds(machine, b * a, s, d)
        measurements.attention.append(AttentionTime(b, a, s, d, forward + backward, forward))
    for name in ("sum", "gelu", "square"):
        measurements.elements.append(ElementTime(name, 2**16, gpu.kernel_seconds))
        measurements.elements.append(ElementTime(name, 2**30, gpu.kernel_seconds + 2**30 / gpu.memory))
        measurements.elements.append(ElementTime(name, 2**24, 2**24 / gpu.memory / 3))  # in a cache
    measurements.elements.extend(ElementTime("update", moved, moved / gpu.update) for moved in (2**16, 2**29))
    measurements.copies.extend(
        [CopyTime("to_device", 2**28, 2**28 / gpu.copy), CopyTime("to_host", 2**28, 0.9 * 2**28 / gpu.copy)]
    )
    for family in ("gpt", "llama", "qwen"):
        row = StepSeconds(document_of((8, 128, 2, 128, 1, 4, 1024), "bf16", family=family), 1.0)
        measurements.steps.append(replace(row, seconds=step_seconds(row, machine)))
    return measurements


@pytest.mark.parametrize("adds_wider", [False, True])
def test_fit_of_a_gpu_recovers_the_constants_its_rows_were_made_with(adds_wider):
    gpu = replace(GPU, adds_wider=adds_wider)
    assert Measurements.from_json(asdict(gpu_rows(gpu))) == gpu_rows(gpu)
    assert asdict(fit_gpu(gpu_rows(gpu), ASSUMED)) == pytest.approx(asdict(gpu), rel=0.03)


@pytest.mark.parametrize("name", [name for name in asdict(GPU) if name != "adds_wider"])
def test_fit_of_a_gpu_follows_a_change_of_each_constant(name):
    changed = replace(GPU, **{name: 1.3 * getattr(GPU, name)})
    assert asdict(fit_gpu(gpu_rows(changed), ASSUMED)) == pytest.approx(asdict(changed), rel=0.03)


@pytest.mark.parametrize(
    ("device", "gibibytes", "name"),
    [
        ("NVIDIA H100 80GB HBM3", 79.2, "h100-80gb"),
        ("NVIDIA H200", 140.0, "h200-141gb"),
        ("NVIDIA A100-SXM4-40GB", 39.5, "a100-40gb"),
        ("NVIDIA A100-SXM4-80GB", 79.3, "a100-80gb"),
        ("Tesla V100-SXM2-16GB", 15.8, "v100-16gb"),
        ("NVIDIA L40S", 44.5, "l40s-48gb"),
        ("NVIDIA B200", 178.0, "b200-180gb"),
        ("NVIDIA H100 PCIe", 79.6, "h100-80gb"),
        ("NVIDIA GeForce RTX 4090", 24.0, None),
        ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 39.5, None),
    ],
)
def test_gpu_name_of_the_driver_maps_to_a_known_accelerator(device, gibibytes, name):
    assert named_by_driver(device, gibibytes * 2**30) == name


def test_fit_of_an_unknown_gpu_is_refused_by_name():
    with pytest.raises(UnknownMachine, match=r"\(Abacus\); known are v100-32gb"):
        machine_measured(Measurements("Abacus", 1, gpu_memory_bytes=1))


def test_products_with_few_tiles_and_long_sums_are_split_along_the_sum():
    machine = measured(ASSUMED, GPU)
    one_wave = 2 * 64 * 64 * 16384 / (GPU.product_16bit / 132 * 0.55)
    assert product_seconds(machine, 512, 512, 16384) < 0.6 * one_wave
    assert product_seconds(machine, 512, 512, 256) > GPU.kernel_seconds


def test_planned_attention_of_few_heads_is_less_efficient():
    machine = measured(ASSUMED, replace(GPU, kernel_seconds=1e-12))
    one, many = attention_seconds(machine, 1, 2048, 128)[0], attention_seconds(machine, 64, 2048, 128)[0]
    assert one > many / 32
    forward, backward = attention_seconds(machine, 128, 2048, 128)
    assert forward == pytest.approx(2 * many)
    # Half of the scores and those on the diagonal, two products forward and five backward.
    assert forward * GPU.attention == pytest.approx(4 * 128 * 2048 * (2048 + 128) / 2 * (128 + 64))
    assert backward / forward == pytest.approx(5 / 2 / 0.74)


KINDS = ("all_gather", "reduce_scatter", "all_reduce", "message")


def link_rows(links, ranks=(2, 8), machine="h100-80gb", noise=lambda: 1.0):
    """As such links would give them."""
    known = linked(MACHINES[machine], links)
    made = [CollectiveTime(kind, count, size, 1.0) for count in ranks for size in GPU_SIZES for kind in KINDS]
    return [replace(row, seconds=exchange_seconds(row, known) * noise()) for row in made]


@pytest.mark.parametrize("links", [Links(3.6e11, 3e-6), Links(2e10, 2e-5), Links(8e11, 8e-7)])
@pytest.mark.parametrize("ranks", [(2,), (2, 3), (2, 8)])
def test_fit_of_links_recovers_the_constants_their_rows_were_made_with(links, ranks):
    fitted = fit_links(link_rows(links, ranks), MACHINES["h100-80gb"])
    assert asdict(fitted) == pytest.approx(asdict(links), rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("seed", range(20))
def test_fit_of_links_recovers_drawn_constants_from_noisy_rows(seed):
    draw = random.Random(seed)
    links = Links(10 ** draw.uniform(9.7, 12), 10 ** draw.uniform(-6.3, -4.3))
    name = draw.choice([*MACHINES])
    fitted = fit_links(link_rows(links, machine=name, noise=lambda: draw.lognormvariate(0.0, 0.05)), MACHINES[name])
    assert fitted.bandwidth == pytest.approx(links.bandwidth, rel=0.1)
    assert fitted.hop_seconds == pytest.approx(links.hop_seconds, rel=0.1)
    assert 0.01 < fitted.error < 0.08


def test_fit_of_links_is_robust_to_one_delayed_row():
    made = link_rows(Links(3.6e11, 3e-6))
    made[5] = replace(made[5], seconds=20 * made[5].seconds)
    fitted = fit_links(made, MACHINES["h100-80gb"])
    assert (fitted.bandwidth, fitted.hop_seconds) == (pytest.approx(3.6e11, rel=0.1), pytest.approx(3e-6, rel=0.1))


def test_fit_of_unlike_links_follows_the_larger_groups_and_reports_a_large_error():
    """Pairs with a bridge, and one switch for all: the larger groups are told as they are."""
    pairs = [row for row in link_rows(Links(1e11, 3e-6), (2,)) if row.kind != "message"]
    fitted = fit_links([*pairs, *link_rows(Links(1e10, 3e-6), (8,))], MACHINES["l40s-48gb"])
    assert fitted.bandwidth == pytest.approx(1e10, rel=0.1) and fitted.hop_seconds == pytest.approx(3e-6, rel=0.1)
    assert fitted.error > 0.3


def test_fit_of_links_without_rows_is_refused():
    with pytest.raises(ValueError, match="too few rows"):
        fit_links([], MACHINES["h100-80gb"])


def test_plan_uses_the_fitted_link_in_a_node_and_the_lower_bandwidth_across_nodes():
    known, size = linked(MACHINES["h100-80gb"], Links(1e11, 1e-3)), 1e9
    one, two = Cluster(known, 1, 8), Cluster(known, 2, 8)
    assert gather_seconds(Group(4, 4), one, size) == pytest.approx(0.75 * size / 1e11 + 4e-3)
    assert reduce_seconds(Group(4, 4), one, size) == pytest.approx(1.5 * size / 1e11 + 6e-3)
    assert message_seconds(one, size, True) == pytest.approx(size / 1e11 + 1e-3)
    assert message_seconds(two, size, False) == message_seconds(Cluster(MACHINES["h100-80gb"], 2, 8), size, False)
    assert gather_seconds(Group(16, 8), two, size) == pytest.approx(15 / 16 * size / 1e11 + 14e-3, rel=0.01)
