"""Tables of commands: whatever the width of the terminal, what stands in them can be read and copied."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from manta.api.cli.render import GAP, table, widths_of

JOB = "job_0vyq68q7jhxr"
HEADINGS = ("JOB", "NAME", "LOSS", "SUBMITTED")
ROW = (JOB, "quickstart", "5.2807", "2026-11-26 22:52:49")
WORDS = st.lists(st.text("abc0.漢", max_size=12), min_size=1, max_size=4).map(" ".join)


def printed(width, *rows, headings=HEADINGS, spare=(), terminal=True):
    file = io.StringIO()
    table(Console(file=file, width=width, force_terminal=terminal, no_color=True), headings, rows, "none", spare)
    return [line.replace("\x1b[1m", "").replace("\x1b[0m", "").rstrip() for line in file.getvalue().splitlines()]


@pytest.mark.parametrize("width", [30, 40, 50, 60, 80, 200])
def test_tables_break_no_word_at_any_width(width):
    text = "\n".join(printed(width, ROW))
    assert all(word in text.split() for word in " ".join((*HEADINGS, *ROW)).split())


def test_table_cells_are_wrapped_between_words_when_space_is_short():
    assert printed(49, ROW) == [
        "JOB               NAME        LOSS    SUBMITTED",
        f"{JOB}  quickstart  5.2807  2026-11-26",
        "                                      22:52:49",
    ]


def test_table_too_wide_for_the_terminal_keeps_its_rows_on_long_lines():
    assert printed(30, ROW)[1] == "  ".join(ROW)


def test_table_omits_spare_columns_on_narrow_terminals_only_and_says_so():
    assert printed(49, ROW, spare=("NAME", "LOSS")) == [
        "JOB               LOSS    SUBMITTED",
        f"{JOB}  5.2807  2026-11-26 22:52:49",
        "\x1b[2mColumns omitted for lack of room: NAME.",
    ]
    assert "quickstart" in printed(49, ROW, spare=("NAME", "LOSS"), terminal=False)[1]
    assert len(printed(80, ROW, spare=("NAME", "LOSS"))) == 2


def test_table_without_rows_prints_a_sentence():
    assert printed(80) == ["none"]


@given(st.lists(st.lists(WORDS, min_size=3, max_size=3), min_size=1, max_size=4), st.integers(1, 120))
def test_table_columns_are_as_wide_as_the_terminal_allows(rows, width):
    columns = [["A", *(row[at] for row in rows)] for at in range(3)]
    widths = widths_of(columns, width)
    words = widths_of(columns, 0)
    assert all(one >= other for one, other in zip(widths, widths_of(columns, width - 1), strict=True))
    if sum(words) + 2 * GAP <= width:
        assert sum(widths) + 2 * GAP <= width
