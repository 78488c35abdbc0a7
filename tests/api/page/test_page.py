"""The page at `/`: what a browser is allowed to do with it, who can load it, and its size."""

import re
from html.parser import HTMLParser

import pytest

from motet.api.page import FOLDER, HEADERS, PAGE_ROUTES
from tests.api.serving import Served, Serving
from tests.error_response import assert_error

pytestmark = pytest.mark.anyio

MOST_BYTES = 60 * 1024
FILES = sorted(FOLDER.iterdir())
KINDS = {"/": "text/html; charset=utf-8", "js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8"}


class Elements(HTMLParser):
    """The elements of a page, each with its attributes and the text after its start tag."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self.texts.append("")

    def handle_data(self, data: str) -> None:
        if self.texts:
            self.texts[-1] += data


@pytest.mark.parametrize("route", ["/", "/health", "/metrics", "/v1/models"])
async def test_a_head_request_gets_no_body(served: Served, route: str) -> None:
    head, full = await served.http.head(route), await served.http.get(route)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == full.headers["content-type"]


@pytest.mark.parametrize("route", sorted(PAGE_ROUTES))
async def test_a_file_of_the_page_has_headers_that_allow_nothing_else(served: Served, route: str) -> None:
    answer = await served.http.get(route)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == KINDS[route.rpartition(".")[2]]
    policy = dict(part.split(" ", 1) for part in answer.headers["content-security-policy"].split("; "))
    assert policy == {
        "default-src": "'none'",
        "script-src": "'self'",
        "style-src": "'self'",
        "connect-src": "'self'",
        "img-src": "'self' data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
    }
    assert HEADERS.items() <= dict(answer.headers).items()
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["referrer-policy"] == "no-referrer"


async def test_every_file_has_a_route_and_every_route_a_file(served: Served) -> None:
    assert {f"/page/{path.name}" for path in FILES if path.name != "index.html"} | {"/"} == PAGE_ROUTES
    assert_error(await served.http.get("/page/index.html"), status=404, code="unknown_url")
    assert_error(await served.http.get("/page/../page.py"), status=404, code="unknown_url")


def test_the_page_is_small() -> None:
    assert sum(path.stat().st_size for path in FILES) < MOST_BYTES


def test_the_page_has_no_script_or_style_in_its_text_and_names_no_other_host() -> None:
    elements = Elements((FOLDER / "index.html").read_text())
    for (tag, attributes), text in zip(elements.found, elements.texts, strict=True):
        assert tag != "style" and "style" not in attributes
        assert not [name for name in attributes if name.startswith("on")]
        assert tag != "script" or (attributes["src"] and not text.strip())
    words = "".join(path.read_text() for path in FILES).replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"https?:|innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", words)


def test_every_file_that_the_page_loads_exists() -> None:
    elements = Elements((FOLDER / "index.html").read_text())
    loaded = [attributes.get("src") or attributes.get("href") or "" for _, attributes in elements.found]
    assert {f"/{path}" for path in loaded if path.startswith("page/")} == {"/page/page.js", "/page/page.css"}
    for script in FOLDER.glob("*.js"):
        for name in re.findall(r'from "\./(.*?)"', script.read_text()):
            assert f"/page/{name}" in PAGE_ROUTES


def test_every_field_has_a_label() -> None:
    elements = Elements((FOLDER / "index.html").read_text()).found
    labelled = {attributes["for"] for tag, attributes in elements if tag == "label"}
    fields = {attributes["id"] for tag, attributes in elements if tag in ("input", "select", "textarea")}
    assert fields == labelled


def contrast(one: str, other: str) -> float:
    """Returns the contrast of two colours such as `#0b5cad`, as WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        digits = colour[1:] if len(colour) == 7 else "".join(2 * digit for digit in colour[1:])
        parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
        red, green, blue = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", [0, 1], ids=["light", "dark"])
def test_every_text_can_be_read_on_its_background(scheme: int) -> None:
    """WCAG's level AA requires this contrast of texts, and 3 of frames."""
    blocks = re.findall(r":root {(.*?)}", (FOLDER / "page.css").read_text(), re.DOTALL)
    colour = dict(re.findall(r"--([\w-]+): (#\w+);", blocks[scheme]))
    for ground in (colour["ground"], colour["raised"]):
        for name in ("ink", "quiet", "accent", "alarm", *(f"w{number}" for number in range(8))):
            assert contrast(colour[name], ground) >= 4.5, (name, ground)
        assert contrast(colour["line"], ground) >= 3
    assert contrast(colour["on-accent"], colour["accent"]) >= 4.5


async def test_a_server_shows_no_page_if_the_setting_is_off(serve: Serving) -> None:
    served = await serve(page=False)
    for route in PAGE_ROUTES:
        assert_error(await served.http.get(route), status=404, code="unknown_url")


async def test_the_page_needs_no_key_but_its_requests_do(serve: Serving) -> None:
    served = await serve(api_keys=("client",), admin_key="boss")
    for route in PAGE_ROUTES:
        assert (await served.http.get(route)).status_code == 200
    assert_error(await served.http.get("/status"), status=401, code="invalid_api_key")
    assert_error(await served.http.get("/page/secret"), status=401, code="invalid_api_key")


async def test_the_page_answers_only_to_names_of_the_server(served: Served) -> None:
    refused = await served.http.get("/", headers={"host": "evil.example"})
    assert_error(refused, status=403, code="host_not_allowed")


@pytest.mark.slow
async def test_the_page_is_not_part_of_the_api(served: Served) -> None:
    paths = (await served.http.get("/openapi.json")).json()["paths"]
    assert not PAGE_ROUTES & paths.keys()
    assert "/workers/{id}/kill" in paths
