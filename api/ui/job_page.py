"""The page of one job."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime

from nicegui import ui

from api import calls
from api.client import ApiError, ServiceUnreachable
from api.schemas import Job
from api.ui import charts, formatting
from api.ui.components import Badge, Bar, Figures, Table, Words, frame, panel
from api.ui.job_parts import EventList, LedgerBar, LogView, RankGrid
from api.ui.live import Live
from api.ui.polling import JobFeed
from api.ui.viewer import Viewer
from service.states import JobState, after_action

_FIGURES = (
    "Train loss", "Validation loss", "Tokens/s", "MFU (full)", "Goodput", "Restarts", "Generation",
    "Ranks (t × p × d)", "Running for",
)  # fmt: skip


class JobPage:
    """The page: header, charts, ranks, events, checkpoints, log."""

    def __init__(self, viewer: Viewer, job_id: str):
        """Build the page of a job, empty for now."""
        self._client, self._may_change = viewer.client, viewer.may_change
        self._feed = JobFeed(viewer.client, job_id)
        self._drawn: tuple[int, int] = (0, 0)
        frame(job_id, viewer)
        with ui.element("main").classes("page"):
            self.live = Live(self.refresh)
            self._build_header()
            with ui.element("div").classes("columns"):
                with panel("Loss", classes="chart-panel"):
                    self._loss = ui.echart(charts.loss_options({})).classes("chart loss-chart")
                with panel("Throughput", classes="chart-panel"):
                    self._throughput = ui.echart(charts.throughput_options({})).classes("chart throughput-chart")
            with panel("Ranks", "columns are pipeline stages, lines are tensor ranks"):
                self._ranks = RankGrid()
            with panel("Time") as head:
                with head:
                    self._ledger_note = Words("note")
                self._ledger = LedgerBar()
            with panel("Recoveries", "newest first, UTC; phases in seconds: detect + rest + re-form + restore + redo"):
                parts = ("Time", "Gen.", "Cause", "Replaced", "State from", "Phases", "Total")
                self._recoveries = Table(parts, "Nothing has failed.", "recoveries")
            with ui.element("div").classes("columns"):
                with panel("Events", "newest first, UTC"):
                    self._events = EventList()
                with panel("Checkpoints", "time in UTC"):
                    headings = ("Step", "State", "Size", "Begun", "Folder")
                    self._checkpoints = Table(headings, "No checkpoint yet.", "checkpoints")
            with panel("Log", "last 100 lines") as head:
                self._log = LogView(head, self._feed, self.live.update)

    async def refresh(self) -> bool:
        """Bring the page up to date; returns whether the job is final and everything about it is shown."""
        feed = self._feed
        await feed.poll()
        if feed.job is not None:
            self._show_header(feed.job)
        if (feed.curves_version, len(feed.restarts)) != self._drawn:
            self._drawn = (feed.curves_version, len(feed.restarts))
            self._draw(self._loss, charts.loss_options(feed.curves.points, feed.restarts, feed.validation_sets))
            self._draw(self._throughput, charts.throughput_options(feed.curves.points))
        self._ranks.show(feed.ranks)
        self._events.show(feed.events)
        self._checkpoints.show([formatting.checkpoint_row(checkpoint) for checkpoint in feed.checkpoints])
        if feed.ledger is not None:
            self._ledger_note.show(formatting.ledger_note(feed.ledger))
            self._ledger.show(formatting.ledger_rows(feed.ledger))
        self._recoveries.show([formatting.recovery_row(recovery) for recovery in feed.recoveries])
        self._log.show()
        return feed.done

    @staticmethod
    def _draw(chart: ui.echart, options: dict) -> None:
        chart.options.clear()
        chart.options.update(options)
        chart.update()

    def _build_header(self) -> None:
        with ui.element("div").classes("title-row"):
            with ui.element("h1"):
                self._name = Words("job-name", self._feed.job_id)
            self._badge = Badge()
            ui.element("div").classes("gap")
            self._cancel = ui.button("Cancel job", on_click=self._confirm_cancel, color=None).props(
                "outline dense no-caps"
            )
            self._cancel.classes("cancel")
            self._cancel.set_visibility(False)
            self._actions = {
                action: self._build_action(action, call)
                for action, call in (("pause", calls.pause), ("resume", calls.resume), ("retry", calls.retry))
            }
        self._why = Words("why hidden")
        with ui.element("div").classes("progress-row"):
            self._bar = Bar()
            self._progress = Words("progress-text")
        self._figures = Figures(_FIGURES)
        self._dialog = self._build_dialog()

    def _show_header(self, job: Job) -> None:
        tone = formatting.state_tone(job.state)
        self._name.show(job.name)
        self._badge.show(job.state, tone)
        reason = formatting.why(job)
        self._why.show(reason)
        self._why.label.classes(replace=f"why tone-{tone}" if reason else "why hidden")
        self._bar.show(formatting.share_of(job), tone)
        self._progress.show(formatting.progress_text(job))
        self._figures.show(formatting.job_figures(job, datetime.now(UTC)))
        for action, button in {"cancel": self._cancel, **self._actions}.items():
            changes = after_action(action, JobState(job.state)) not in (None, job.state)
            button.set_visibility(self._may_change and changes)

    def _build_action(self, action: str, call: Callable[[str], calls.Call[Job]]) -> ui.button:
        """A button that sends `call` without asking; hidden for now."""

        async def send() -> None:
            await self._send(call(self._feed.job_id))

        button = ui.button(action.capitalize(), on_click=send, color=None).props("outline dense no-caps")
        button.classes(action)
        button.set_visibility(False)
        return button

    def _build_dialog(self) -> ui.dialog:
        with ui.dialog() as dialog, ui.card().classes("confirm"):
            ui.label("Cancel this job?").classes("confirm-title")
            ui.label("Its ranks are stopped for good. Checkpoints that are complete stay on disk.")
            with ui.element("div").classes("confirm-buttons"):
                ui.button("Keep it running", on_click=lambda: dialog.submit(False)).props("flat no-caps")
                ui.button("Cancel the job", on_click=lambda: dialog.submit(True)).props(
                    "unelevated no-caps color=red-8"
                )
        return dialog

    async def _confirm_cancel(self) -> None:
        if await self._dialog:
            await self._send(calls.cancel(self._feed.job_id))

    async def _send(self, call: calls.Call[Job]) -> None:
        try:
            await self._client.send(call)
        except (ApiError, ServiceUnreachable) as error:
            ui.notify(str(error), type="warning", position="top")
        await self.live.update()
