"""Decode rate and time to the first token of the last choice, for Motet and other servers: figures of docs/log.md."""

from collections.abc import Sequence
from dataclasses import dataclass

from tools.pictures.log_tables import entry, numbers
from tools.pictures.svg import box, path, picture, text

WIDTH, HEIGHT = 880, 416
PANEL_WIDTH, PANEL_HEIGHT, TOP = 396, 210, 122
BAR, GAP = 30, 6
ENTRY = "Motet compared with vLLM and llama.cpp"
"""Start of the title of an entry of the log. A cell of its table has a figure for each server, in their order."""
SERVERS = {"Motet": "first", "vLLM 0.32": "peer", "llama.cpp": "other"}
"""Servers, with the class of their bars."""


@dataclass(frozen=True)
class Group:
    """One number of choices, with a figure for each server."""

    n: str
    decode: Sequence[float]
    last_first_s: Sequence[float]


def read_groups() -> list[Group]:
    return [
        Group(row["n"], numbers(row["decode tokens/s"]), numbers(row["first token of the last choice"]))
        for row in entry(ENTRY).rows("n")
    ]


@dataclass(frozen=True)
class Series:
    """One figure of all servers."""

    title: str
    hint: str
    digits: int
    values: Sequence[tuple[str, Sequence[float]]]
    """For each n, the value of each server."""


def panel(x: float, series: Series) -> list[str]:
    """Returns bars for each n, scaled so that the largest one fills the panel."""
    largest = max(max(values) for _, values in series.values)
    parts = [text(x, 76, series.title, "bold", size=17), text(x, 97, series.hint, "soft", size=13)]
    bottom, pitch = TOP + PANEL_HEIGHT, PANEL_WIDTH / len(series.values)
    parts.append(path(f"M{x} {bottom}h{PANEL_WIDTH}", "stroke line"))
    for number, (n, values) in enumerate(series.values):
        group_width = len(values) * BAR + (len(values) - 1) * GAP
        left = x + number * pitch + (pitch - group_width) / 2
        for place, (value, kind) in enumerate(zip(values, SERVERS.values(), strict=True)):
            height = max(2.0, value / largest * (PANEL_HEIGHT - 18))
            at = left + place * (BAR + GAP)
            shown = f"{value:.{series.digits}f}"
            strong = "bold" if kind == "first" else "soft"
            parts.append(box(round(at, 1), round(bottom - height, 1), BAR, round(height, 1), kind, radius=2))
            middle = round(at + BAR / 2, 1)
            parts.append(text(middle, round(bottom - height - 5, 1), shown, strong, size=12, anchor="middle"))
        parts.append(text(round(left + group_width / 2, 1), bottom + 20, f"n = {n}", size=14, anchor="middle"))
    return parts


def legend() -> list[str]:
    parts, at = [], 24.0
    for name, kind in SERVERS.items():
        parts += [
            box(at, 22, 14, 14, kind, radius=3),
            text(at + 21, 34, name, "bold" if kind == "first" else "", size=15),
        ]
        at += 46 + 8.5 * len(name)
    return parts


def bars() -> str:
    groups = read_groups()
    rates = Series("Decode, tokens per second", "more is better; sum of all n choices", 0,
                   [(group.n, group.decode) for group in groups])  # fmt: skip
    firsts = Series("First token of the last choice, seconds", "less is better; 1,340 prompt tokens, not cached", 2,
                    [(group.n, group.last_first_s) for group in groups])  # fmt: skip
    machine = "SmolLM2-135M in bf16, two cores of an AMD EPYC, 64 tokens per choice."
    method = f"The servers got the same requests in turn; medians of three, {entry(ENTRY).date}."
    parts = [
        *legend(),
        *panel(24, rates),
        *panel(460, firsts),
        text(24, HEIGHT - 32, machine, "soft", size=12),
        text(24, HEIGHT - 15, method, "soft", size=12),
    ]
    return picture(WIDTH, HEIGHT, summary(groups), parts)


def summary(groups: Sequence[Group]) -> str:
    """Returns the figures as a sentence, for readers who do not see the picture."""
    sentences = [
        f"n = {group.n}: "
        + ", ".join(
            f"{name} {rate:.0f} tokens/s and {first:.2f} s"
            for name, rate, first in zip(SERVERS, group.decode, group.last_first_s, strict=True)
        )
        for group in groups
    ]
    return "Decode rate, and time to the first token of the last choice. " + "; ".join(sentences)
