"""The page in a real browser, with a scripted engine behind the server."""

import asyncio
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from motet.errors import EngineError
from motet.testing.engine import Script
from motet.types import ChoiceStart, GenerateRequest
from tests.fake_server import FakeServer
from tests.patience import PATIENCE_S
from tests.tiny_tokenizer import fake_answer

pytestmark = [pytest.mark.slow, pytest.mark.browser]

OWNED = "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'</script>&amp;<b>bold</b>"
WORDS = "alpha beta gamma delta"

Start = Callable[..., "GatedServer"]

expect.set_options(timeout=1000 * PATIENCE_S)


class GatedServer(FakeServer):
    """A server whose engine takes as many steps as it is let."""

    def __init__(self, folder: Path, script: Script, **settings: Any) -> None:
        super().__init__(folder, script, **settings)
        self.steps = asyncio.Semaphore(0)
        self.engine.gate = self.steps

    def go(self, steps: int) -> None:
        for _ in range(steps):
            self._loop.call_soon_threadsafe(self.steps.release)


def worded(_: GenerateRequest, start: ChoiceStart) -> list[int]:
    return fake_answer(f"{start.index}: {WORDS}")


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    with ExitStack() as stack:

        def start(script: Script = worded, **settings: Any) -> GatedServer:
            server = GatedServer(folder, script, **settings)
            stack.enter_context(server)
            return server

        yield start


def ask(page: Page, server: FakeServer, **fields: str) -> None:
    """Opens the page, fills in the fields and asks."""
    page.goto(server.url)
    for id, value in fields.items():
        page.fill(f"#{id}", value)
    expect(page.locator("#model option")).to_have_count(1)
    page.click("#send")


def choices(page: Page, state: str) -> Any:
    return page.locator(f'.choice[data-state="{state}"]')


def text_of(page: Page, index: int) -> str | None:
    return page.locator(".choice .text").nth(index).text_content()


def test_eight_choices_stream_one_is_stopped_and_four_more_follow(page: Page, start: Start) -> None:
    server = start()
    ask(page, server)
    expect(choices(page, "waiting")).to_have_count(8)
    server.go(5)
    expect(choices(page, "writing")).to_have_count(8)
    expect(page.locator(".facts").first).to_contain_text("5 tokens")
    written = text_of(page, 3)
    page.get_by_role("button", name="Stop choice 3").click()
    expect(page.get_by_role("button", name="Stop choice 3")).to_be_disabled()
    server.go(200)
    expect(choices(page, "over")).to_have_count(8)
    assert [text_of(page, index) for index in range(8)] == [
        written if index == 3 else f"{index}: {WORDS}" for index in range(8)
    ]
    expect(page.locator(".facts").nth(3)).to_contain_text("over: stopped · 5 tokens")
    expect(page.locator(".receipt")).to_have_count(1)
    prompt = len(server.engine.requests[0].prompt)
    expect(page.locator("#blocks")).to_contain_text(f"Trunk: {prompt} prompt tokens.")
    page.click("#more")
    server.go(200)
    expect(choices(page, "over")).to_have_count(12)
    assert [text_of(page, index) for index in range(8, 12)] == [f"{index}: {WORDS}" for index in range(8, 12)]
    expect(page.locator(".receipt")).to_have_count(2)


def test_all_choices_are_stopped(page: Page, start: Start) -> None:
    server = start()
    ask(page, server, n="3")
    server.go(4)
    expect(choices(page, "writing")).to_have_count(3)
    page.click("#stop-all")
    expect(choices(page, "over")).to_have_count(3)
    expect(page.locator("#more")).to_be_disabled()
    assert server.engine.open == {}


def test_the_choices_of_a_large_group_fit_on_a_phone(page: Page, start: Start) -> None:
    server = start()
    server.go(1000)
    page.set_viewport_size({"width": 360, "height": 740})
    ask(page, server, n="128")
    expect(choices(page, "over")).to_have_count(128)
    expect(page.locator(".tail")).to_have_count(128)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.parametrize("shaded", [False, True])
def test_what_is_written_stays_text(page: Page, start: Start, shaded: bool) -> None:
    server = start(lambda _, __: fake_answer(OWNED))
    server.go(1000)
    page.goto(server.url)
    page.set_checked("#shading", shaded)
    expect(page.locator("#model option")).to_have_count(1)
    page.fill("#prompt", OWNED)
    page.fill("#n", "2")
    page.fill("#max-tokens", "500")
    page.click("#send")
    expect(choices(page, "over")).to_have_count(2)
    expect(page.locator(".receipt")).to_have_count(1)
    assert [text_of(page, index) for index in range(2)] == [OWNED, OWNED]
    assert page.locator("main img, main script, .text b").count() == 0
    assert (page.locator(".text span").count() > 0) == shaded
    assert page.title() == "Motet"


def test_a_group_with_enough_answers_shows_its_majority(page: Page, start: Start) -> None:
    server = start(lambda _, start: fake_answer(f"It is {42 if start.index else 41}"))
    server.go(1000)
    page.goto(server.url)
    page.select_option("#stop", "last_number")
    page.fill("#k", "3")
    page.click("#send")
    receipt = page.locator(".receipt")
    expect(receipt).to_contain_text("agree")
    expect(receipt).to_contain_text("42")


def test_a_form_that_cannot_be_is_refused_in_the_server_s_words(page: Page, start: Start) -> None:
    server = start()
    page.goto(server.url)
    page.click("summary")
    problem = page.get_by_role("alert")
    page.fill("#schema", "{")
    page.click("#send")
    expect(problem).to_contain_text("The JSON Schema is no JSON")
    page.fill("#schema", '{"type": "no such type"}')
    page.click("#send")
    expect(problem).to_contain_text("no such type")
    expect(page.locator(".choice")).to_have_count(0)
    page.fill("#schema", "")
    server.go(1000)
    page.click("#send")
    expect(choices(page, "over")).to_have_count(8)
    expect(problem).to_be_hidden()


def test_a_busy_server_says_so(page: Page, start: Start) -> None:
    server = start(key_max_requests=1)
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    server.go(2)
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S):
        ask(page, server)
        expect(page.get_by_role("alert")).to_contain_text("requests")
        expect(page.locator(".choice")).to_have_count(0)


def test_a_server_with_keys_asks_for_one_and_forgets_it_with_the_page(page: Page, start: Start) -> None:
    server = start(api_key="sesame")
    server.go(1000)
    page.goto(server.url)
    dialog = page.get_by_role("dialog")
    expect(dialog).to_contain_text("You didn't provide an API key.")
    page.fill("#key", "wrong")
    page.keyboard.press("Enter")
    expect(dialog).to_contain_text("Incorrect API key provided.")
    page.fill("#key", "sesame")
    page.keyboard.press("Enter")
    expect(dialog).to_be_hidden()
    expect(page.locator("#model option")).to_have_count(1)
    page.click("#send")
    expect(choices(page, "over")).to_have_count(8)
    assert page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]") == [0, 0, ""]
    page.reload()
    expect(dialog).to_be_visible()


def test_the_views_are_changed_from_the_keyboard(page: Page, start: Start) -> None:
    page.goto(start().url)
    page.get_by_role("tab", name="Ask").focus()
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Workers")).to_be_focused()
    expect(page.locator("#worker-rows tr")).to_have_count(1)
    expect(page.locator("#form")).to_be_hidden()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#form")).to_be_visible()


def test_a_stream_that_fails_ends_in_the_server_s_words(page: Page, start: Start) -> None:
    server = start()
    server.engine.fail_after = {3: EngineError("the engine has had enough")}
    ask(page, server, n="2")
    server.go(4)
    expect(page.get_by_role("alert")).to_have_text("the engine has had enough")
    expect(choices(page, "over")).to_have_count(2)
    expect(page.locator(".facts").first).to_contain_text("over: broken off · 3 tokens")


def test_a_connection_that_breaks_off_is_told(page: Page, start: Start) -> None:
    server = start()
    chunk = {"id": "x", "choices": [{"index": 0, "delta": {"content": "half"}, "finish_reason": None}]}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=f"data: {json.dumps(chunk)}\n\n"))
    ask(page, server, n="1")
    expect(page.get_by_role("alert")).to_have_text("The connection to the server was lost.")
    expect(page.locator(".facts")).to_contain_text("broken off")
    page.context.set_offline(True)
    page.click("#send")
    expect(page.get_by_role("alert")).to_have_text("The server cannot be reached.")
