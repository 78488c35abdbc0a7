"""The way of a group through a cell: client, router, prefill engine, one transfer, trunk and tails, and a failover."""

from tools.pictures.svg import box, fork, path, picture, text

WIDTH, HEIGHT = 880, 440
BLOCK = 14
TAILS = (7, 10, 5, 9, 4, 8, 11, 6)
"""Number of blocks of each tail."""
TRUNK = 8

STYLE = (
    ".arrow{fill:none;stroke:var(--soft);stroke-width:1.6}"
    ".strong{fill:none;stroke:var(--first);stroke-width:3}"
    ".dashed{fill:none;stroke:var(--second);stroke-width:1.6;stroke-dasharray:5 4}"
    ".engine{fill:var(--tint);stroke:var(--first)}"
    ".spare{fill:var(--warm);stroke:var(--second);stroke-dasharray:5 4}"
)


def head(x: float, y: float, direction: str, kind: str) -> str:
    """Returns the head of an arrow whose tip is at (x, y)."""
    courses = {
        "right": f"M{x} {y}l-9 -5v10z",
        "left": f"M{x} {y}l9 -5v10z",
        "down": f"M{x} {y}l-5 -9h10z",
    }
    return path(courses[direction], kind)


def blocks(x: float, y: float, count: int, kind: str) -> list[str]:
    return [box(x + place * (BLOCK + 2), y, BLOCK, BLOCK, kind, radius=2) for place in range(count)]


def client() -> list[str]:
    return [
        box(24, 176, 132, 92),
        text(90, 206, "Client", "bold", size=16, anchor="middle"),
        text(90, 229, "any OpenAI", "soft", size=13, anchor="middle"),
        text(90, 247, "client, n = 8", "soft", size=13, anchor="middle"),
        path("M156 208H223", "arrow"),
        head(232, 208, "right", "soft"),
        text(194, 199, "1 request", "soft", size=12, anchor="middle"),
        path("M232 238H165", "arrow"),
        head(156, 238, "left", "soft"),
        text(194, 257, "8 streams", "soft", size=12, anchor="middle"),
    ]


def router() -> list[str]:
    lines = ("HTTP and limits", "templates, tools", "queue", "choice of workers", "failover")
    return [
        box(232, 132, 148, 180),
        text(306, 162, "API and router", "bold", size=16, anchor="middle"),
        *(text(306, 190 + 22 * at, line, "soft", size=13, anchor="middle") for at, line in enumerate(lines)),
        path(fork(380, 176, 433, 92), "arrow"),
        head(442, 92, "right", "soft"),
        path(fork(442, 336, 389, 268), "arrow"),
        head(380, 268, "left", "soft"),
    ]


def prefill() -> list[str]:
    return [
        box(442, 36, 206, 112, "engine"),
        text(458, 62, "Prefill engine", "bold", size=16),
        text(458, 84, "computes the prompt once", "soft", size=13),
        *blocks(458, 106, TRUNK, "first"),
        path("M512 148V208", "strong"),
        head(512, 219, "down", "first"),
        text(526, 180, "one ticket, one transfer", "bold", size=13),
        text(526, 198, "of the prompt's KV, for any n", "soft", size=13),
    ]


def decode() -> list[str]:
    top, pitch = 272, 17
    trunk_x, trunk_y = 458, 323
    end = trunk_x + TRUNK * (BLOCK + 2)
    middle = trunk_y + BLOCK / 2
    parts = [
        box(442, 219, 414, 202, "engine"),
        text(458, 246, "Decode engine", "bold", size=16),
        text(840, 246, "8 tails: one per choice", "soft", size=13, anchor="end"),
        *blocks(trunk_x, trunk_y, TRUNK, "first"),
        text(trunk_x, trunk_y + 36, "trunk: stored once,", "soft", size=13),
        text(trunk_x, trunk_y + 54, "read once per step", "soft", size=13),
    ]
    for number, length in enumerate(TAILS):
        y = top + pitch * number
        parts.append(path(fork(end, middle, end + 66, y + BLOCK / 2), "stroke"))
        parts += blocks(end + 70, y, length, "third" if number % 2 else "first")
    return parts


def spare() -> list[str]:
    return [
        box(664, 36, 192, 112, "spare"),
        text(680, 62, "Decode engine", "bold", size=16),
        text(680, 84, "continues the choices", "soft", size=13),
        text(680, 102, "of an engine that dies:", "soft", size=13),
        text(680, 124, "the same texts", "second bold", size=13),
        path("M760 219V157", "dashed"),
        path("M760 148l-5 9h10z", "second"),
    ]


def architecture() -> str:
    title = (
        "A client sends one request for eight choices to the router. A prefill engine computes the prompt once. One "
        "transfer brings its KV to a decode engine, and eight tails fork from this trunk. If the engine dies, another "
        "one continues."
    )
    parts = [*client(), *router(), *prefill(), *spare(), *decode()]
    return picture(WIDTH, HEIGHT, title, parts, style=STYLE)
