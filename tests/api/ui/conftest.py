"""One Chromium and one sample server for all tests of a file that only look. Playwright keeps an event loop of its own
running in the thread meanwhile, which tests of other files could not bear."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, sync_playwright

from manta.api.ui import DIGEST
from tests.api.ui.browser import ARGUMENTS, CHROMIUM, Complaints, Sample, Viewer, served, sign_in


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield launched
        launched.close()


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    """Knows nothing of the tests before."""
    before = chromium.contexts
    yield chromium
    for context in chromium.contexts:
        if context not in before:
            context.close()


@pytest.fixture(scope="module")
def viewed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sample]:
    """A server for those who only look."""
    with served(tmp_path_factory.mktemp("viewed")) as sample:
        yield sample


@pytest.fixture
def followed(tmp_path: Path, empty_database: Path) -> Iterator[Sample]:
    """One whose jobs are changed."""
    shutil.copy(empty_database, tmp_path / "manta.db")
    with served(tmp_path) as sample:
        yield sample


@pytest.fixture(scope="module")
def signed_in(chromium: Browser, viewed: Sample) -> Viewer:
    """Somebody whose browser has the dashboard's files already, as it does of whoever comes back."""
    return sign_in(chromium, viewed, viewed.new_link())


@pytest.fixture
def viewer(signed_in: Viewer) -> Iterator[Viewer]:
    """Somebody who looks; what the browser complains about fails the test."""
    somebody = Viewer(signed_in.sample, signed_in.context, Complaints())
    yield somebody
    said = list(somebody.complaints.said)
    for page in signed_in.context.pages:
        page.close()
    assert said == []


@pytest.fixture(scope="module")
def run(signed_in: Viewer) -> Iterator[Callable[..., Any]]:
    """`run("charts/scale.js", "(module, low) => module.ticks(low, 10, 5)", 0)`: what a function of a module and of what
    is given beside it returns, as JSON knows it."""
    page = signed_in.open()

    def ran(module: str, body: str, *arguments: Any) -> Any:
        script = f"""async ([address, given]) => {{
            const answer = await ({body})(await import(address), ...given);
            return JSON.stringify(answer, (key, value) => (ArrayBuffer.isView(value) ? [...value] : value) ?? null);
        }}"""
        return json.loads(page.evaluate(script, [f"/ui/static/{DIGEST}/{module}", list(arguments)]))

    yield ran
    page.close()


@pytest.fixture(scope="module")
def call(run: Callable[..., Any]) -> Callable[..., Any]:
    """`call("charts/scale.js", "ticks", 0, 10, 5)`: what a function of a module returns."""
    return lambda module, name, *given: run(module, f"(module, ...given) => module.{name}(...given)", *given)
