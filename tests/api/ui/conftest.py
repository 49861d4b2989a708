"""Pages without a browser, which read the real API."""

import pytest

from api.client import AsyncMantaClient
from api.ui.viewer import Viewer
from tests.api.support.headless import on_a_page


@pytest.fixture
def watch(service):
    """What `look` finds on a page, made by `make` for a viewer, each time that it was brought up to date: at first, and
    after each of the `changes`."""

    def watched(make, look, *changes):
        async def body():
            async with AsyncMantaClient(service.url) as client:
                page, seen = make(Viewer(client)), []
                for change in (lambda: None, *changes):
                    change()
                    done = await page.live._refresh()
                    seen.append(look(page, done))
                return seen

        return on_a_page(body)

    return watched
