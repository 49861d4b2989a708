"""A page is kept fresh until nothing changes any more, and says so while the service does not answer."""

import asyncio
from types import SimpleNamespace

import pytest

from api.client import ApiError, ServiceUnreachable
from api.schemas import Problem
from api.ui import live
from api.ui.live import Live


class Banner:
    """A label of the page."""

    def __init__(self, text):
        self.text, self.visible = text, True

    def classes(self, names):
        return self

    def props(self, names):
        return self

    def set_text(self, text):
        self.text = text

    def set_visibility(self, visible):
        self.visible = visible


class Page:
    """What a page shows, and what it hears of the service, in turns."""

    def __init__(self, monkeypatch, *answers):
        self.answers, self.timer = list(answers), None
        monkeypatch.setattr(live, "ui", SimpleNamespace(label=self._label, timer=self._timer))
        self.live = Live(self._refresh)

    def _label(self, text):
        self.banner = Banner(text)
        return self.banner

    def _timer(self, seconds, callback, active, immediate):
        self.timer = SimpleNamespace(callback=callback, active=active)
        return self.timer

    async def _refresh(self):
        answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def complaint(self):
        return self.banner.text if self.banner.visible else None


UNREACHABLE = ServiceUnreachable("http://there", ConnectionRefusedError())
BROKEN = ApiError(Problem(code="not_ready", title="Service Unavailable", status=503, detail="Ray does not answer"))


@pytest.mark.parametrize(
    ("error", "words"), [(UNREACHABLE, "Cannot reach"), (BROKEN, "Ray does not answer"), (TimeoutError(), "Cannot")]
)
def test_page_complains_as_long_as_the_service_does_not_answer(monkeypatch, error, words):
    page = Page(monkeypatch, error, error, False)

    async def main():
        assert page.complaint is None
        await page.live.start()
        assert words in page.complaint and page.timer.active
        await page.timer.callback()
        assert words in page.complaint and page.timer.active
        await page.timer.callback()
        assert page.complaint is None and page.timer.active

    asyncio.run(main())


@pytest.mark.parametrize("answers", [(True,), (False, True), (UNREACHABLE, True)])
def test_page_on_which_nothing_changes_any_more_is_left_alone(monkeypatch, answers):
    page = Page(monkeypatch, *answers)

    async def main():
        await page.live.start()
        for _ in answers[1:]:
            assert page.timer.active
            await page.timer.callback()
        assert page.complaint is None and not page.timer.active

    asyncio.run(main())
