"""A plan as an SVG picture: the pipeline of one step by rank, the parts of the step, memory by rank. Pure Python.

A picture is self-contained: it has no scripts or fonts of its own and fetches nothing; each bar has a tooltip.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any
from xml.sax.saxutils import escape

WIDTH, LEFT, LANE, GAP = 1200, 150, 22, 46
"""Pixels: width of the picture, left margin, height of a lane, gap between parts."""
_PASSES = {
    "forward": ("forward", "#4c78a8"),
    "backward": ("backward", "#54a24b"),
    "backward_input": ("backward, inputs", "#54a24b"),
    "backward_weight": ("backward, weights", "#b5cf6b"),
}
"""Name and colour of each kind of pass."""
_COLOURS = (
    "#4c78a8", "#9ecae9", "#88d27a", "#f58518", "#e45756", "#b279a2", "#d8d8d8", "#ffbf79", "#54a24b", "#8c6d31",
    "#79706e", "#d37295",
)  # fmt: skip
_MEMORY = ("parameters", "gradients", "optimizer", "activations", "buffers")


def picture(title: str, explanation: Mapping[str, Any]) -> str:
    """The picture of a plan from its explanation, in the form of `manta.api.schemas.PlanExplanation`."""
    parts: list[str] = [_text(8, 24, title, 16)]
    top = 40
    memory = _memory(explanation["memory_by_stage"], explanation["usable_by_stage"])
    for heading, lines, height in (_pipeline(explanation["timeline"]), _step(explanation["shares"]), memory):
        parts.append(_text(8, top + 14, heading, 13))
        parts.append(f'<g transform="translate(0,{top + 22})">{"".join(lines)}</g>')
        top += 22 + height + GAP
    style = "text{font-family:system-ui,sans-serif;fill:#222}rect{stroke:#fff;stroke-width:.5}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top}" width="{WIDTH}" height="{top}">'
        f"<style>{style}</style>"
        f'<rect width="{WIDTH}" height="{top}" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


_Part = tuple[str, list[str], int]
"""Heading, elements, height."""


def _pipeline(bars: Sequence[Mapping[str, Any]] | None) -> _Part:
    if bars is None:
        return "Pipeline: too many passes to be drawn", [], 0
    end, ranks = max(bar["end"] for bar in bars), 1 + max(bar["rank"] for bar in bars)
    lines = [_text(8, rank * LANE + 15, f"stage {rank}") for rank in range(ranks)]
    for bar in bars:
        (name, colour), number = _PASSES[bar["kind"]], str(bar["micro_batch"])
        span = f"{_seconds(bar['end'] - bar['begin'])} from {_seconds(bar['begin'])} on"
        label = f"{name} of micro-batch {number} on virtual stage {bar['stage']}: {span}"
        x, width = _across(bar["begin"], bar["end"], end)
        lines.append(_bar(x, bar["rank"] * LANE, width, colour, label))
        if width > 7 * len(number):
            lines.append(_text(x + width / 2, bar["rank"] * LANE + 14, number, 10, "middle"))
    heading = f"Pipeline of one step, {_seconds(end)}: forward blue, backward green, waiting white"
    return heading, lines, ranks * LANE


def _step(shares: Sequence[Mapping[str, Any]]) -> _Part:
    """One bar for the whole step, and a line for each part."""
    total, at, lines = sum(share["seconds"] for share in shares), 0.0, []
    whole = sum(max(0.0, share["seconds"]) for share in shares)
    for row, (each, colour) in enumerate(zip(shares, cycle(_COLOURS), strict=False)):
        seconds, label = each["seconds"], f"{each['label']}: {_seconds(each['seconds'])}"
        x, width = _across(at, at + max(0.0, seconds), whole)
        y = LANE + 8 + row * 18
        text = f"{seconds / total:6.1%}  {_seconds(seconds)}  {each['label']}: {each['what']}"
        lines += [_bar(x, 0, width, colour, label), _bar(LEFT, y, 12, colour, label, 12)]
        lines.append(_text(LEFT + 20, y + 11, text))
        at += max(0.0, seconds)
    return f"The step, {_seconds(total)}, from the device's peak on", lines, LANE + 8 + 18 * len(shares)


def _memory(stages: Sequence[Mapping[str, Any]], usable: Sequence[float]) -> _Part:
    most, lines = max(*usable, *(stage["total"] for stage in stages)), []
    for lane, (each, own) in enumerate(zip(stages, usable, strict=True)):
        lines.append(_text(8, lane * LANE + 15, f"stage {lane}"))
        at = 0.0
        for name, colour in zip(_MEMORY, _COLOURS, strict=False):
            x, width = _across(at, at + each[name], most)
            lines.append(_bar(x, lane * LANE, width, colour, f"{name}: {_gib(each[name])}"))
            at += each[name]
        lines.append(_text(LEFT + 6, lane * LANE + 15, _gib(each["total"]), 10))
        x, _ = _across(own, own, most)
        y = lane * LANE
        lines.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 3}" y2="{y + LANE}" stroke="#c00"/>')
    height = len(stages) * LANE
    for number, (name, colour) in enumerate(zip(_MEMORY, _COLOURS, strict=False)):
        lines.append(_bar(LEFT + 150 * number, height + 8, 12, colour, name, 12))
        lines.append(_text(LEFT + 150 * number + 18, height + 19, name))
    has = " or ".join(_gib(each) for each in sorted(set(usable)))
    return f"Memory of a rank of each stage; the device has {has}", lines, height + 24


def _across(begin: float, end: float, whole: float) -> tuple[float, float]:
    """Left edge and width in pixels."""
    scale = (WIDTH - LEFT - 10) / whole
    return LEFT + begin * scale, (end - begin) * scale


def _bar(x: float, y: float, width: float, colour: str, label: str, height: int = LANE - 2) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.1f}" width="{max(width, 0.2):.2f}" height="{height}" fill="{colour}">'
        f"<title>{escape(label)}</title></rect>"
    )


def _text(x: float, y: float, text: str, size: int = 12, anchor: str = "start") -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" text-anchor="{anchor}" xml:space="preserve">'
        f"{escape(text)}</text>"
    )


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if abs(seconds) >= 1 else f"{1e3 * seconds:.3g} ms"


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
