"""An answer that is long enough for a fault in its middle, as a client reads it."""

import json
import os
import signal
from collections.abc import Callable

import httpx

from motet.deploy.child import ChildServer
from tests.patience import PATIENCE_S

ENDLESS = 10_000
"""Number of tokens of an answer, with the model of `long_folder`, that does not end before the signals arrive."""


def events_of_long_answer(
    server: ChildServer,
    *then_signal: tuple[int, signal.Signals],
    max_tokens: int = 400,
    after_first: Callable[[], object] = lambda: None,
) -> list[str]:
    """Returns the events of an answer that ends only at its maximum length. After the first event `after_first` is
    called, and the processes get their signals."""
    body = {"prompt": "the hand", "n": 3, "seed": 1, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE_S) as response:
        lines = response.iter_lines()
        events = [next(lines)]
        after_first()
        for pid, number in then_signal:
            os.kill(pid, number)
        events.extend(lines)
    return [event for event in events if event]


def texts_of(events: list[str]) -> list[str]:
    """Returns the texts of the three choices."""
    texts = [""] * 3
    for event in events[:-1]:
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            texts[choice["index"]] += choice["text"]
    return texts
