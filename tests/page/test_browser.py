"""The page in a real browser, with a server that has a scripted engine."""

import json
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, expect

from bench.servers.ports import free_port
from motet.errors import EngineError
from tests.page.user import (
    WORDS,
    GatedServer,
    Start,
    choices,
    click,
    enter_key,
    numbered_words,
    send_request,
    stored,
    text_of,
)
from tests.patience import PATIENCE_S
from tests.tiny_tokenizer import fake_answer

pytestmark = [pytest.mark.slow, pytest.mark.browser]

OWNED = "<img src=x onerror=\"document.title='owned'\"></script><script>document.title='owned'</script>&amp;<b>bold</b>"
OWNED += " \u05e9\u05dc\u05d5\u05dd \U0001f469\u200d\U0001f467 e\u0301"
"""Markup, then Hebrew, an emoji of three code points, and a letter of two."""


def test_eight_choices_stream_one_is_stopped_and_four_more_follow(page: Page, start: Start) -> None:
    server = start()
    send_request(page, server, clicks=3)
    expect(choices(page, "waiting")).to_have_count(8)
    server.go(5)
    expect(choices(page, "writing")).to_have_count(8)
    expect(page.locator(".facts").first).to_contain_text("5 tokens")
    generated = "3: alp"
    expect(page.locator(".choice .text").nth(3)).to_have_text(
        generated
    )  # a poll can report tokens before they are streamed
    with page.expect_response("**/choices/3"):
        page.get_by_role("button", name="Stop choice 3").click()
    server.go(200)
    expect(choices(page, "over")).to_have_count(8)
    assert [text_of(page, index) for index in range(8)] == [
        generated if index == 3 else f"{index}: {WORDS}" for index in range(8)
    ]
    expect(page.locator(".facts").nth(3)).to_contain_text("stopped · 5 tokens")
    expect(page.locator(".receipt")).to_have_count(1)
    prompt = len(server.engine.requests[0].prompt)
    expect(page.locator("#blocks")).to_contain_text(f"Trunk: {prompt} prompt tokens.")
    click(page, "more", times=2)
    server.go(200)
    expect(choices(page, "over")).to_have_count(12)
    assert [text_of(page, index) for index in range(8, 12)] == [f"{index}: {WORDS}" for index in range(8, 12)]
    expect(page.locator(".receipt")).to_have_count(2)
    assert len(server.engine.requests) == 2


@pytest.mark.long
def test_tokens_that_are_reported_before_they_stream_are_counted_once(page: Page, start: Start) -> None:
    server = start()
    send_request(page, server, n="1")
    server.go(3)
    facts, text = page.locator(".facts"), page.locator(".choice .text")
    expect(facts).to_contain_text("3 tokens")
    ahead = {"prompt_tokens": 9, "choices": [{"index": 0, "tokens": 5, "worker": "engine-0", "state": "writing"}]}
    page.route("**/v1/groups/*", lambda route: route.fulfill(json=ahead))
    expect(facts).to_contain_text("5 tokens")
    server.go(2)
    expect(text).to_have_text("0: alp")
    expect(facts).to_contain_text("5 tokens")
    complete = f"0: {WORDS}"
    server.go(1000)
    expect(text).to_have_text(complete)
    expect(facts).to_contain_text(f"ended · {len(fake_answer(complete))} tokens")


@pytest.mark.long
def test_all_choices_are_stopped(page: Page, start: Start) -> None:
    server = start()
    send_request(page, server, n="3")
    server.go(4)
    expect(choices(page, "writing")).to_have_count(3)
    page.click("#stop-all")
    expect(choices(page, "over")).to_have_count(3)
    expect(page.locator("#more")).to_be_disabled()
    assert server.engine.open == {}


@pytest.mark.long
def test_the_choices_of_a_large_group_fit_on_a_phone(page: Page, start: Start) -> None:
    server = start()
    server.go(1000)
    page.set_viewport_size({"width": 360, "height": 740})
    send_request(page, server, n="128")
    expect(choices(page, "over")).to_have_count(128)
    expect(page.locator(".tail")).to_have_count(128)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_output_stays_text(page: Page, start: Start) -> None:
    server = start(lambda _, __: fake_answer(OWNED))
    server.go(2000)
    for shaded in (False, True):
        page.goto(server.url)
        expect(page.locator("#model option")).to_have_count(1)
        page.fill("#prompt", OWNED)
        page.fill("#n", "2")
        page.fill("#max-tokens", "500")
        page.set_checked("#shading", shaded)
        page.click("#send")
        expect(page.locator(".receipt")).to_have_count(1)
        expect(choices(page, "over")).to_have_count(2)
        assert [text_of(page, index) for index in range(2)] == [OWNED, OWNED]
        assert page.locator("main img, main script, .text b").count() == 0
        assert (page.locator(".text span").count() > 0) == shaded
    assert page.title() == "Motet"


@pytest.mark.long
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


@pytest.mark.long
def test_an_impossible_form_is_refused_with_the_server_s_message(page: Page, refusals: set[int], start: Start) -> None:
    refusals.add(400)
    server = start()
    page.goto(server.url)
    page.click("summary")
    problem = page.get_by_role("alert")
    page.fill("#schema", "{")
    page.click("#send")
    expect(problem).to_contain_text("The JSON Schema is not valid JSON")
    page.fill("#schema", '{"type": "no such type"}')
    page.click("#send")
    expect(problem).to_contain_text("no such type")
    expect(page.locator(".choice")).to_have_count(0)
    page.fill("#schema", "")
    page.fill("#n", "300")
    page.click("#send")
    expect(problem).to_contain_text("256")
    expect(page.locator("#announcement")).to_have_text("No choices are generated.")
    page.fill("#n", "8")
    server.go(1000)
    page.click("#send")
    expect(choices(page, "over")).to_have_count(8)
    expect(problem).to_be_hidden()


@pytest.mark.long
def test_a_busy_server_returns_a_503(page: Page, refusals: set[int], start: Start) -> None:
    refusals.add(503)
    server = start(key_max_requests=1)
    body = {"messages": [{"role": "user", "content": "hi"}], "stream": True}
    server.go(2)
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json=body, timeout=PATIENCE_S):
        send_request(page, server)
        expect(page.get_by_role("alert")).to_contain_text("requests")
        expect(page.locator(".choice")).to_have_count(0)


def test_keys_are_requested_in_both_views_and_forgotten_with_the_page(
    page: Page, refusals: set[int], start: Start
) -> None:
    refusals.add(401)
    server = start(api_key="sesame", admin_key="boss")
    server.go(1000)
    page.goto(server.url)
    dialog, problem, admin = page.get_by_role("dialog"), page.locator("#problem"), page.locator("#admin-key")
    expect(dialog).to_contain_text("You didn't provide an API key.")
    page.keyboard.press("Escape")
    expect(problem).to_contain_text("You didn't provide an API key.")
    page.get_by_role("tab", name="Workers").click()
    enter_key(page, "wr\u014dng")
    expect(page.locator("#key:invalid")).to_be_visible()  # browsers send no such key
    enter_key(page, "wrong")
    expect(dialog).to_contain_text("Incorrect API key provided.")
    page.click("#key-cancel")
    expect(problem).to_contain_text("Incorrect API key provided.")
    expect(page.locator("#worker-rows tr")).to_have_count(0)
    page.get_by_role("tab", name="Generate").click()
    page.click("#send")
    enter_key(page, "sesame")
    expect(choices(page, "over")).to_have_count(8)
    expect(problem).to_be_hidden()
    expect(page.locator("#model option")).to_have_count(1)

    page.get_by_role("tab", name="Workers").click()
    expect(page.locator("#worker-rows tr")).to_have_count(1)
    admin.click()
    expect(dialog).to_contain_text("Admin key of this server")
    enter_key(page, "sesame")
    expect(dialog).to_contain_text("Incorrect admin key provided.")
    enter_key(page, "boss")
    expect(page.locator("#admin-note")).to_have_text("The page keeps the admin key until it is closed.")
    assert stored(page) == [0, 0, "", f"{server.url}/"]
    page.reload()
    enter_key(page, "sesame")
    page.get_by_role("tab", name="Workers").click()
    expect(admin).to_have_text("Enter the key")


def test_a_stream_that_fails_ends_with_the_server_s_message(page: Page, start: Start) -> None:
    server = start()
    server.engine.scenario.fail_after = {3: EngineError("the engine has had enough")}
    send_request(page, server, n="2")
    server.go(4)
    expect(page.get_by_role("alert")).to_have_text("the engine has had enough")
    expect(choices(page, "over")).to_have_count(2)
    expect(page.locator(".facts").first).to_contain_text("interrupted · 3 tokens")


def test_a_broken_connection_is_reported(page: Page, refusals: set[int], start: Start) -> None:
    refusals.update((0, 404))
    server = start()
    chunk = {"id": "x", "choices": [{"index": 0, "delta": {"content": "half"}, "finish_reason": None}]}
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=f"data: {json.dumps(chunk)}\n\n"))
    send_request(page, server, n="1")
    expect(page.get_by_role("alert")).to_have_text("The connection to the server was lost.")
    expect(page.locator(".facts")).to_contain_text("interrupted")
    page.context.set_offline(True)
    page.click("#send")
    expect(page.get_by_role("alert")).to_have_text("The server cannot be reached.")


@pytest.mark.long
def test_a_silent_server_is_announced_and_its_choices_can_be_stopped(
    page: Page, refusals: set[int], start: Start
) -> None:
    refusals.add(0)
    server = start()
    send_request(page, server, n="2")
    server.go(2)
    expect(choices(page, "writing")).to_have_count(2)
    announcement = page.locator("#announcement")
    page.route("**/v1/groups/**", lambda route: route.abort())
    expect(announcement).to_have_text("The server is not responding.")
    page.unroute("**/v1/groups/**")
    expect(announcement).to_have_text("The server is responding again.")
    page.route("**/v1/groups/**", lambda route: route.abort())
    page.click("#stop-all")
    expect(page.get_by_role("alert")).to_have_text("The server cannot be reached.")
    expect(page.locator(".facts").first).to_contain_text("interrupted")
    expect(page.locator("#send")).to_be_enabled()


def test_a_restarted_server_gets_requests_as_before(page: Page, refusals: set[int], folder: Path) -> None:
    refusals.update((0, 404))
    problem, rows = page.get_by_role("alert"), page.locator("#worker-rows tr")
    port = free_port()  # not used by other processes in between
    first = GatedServer(folder, numbered_words, port=port)
    with first:
        first.go(1000)
        send_request(page, first, n="2")
        expect(page.locator(".receipt")).to_have_count(1)
    page.get_by_role("tab", name="Workers").click()
    expect(problem).to_have_text("The server cannot be reached.")
    second = GatedServer(folder, numbered_words, port=port)
    with second:
        second.go(1000)
        expect(rows).to_have_count(1)
        expect(problem).to_be_hidden()
        page.get_by_role("tab", name="Generate").click()
        page.click("#more")
        expect(problem).to_contain_text("group")
        expect(page.locator("#announcement")).to_have_text("No choices are added.")
        expect(page.locator("#more")).to_be_disabled()
        assert [text_of(page, index) for index in range(2)] == [f"{index}: {WORDS}" for index in range(2)]
        page.click("#send")
        expect(page.locator(".receipt")).to_have_count(1)
        expect(choices(page, "over")).to_have_count(2)
        expect(problem).to_be_hidden()
