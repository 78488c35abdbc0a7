"""A headless Chromium, and pages in it that fail the test if they log errors or send requests to hosts other than
their server; and servers whose engine takes only the steps that a test allows."""

import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page, Request, expect, sync_playwright

from motet.testing.fake_engine import Script
from tests.page.user import GatedServer, Start, numbered_words
from tests.patience import PATIENCE_S
from tools.screenshots import CHROMIUM_FLAGS, chromium_path

REFUSED = re.compile(r"Failed to load resource: (?:the server responded with a status of (\d+)|net::)")
"""Chromium logs this for each error status and each failed connection, even if the page handles it."""

expect.set_options(timeout=1000 * PATIENCE_S)


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def start(script: Script = numbered_words, **settings: Any) -> GatedServer:
            server = GatedServer(folder, script, **settings)
            stack.enter_context(server)
            return server

        yield start


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser for each module, since Playwright's event loop counts as running in this thread while it exists."""
    if (path := chromium_path()) is None:
        pytest.skip("Chromium is not installed: apt-get install chromium")
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=path, args=CHROMIUM_FLAGS) as running,
    ):
        yield running


@pytest.fixture
def refusals() -> set[int]:
    """The error statuses that the page may get, and 0 for a lost connection. A test adds the statuses that it
    expects."""
    return set()


@pytest.fixture
def page(browser: Browser, refusals: set[int]) -> Iterator[Page]:
    logged: list[str] = []
    hosts: set[str] = set()

    def record(request: Request) -> None:
        if not request.url.startswith("data:"):
            hosts.add(request.url.split("/")[2])

    with browser.new_context() as context:
        page = context.new_page()
        page.set_default_timeout(1000 * PATIENCE_S)
        page.on("pageerror", lambda error: logged.append(str(error)))
        page.on(
            "console", lambda message: logged.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("request", record)
        yield page
        assert [one for one in logged if _error_status(one) not in refusals] == []
        assert len(hosts) <= 1


def _error_status(line: str) -> int | None:
    """Returns the status that a logged line reports, 0 for a lost connection, or None for any other line."""
    match = REFUSED.match(line)
    return None if match is None else int(match[1] or 0)
