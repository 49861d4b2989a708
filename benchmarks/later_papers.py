"""Published throughputs that the planner was not fitted to, compared with its predictions for the same jobs.

The tables are in `benchmarks/support/published/later/`; nothing is fitted on them, and every row is listed under
`samples`. Errors are those of a step's time. What they mean is in `docs/planner.md`.
"""

from __future__ import annotations

import argparse
import statistics
import sys

from benchmarks.support.published.later import TABLES, rows
from benchmarks.support.published.rows import Row, rank_correlation
from benchmarks.support.report import Report, deliver, parser


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; returns the exit status."""
    options = parser("later_papers", __doc__)
    options.add_argument("--table", choices=TABLES, action="append", help="only this one; may be given again")
    options.add_argument("--rows", action="store_true", help="print every row too (without --json)")
    return deliver(measure, options.parse_args(arguments))


def measure(options: argparse.Namespace) -> Report:
    """Tell every row."""
    report = Report("later_papers", options.seed)
    for name in options.table or TABLES:
        table_rows = list(rows(name))
        errors = [error_of(row) for row in table_rows]
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
            for row, error in zip(table_rows, errors, strict=True):
                print(f"  {row.case:<95} {row.published:>10.5g} {row.predicted:>10.4g} {row.unit:<16} {error:+.1%}")
    report.settings = {"sources": {name: table.source for name, table in TABLES.items()}}
    return report


def error_of(row: Row) -> float:
    """Of the step's time, as a part of it: above zero where it is predicted too slow."""
    ratio = row.predicted / row.published if row.unit == "s" else row.published / row.predicted
    return ratio - 1


if __name__ == "__main__":
    sys.exit(main())
