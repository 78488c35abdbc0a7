"""Takes the pictures of the dashboard in docs/metrics.md: docs/pictures/board-*.png.

Starts a cell of the default model and a Prometheus that scrapes it. Clients send requests to the cell, one of its
engines is killed, and then Prometheus answers the dashboard's queries. `panels.jsx` draws the results without Grafana,
with the components that Grafana publishes for plugins. npm downloads them into a folder that is removed at the end.

Run: python -m tools.panels     takes seven minutes
"""

import argparse
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
from playwright.sync_api import Route, expect, sync_playwright

from bench.servers.ports import free_port
from motet.deploy.child import ChildServer
from tests.boards.reading import Prometheus, grafana_query, reading
from tools import dashboard
from tools.screenshots import CHROMIUM_FLAGS, SIZE, chromium_path, take

GRAFANA = "13.2.3"
PACKAGES = (
    *(f"@grafana/{name}@{GRAFANA}" for name in ("data", "ui")),
    *("react@19", "react-dom@19", "esbuild@0.28", "@fontsource/inter@5"),
)
DRAWING = Path(__file__).with_suffix(".jsx")
PAGE = """<!doctype html>
<link rel="stylesheet" href="panels.css">
<body style="margin: 0"><div id="board"></div><script src="panels.js"></script>
"""
FONTS = {"Inter-Regular": 400, "Inter-Medium": 500}
"""Weights of the font files that Grafana's styles refer to. Grafana's packages do not contain these files."""
ESBUILD = (
    *("--bundle", "--minify", "--outdir=.", "--allow-overwrite", "--jsx=automatic", "--loader:.ttf=empty"),
    *('--define:process.env.NODE_ENV="production"', "--log-level=error"),
)

LITTLE_KV = ("--kv-cache-gb", "0.1", "--max-model-len", "2048")
"""A cache that fills up within a picture."""
SERVED = ("smollm2", "--prefill", "1", "--decode", "2", "--admin-key", "secret", *LITTLE_KV)
PICTURES = {
    "board-requests": ("Requests",),
    "board-cache": ("Queue and load", "KV cache"),
    "board-workers": ("Disaggregated prefill and decode", "Workers"),
}
CLIENTS = 3
BEFORE_S, AFTER_S = 150, 200
"""Duration of the load before and after an engine is killed."""
MINUTE_S = 60
SCRAPE_S = 5
TOPICS = ("a lighthouse keeper", "the harvest moon", "two rivers", "a violin", "the night train", "an old map")
SCHEMA = {
    "type": "object",
    "properties": {"title": {"type": "string", "maxLength": 40}, "chapters": {"enum": [3, 5, 8]}},
    "required": ["title", "chapters"],
}


def bodies(client: int) -> Iterator[dict[str, object]]:
    """Yields the request bodies of one client: few and many choices, short and long answers, free text and JSON."""
    for number in count():
        topic = TOPICS[(number + client) % len(TOPICS)]
        messages = [{"role": "user", "content": f"Write about {topic}."}]
        body: dict[str, object] = {
            "n": (2, 8, 4)[(number + client) % 3],
            "seed": number,
            "max_tokens": (24, 64, 120)[number % 3],
        }
        if number % 2:
            style = "Be plain, be kind, and let every voice be heard. " * 12
            messages.insert(0, {"role": "system", "content": f"You write scene {number} of a play. {style}"})
        if number % 4 == 2:
            schema = {"name": "book", "schema": SCHEMA, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        yield body | {"messages": messages}


def send_requests(url: str, client: int, until: float) -> None:
    with httpx.Client(base_url=url, timeout=60) as http:
        for body in bodies(client):
            if time.monotonic() > until:
                return
            http.post("/v1/chat/completions", json=body).raise_for_status()


def load(url: str) -> None:
    """Sends requests to a cell, and kills one of its engines after `BEFORE_S`."""
    until = time.monotonic() + BEFORE_S + AFTER_S
    with ThreadPoolExecutor(CLIENTS) as clients:
        running = [clients.submit(send_requests, url, client, until) for client in range(CLIENTS)]
        time.sleep(BEFORE_S)
        key = {"authorization": "Bearer secret"}
        httpx.post(f"{url}/workers/decode-0/kill", headers=key).raise_for_status()
        for one in running:
            one.result()


def series(prometheus: Prometheus, target: dict[str, str], span: tuple[int, int]) -> Iterator[dict[str, object]]:
    """Yields the series that Grafana would receive for one query of a panel, named as in the panel's legend."""
    start, end = span
    query = grafana_query(target["expr"], rate_s=4 * SCRAPE_S)
    data = {"query": query, "start": start, "end": end, "step": SCRAPE_S}
    answer = prometheus.http.post("/api/v1/query_range", data=data).raise_for_status().json()
    times = range(start, end + 1, SCRAPE_S)
    for found in answer["data"]["result"]:
        values = {round(at): float(value) for at, value in found["values"] if value != "NaN"}
        name = target["legendFormat"]
        for label, value in found["metric"].items():
            name = name.replace(f"{{{{{label}}}}}", value)
        yield {
            "name": name,
            "times": [at * 1000 for at in times],
            "values": [values.get(at) for at in times],
        }


def measured() -> dict[str, Any]:
    """Returns the dashboard with the results of its queries, as the argument of `window.draw` in `panels.jsx`."""
    port = free_port()
    with (
        tempfile.TemporaryDirectory() as folder,
        reading(f"127.0.0.1:{port}", Path(folder), every_s=SCRAPE_S) as prometheus,
        ChildServer(SERVED, port=port) as server,
    ):
        prometheus.until("motet:worker_state")
        start = int(time.time())
        load(server.url)
        end = int(time.time()) // MINUTE_S * MINUTE_S - SCRAPE_S  # the label of a full minute does not fit at the edge
        span = (start, end)
        rows: list[dict[str, Any]] = []
        for panel in json.loads(dashboard.text())["panels"]:
            if panel["type"] == "row":
                rows.append({"title": panel["title"], "panels": []})
            else:
                found = [one for target in panel["targets"] for one in series(prometheus, target, span)]
                rows[-1]["panels"].append(panel | {"series": found})
    return {"from": span[0] * 1000, "to": span[1] * 1000, "width": SIZE[0], "rows": rows}


def build(site: Path) -> None:
    """Downloads Grafana's components, and builds a page in the folder `site` that draws a board with them."""
    run = partial(subprocess.run, cwd=site, check=True, stdout=subprocess.DEVNULL)
    run(["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--loglevel=error", *PACKAGES])
    shutil.copy(DRAWING, site)
    run(["node_modules/.bin/esbuild", DRAWING.name, *ESBUILD])
    (site / "index.html").write_text(PAGE)
    packages = site / "node_modules"
    shutil.copytree(packages / "@grafana" / "ui" / "dist" / "public", site / "public" / "build")
    (site / "public" / "fonts" / "inter").mkdir(parents=True)
    for name, weight in FONTS.items():
        font = packages / "@fontsource" / "inter" / "files" / f"inter-latin-{weight}-normal.woff2"
        shutil.copy(font, site / "public" / "fonts" / "inter" / f"{name}.woff2")


def draw(board: dict[str, Any], site: Path) -> None:
    def answer(route: Route) -> None:
        route.fulfill(path=site / urlsplit(route.request.url).path.lstrip("/"))

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium_path(), args=CHROMIUM_FLAGS)
        for name, titles in PICTURES.items():
            page = browser.new_page(viewport={"width": SIZE[0], "height": SIZE[1]})
            page.route("**/*", answer)
            page.goto("http://board/index.html")
            rows = [row for row in board["rows"] if row["title"] in titles]
            page.evaluate("board => window.draw(board)", board | {"rows": rows})
            height = page.locator("#board").evaluate("board => board.scrollHeight")
            page.set_viewport_size({"width": SIZE[0], "height": height})
            panels = sum(len(row["panels"]) for row in rows)
            expect(page.locator("[data-testid=title-items-container] svg path")).to_have_count(panels)
            take(page, name)
        browser.close()


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        build(Path(folder))
        draw(measured(), Path(folder))


if __name__ == "__main__":
    main()
