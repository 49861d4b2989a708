"""Iteration times of the published tables, as the planner predicts them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.support.published.arithmetic import README_DP, README_TP, paper_job, readme_model
from benchmarks.support.published.rows import Row, rank_correlation
from benchmarks.support.published.tables import Tables, gpt
from manta.service.planner.communication import groups_of
from manta.service.planner.hardware import Cluster, machine_of
from manta.service.planner.layer_time import LayerTime
from manta.service.planner.software import (
    MEGATRON_2020,
    MEGATRON_2021,
    MEGATRON_2021_SCATTER,
    MEGATRON_2022,
    MEGATRON_DEEPSPEED_2021,
    Software,
)
from manta.service.planner.step_time import StepModel
from manta.workers.accounting.flops import step_flops
from manta.workers.config import JobSpec

FIGURES = "b_ptdp_figures_7_to_18"


def rows(tables: Tables) -> Iterator[Row]:
    """All of them."""
    yield from readme(tables)
    yield from _layer(tables)
    yield from _iterations(tables)
    yield from _megatron_turing(tables)
    yield from _figures(tables)
    yield from _recomputation(tables)
    yield from _scatter_gather(tables)
    yield from _zero_comparison(tables)


def a100(gpus: int) -> Cluster:
    """So many GPUs in DGX A100s."""
    return Cluster(machine_of("a100-80gb"), -(-gpus // 8), min(8, gpus))


def seconds(spec: JobSpec, software: Software) -> float:
    """Of a step on as many A100s as the layout has ranks."""
    return StepModel(spec, a100(spec.layout.world_size), software).time().seconds


def teraflops(spec: JobSpec, software: Software) -> float:
    """TFLOP/s a GPU, as arXiv:2104.04473 counts them: with a full recomputation, whether there is one or not."""
    again = spec.layout.model_copy(update={"recompute": "full", "recompute_every": 1})
    work = step_flops(spec.model_copy(update={"parallel": again})).hardware_full
    return work / spec.layout.world_size / seconds(spec, software) / 1e12


def readme(tables: Tables) -> Iterator[Row]:
    """The tables that three constants of a machine are fitted on."""
    models = {row["case"]: row for row in tables.rows(README_TP)}
    recompute: dict[str, Any] = {"recompute": "full", "sequence_parallel": False}
    for case, row in models.items():
        for column, machine, batch in (("v100_batch8", "v100-32gb", 8), ("a100_batch16", "a100-40gb", 16)):
            spec = readme_model(row, batch, tensor=row["tp"], **recompute)
            cluster = Cluster(machine_of(machine), 1, machine_of(machine).devices)
            ours = 1e3 * StepModel(spec, cluster, MEGATRON_2020).time().seconds
            yield Row(README_TP, f"{column} {case}", row[f"{column}_iter_ms"], ours, "ms", "relative", 0.05)
    for row in tables.rows(README_DP):
        spec = readme_model(models[row["case"]], 2048, tensor=row["tp"], data=128, **recompute)
        cluster = Cluster(machine_of("a100-40gb"), row["gpus"] // 8, 8)
        ours = 1e3 * StepModel(spec, cluster, MEGATRON_2020).time().seconds
        yield Row(README_DP, row["case"], row["iter_ms"], ours, "ms", "relative", 0.05)


LAYER_CASES: dict[str, dict[str, Any]] = {
    "Baseline no recompute": {"recompute": "none", "sequence_parallel": False},
    "Sequence Parallelism": {"recompute": "none"},
    "Baseline with recompute": {"recompute": "full", "sequence_parallel": False},
    "Selective Recompute": {"recompute": "selective", "sequence_parallel": False},
    "Selective + Sequence": {"recompute": "selective"},
}


def _layer(tables: Tables) -> Iterator[Row]:
    """Table 4 of arXiv:2205.05198; shown, as constants were chosen on it."""
    name = "c_actrecomp_table4_layer_times_22B"
    for row in tables.rows(name):
        spec = paper_job(tables.models_of_2205_05198["22B"], **LAYER_CASES[row["experiment"]])
        layer = LayerTime(spec, groups_of(spec.layout, a100(8), MEGATRON_2022), MEGATRON_2022)
        backward = layer.backward_input().plus(layer.backward_weight()).seconds
        for way, ours in (("forward", layer.forward().seconds), ("backward", backward)):
            yield Row(name, f"{row['experiment']}, {way}", row[f"{way}_ms"], 1e3 * ours, "ms", "none")


def _iterations(tables: Tables) -> Iterator[Row]:
    name = "c_actrecomp_table5_end_to_end"
    document = tables.read(name)
    full: dict[str, Any] = {"recompute": "full", "sequence_parallel": False}
    for row in tables.rows(name):
        shape = tables.models_of_2205_05198[row["model"]]
        for case, column, layout in (("full", "full_recompute_s", full), ("present", "present_work_s", {})):
            spec = paper_job(shape, **layout)
            ours = seconds(spec, MEGATRON_2022)
            yield Row(name, f"{row['model']}, {case}", row[column], ours, "s", "relative", 0.05)
            if case == "present":
                mfu = 100 * step_flops(spec).model_full / (shape["gpus"] * 312e12 * ours)
                yield Row(name, f"{row['model']}, mfu", row["mfu_pct"], mfu, "%", "relative", 0.05)
    extra = document["extra"]["530B_dp8_2240gpus"]
    shape = tables.models_of_2205_05198["530B"] | {"global_batch": extra["global_batch"]}
    spec = paper_job(shape, data=8)
    ours = seconds(spec, MEGATRON_2022)
    yield Row(name, "530B on 2240 GPUs", extra["iter_s"], ours, "s", "relative", 0.05)
    mfu = 100 * step_flops(spec).model_full / (2240 * 312e12 * ours)
    yield Row(name, "530B on 2240 GPUs, mfu", extra["mfu_pct"], mfu, "%", "relative", 0.05)


FULL: dict[str, Any] = {"recompute": "full", "sequence_parallel": False}
"""Layouts of arXiv:2104.04473 and arXiv:2201.11990."""


def _megatron_turing(tables: Tables) -> Iterator[Row]:
    name = "d_mtnlg_config_and_throughput"
    for row in tables.rows(name):
        spec = gpt(105, 20480, 128, batch=1920, tensor=8, pipeline=35, data=row["gpus"] // 280, **FULL)
        ours = seconds(spec, MEGATRON_DEEPSPEED_2021)
        yield Row(name, f"{row['gpus']} GPUs", row["iter_time_s"], ours, "s", "relative", 0.05)


@dataclass(frozen=True)
class Series:
    """A line in a figure of arXiv:2104.04473: a job at every point."""

    figure: str
    name: str
    points: dict[str, tuple[JobSpec, Software]]


def _interleaved(batch: int) -> JobSpec:
    layout: dict[str, Any] = {"tensor": 8, "pipeline": 12, "virtual_stages": 4, "schedule": "interleaved"}
    return gpt(96, 12288, 96, batch=batch, **layout, **FULL)


def series_of(figures: dict[str, Any]) -> Iterator[Series]:
    """Figures 12 to 16."""
    plain = MEGATRON_2021
    batches = figures["fig12"]["series"]["non_interleaved"]
    single = {b: (gpt(96, 12288, 96, batch=int(b), tensor=8, pipeline=12, **FULL), plain) for b in batches}
    yield Series("fig12", "non_interleaved", single)
    chunked = {b: (_interleaved(int(b)), MEGATRON_2021_SCATTER) for b in batches}
    yield Series("fig12", "interleaved_with_scatter_gather", chunked)
    shapes: dict[str, tuple[int, int, int]] = {
        "fig13": (32, 20480, 128),
        "fig14": (32, 3840, 32),
        "fig15": (32, 3840, 32),
    }
    axes = {"fig13": ("pipeline", "tensor"), "fig14": ("pipeline", "data"), "fig15": ("tensor", "data")}
    for figure, (layers, hidden, heads) in shapes.items():
        for name, points in figures[figure]["series"].items():
            batch, jobs = int(name.removeprefix("batch")), {}
            for point in points:
                layout: dict[str, Any] = dict(zip(axes[figure], map(int, point.split(",")), strict=True))
                jobs[point] = gpt(layers, hidden, heads, batch=batch, **layout, **FULL), plain
            yield Series(figure, name, jobs)
    for name, points in figures["fig16"]["series"].items():
        batch, layout = int(name.removeprefix("batch")), {"tensor": 8, "pipeline": 8}
        sizes = {b: gpt(32, 15360, 128, batch=batch, micro_batch=int(b), **layout, **FULL) for b in points}
        yield Series("fig16", name, {b: (spec, plain) for b, spec in sizes.items()})


def _figures(tables: Tables) -> Iterator[Row]:
    figures = tables.read(FIGURES)["figures"]
    for series in series_of(figures):
        published = figures[series.figure]["series"][series.name]
        ours = {point: teraflops(*job) for point, job in series.points.items()}
        case = f"{series.figure}, {series.name}"
        for point, value in published.items():
            yield Row(FIGURES, f"{case}, {point}", value, ours[point], "TFLOP/s", "relative", 0.12)
        best = [max(each, key=lambda point, each=each: each[point]) for each in (published, ours)]
        yield Row(FIGURES, f"{case}, best point is {best[0]}", 1, int(best[0] == best[1]), "yes", "absolute")
        correlation = rank_correlation(list(published.values()), [ours[point] for point in published])
        yield Row(FIGURES, f"{case}, rank correlation", 1, correlation, "1", "absolute", 0.1)
    for name, points in figures["fig11"]["series"].items():
        for p, value in points.items():
            batch, stages = int(name.removeprefix("batch")), int(p)
            spec = gpt(3 * stages, 20480, 128, batch=batch, tensor=8, pipeline=stages, **FULL)
            ours_here = teraflops(spec, MEGATRON_2021)
            yield Row(FIGURES, f"fig11, {name}, {p} stages", value, ours_here, "TFLOP/s", "none")
    for b, value in figures["fig7"]["series"]["TFLOPs"].items():
        spec = gpt(4, 4096, 128, batch=int(b), micro_batch=int(b), **FULL)
        yield Row(FIGURES, f"fig7, micro-batch {b}", value, teraflops(spec, MEGATRON_2021), "TFLOP/s", "none")


def _recomputation(tables: Tables) -> Iterator[Row]:
    """Figure 17: what no recomputation gains, in percent; and its rates."""
    series = tables.read(FIGURES)["figures"]["fig17"]["series"]

    def rate(batch: str, recompute: str) -> float:
        spec = gpt(80, 12288, 96, batch=int(batch), tensor=8, pipeline=16, **(FULL | {"recompute": recompute}))
        return int(batch) / seconds(spec, MEGATRON_2021)

    names = {"recompute": "full", "no_recompute": "none"}
    for name, recompute in names.items():
        for batch, value in series[name].items():
            yield Row(FIGURES, f"fig17, {name}, {batch}", value, rate(batch, recompute), "sequences/s", "none")
    for batch, value in series["no_recompute"].items():
        # Printed to a tenth: the gain is known only as well as that.
        low, high = (
            (value - 0.05) / (series["recompute"][batch] + 0.05),
            (value + 0.05) / (series["recompute"][batch] - 0.05),
        )
        gain = 100 * (value / series["recompute"][batch] - 1)
        ours = 100 * (rate(batch, "none") / rate(batch, "full") - 1)
        rounding = 50 * (high - low)
        yield Row(FIGURES, f"fig17, gain, {batch}", gain, ours, "%", "absolute", 5 + rounding)


def _scatter_gather(tables: Tables) -> Iterator[Row]:
    """Figure 18: what scatter/gather gains, in percent."""
    series = tables.read(FIGURES)["figures"]["fig18"]["series"]
    for batch, value in series["unoptimized"].items():
        spec = _interleaved(int(batch))
        plain, scattered = teraflops(spec, MEGATRON_2021), teraflops(spec, MEGATRON_2021_SCATTER)
        yield Row(FIGURES, f"fig18, unoptimized, {batch}", value, plain, "TFLOP/s", "none")
        gain = 100 * (series["scatter_gather"][batch] / value - 1)
        yield Row(FIGURES, f"fig18, gain, {batch}", gain, 100 * (scattered / plain - 1), "%", "absolute", 5)


def _zero_comparison(tables: Tables) -> Iterator[Row]:
    """Table 2 of arXiv:2104.04473, as far as it is Megatron's; which schedule it had is not said: the paper's best."""
    name = "b_ptdp_table2_vs_zero3"
    for row in tables.rows(name):
        if row["scheme"] != "PTD-P":
            continue
        small = row["params_billion"] < 200
        layers, hidden, heads, pipeline = (96, 12288, 96, 12) if small else (105, 20480, 128, 35)
        data = row["gpus"] // (8 * pipeline)
        layout: dict[str, Any] = {"tensor": 8, "pipeline": pipeline, "data": data}
        layout |= {"virtual_stages": 2 if small else 3, "schedule": "interleaved"}
        spec = gpt(layers, hidden, heads, batch=row["global_batch"], **layout, **FULL)
        ours = teraflops(spec, MEGATRON_2021_SCATTER)
        yield Row(name, f"{row['params_billion']}B on {row['gpus']}", row["TFLOPs_per_gpu"], ours, "TFLOP/s", "none")
