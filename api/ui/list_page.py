"""The list of jobs."""

from __future__ import annotations

from datetime import UTC, datetime

from nicegui import ui

from api import calls
from api.ui.components import Badge, Bar, Words, frame, table_head
from api.ui.formatting import JobRow, cluster_text, job_row
from api.ui.live import Live
from api.ui.viewer import Viewer
from service.states import STATE_NAMES

_HEADINGS = ("Name", "State", "Progress", "Loss", "Tokens/s", "MFU", "Restarts", "Age")
_PAGE = 50
_MOST = 1000
_ALL = "All states"


class JobLine:
    """A job in the list; draws only those of its cells that have changed."""

    def __init__(self, row: JobRow):
        """Draw `row`."""
        with ui.element("tr") as self.element:
            with ui.element("td").classes("c-name"):
                self._name = ui.link(row.name, f"/jobs/{row.id}").classes("job-link")
                ui.label(row.id).classes("job-id")
            with ui.element("td").classes("c-state"):
                self._badge = Badge(row.state, row.tone)
            with ui.element("td").classes("c-progress"):
                self._step = Words("step")
                self._bar = Bar()
            self._cells = [self._cell(name) for name in ("loss", "tokens-s", "mfu", "restarts", "age")]
        self.show(row)

    def show(self, row: JobRow) -> None:
        """Bring the line up to date."""
        if row.name != self._name.text:
            self._name.set_text(row.name)
        self._badge.show(row.state, row.tone)
        self._step.show(row.step)
        self._bar.show(row.share, row.tone)
        texts = (row.loss, row.tokens_per_second, row.mfu, row.restarts, row.age)
        for cell, text in zip(self._cells, texts, strict=True):
            cell.show(text)

    @staticmethod
    def _cell(name: str) -> Words:
        with ui.element("td").classes(f"c-{name}"):
            return Words("number")


class JobList:
    """The page."""

    def __init__(self, viewer: Viewer, url: str):
        """Build the page. `url` is where the browser finds the service, for the commands shown when it is empty."""
        self._client = viewer.client
        self._state: str | None = None
        self._limit = _PAGE
        self._lines: dict[str, JobLine] = {}
        frame(viewer=viewer)
        with ui.element("main").classes("page"):
            self.live = Live(self.refresh)
            with ui.element("div").classes("title-row"):
                with ui.element("h1"):
                    ui.label("Jobs")
                self._cluster = Words("cluster")
                ui.element("div").classes("gap")
                options = {"": _ALL, **{name: name for name in STATE_NAMES}}
                select = ui.select(options, value="", on_change=self._filter).props("dense outlined options-dense")
                select.classes("state-filter compact").props('aria-label="Filter by state"')
            self._build_table()
            self._none = Words("empty-note")
            self._build_welcome(url)

    async def refresh(self) -> bool:
        """Bring the page up to date; it is never done."""
        state = self._state
        page = await self._client.send(calls.jobs(state, limit=self._limit))
        cluster = await self._client.send(calls.cluster())
        if state != self._state:  # the filter has moved meanwhile: the next refresh is under way
            return False
        now = datetime.now(UTC)
        self._show([job_row(job, now) for job in page.items])
        self._more.set_visibility(page.next_cursor is not None and self._limit < _MOST)
        self._cluster.show(cluster_text(cluster))
        return False

    def _show(self, rows: list[JobRow]) -> None:
        for gone in self._lines.keys() - {row.id for row in rows}:
            self._body.remove(self._lines.pop(gone).element)
        for place, row in enumerate(rows):
            line = self._lines.get(row.id)
            if line is not None:
                line.show(row)
                continue
            with self._body:
                line = self._lines[row.id] = JobLine(row)
            line.element.move(self._body, target_index=place)
        self._table.set_visibility(bool(rows))
        self._welcome.set_visibility(not rows and self._state is None)
        self._none.label.set_visibility(not rows and self._state is not None)
        self._none.show(f"No job is {self._state}.")

    def _build_table(self) -> None:
        with ui.element("div").classes("panel scroll") as self._table:
            with ui.element("table").classes("grid jobs"):
                table_head(_HEADINGS)
                self._body = ui.element("tbody")
            self._more = ui.button("Show more", on_click=self._show_more).props("flat dense no-caps")
        self._table.set_visibility(False)
        self._more.set_visibility(False)

    def _build_welcome(self, url: str) -> None:
        with ui.element("section").classes("panel welcome") as self._welcome:
            with ui.element("h2"):
                ui.label("No jobs yet")
            ui.label("Submit one from a terminal; it will show up here at once.")
            with ui.element("pre"):
                ui.label(f"export MANTA_URL={url}\nmanta submit examples/quickstart.yaml")
        self._welcome.set_visibility(False)

    async def _filter(self, event: object) -> None:
        self._state = getattr(event, "value", None) or None
        self._limit = _PAGE
        await self.live.update()

    async def _show_more(self) -> None:
        self._limit = min(_MOST, self._limit + 100)
        await self.live.update()
