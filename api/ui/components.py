"""Small parts that pages are made of. Each remembers what it shows and sends the browser only what is new."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from nicegui import ui

from api.ui.viewer import Viewer

_STYLE = (Path(__file__).parent / "style.css").read_text(encoding="utf-8")


def frame(crumb: str = "", viewer: Viewer | None = None) -> None:
    """The head of every page: style, name, the way back to the list, and who looks at it."""
    ui.add_css(_STYLE)
    with ui.element("header").classes("top"), ui.element("div").classes("top-inner"):
        ui.link("Manta", "/").classes("brand")
        ui.link("Jobs", "/").classes("crumb-link")
        if crumb:
            ui.label(f"/ {crumb}").classes("crumb")
        if viewer is not None:
            ui.element("div").classes("gap")
            ui.label(viewer.name).classes("viewer")
            if viewer.me is not None and viewer.me.browser:
                ui.button("Sign out", on_click=viewer.sign_out, color=None).props("flat dense no-caps").classes(
                    "sign-out"
                )


@contextmanager
def panel(title: str, note: str = "", classes: str = "") -> Any:
    """A titled box; yields its head line, for controls."""
    with ui.element("section").classes(f"panel {classes}"):
        with ui.element("div").classes("panel-head") as head:
            with ui.element("h2"):
                ui.label(title)
            if note:
                ui.label(note).classes("note")
        yield head


class Words:
    """A text that changes."""

    def __init__(self, classes: str, text: str = ""):
        """An empty or given text with CSS classes."""
        self.label = ui.label(text).classes(classes)
        self._shown = text

    def show(self, text: str) -> None:
        """Show `text`."""
        if text != self._shown:
            self._shown = text
            self.label.set_text(text)


class Badge:
    """A state as coloured text."""

    def __init__(self, text: str = "", tone: str = "idle"):
        """A badge that reads `text`, in the colour of `tone`."""
        self._shown = (text, tone)
        self._label = ui.label(text).classes(f"badge tone-{tone}")

    def show(self, text: str, tone: str) -> None:
        """Show another state."""
        if (text, tone) != self._shown:
            self._shown = (text, tone)
            self._label.set_text(text)
            self._label.classes(replace=f"badge tone-{tone}")


class Bar:
    """A progress bar."""

    def __init__(self) -> None:
        with ui.element("div").classes("bar").props("role=progressbar aria-valuemin=0 aria-valuemax=100") as self._bar:
            self._fill = ui.element("div").classes("fill")
        self._shown = ""

    def show(self, share: float, tone: str) -> None:
        """Show progress `share`, 0 to 1."""
        width = f"{100 * share:.1f}"
        if width + tone != self._shown:
            self._shown = width + tone
            self._bar.props(f"aria-valuenow={width}")
            self._fill.style(replace=f"width: {width}%").classes(replace=f"fill tone-{tone}")


class Figures:
    """Labelled figures in a row."""

    def __init__(self, labels: Sequence[str]):
        """Empty figures with these labels."""
        self._words: dict[str, Words] = {}
        with ui.element("dl").classes("figures"):
            for label in labels:
                with ui.element("div").classes("figure"):
                    with ui.element("dt"):
                        ui.label(label)
                    with ui.element("dd"):
                        self._words[label] = Words("value", "–")

    def show(self, figures: Mapping[str, str]) -> None:
        """Show figures by label."""
        for label, text in figures.items():
            self._words[label].show(text)


class Table:
    """A plain table whose rows are drawn anew when any of them changes; for few rows that rarely change."""

    def __init__(self, headings: Sequence[str], empty: str, classes: str = ""):
        """An empty table; `empty` is what it says without rows."""
        self._empty = ui.label(empty).classes("empty-note")
        self._shown: Sequence[Sequence[str]] = ()
        with ui.element("div").classes("scroll") as self._scroll, ui.element("table").classes(f"grid {classes}"):
            table_head(headings)
            self._body = ui.element("tbody")
        self._scroll.set_visibility(False)

    def show(self, rows: Sequence[Sequence[str]]) -> None:
        """Show `rows`."""
        if rows == self._shown:
            return
        self._shown = rows
        self._empty.set_visibility(not rows)
        self._scroll.set_visibility(bool(rows))
        self._body.clear()
        with self._body:
            for row in rows:
                table_row(row)


def table_head(headings: Sequence[str]) -> None:
    """The head of a table."""
    with ui.element("thead"), ui.element("tr"):
        for heading in headings:
            with ui.element("th").classes(_column_class(heading)):
                ui.label(heading)


def table_row(cells: Sequence[str]) -> ui.element:
    """A row of text cells."""
    with ui.element("tr") as row:
        for text in cells:
            with ui.element("td"):
                ui.label(text)
    return row


def _column_class(heading: str) -> str:
    return "c-" + "".join(letter if letter.isalnum() else "-" for letter in heading.lower())
