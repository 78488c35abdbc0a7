"""The page in a real browser, with a cell of real engines."""

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import pytest
from playwright.sync_api import Page, expect

from motet.deploy.child import ChildServer
from tests.forked import ForkingProcess
from tests.hosts.servers import eventually
from tests.page.user import WORDS, GatedServer, choices, enter_key, numbered_words, text_of
from tests.patience import PATIENCE_S
from tests.tiny_engine import TINY

pytestmark = [pytest.mark.slow, pytest.mark.browser]

ADMIN_KEY = "boss"
N, TOKENS, SEED = 8, 800, 7
SCHEMA = {"type": "array", "minItems": 80, "items": {"type": "string", "minLength": 12, "maxLength": 16}}
"""A form so long that every answer ends at its maximum number of tokens."""
IDLE = [(0, 0), (0, 0)]
PROMPT = "the hand in the sand and then the other hand"


@pytest.fixture(scope="module")
def cell(folder: Path, forking: ForkingProcess) -> Iterator[ChildServer]:
    with forking.server([str(folder), *TINY, "--decode", "2", "--admin-key", ADMIN_KEY]) as server:
        yield server


def workers(cell: ChildServer) -> dict[str, dict[str, int | str | None]]:
    return {one["id"]: one for one in httpx.get(f"{cell.url}/status", timeout=PATIENCE_S).json()["workers"]}


def running(cell: ChildServer) -> int:
    return sum(int(one["choices_running"] or 0) for one in workers(cell).values())


def pids(cell: ChildServer) -> dict[str, int]:
    return {id: pid for id, one in workers(cell).items() if isinstance(pid := one["pid"], int)}


def is_complete(cell: ChildServer) -> bool:
    return all(one["state"] == "ready" for one in workers(cell).values())


def undisturbed(cell: ChildServer) -> list[str]:
    body = {"messages": [{"role": "user", "content": PROMPT}], "n": N, "seed": SEED, "max_tokens": TOKENS}
    form = {"type": "json_schema", "json_schema": {"name": "form", "schema": SCHEMA}}
    body |= {"temperature": 0.8, "response_format": form}
    answer = httpx.post(f"{cell.url}/v1/chat/completions", json=body, timeout=PATIENCE_S)
    return [choice["message"]["content"] for choice in answer.json()["choices"]]


def send_request(page: Page, cell: ChildServer) -> None:
    """Sends the request, and waits until all choices run."""
    page.fill("#prompt", PROMPT)
    page.fill("#max-tokens", str(TOKENS))
    page.fill("#seed", str(SEED))
    page.click("summary")
    page.fill("#schema", json.dumps(SCHEMA))
    page.click("#send")
    eventually(lambda: running(cell) == N, bool)


@pytest.mark.long
def test_an_engine_is_killed_and_its_choices_end_as_if_undisturbed(page: Page, cell: ChildServer) -> None:
    eventually(lambda: is_complete(cell), bool)
    expected = undisturbed(cell)
    page.goto(cell.url)
    page.get_by_role("tab", name="Workers").click()
    page.click("#admin-key")
    enter_key(page, ADMIN_KEY)
    expect(page.locator("#worker-rows tr")).to_have_count(2)
    page.get_by_role("tab", name="Generate").click()
    engines = pids(cell)
    send_request(page, cell)
    for pid in engines.values():
        os.kill(pid, signal.SIGSTOP)  # so that they do not end before they are killed
    kill = page.get_by_role("button", name="Kill decode-")
    killed = (kill.text_content() or "").removeprefix("Kill ")
    kill.click()
    (other,) = engines.keys() - {killed}
    expect(page.locator("#announcement")).to_contain_text(f"{killed} was killed.")
    os.kill(engines[other], signal.SIGCONT)
    expect(page.locator('.choice[data-state="over"]')).to_have_count(N)
    expect(page.locator(".receipt")).to_contain_text("choices continued on another worker")
    assert page.locator(".choice .text").all_text_contents() == expected
    moved = page.locator('.choice[data-moved="true"] .facts b')
    expect(moved).to_have_text([f"{killed} → {other}"] * N)
    eventually(lambda: is_complete(cell), bool)


def test_an_engine_is_killed_in_the_table_of_workers_by_the_admin_key_alone(
    page: Page, refusals: set[int], cell: ChildServer
) -> None:
    refusals.add(401)
    eventually(lambda: is_complete(cell), bool)
    before = pids(cell)
    page.goto(cell.url)
    page.get_by_role("tab", name="Workers").click()
    first = page.locator("#worker-rows tr").first
    expect(first.locator('[data-name="Kernels"]')).to_have_text(str(workers(cell)["decode-0"]["kernels"]))
    expect(first.locator('[data-name="Memory"]')).to_have_text(re.compile(r"^\d\.\d\d GiB$"))
    kill = page.get_by_role("button", name="Kill the engine of decode-1")
    kill.click()
    why = page.locator("#key-why")
    expect(why).to_contain_text("admin key")
    enter_key(page, "wrong")
    expect(why).to_contain_text("Incorrect admin key provided.")
    assert pids(cell) == before
    enter_key(page, ADMIN_KEY)
    expect(page.locator("#announcement")).to_have_text("decode-1 was killed.")
    eventually(lambda: is_complete(cell) and pids(cell)["decode-1"] != before["decode-1"], bool)
    expect(page.locator("#worker-rows tr").nth(1)).to_contain_text("ready")


@pytest.mark.long
def test_a_worker_is_drained_and_the_models_of_a_gateway_get_requests(
    page: Page, refusals: set[int], cell: ChildServer, folder: Path, forking: ForkingProcess
) -> None:
    """One worker is a cell, the other is a text upstream."""
    refusals.update((401, 503))
    texts = GatedServer(folder, numbered_words, name="texts")
    with (
        texts,
        forking.server(
            ["--worker", cell.url, "--worker", f"{texts.url},openai", "--admin-key", ADMIN_KEY], command="gateway"
        ) as gateway,
    ):
        eventually(lambda: is_complete(gateway), bool)
        page.goto(gateway.url)
        expect(page.locator("#model option")).to_have_text(["tiny", "texts"])
        page.get_by_role("tab", name="Workers").click()
        row, drain = page.locator("#worker-rows tr").first, page.get_by_role("button", name="Drain").first
        drain.click()
        enter_key(page, ADMIN_KEY)
        expect(page.locator("#announcement")).to_contain_text("gets no new groups.")
        expect(row).to_contain_text("draining")
        expect(drain).to_be_disabled()
        page.get_by_role("tab", name="Generate").click()
        page.click("#send")
        expect(page.get_by_role("alert")).to_contain_text("drain")
        page.select_option("#model", "texts")
        generating = choices(page, "writing")

        def number_generating() -> int:
            texts.go(1)  # a single step: each choice is a request of its own, and the requests get steps in turn
            return generating.count()

        with page.expect_response("**/v1/groups/*") as polled:
            page.click("#send")
            eventually(number_generating, (8).__eq__)
        assert polled.value.ok
        page.get_by_role("button", name="Stop choice 3").click()
        expect(page.locator(".facts").nth(3)).to_contain_text("stopped")
        assert f"0: {WORDS}".startswith(text_of(page, 7) or "none")
        expect(page.locator("#more")).to_be_disabled()
        page.click("#stop-all")
        expect(page.locator(".receipt")).to_have_count(1)
        expect(choices(page, "over")).to_have_count(8)
        expect(page.get_by_role("alert")).to_be_hidden()


def test_a_reload_during_a_stream_leaves_nothing(page: Page, cell: ChildServer) -> None:
    eventually(lambda: is_complete(cell), bool)
    page.goto(cell.url)
    with page.expect_request("**/v1/groups/*") as polled:
        send_request(page, cell)
    page.reload()
    eventually(lambda: [(one["groups_running"], one["blocks_used"]) for one in workers(cell).values()], IDLE.__eq__)
    group = urlsplit(polled.value.url).path
    eventually(lambda: httpx.get(f"{cell.url}{group}", timeout=PATIENCE_S).status_code, (404).__eq__)
    expect(page.locator(".choice")).to_have_count(0)
