"""A headless Chromium, and pages in it that may neither complain in the console nor ask anybody but their server."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, Request, sync_playwright

from tests.patience import PATIENCE_S
from tools.screenshots import CHROMIUM_FLAGS, chromium_path

REFUSED = "Failed to load resource: "
"""Chromium says so of each refusal and each connection that fails, whatever the page makes of it."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One for a module: Playwright's loop counts as running in this thread for as long as it lives."""
    if (path := chromium_path()) is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=path, args=CHROMIUM_FLAGS) as running,
    ):
        yield running


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    complaints: list[str] = []
    hosts: set[str] = set()

    def note(request: Request) -> None:
        if not request.url.startswith("data:"):
            hosts.add(request.url.split("/")[2])

    with browser.new_context() as context:
        page = context.new_page()
        page.set_default_timeout(1000 * PATIENCE_S)
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
        page.on("request", note)
        yield page
        assert [one for one in complaints if not one.startswith(REFUSED)] == []
        assert len(hosts) <= 1
