"""The larger parts of a job's page show what is, and nothing of what was."""

from datetime import UTC, datetime
from types import SimpleNamespace

from api.schemas import Event, LogLine, Rank
from api.ui import job_parts
from api.ui.job_parts import EventList, LedgerBar, LogView, RankGrid
from api.ui.polling import LogTail
from tests.api.support.headless import on_a_page, texts


def rank(number, **fields):
    usual = {"tensor": number, "pipeline": 0, "data": 0, "context": 0, "state": "running"}
    usual |= {"node": "n", "device": "cpu", "pid": 100 + number, "generation": 1}
    return Rank(rank=number, **{**usual, **fields})


def event(number, kind="submitted"):
    return Event(
        id=str(number),
        time=datetime(2026, 1, 1, tzinfo=UTC),
        type=kind,
        message=f"message {number}",
        generation=1,
        rank=None,
        step=None,
        data={},
    )


def test_ledger_shows_its_last_rows_only():
    async def body():
        bar = LedgerBar()
        bar.show([("training", 0.5, "1 s", "good"), ("waiting", 0.5, "1 s", "muted")])
        bar.show([("training", 0.9, "9 s", "good"), ("redone", 0.1, "1 s", "bad")])
        return bar

    bar = on_a_page(body)
    assert texts(bar._names) == ["training 9 s (90.0%)", "redone 1 s (10.0%)"]
    parts = bar._bar.default_slot.children
    assert [part.props["title"] for part in parts] == ["training: 9 s", "redone: 1 s"]
    assert [part.style["flex-grow"] for part in parts] == ["0.900000", "0.100000"]


def test_ranks_that_change_are_shown_as_they_are_and_those_that_go_are_gone():
    async def body():
        grid = RankGrid()
        first = texts(grid._area), grid._note.label.visible
        grid.show([rank(0), rank(1)])
        both = texts(grid._area)
        grid.show([rank(0), rank(1, pid=777, state="exited")])
        changed = texts(grid._area)
        grid.show([rank(0)])
        return first, both, changed, texts(grid._area), grid._note.label.visible

    first, both, changed, one, note = on_a_page(body)
    assert first == ([], True)
    assert len([text for text in both if "rank" in text.lower()]) >= 2
    assert any("777" in text for text in changed) and not any("777" in text for text in both)
    assert any("exited" in text for text in changed)
    assert len(one) < len(both) and not note


def test_more_ranks_than_can_be_drawn_are_counted(monkeypatch):
    monkeypatch.setattr(job_parts, "MOST_RANKS_DRAWN", 2)

    async def body():
        grid = RankGrid()
        grid.show([rank(number) for number in range(5)])
        return list(grid._boxes), grid._note.label.text, grid._note.label.visible

    assert on_a_page(body) == ([0, 1], "and 3 more ranks", True)


def test_events_are_put_on_top_once_and_the_oldest_make_room(monkeypatch):
    monkeypatch.setattr(job_parts, "EVENTS_SHOWN", 3)

    async def body():
        shown = EventList()
        empty = shown._empty.visible
        shown.show([event(9), event(10)])
        shown.show([event(9), event(10), event(11)])
        three = [text for text in texts(shown._body) if text.startswith("message")]
        shown.show([event(12)])
        return empty, three, [text for text in texts(shown._body) if text.startswith("message")], shown._empty.visible

    empty, three, last, still_empty = on_a_page(body)
    assert (empty, still_empty) == (True, False)
    assert three == ["message 11", "message 10", "message 9"], "by number, not as words"
    assert last == ["message 12", "message 11", "message 10"]


def test_log_of_a_chosen_rank_is_read_at_once():
    updates = []

    async def update():
        updates.append(feed.log.rank)

    feed = SimpleNamespace(ranks=[rank(0), rank(1)], log=LogTail())

    async def body():
        from nicegui import ui

        view = LogView(ui.element("div"), feed, update)
        view.show()
        nothing = view._text.label.text
        feed.log.lines.append(
            LogLine(rank=1, time=datetime(2026, 1, 1, tzinfo=UTC), stream="stdout", text="hello", generation=1)
        )
        view.show()
        of_all = view._text.label.text
        await view._choose(SimpleNamespace(value=1))
        chosen = feed.log.rank
        await view._choose(SimpleNamespace(value=-1))
        return dict(view._select.options), nothing, of_all, chosen, feed.log.rank

    options, nothing, of_all, chosen, all_again = on_a_page(body)
    assert options == {-1: "All ranks", 0: "Rank 0", 1: "Rank 1"}
    assert nothing == "Nothing was printed yet."
    assert "hello" in of_all and "1" in of_all
    assert (chosen, all_again, updates) == (1, None, [1, None])
