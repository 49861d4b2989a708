"""The published figures beside what this project's arithmetic, simulator and planner say of the same cases.

Every row of the tables that can be predicted is listed under `samples`, with its error; figures count the rows of each
table that agree. With `--later`: throughputs that the planner was not fitted to, from the tables in
`benchmarks/support/published/later/`; errors are those of a step's time. What they mean is in
`benchmarks/results/planner.md`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.support.published import arithmetic, bubbles, memory, times
from benchmarks.support.published.later import TABLES
from benchmarks.support.published.later import rows as later_rows
from benchmarks.support.published.rows import Row, rank_correlation
from benchmarks.support.published.tables import Tables
from benchmarks.support.report import ROOT, Report, deliver, parser

MARKDOWN_HEAD = """Written by `python -m benchmarks.papers --markdown FILE`; `planner.md` beside it explains the rows,
and why some are missed. Errors are relative to the published value, or absolute differences if they have no percent
sign."""
FAMILIES: dict[str, Callable[[Tables], Iterator[Row]]] = {
    "arithmetic": arithmetic.rows,
    "memory": memory.rows,
    "bubbles": bubbles.rows,
    "times": times.rows,
}


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; returns the exit status."""
    options = parser("papers", __doc__)
    options.add_argument(
        "--tables", type=Path, default=ROOT.parent / "shared" / "papers", help="folder of the published tables"
    )
    options.add_argument("--rows", action="store_true", help="print every row too (without --json)")
    options.add_argument("--later", action="store_true", help="the later tables instead")
    options.add_argument("--table", choices=TABLES, action="append", help="only this later one; may be given again")
    options.add_argument("--markdown", type=Path, metavar="FILE", help="also write every row to FILE, as tables")
    given = options.parse_args(arguments)
    return deliver(measure_later if given.later or given.table else measure, given)


def measure(options: argparse.Namespace) -> Report:
    """Compare every row."""
    report = Report("papers", options.seed)
    tables = Tables(options.tables)
    for family, rows_of in FAMILIES.items():
        rows = list(rows_of(tables))
        report.samples[family] = [row.to_json() for row in rows]
        for reference in dict.fromkeys(row.reference for row in rows):
            add_summary(report, family, [row for row in rows if row.reference == reference])
        if options.rows and not options.json:
            print("\n".join(map(line, rows)))
    if options.markdown is not None:
        options.markdown.write_text(as_markdown(report.samples), encoding="utf-8")
    report.settings = {"tables": options.tables.name}
    return report


def measure_later(options: argparse.Namespace) -> Report:
    """Compare every row of the later tables."""
    report = Report("later_papers", options.seed)
    for name in options.table or TABLES:
        table_rows = list(later_rows(name))
        errors = [step_error(row) for row in table_rows]
        report.samples[name] = [
            {"case": row.case, "published": row.published, "predicted": float(f"{row.predicted:.4g}"), "unit": row.unit}
            | {"error": round(error, 3)}
            for row, error in zip(table_rows, errors, strict=True)
        ]
        report.add(f"{name}_rows", len(table_rows), "rows")
        report.add(f"{name}_step_error_median", round(statistics.median(map(abs, errors)), 3), "ratio")
        report.add(f"{name}_step_error_max", round(max(map(abs, errors)), 3), "ratio")
        order = rank_correlation([row.published for row in table_rows], [row.predicted for row in table_rows])
        report.add(f"{name}_rank_correlation", round(order, 3), "ratio")
        if options.rows and not options.json:
            print("\n".join(map(line, table_rows)))
    report.settings = {"sources": {name: table.source for name, table in TABLES.items()}}
    return report


def step_error(row: Row) -> float:
    """Of the step's time, as a fraction of it: above zero where it is predicted too slow."""
    ratio = row.predicted / row.published if row.unit == "s" else row.published / row.predicted
    return ratio - 1


def add_summary(report: Report, family: str, rows: list[Row]) -> None:
    """Note how many rows of one table disagree, of those that are held to something."""
    held = [row for row in rows if row.met is not None]
    name = f"{family}_{rows[0].reference}"
    report.add(f"{name}_rows", len(rows), "rows")
    if held:
        report.add(f"{name}_missed", sum(not row.met for row in held), "rows", 0)


def as_markdown(samples: dict[str, list[dict[str, Any]]]) -> str:
    """Every row, a table each family and published table."""
    text = ["# Published and predicted results\n", MARKDOWN_HEAD]
    for family, rows in samples.items():
        for reference in dict.fromkeys(row["reference"] for row in rows):
            text.append(f"\n## {reference}: {family}\n")
            text.append("| case | published | predicted | unit | error | |\n|---|---|---|---|---|---|")
            for row in rows:
                if row["reference"] == reference:
                    verdict = {True: "", False: "missed", None: "shown only"}[row["met"]]
                    error = f"{row['error']:+.4f}" if row["measure"] == "absolute" else f"{row['error']:+.1%}"
                    numbers = f"{row['published']:.6g} | {row['predicted']:.4g}"
                    text.append(f"| {row['case']} | {numbers} | {row['unit']} | {error} | {verdict} |")
    return "\n".join(text) + "\n"


def line(row: Row) -> str:
    """A row for people."""
    verdict = {True: "met", False: "MISSED", None: ""}[row.met]
    error = f"{row.error:+.4f}" if row.measure == "absolute" else f"{row.error:+.2%}"
    shown = f"{row.reference}: {row.case}"
    return f"  {shown:<90} {row.published:>10.6g} {row.predicted:>10.6g} {row.unit:<16} {error:>9} {verdict}"


if __name__ == "__main__":
    sys.exit(main())
