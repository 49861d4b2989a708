"""Options of the charts. Pure functions; colours that read on light and dark ground alike."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from api.schemas import Event

Points = Mapping[int, Mapping[str, float | None]]
"""Step -> metric name -> value."""

_INK = "#7c8794"
_LINE = "rgba(128, 138, 150, 0.22)"
_RESTART = "#dc6803"
_VALIDATION = ("#e0960c", "#0d9f8c", "#9366f0", "#d6409f", "#6b8e23", "#2b95c4")
NO_SETS: Mapping[str, str] = {}


def restart_steps(events: Iterable[Event]) -> list[int]:
    """The steps at which a recovery began, ascending, each once."""
    recoveries = (
        event.step
        for event in events
        if event.type == "state_changed" and event.data.get("to") == "RECOVERING" and event.step is not None
    )
    return sorted(set(recoveries))


def series(points: Points, name: str, scale: float = 1.0, *, sparse: bool = False) -> list[list[float | None]]:
    """`[step, value]` pairs of a metric. A value that is unknown or not finite is a gap; `sparse` leaves it out."""
    pairs: list[list[float | None]] = []
    for step in sorted(points):
        value = points[step].get(name)
        drawable = value is not None and math.isfinite(value)
        if drawable or not sparse:
            pairs.append([step, value * scale if value is not None and drawable else None])
    return pairs


def loss_options(
    points: Points, restarts: Sequence[int] = (), validation_sets: Mapping[str, str] = NO_SETS
) -> dict[str, Any]:
    """Training and validation losses over steps, a line for each validation set (by its name, the name of its metric)
    that has any; a vertical mark where a restart happened."""
    train = _line("train loss", "#2f7bf6", series(points, "loss"))
    train["markLine"] = {
        "silent": True,
        "symbol": "none",
        "animation": False,
        "lineStyle": {"color": _RESTART, "type": "dashed", "width": 1.5},
        "label": {"formatter": "restart", "color": _RESTART, "position": "insideEndTop", "fontSize": 11},
        "data": [{"xAxis": step} for step in restarts],
    }
    names = {"validation loss": "validation_loss"} | {
        f"validation {name}": key for name, key in validation_sets.items()
    }
    lines = [train]
    for number, (label, key) in enumerate(names.items()):
        line = _line(label, _VALIDATION[number % len(_VALIDATION)], series(points, key, sparse=True))
        if line["data"] or number == 0:
            lines.append(line | {"showSymbol": True, "symbol": "circle", "symbolSize": 6})
    return _frame(lines, [_value_axis("loss (nats per token)")])


def throughput_options(points: Points) -> dict[str, Any]:
    """Tokens per second (left axis) and model FLOP utilisation (right axis, percent) over steps."""
    tokens = _line("tokens/s", "#0d9f8c", series(points, "tokens_per_second"))
    mfu = _line("MFU", "#9366f0", series(points, "mfu_full", 100.0)) | {"yAxisIndex": 1}
    mfu["lineStyle"] = {"width": 1.25, "type": [4, 3]}  # the two often coincide, one being proportional to the other
    right = _value_axis("MFU, full attention (%)") | {"splitLine": {"show": False}}
    right["nameTextStyle"] = {"color": _INK, "align": "right"}
    return _frame([tokens, mfu], [_value_axis("tokens/s") | {"min": 0}, right | {"min": 0}])


def _line(name: str, color: str, data: list[list[float | None]]) -> dict[str, Any]:
    return {
        "name": name,
        "type": "line",
        "showSymbol": len(data) == 1,
        "connectNulls": False,
        "lineStyle": {"width": 1.75},
        "itemStyle": {"color": color},
        "emphasis": {"disabled": True},
        "data": data,
    }


def _value_axis(name: str) -> dict[str, Any]:
    return {
        "type": "value",
        "name": name,
        "scale": True,
        "nameTextStyle": {"color": _INK, "align": "left"},
        "axisLabel": {"color": _INK},
        "axisLine": {"show": False},
        "axisTick": {"show": False},
        "splitLine": {"lineStyle": {"color": _LINE}},
    }


def _frame(lines: list[dict[str, Any]], y_axes: list[dict[str, Any]]) -> dict[str, Any]:
    x_axis = _value_axis("step") | {
        "nameLocation": "middle",
        "nameGap": 26,
        "nameTextStyle": {"color": _INK},
        "splitLine": {"show": False},
        "axisLine": {"show": True, "lineStyle": {"color": _LINE}},
        "minInterval": 1,
        "scale": False,
    }
    return {
        "animation": False,
        "textStyle": {"fontFamily": "inherit"},
        "grid": {"left": 52, "right": 52 if len(y_axes) > 1 else 24, "top": 52, "bottom": 40},
        "legend": {
            "top": 0,
            "left": 0,
            "icon": "roundRect",
            "itemWidth": 14,
            "itemHeight": 4,
            "textStyle": {"color": _INK},
        },
        "tooltip": {
            "trigger": "axis",
            "confine": True,
            "backgroundColor": "rgba(24, 28, 34, 0.94)",
            "borderWidth": 0,
            "textStyle": {"color": "#e6eaef", "fontSize": 12},
            "axisPointer": {"lineStyle": {"color": _INK}},
        },
        "xAxis": x_axis,
        "yAxis": y_axes,
        "series": lines,
    }
