"""Actions of a user of the page, and a server whose engine takes only the steps that a test allows."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

from playwright.sync_api import Locator, Page, expect

from motet.testing.fake_engine import Script
from motet.types import ChoiceStart, GenerateRequest
from tests.fake_server import FakeServer
from tests.tiny_tokenizer import fake_answer

WORDS = "alpha beta gamma delta"


class GatedServer(FakeServer):
    """A server whose engine takes only the steps that `go` allows."""

    def __init__(self, folder: Path, script: Script, **settings: Any) -> None:
        super().__init__(folder, script, **settings)
        self.steps = asyncio.Semaphore(0)
        self.engine.scenario.gate = self.steps

    def go(self, steps: int) -> None:
        """Allows this number of further steps."""
        for _ in range(steps):
            self._loop.call_soon_threadsafe(self.steps.release)


Start = Callable[..., GatedServer]


def numbered_words(_: GenerateRequest, start: ChoiceStart) -> list[int]:
    return fake_answer(f"{start.index}: {WORDS}")


def send_request(page: Page, server: FakeServer, *, clicks: int = 1, **fields: str) -> None:
    """Opens the page, fills in the fields and sends the request."""
    page.goto(server.url)
    for id, value in fields.items():
        page.fill(f"#{id}", value)
    expect(page.locator("#model option")).to_have_count(1)
    click(page, "send", times=clicks)


def click(page: Page, id: str, *, times: int = 1) -> None:
    """Clicks without a pause between the clicks."""
    expect(page.locator(f"#{id}")).to_be_enabled()
    page.locator(f"#{id}").evaluate("(button, times) => { while (times--) button.click(); }", times)


def choices(page: Page, state: str) -> Locator:
    return page.locator(f'.choice[data-state="{state}"]')


def text_of(page: Page, index: int) -> str | None:
    return page.locator(".choice .text").nth(index).text_content()


def enter_key(page: Page, key: str) -> None:
    """Types a key into the open dialog."""
    page.fill("#key", key)
    page.keyboard.press("Enter")


def stored(page: Page) -> object:
    """Returns the number of stored items, the cookies and the address of the page."""
    return page.evaluate("[localStorage.length, sessionStorage.length, document.cookie, location.href]")
