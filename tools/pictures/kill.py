"""An animation of a recorded run: eight choices of one prompt, an engine that is killed, and the same eight texts.

Without animation, or if the reader prefers reduced motion, the picture shows the end of the run.

A line of text is covered by a rectangle that moves to the right when tokens arrive. CSS cannot animate text, and a
moving rectangle works in every browser. Each character has the same width with every font (`textLength`).
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from textwrap import wrap

from tools.pictures.svg import box, dot, fork, path, picture, text

RECORD = Path(__file__).with_name("kill.json")
WIDTH = 880
PROMPT_LENGTH = 14
ROWS_X, ROWS_TOP, ROW_PITCH, LINE_PITCH = 246, 92, 42, 17
CHARACTER, LINE_LENGTH, FONT_SIZE = 7.2, 84, 12
SLOWER = 15
"""Time of the animation divided by the time of the run."""
HOLD_S = 4.0
"""Time for which the end is shown before the animation starts again."""


@dataclass(frozen=True)
class RecordedDelta:
    at_s: float
    """Time since the request was sent."""
    index: int
    text: str


@dataclass(frozen=True)
class RecordedRun:
    model: str
    prompt: str
    n: int
    first_worker: str
    second_worker: str
    killed_s: float
    """Time since the request was sent at which the first worker was killed."""
    deltas: Sequence[RecordedDelta]

    @property
    def first_s(self) -> float:
        return self.deltas[0].at_s

    @property
    def lost_s(self) -> float:
        """Returns the time of the last token of the worker that was killed."""
        return max(delta.at_s for delta in self.deltas if delta.at_s <= self.killed_s)

    @property
    def continued_s(self) -> float:
        return min(delta.at_s for delta in self.deltas if delta.at_s > self.killed_s)

    @property
    def end_s(self) -> float:
        return self.deltas[-1].at_s

    @property
    def loop_s(self) -> float:
        return self.end_s * SLOWER + HOLD_S

    def share(self, at_s: float) -> str:
        """Returns a moment of the run as a percentage of the animation."""
        return f"{100 * at_s * SLOWER / self.loop_s:.2f}%"

    def lines(self, index: int) -> list["Line"]:
        """Returns the text of a choice, broken between words."""
        times = [delta.at_s for delta in self.deltas if delta.index == index for _ in delta.text]
        characters = "".join(delta.text for delta in self.deltas if delta.index == index)
        lines, start = [], 0
        while start < len(characters):
            end = len(characters)
            if end - start > LINE_LENGTH:
                end = characters.rindex(" ", start, start + LINE_LENGTH + 1)
            lines.append(Line(characters[start:end], times[start:end]))
            start = end + 1
        return lines


@dataclass(frozen=True)
class Line:
    text: str
    times: Sequence[float]
    """Time of each character."""

    @property
    def width(self) -> float:
        return len(self.text) * CHARACTER


def load() -> RecordedRun:
    record = json.loads(RECORD.read_text())
    return RecordedRun(**record | {"deltas": [RecordedDelta(**delta) for delta in record["deltas"]]})


def kill() -> str:
    run = load()
    rows = [row for index in range(run.n) for row in draw_row(run, index)]
    height = ROWS_TOP + run.n * ROW_PITCH + 92
    title = (
        f"Eight choices of one prompt stream side by side. After {run.killed_s:.2f} s their engine is killed. "
        f"{run.continued_s - run.lost_s:.2f} s later another engine continues all eight, and every text is the same as "
        "without the kill."
    )
    parts = [*header(run), *trunk(run), *rows, *timeline(run, ROWS_TOP + run.n * ROW_PITCH + 14)]
    return picture(WIDTH, height, title, parts, style=style(run))


def header(run: RecordedRun) -> list[str]:
    return [
        text(24, 38, "One prompt, eight choices, one killed engine", "bold", size=18),
        f'<g class="lost">{dot(522, 33, 6, "first")}{text(534, 38, run.first_worker)}</g>',
        f'<g class="dead">{text(605, 38, "killed", "alarm bold")}</g>',
        f'<g class="next">{dot(684, 33, 6, "second")}{text(696, 38, run.second_worker)}</g>',
        f'<g class="more">{text(768, 38, "continues", "second bold")}</g>',
    ]


def trunk(run: RecordedRun) -> list[str]:
    middle = ROWS_TOP + (run.n - 1) * ROW_PITCH / 2 + 8
    lines = wrap(run.prompt, PROMPT_LENGTH)
    top = middle - 17 * (len(lines) + 1) / 2
    return [
        box(24, top - 14, 152, 17 * len(lines) + 46),
        *(text(38, top + 9 + 17 * number, line, "bold", size=14) for number, line in enumerate(lines)),
        text(38, top + 12 + 17 * len(lines), "computed once", "soft", size=12),
    ]


def draw_row(run: RecordedRun, index: int) -> list[str]:
    top = ROWS_TOP + index * ROW_PITCH
    middle = ROWS_TOP + (run.n - 1) * ROW_PITCH / 2 + 8
    return [
        path(fork(176, middle, ROWS_X - 28, top + 8), "tail"),
        dot(ROWS_X - 18, top + 8, 10, "voice"),
        text(ROWS_X - 18, top + 12, str(index), "number bold", size=11, anchor="middle"),
        *(draw_line(run, line, index, number) for number, line in enumerate(run.lines(index))),
    ]


def draw_line(run: RecordedRun, line: Line, index: int, number: int) -> str:
    """Returns a line in the colours of the workers that generated its two parts, and the rectangle that covers it."""
    first = sum(at_s <= run.killed_s for at_s in line.times)
    spans = "".join(
        f'<tspan class="{kind}">{escape(words, quote=False)}</tspan>'
        for words, kind in ((line.text[:first], "first"), (line.text[first:], "second"))
        if words
    )
    x, y, width = ROWS_X, ROWS_TOP + index * ROW_PITCH + number * LINE_PITCH, f"{line.width:.1f}"
    return (
        f'<svg x="{x}" y="{y}" width="{width}" height="17">'
        f'<text class="mono" y="12.5" font-size="{FONT_SIZE}" textLength="{width}" lengthAdjust="spacingAndGlyphs" '
        f'xml:space="preserve">{spans}</text>'
        f'<rect class="page cover {name_of(index, number)}" width="{width}" height="17"/></svg>'
    )


def name_of(index: int, number: int) -> str:
    return f"c{index}{'abcd'[number]}"


def timeline(run: RecordedRun, y: float) -> list[str]:
    """Returns the times of the run on an axis, and a mark that moves along it."""
    width = WIDTH - 24 - ROWS_X

    def at(moment_s: float) -> float:
        return round(ROWS_X + width * moment_s / run.end_s, 1)

    def part(start_s: float, end_s: float, kind: str) -> str:
        return box(at(start_s), y, round(at(end_s) - at(start_s), 1), 8, kind, radius=2)

    def label(moment_s: float, words: str, kind: str, anchor: str = "middle") -> str:
        return text(at(moment_s), y + 27, words, kind, size=12, anchor=anchor)

    pause_s = run.continued_s - run.lost_s
    caption = (
        f"A recorded run of {run.model} on two CPU cores, played {SLOWER} times slower. "
        "The eight texts are those of the run without a kill."
    )
    return [
        part(0, run.first_s, "line"),
        part(run.first_s, run.lost_s, "first"),
        part(run.lost_s, run.continued_s, "alarm"),
        part(run.continued_s, run.end_s, "second"),
        text(ROWS_X - 12, y + 9, "time", "soft", size=12, anchor="end"),
        label(run.first_s, f"first tokens {run.first_s:.2f} s", "soft"),
        label((run.lost_s + run.continued_s) / 2, f"kill at {run.killed_s:.2f} s, pause {pause_s:.2f} s", "alarm bold"),
        label(run.end_s, f"end {run.end_s:.2f} s", "soft", "end"),
        f'<rect class="ink cursor" x="{ROWS_X}" y="{y - 4}" width="2" height="16"/>',
        text(24, y + 62, caption, "soft", size=12),
    ]


def style(run: RecordedRun) -> str:
    """Returns the rules of the animation. The rules without animation show the end."""
    names = [(name_of(index, number), line) for index in range(run.n) for number, line in enumerate(run.lines(index))]
    killed, continued, end = run.share(run.killed_s), run.share(run.continued_s), run.share(run.end_s)
    colours = f"0%{{KIND:var(--first)}}{killed}{{KIND:var(--other)}}{continued}{{KIND:var(--second)}}"
    rules = [
        ".cover{transform:translateX(1000px)}.dead{opacity:1}.lost{opacity:.35}",
        ".voice{fill:var(--second)}.tail{fill:none;stroke:var(--second);stroke-width:1.5}.number{fill:var(--page)}",
        f".cursor{{transform:translateX({WIDTH - 26 - ROWS_X}px)}}",
        f"@keyframes voice{{{colours.replace('KIND', 'fill')}}}",
        f"@keyframes tail{{{colours.replace('KIND', 'stroke')}}}",
        f"@keyframes lost{{0%{{opacity:1}}{killed}{{opacity:.35}}}}",
        f"@keyframes dead{{0%{{opacity:0}}{killed}{{opacity:1}}}}",
        f"@keyframes next{{0%{{opacity:.35}}{continued}{{opacity:1}}}}",
        f"@keyframes more{{0%{{opacity:0}}{continued}{{opacity:1}}}}",
        f"@keyframes cursor{{0%{{transform:translateX(0)}}{end}{{transform:translateX({WIDTH - 26 - ROWS_X}px)}}}}",
        *(f"@keyframes {name}{{{uncovering(run, line)}}}" for name, line in names),
    ]
    moving = [*("voice", "tail", "lost", "dead", "next", "more"), *(name for name, _ in names)]
    loop = f"{run.loop_s:.2f}s infinite"
    rules.append("@media (prefers-reduced-motion: no-preference){")
    rules += [f".{name}{{animation:{name} {loop} step-end}}" for name in moving]
    rules.append(f".cursor{{animation:cursor {loop} linear}}}}")
    return "".join(rules)


def uncovering(run: RecordedRun, line: Line) -> str:
    """Returns the keyframes that uncover a line, one for each moment at which characters arrive."""
    frames = ["0%{transform:translateX(0)}"]
    for moment_s in sorted(set(line.times)):
        shown = sum(at_s <= moment_s for at_s in line.times)
        frames.append(f"{run.share(moment_s)}{{transform:translateX({shown * CHARACTER:.1f}px)}}")
    return "".join(frames)
