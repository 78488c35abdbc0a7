"""Makes choices, and feeds deltas to them as an engine does."""

from collections.abc import Sequence
from typing import Any

import pytest

from motet.ids import RequestId
from motet.text.choice import ChoiceEvent, ChoiceStream, TextRules
from motet.text.stop_strings import StopStrings
from motet.text.text_group import GroupStep, TextGroup
from motet.text.tokenizer import Tokenizer
from motet.types import (
    ChoiceDelta,
    ChoiceStart,
    Finish,
    FinishReason,
    GenerateRequest,
    SamplingParams,
    TokenLogprob,
    choice_starts,
)
from tests.tiny_tokenizer import FIRST_BYTE_ID

INDEX = 2
LENGTH, STOP = Finish(FinishReason.LENGTH), Finish(FinishReason.STOP)


def stopping(*strings: str, **rules: Any) -> TextRules:
    """Returns rules with stop strings, if there are any."""
    return TextRules(stops=StopStrings(strings) if strings else None, **rules)


def stream(
    tokenizer: Tokenizer,
    rules: TextRules | None = None,
    output: tuple[int, ...] = (),
    *,
    prompt: tuple[int, ...] = (),
) -> ChoiceStream:
    rules = rules or TextRules()
    start = ChoiceStart(INDEX, 7, output)
    return ChoiceStream(start, prompt, tokenizer=tokenizer, rules=rules)


def request(n: int = 3, name: str = "r") -> GenerateRequest:
    starts, sampling = choice_starts(n, 1), SamplingParams(max_tokens=200)
    return GenerateRequest(request_id=RequestId(name), prompt=(5, 6, 7), choices=starts, sampling=sampling)


def ids_of(text: str) -> tuple[int, ...]:
    """Returns one token for each byte, without merges."""
    return tuple(FIRST_BYTE_ID + byte for byte in text.encode())


def logprob(token_id: int) -> TokenLogprob:
    return TokenLogprob(token_id, -token_id / 100, 1)


def fed(choice: ChoiceStream, pieces: Sequence[tuple[int, ...]], finish: Finish | None = LENGTH) -> list[ChoiceEvent]:
    """Returns the events for tokens that arrive in these pieces. The last piece has `finish`."""
    shown = []
    for number, ids in enumerate(pieces, 1):
        end = finish if number == len(pieces) else None
        shown.append(choice.feed(ChoiceDelta(INDEX, ids, tuple(map(logprob, ids)), end)))
    return [event for event in shown if event is not None]


def events(
    choice: ChoiceStream, ids: Sequence[int], finish: Finish | None = LENGTH, *, size: int = 1
) -> list[ChoiceEvent]:
    """Returns the events for tokens that arrive `size` at a time."""
    return fed(choice, [tuple(ids[start : start + size]) for start in range(0, len(ids), size)], finish)


def text_of(shown: Sequence[ChoiceEvent]) -> str:
    return "".join(event.text for event in shown)


class Enough(Exception):
    """Raised to stop reading."""


async def first_of(group: TextGroup) -> list[GroupStep]:
    """Returns the next steps. The group can be read again."""
    steps: list[GroupStep] = []

    def take(read: Sequence[GroupStep]) -> None:
        steps.extend(read)
        raise Enough

    with pytest.raises(Enough):
        await group.run(take)
    return steps
