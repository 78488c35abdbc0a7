"""Measures requests that share a prompt, or its beginning, and come apart.

    group       one request with n choices
    separate    the same n choices as n requests, sent at once
    few-shot    n different questions behind one long beginning, sent at once
    different   n prompts that share nothing, sent at once

Every prompt is new, so no cache has it; the questions of few-shot share a new beginning. With `--before URL` another
server, for instance of an older version, gets the same requests by turns with ours. Prints a table, and JSON on the
last line.

Floors (`--check` fails when one is missed): separate requests have 0.9 of the tokens per second of one group, and their
last first token within 1.2 times its time.

Run: python -m bench.shared [--ns 32] [--prompt-tokens 1340] [--question-tokens 40] [--repeats 3]
    [--cases separate,few-shot] [--before URL] [--check]
"""

import argparse
import asyncio
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import product

from rich.table import Table

from bench.fork import connected, server
from bench.load import Load, Setup, Timing, middle, options, progress
from bench.prompt import TEXT, FreshPrompts, seed_of_this_run
from bench.report import Bound, Floor, machine, table, tell

CASES = ("group", "separate", "few-shot", "different")

Case = Callable[[Load], Awaitable[Timing]]


@dataclass(frozen=True)
class Row:
    server: str
    case: str
    n: int
    timing: Timing
    share: float
    """Tokens per second over the whole time, as a share of those of one group with as many choices there."""

    def record(self) -> dict[str, object]:
        return {
            "server": self.server,
            "case": self.case,
            "n": self.n,
            "tokens_per_s": rate(self.timing),
            "last_first_s": self.timing.last_first_s,
            "share": self.share,
        }


def rate(timing: Timing) -> float:
    return timing.tokens / timing.total_s


def cases(fresh: FreshPrompts, n: int, *, prompt_tokens: int, question_tokens: int, seed: int) -> Mapping[str, Case]:
    """Returns the cases, each with prompts of its own."""
    beginning = fresh.next(prompt_tokens - question_tokens)
    questions = [[*beginning, *fresh.next(question_tokens)] for _ in range(n)]
    different = [fresh.next(prompt_tokens) for _ in range(n)]
    one, another = fresh.next(prompt_tokens), fresh.next(prompt_tokens)
    return {
        "group": lambda load: load.group(one, n, seed=seed),
        "separate": lambda load: load.separate(another, n, seed=seed),
        "few-shot": lambda load: load.groups(questions, 1, seed=seed),
        "different": lambda load: load.groups(different, 1, seed=seed),
    }


async def measure(urls: Mapping[str, str], setup: Setup, *, question_tokens: int, chosen: Sequence[str]) -> list[Row]:
    """Measures the chosen cases on every server by turns."""
    async with AsyncExitStack() as stack:
        loads = {
            name: Load(await stack.enter_async_context(connected(url)), setup.max_tokens, count_blocks=False)
            for name, url in urls.items()
        }
        text = await next(iter(loads.values())).tokens_of(TEXT)
        fresh = FreshPrompts(text, seed=seed_of_this_run())
        make = partial(cases, fresh, prompt_tokens=setup.prompt_tokens, question_tokens=question_tokens)
        rows: list[Row] = []
        for n in setup.ns:
            times: dict[tuple[str, str], list[Timing]] = {}
            for repeat in range(setup.repeats + 1):  # the first is the warm-up
                asked = make(n, seed=repeat)
                for case, (name, load) in product(chosen, loads.items()):
                    timing = await asked[case](load)
                    progress(f"{name}: {case}, n = {n}: {timing.total_s:.2f} s")
                    if repeat:
                        times.setdefault((name, case), []).append(timing)
            rows += rows_of(times, n)
    return rows


def rows_of(times: Mapping[tuple[str, str], list[Timing]], n: int) -> list[Row]:
    middles = {place: middle(timings) for place, timings in times.items()}
    return [
        Row(name, case, n, timing, rate(timing) / rate(middles[name, "group"]))
        for (name, case), timing in sorted(middles.items())
    ]


def table_of(rows: Sequence[Row]) -> Table:
    heads = [("server", ""), ("case", ""), ("n", ""), ("last first s", ".2f"), ("total s", ".2f"), ("tokens/s", ".0f")]
    heads += [("of a group's", ".2f")]
    cells = ((r.server, r.case, r.n, r.timing.last_first_s, r.timing.total_s, rate(r.timing), r.share) for r in rows)
    return table(heads, cells)


def floors(rows: Sequence[Row]) -> list[Floor]:
    ours = {(row.case, row.n): row for row in rows if row.server == "motet"}
    found = []
    for (case, n), row in ours.items():
        if case == "separate":
            group = ours["group", n].timing
            found.append(Floor(f"tokens/s, {n} requests to one group", row.share, 0.9, Bound.AT_LEAST))
            found.append(Floor(f"last first token, {n} requests", row.timing.last_first_s / group.last_first_s, 1.2))
    return found


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = options(__doc__, ns=(32,), prompt_tokens=1340, max_tokens=64, repeats=3)
    parser.add_argument("--question-tokens", type=int, default=40, help="tokens of a few-shot question")
    parser.add_argument("--cases", type=lambda text: ("group", *text.split(",")), default=CASES, help="beside group")
    parser.add_argument("--url", help="a running server, in place of one started here")
    parser.add_argument("--before", metavar="URL", help="another running server that gets the same requests")
    return parser.parse_args(argv)


def main(argv: Sequence[str]) -> int:
    arguments = parse(argv)
    about = machine()
    setup = Setup.of(arguments)
    with ExitStack() as stack:
        urls = {"motet": arguments.url or stack.enter_context(server(arguments.model)).url}
        if arguments.before:
            urls["before"] = arguments.before
        rows = asyncio.run(measure(urls, setup, question_tokens=arguments.question_tokens, chosen=arguments.cases))
    shown = f"prompt {setup.prompt_tokens} tokens, {setup.max_tokens} tokens a choice"
    record = {"prompt_tokens": setup.prompt_tokens, "max_tokens": setup.max_tokens, "rows": [r.record() for r in rows]}
    return tell(record, shown, table_of(rows), about=about, floors=floors(rows), check=arguments.check)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
