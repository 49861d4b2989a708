"""Bubble rates: table 5 of arXiv:2401.10241 from the times of its table 9, by event simulation of the schedules; figure
8 of arXiv:2104.04473 from its figure 7."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.support.published.rows import Row
from benchmarks.support.published.tables import Tables
from benchmarks.support.timeline import PassTimes, Timeline

COLUMNS = {"1F1B": "1f1b", "ZB-H1": "zb-h1", "ZB-H2": "zb-h2", "1F1B-I": "interleaved"}
STAGES = 8
"""Of the pipeline of figure 8."""


def rows(tables: Tables) -> Iterator[Row]:
    """All of them."""
    yield from _zero_bubble(tables)
    yield from _micro_batches(tables)


def _zero_bubble(tables: Tables) -> Iterator[Row]:
    name = "f_zero_bubble_table5_bubble_rates"
    # First and last stage have a layer less, so that many would be even; interleaved chunks have one layer each.
    layers = {row["model"]: row["layers"] + 2 for row in tables.rows("f_zero_bubble_table3_configs")}
    profiled = {
        (row["model"], row["m"]): PassTimes(row["TF_ms"], row["TB_ms"], row["TW_ms"], row["Tcomm_ms"])
        for row in tables.rows("f_zero_bubble_table9_profiled_times")
    }
    for row in tables.rows(name):
        model, p, m = row["model"], row["p"], row["m"]
        for column, kind in COLUMNS.items():
            v = layers[model] // p if kind == "interleaved" else 1
            rate = Timeline.of(profiled[model, m].pipeline(kind, p, v), m).bubble_ratio
            case = f"{model}, {m} micro-batches, {column}"
            if kind == "interleaved":
                yield Row(name, case, row[column], rate, "ratio", "absolute", 0.004)
            else:
                yield Row(name, case, row[column], round(rate, 4), "ratio", "absolute", 0.0)


def _micro_batches(tables: Tables) -> Iterator[Row]:
    """Eq. 1 of arXiv:2104.04473: (b'/b + p - 1) (tf(b) + tb(b)), relative to b = 1; times are b / rate of figure 7."""
    name = "b_ptdp_figures_7_to_18"
    figures = tables.read(name)["figures"]
    rates = {int(size): rate for size, rate in figures["fig7"]["series"]["TFLOPs"].items()}
    for series, points in figures["fig8"]["series"].items():
        batch = int(series.removeprefix("batch"))
        times = {size: (batch / size + STAGES - 1) * size / rate for size, rate in rates.items()}
        for size, published in points.items():
            ours = times[1] / times[int(size)]
            case = f"figure 8, {series}, micro-batch {size}"
            yield Row(name, case, published, ours, "relative to b = 1", "absolute", 0.011)
