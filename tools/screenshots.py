"""Takes the pictures of docs/page.md and of the README: docs/pictures/*.png.

Starts a cell with the default model. In a headless Chromium it requests eight choices on the server's page, kills the
engine that generates them, and opens the list of workers.

Run: python tools/screenshots.py
"""

import argparse
import io
import re
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, expect, sync_playwright

from motet.deploy.child import ChildServer

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
CHROMIUM_FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync"),
]
SERVED = ("smollm2", "--prefill", "1", "--decode", "2", "--bypass-tokens", "0", "--admin-key", "secret")
SIZE = (1400, 1060)
COLOURS = 128
"""Number of colours of a picture. 128 look the same as all colours, and the file has a third of the size."""
PATIENCE_MS = 60_000
PROMPT = "Write a short story about a lighthouse keeper who sings in a choir of eight voices."


def chromium_path() -> str | None:
    """Returns the path of Chromium, None if it is not installed."""
    return shutil.which("chromium") or shutil.which("chromium-browser")


def take(page: Page, name: str) -> None:
    """Stores what a page shows as the picture with this name."""
    picture = Image.open(io.BytesIO(page.screenshot()))
    path = FOLDER / f"{name}.png"
    picture.convert("RGB").quantize(COLOURS).save(path, optimize=True)
    print(f"{path.relative_to(FOLDER.parent.parent)}: {path.stat().st_size / 1000:.0f} kB")


def take_all(browser: Browser, url: str) -> None:
    page = browser.new_page(viewport={"width": SIZE[0], "height": SIZE[1]})
    page.goto(url)
    page.get_by_role("tab", name="Workers").click()
    page.click("#admin-key")
    page.fill("#key", "secret")
    page.keyboard.press("Enter")
    expect(page.locator("#worker-rows tr")).to_have_count(3)
    page.get_by_role("tab", name="Generate").click()
    page.fill("#prompt", PROMPT)
    page.fill("#max-tokens", "160")
    page.fill("#seed", "1")
    page.click("#send")
    last = page.locator(".facts").last
    expect(last).to_contain_text(re.compile(r" [3-7]\d tokens"), timeout=PATIENCE_MS)
    take(page, "streaming")
    page.locator("#legend button").click()
    expect(page.locator(".choice[data-moved=true]").first).to_be_visible(timeout=PATIENCE_MS)
    expect(page.locator("#announcement")).to_contain_text("continue on", timeout=PATIENCE_MS)
    left = page.locator(".choice[data-state=writing][data-moved=false]")
    expect(left).to_have_count(0, timeout=PATIENCE_MS)
    take(page, "killed")
    page.get_by_role("tab", name="Workers").click()
    expect(page.get_by_role("row", name="starting")).to_be_visible(timeout=PATIENCE_MS)
    page.set_viewport_size({"width": SIZE[0], "height": 440})
    take(page, "workers")


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    FOLDER.mkdir(exist_ok=True)
    with ChildServer(SERVED) as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=CHROMIUM_FLAGS)
        take_all(browser, server.url)
        browser.close()


if __name__ == "__main__":
    main()
