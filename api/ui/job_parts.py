"""The larger parts of a job's page: rank grid, events, log."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Any

from nicegui import ui

from api.schemas import Event, Rank
from api.ui.components import Words, table_head
from api.ui.formatting import RankCell, event_row, event_tone, log_text, rank_cells
from api.ui.polling import EVENTS_SHOWN, JobFeed, LogTail

MOST_RANKS_DRAWN = 256


class RankBox:
    """One rank of the grid."""

    def __init__(self, cell: RankCell):
        """Draw `cell`."""
        self._shown = cell
        with ui.element("div").classes(f"rank tone-{cell.tone}") as self._box:
            self._box.style(f"grid-column: {cell.column + 1}; grid-row: {cell.line + 1}")
            self._box.props["title"] = cell.details
            with ui.element("div").classes("rank-head"):
                ui.label(cell.title).classes("rank-title")
                self._state = Words("rank-state", cell.state)
            ui.label(cell.place).classes("rank-place")
            self._pid = Words("rank-pid", cell.pid)

    def show(self, cell: RankCell) -> None:
        """Bring the box up to date."""
        if cell == self._shown:
            return
        self._shown = cell
        self._state.show(cell.state)
        self._pid.show(cell.pid)
        self._box.props["title"] = cell.details
        self._box.classes(replace=f"rank tone-{cell.tone}")
        self._box.update()


class RankGrid:
    """Replicas as rows of blocks, a block a rank."""

    def __init__(self) -> None:
        self._note = Words("empty-note", "No ranks are placed yet.")
        self._area = ui.element("div").classes("replicas")
        self._ranks: Sequence[Rank] = ()
        self._shape: list[tuple[int, int, int, int]] = []
        self._boxes: dict[int, RankBox] = {}

    def show(self, ranks: Sequence[Rank]) -> None:
        """Show the ranks as they are now."""
        if ranks == self._ranks:
            return
        self._ranks = ranks
        cells = rank_cells(ranks)
        hidden = len(cells) - MOST_RANKS_DRAWN
        cells = cells[:MOST_RANKS_DRAWN]
        shape = [(cell.rank, cell.data, cell.column, cell.line) for cell in cells]
        if shape != self._shape:
            self._shape = shape
            self._build(cells)
        for cell in cells:
            self._boxes[cell.rank].show(cell)
        self._note.show(f"and {hidden:,} more ranks" if hidden > 0 else "No ranks are placed yet.")
        self._note.label.set_visibility(hidden > 0 or not cells)

    def _build(self, cells: Sequence[RankCell]) -> None:
        self._area.clear()
        self._boxes = {}
        with self._area:
            for replica in sorted({cell.data for cell in cells}):
                with ui.element("div").classes("replica"):
                    ui.label(f"replica {replica}").classes("replica-name")
                    with ui.element("div").classes("rank-grid"):
                        for cell in cells:
                            if cell.data == replica:
                                self._boxes[cell.rank] = RankBox(cell)


class LedgerBar:
    """Every second of the job as one bar, with its classes named below."""

    def __init__(self) -> None:
        self._bar = ui.element("div").classes("ledger-bar")
        self._names = ui.element("div").classes("ledger-names")
        self._shown: list[tuple[str, float, str, str]] = []

    def show(self, rows: list[tuple[str, float, str, str]]) -> None:
        """Show `rows` of name, share, duration and colour."""
        if rows == self._shown:
            return
        self._shown = rows
        self._bar.clear()
        self._names.clear()
        with self._bar:
            for name, share, spent, tone in rows:
                part = ui.element("div").classes(f"ledger-part tone-{tone}").style(f"flex-grow: {share:.6f}")
                part.props["title"] = f"{name}: {spent}"
        with self._names:
            for name, share, spent, tone in rows:
                ui.label(f"{name} {spent} ({share:.1%})").classes(f"ledger-name tone-{tone}")


class EventList:
    """Events, newest first; new ones are put on top, the others stay as they are."""

    def __init__(self) -> None:
        self._rows: list[ui.element] = []
        self._newest: str | None = None
        self._empty = ui.label("No event yet.").classes("empty-note")
        with ui.element("div").classes("scroll tall"), ui.element("table").classes("grid events"):
            table_head(("Time", "Event", "Message", "Gen."))
            self._body = ui.element("tbody")

    def show(self, events: Iterable[Event]) -> None:
        """Show those of `events`, oldest first, that are not there yet."""
        known = -1 if self._newest is None else int(self._newest)
        for event in events:
            if int(event.id) > known:
                self._newest = event.id
                self._add(event)
        self._empty.set_visibility(not self._rows)
        while len(self._rows) > EVENTS_SHOWN:
            self._body.remove(self._rows.pop(0))

    def _add(self, event: Event) -> None:
        time, kind, message, generation = event_row(event)
        with self._body, ui.element("tr") as row:
            for text, classes in ((time, "mono"), (kind, f"kind tone-{event_tone(event)}"), (message, "message"),
                                  (generation, "mono")):  # fmt: skip
                with ui.element("td").classes(classes):
                    ui.label(text)
        row.move(self._body, target_index=0)
        self._rows.append(row)


class LogView:
    """The end of what the ranks print."""

    def __init__(self, head: ui.element, feed: JobFeed, update: Callable[[], Awaitable[Any]]):
        """Draw the log of `feed`, with the choice of rank in `head`; `update` reads it anew after a choice."""
        self._feed = feed
        self._update = update
        with head:
            ui.element("div").classes("gap")
            self._select = ui.select({-1: "All ranks"}, value=-1, on_change=self._choose).classes("rank-choice compact")
            self._select.props("dense outlined options-dense").props('aria-label="Rank of the log"')
        with ui.element("div").classes("log"):
            self._text = Words("log-text")

    def show(self) -> None:
        """Show the lines that were read."""
        options = {-1: "All ranks", **{rank.rank: f"Rank {rank.rank}" for rank in self._feed.ranks}}
        if options.keys() != self._select.options.keys() and self._select.value in options:
            self._select.set_options(options)
        log = self._feed.log
        self._text.show(log_text(log.lines, with_rank=log.rank is None) or "Nothing was printed yet.")

    async def _choose(self, event: Any) -> None:
        self._feed.log = LogTail(None if event.value == -1 else event.value)
        await self._update()
