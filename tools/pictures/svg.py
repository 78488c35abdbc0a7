"""Elements, texts and colours of the SVG pictures.

A picture is one file for light and dark pages, without scripts or external fonts. It paints its own background, so it
can be read even if its colour scheme is not the page's.
"""

from collections.abc import Iterable
from html import escape

SANS = "-apple-system,BlinkMacSystemFont,'Segoe UI','Noto Sans',Helvetica,Arial,sans-serif"
MONO = "ui-monospace,SFMono-Regular,'SF Mono',Menlo,Consolas,'Liberation Mono',monospace"

LIGHT = {
    "page": "#ffffff", "card": "#f6f8fa", "line": "#d1d9e0", "ink": "#1f2328", "soft": "#59636e",
    "first": "#0969da", "second": "#bc4c00", "third": "#8250df", "peer": "#8c959f", "other": "#c5ccd3",
    "alarm": "#cf222e", "tint": "#ddf4ff", "warm": "#fff1e5",
}  # fmt: skip
DARK = {
    "page": "#0d1117", "card": "#151b23", "line": "#3d444d", "ink": "#f0f6fc", "soft": "#9198a1",
    "first": "#4493f8", "second": "#f0883e", "third": "#ab7df8", "peer": "#7d8590", "other": "#4b535d",
    "alarm": "#f85149", "tint": "#121d2f", "warm": "#2a1c10",
}  # fmt: skip
"""Colours of the two schemes, by what they are used for."""


def picture(width: int, height: int, title: str, parts: Iterable[str], *, style: str = "", frame: bool = True) -> str:
    """Returns a complete SVG file. `title` is read by screen readers."""
    ground = f'<rect class="page" width="{width}" height="{height}" rx="8"/>' if frame else ""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
            f'role="img" aria-labelledby="title">',
            f'<title id="title">{escape(title, quote=False)}</title>',
            f"<style>{scheme(LIGHT)}@media (prefers-color-scheme: dark){{{scheme(DARK)}}}{RULES}{style}</style>",
            *([ground] if ground else []),
            *parts,
            "</svg>",
            "",
        ]
    )


def scheme(colours: dict[str, str]) -> str:
    return ":root{" + ";".join(f"--{name}:{value}" for name, value in colours.items()) + "}"


RULES = (
    f"text{{font-family:{SANS};fill:var(--ink)}}"
    f".mono{{font-family:{MONO}}}"
    ".bold{font-weight:600}"
    ".page{fill:var(--page)}"
    ".card{fill:var(--card);stroke:var(--line)}"
    + "".join(f".{name}{{fill:var(--{name})}}" for name in LIGHT if name not in ("page", "card"))
    + ".stroke{fill:none;stroke:var(--soft);stroke-width:1.5}"
    + "".join(f".stroke.{name}{{fill:none;stroke:var(--{name})}}" for name in LIGHT if name not in ("page", "card"))
)


def text(
    x: float, y: float, words: str, kind: str = "", *, size: float = 14, anchor: str = "start", width: float = 0
) -> str:
    """Returns one line of text.

    `kind` is a list of classes, and `anchor` the end of the text that is at x. With a `width` the text is as wide with
    every font.
    """
    where = "" if anchor == "start" else f' text-anchor="{anchor}"'
    where += f' textLength="{width:g}"' if width else ""
    return f'<text x="{x:g}" y="{y:g}" font-size="{size:g}"{where}{classes(kind)}>{escape(words, quote=False)}</text>'


def box(x: float, y: float, width: float, height: float, kind: str = "card", *, radius: float = 6) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"{classes(kind)}/>'


def path(course: str, kind: str = "stroke", more: str = "") -> str:
    return f'<path d="{course}"{classes(kind)}{" " + more if more else ""}/>'


def dot(x: float, y: float, radius: float, kind: str) -> str:
    return f'<circle cx="{x:g}" cy="{y:g}" r="{radius:g}"{classes(kind)}/>'


def fork(x: float, y: float, to_x: float, to_y: float) -> str:
    """Returns the course of a curve that leaves (x, y) and arrives at (to_x, to_y), both horizontally."""
    middle = (x + to_x) / 2
    return f"M{x:g} {y:g}C{middle:g} {y:g} {middle:g} {to_y:g} {to_x:g} {to_y:g}"


def classes(kind: str) -> str:
    return f' class="{kind}"' if kind else ""
