"""The page that a run ends with: which goals were met, the figures behind them, and what did not run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.support.gpu.sizes import SIZES
from benchmarks.support.report import Figure, Report

GOAL_MFU_CAUSAL = 0.45
GOAL_AGAINST_TRANSFORMERS = 1.1
SHARED = "Others held {:.1f} GB of this card when it began: what they computed meanwhile is in these times too."
CONTESTANTS = (
    *("manta", "manta_eager", "manta_same_bits", "manta_fp8_tensorwise", "manta_fp8_rowwise"),
    *("manta_chunked_head", "manta_offload", "manta_offload_state"),
    *("transformers", "transformers_causal", "torchtitan", "megatron_core"),
)
"""In this order; MFU of all is against the peak of bf16."""


@dataclass(frozen=True)
class Goal:
    """A figure that should reach some number."""

    sentence: str
    figure: str
    least: float


def goals() -> Iterator[Goal]:
    """All that go upwards; those that a figure should stay below are in the report itself."""
    for name in ("gpt_1b3", "llama_1b5"):
        yield Goal(f"{name}: MFU, causal products counted once", f"{name}_manta_mfu_causal", GOAL_MFU_CAUSAL)
    for name in SIZES:
        for other, says in (("transformers", ""), ("transformers_causal", ", by flash attention")):
            yield Goal(
                f"{name}: tokens a second against transformers and torch.compile{says}",
                f"{name}_manta_to_{other}",
                GOAL_AGAINST_TRANSFORMERS,
            )


def page_of(report: Report) -> str:
    """The page, as plain text."""
    settings, others = report.settings, report.settings.get("held_by_others", 0)
    lines = [
        f"Manta on {settings['device']}, torch {settings['torch']}, seed {report.seed}",
        *(["A rehearsal on a CPU with tiny models: no figure and no verdict means anything."] * settings["rehearsal"]),
        *([SHARED.format(others / 1e9)] * (others > 0)),
        "",
        "GOALS",
        *(f"  {line}" for line in _verdicts(report)),
        "",
        "STEP, bf16 or fp8                   ms   tokens/s  MFU causal  MFU full  of products  peak GB  predicted",
        *(f"  {line}" for line in _steps(report)),
        "",
        "EVERYTHING ELSE",
        *(f"  {line}" for line in _others(report)),
        "",
        "NOT RUN",
        *(f"  {name}: {why}" for name, why in settings["left_out"].items()),
    ]
    return "\n".join(lines) + "\n"


def _verdicts(report: Report) -> Iterator[str]:
    for goal in goals():
        figure = report.figures.get(goal.figure)
        said = "NOT MEASURED" if figure is None else "met" if figure.value >= goal.least else "MISSED"
        value = "" if figure is None else f" ({figure.value:g}, at least {goal.least:g})"
        yield f"{said:<13} {goal.sentence}{value}"
    for name, figure in report.figures.items():
        if figure.met is not None:
            wanted = f"{figure.target}" if isinstance(figure.target, bool) else f"at most {figure.target:g}"
            yield f"{'met' if figure.met else 'MISSED':<13} {name} ({_value(figure)}, {wanted})"


def _steps(report: Report) -> Iterator[str]:
    for size in report.settings["sizes"]:
        for who in CONTESTANTS:
            figures = {
                what: report.figures.get(f"{size}_{who}_{what}")
                for what in ("step", "tokens_per_second", "mfu_causal", "mfu_full", "of_matrix_products", "peak_memory")
            }
            if figures["step"] is None:
                continue
            step, tokens, causal, full, products, peak = (
                0.0 if each is None else each.value for each in figures.values()
            )
            predicted = report.figures.get(f"{size}_{who}_memory_predicted")
            predicted_gb = "" if predicted is None else f"{predicted.value / 1e9:.2f}"
            name = f"{size} {who}"
            yield (
                f"{name:<28} {step:>8.1f} {tokens:>10.0f} {causal:>11.3f} {full:>9.3f} {products:>12.3f} "
                f"{peak / 1e9:>8.2f} {predicted_gb:>10}"
            )


def _others(report: Report) -> Iterator[str]:
    of_steps = tuple(f"{size}_{who}_" for size in report.settings["sizes"] for who in CONTESTANTS)
    for name, figure in report.figures.items():
        if figure.met is None and not name.startswith(of_steps):
            yield f"{name:<44} {_value(figure)} {figure.unit}"
    for name in ("fp8_product_errors", "fp8_losses", "repair_self_test", "trace"):
        if name in report.settings:
            yield f"{name:<44} {report.settings[name]}"


def _value(figure: Figure) -> str:
    return f"{figure.value:.6g}" if isinstance(figure.value, float) else str(figure.value)
