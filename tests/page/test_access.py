"""The accessibility of the page: axe finds no violation, and everything works with the keyboard alone."""

from typing import Any

import pytest
from axe_playwright_python.base import AXE_SCRIPT
from playwright.sync_api import Locator, Page, expect

from motet.types import ChoiceStart, GenerateRequest
from tests.page.user import WORDS, Start, choices, enter_key, text_of
from tests.tiny_tokenizer import fake_answer

pytestmark = [pytest.mark.slow, pytest.mark.browser]

WCAG = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
AXE = """async (tags) => {
    const { violations, passes } = await axe.run({ runOnly: tags, resultTypes: ["violations"] });
    const wrong = violations.flatMap(({ id, nodes }) => nodes.map(({ target }) => `${id}: ${target}`));
    if (document.documentElement.scrollWidth > innerWidth) wrong.push("the page scrolls sideways");
    return [wrong, passes.some(({ id }) => id === "color-contrast")];
}"""
MAX_STOPS = 60
"""More than the number of elements of the page that can have the focus, while it shows eight choices."""
SHADED = """spans => spans.forEach((span, place) => {
    span.className = `s${place % 5}`;
    span.textContent = "word"; // axe does not judge the contrast of a single letter
})"""
RECORD_ANNOUNCEMENTS = """() => {
    window.announced = [];
    const note = (changes) => changes.forEach(({ target }) => target.textContent && announced.push(target.textContent));
    for (const one of document.querySelectorAll("[role=status], [role=alert], [role=log], [aria-live]"))
        new MutationObserver(note).observe(one, { childList: true, characterData: true, subtree: true });
}"""


def uneven(_: GenerateRequest, start: ChoiceStart) -> list[int]:
    """Returns the tokens of an answer. Every second answer is short."""
    return fake_answer(f"{start.index}: {WORDS}" if start.index % 2 else "no")


def violations_in(page: Page) -> list[str]:
    wrong, contrast_seen = page.evaluate(AXE, WCAG)
    assert contrast_seen
    violations: list[str] = wrong
    return violations


@pytest.mark.parametrize(("scheme", "width"), [("light", 1400), ("dark", 360)])
def test_axe_finds_nothing_wrong(page: Page, refusals: set[int], start: Start, scheme: Any, width: int) -> None:
    server = start(uneven, admin_key="boss")
    page.set_viewport_size({"width": width, "height": 3000})
    page.emulate_media(color_scheme=scheme, reduced_motion="reduce")
    page.goto(server.url)
    page.evaluate(AXE_SCRIPT)
    page.check("#shading")
    page.click("summary")
    page.click("#send")
    server.go(9)
    expect(choices(page, "over")).to_have_count(4)
    spans = page.locator(".text span")
    expect(spans.nth(11)).to_be_attached()
    spans.evaluate_all(SHADED)
    assert violations_in(page) == []
    animations = "document.getAnimations().length"
    assert page.evaluate(animations) == 0
    page.emulate_media(reduced_motion="no-preference")
    assert page.evaluate(animations) == 4
    page.emulate_media(reduced_motion="reduce")
    server.go(1000)
    expect(page.locator(".receipt")).to_have_count(1)
    page.fill("#schema", "{")
    page.click("#send")
    page.get_by_role("tab", name="Workers").click()
    expect(page.locator("#worker-rows tr")).to_have_count(1)
    expect(page.get_by_role("alert")).to_be_visible()
    assert violations_in(page) == []
    refusals.add(401)
    page.click("#admin-key")
    enter_key(page, "wrong")
    expect(page.locator("#key-why")).to_be_visible()
    assert violations_in(page) == []


def go_to(page: Page, target: Locator, key: str) -> None:
    """Presses a key until the element has the focus, and checks that the focus is visible at each step."""
    for _ in range(MAX_STOPS):
        page.keyboard.press(key)
        style, width = page.evaluate(
            "(({ outlineStyle, outlineWidth }) => [outlineStyle, outlineWidth])"
            "(getComputedStyle(document.activeElement))"
        )
        assert (style, width) == ("solid", "3px")
        if target.evaluate("one => one === document.activeElement"):
            return
    raise AssertionError(f"{target} cannot be reached with {key}")


def test_the_keyboard_is_enough_and_only_milestones_are_announced(page: Page, start: Start) -> None:
    server = start()
    page.goto(server.url)
    page.evaluate(RECORD_ANNOUNCEMENTS)
    expect(page.locator("#model option")).to_have_count(1)
    go_to(page, page.locator("#prompt"), "Tab")
    page.keyboard.press("Control+A")
    page.keyboard.type("Name a boat.")
    go_to(page, page.locator("#send"), "Tab")
    page.keyboard.press("Enter")
    expect(choices(page, "waiting")).to_have_count(8)
    server.go(4)
    expect(choices(page, "writing")).to_have_count(8)
    go_to(page, page.locator(".choice button").nth(2), "Tab")
    with page.expect_response("**/choices/2"):
        page.keyboard.press("Enter")
    server.go(200)
    expect(page.locator(".receipt")).to_have_count(1)
    expect(page.locator(".facts").nth(2)).to_contain_text("stopped · 4 tokens")
    page.keyboard.press("Tab")
    expect(page.get_by_label("Answer 2")).to_be_focused()
    go_to(page, page.locator("#more"), "Shift+Tab")
    page.keyboard.press("Enter")
    server.go(200)
    expect(page.locator(".receipt")).to_have_count(2)
    expect(choices(page, "over")).to_have_count(12)  # shown with the last text, which can be after the receipt
    assert text_of(page, 11) == f"11: {WORDS}"
    go_to(page, page.locator("#prompt"), "Shift+Tab")
    page.keyboard.press("Control+Enter")
    server.go(200)
    expect(choices(page, "over")).to_have_count(8)
    expect(page.locator(".receipt")).to_have_count(1)
    go_to(page, page.get_by_role("tab", name="Generate"), "Shift+Tab")
    page.keyboard.press("ArrowRight")
    expect(page.get_by_role("tab", name="Workers")).to_be_focused()
    expect(page.locator("#worker-rows tr")).to_have_count(1)
    expect(page.locator("#form")).to_be_hidden()
    expect(
        page.get_by_text("Start the server with --admin-key to drain workers and kill engines here.")
    ).to_be_visible()
    assert page.locator("#workers :is(button, .act):visible").count() == 0
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#form")).to_be_visible()
    expected = [f"{count} choices {event}." for count in (8, 4, 8) for event in ("are requested", "have ended")]
    assert page.evaluate("announced") == expected
