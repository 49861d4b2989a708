"""Tables on a terminal that never break words, so that ids can be copied and numbers stay correct."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from rich.cells import cell_len, set_cell_size
from rich.console import Console
from rich.table import Table
from rich.text import Text

GAP = 2
SHORT = 20
"""Cells of up to this many characters are kept on one line if there is room."""


def table(
    console: Console, headings: Sequence[str], rows: Sequence[Sequence[Any]], empty: str, spare: Sequence[str] = ()
) -> None:
    """Print `rows` under `headings`, or the sentence `empty` when there are none.

    If the terminal is too narrow, the columns `spare` are omitted one by one, which a line below reports; then cells
    are wrapped between words. Lines that still do not fit are wrapped by the terminal.
    """
    if not rows:
        console.print(empty, markup=False)
        return
    columns = [[heading, *(str(row[at]) for row in rows)] for at, heading in enumerate(headings)]
    left_out = spared(columns, spare, console.width) if console.is_terminal else []
    columns = [column for column in columns if column[0] not in left_out]
    widths = widths_of(columns, console.width)
    if _total(widths) > console.width:
        _print_lines(console, columns)
    else:
        _print_folded(console, columns, widths)
    if left_out:
        console.print(f"Columns omitted for lack of room: {', '.join(left_out)}.", style="dim", highlight=False)


def _print_folded(console: Console, columns: Sequence[Sequence[str]], widths: Sequence[int]) -> None:
    grid = Table(box=None, pad_edge=False, header_style="bold")
    for (heading, *_), width in zip(columns, widths, strict=True):
        grid.add_column(heading, overflow="fold", width=width)
    for cells in zip(*(column[1:] for column in columns), strict=True):
        grid.add_row(*map(Text, cells))
    console.print(grid)


def _print_lines(console: Console, columns: Sequence[Sequence[str]]) -> None:
    """Each row on one line, however long it is."""
    padded = [[set_cell_size(cell, max(map(cell_len, column))) for cell in column] for column in columns]
    for at, cells in enumerate(zip(*padded, strict=True)):
        console.print(Text((" " * GAP).join(cells).rstrip(), "bold" if at == 0 else ""), soft_wrap=True)


def spared(columns: Sequence[Sequence[str]], spare: Sequence[str], width: int) -> list[str]:
    """Headings of the columns that are omitted so that the table fits into `width` characters."""
    left_out: list[str] = []
    for heading in spare:
        if _total([_unbroken(column) for column in columns if column[0] not in left_out]) <= width:
            break
        left_out.append(heading)
    return left_out


def widths_of(columns: Sequence[Sequence[str]], width: int) -> list[int]:
    """Width of each column (heading and cells), in characters; in total, with gaps, at most `width` unless a word would
    be broken."""
    words = [max(cell_len(word) for cell in column for word in cell.split() or [""]) for column in columns]
    unbroken = _widened(words, [_unbroken(column) for column in columns], width)
    return _widened(unbroken, [max(map(cell_len, column)) for column in columns], width)


def _unbroken(column: Sequence[str]) -> int:
    """Minimum width of a column that keeps short cells on one line and breaks no word."""
    lengths = map(cell_len, column)
    words = (cell_len(word) for cell in column for word in cell.split())
    return max(*(length for length in lengths if length <= SHORT), *words, 0, 0)


def _total(widths: Collection[int]) -> int:
    return sum(widths) + GAP * (len(widths) - 1)


def _widened(least: Sequence[int], most: Sequence[int], width: int) -> list[int]:
    """`least`, plus the remaining room in `width`, up to `most`: first for columns that need the least."""
    widths, room = [*least], max(0, width - _total(least))
    lacking = sorted(range(len(widths)), key=lambda at: most[at] - least[at])
    for done, at in enumerate(lacking):
        more = min(most[at] - least[at], room // (len(lacking) - done))
        widths[at] += more
        room -= more
    return widths
