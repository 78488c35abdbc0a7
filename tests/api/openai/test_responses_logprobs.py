"""A message has the log-probabilities of its own tokens, however steps are bundled."""

from collections.abc import Sequence
from itertools import cycle, islice
from typing import Any

import msgspec
import pytest

from motet.api.generation import json_pieces
from motet.api.openai.response_output import PartLogprobs
from motet.api.openai.response_writers import ResponseEvents
from motet.text.choice import ChoiceEvent
from motet.types import TokenLogprob, Usage
from tests.api.responding import final, plain, post, streamed, unstreamed
from tests.api.serving import Serving, hello
from tests.error_response import assert_error

TOKENS = [
    *("<think>", "It", "\n", "</think>", "\n\n", "It", " is", "<", "b"),
    *("<call>", '{"a":', "1}", "</call>", "\n", "al", "l"),
]
"""Texts of the tokens, by their ids."""

PARTS: list[tuple[str, list[int]]] = [("It", [1]), ("It is", [5, 6]), ("<b", [7, 8]), ("al", [14]), ("l", [15])]
"""The parts that a parser makes of these tokens, without the call. The last two texts also occur in the tags."""


def event(first: int, texts: Sequence[str]) -> ChoiceEvent:
    """Returns an event of one step, with tokens from `first` on."""
    offsets = [len("".join(TOKENS[: first + i])) for i in range(len(texts))]
    logprobs = tuple(TokenLogprob(first + i, -0.5, 1) for i in range(len(texts)))
    return ChoiceEvent(0, "".join(texts), tuple(range(len(texts))), logprobs=logprobs, offsets=tuple(offsets))


def taken(logprobs: PartLogprobs, part: str) -> list[int]:
    return [token.token_id for token in logprobs.take(part)]


def take_all(size: int) -> list[tuple[str, list[int]]]:
    """Feeds steps of `size` tokens, and takes each part after its last token."""
    logprobs, found = PartLogprobs(), list[tuple[str, list[int]]]()
    for first in range(0, len(TOKENS), size):
        logprobs.feed(event(first, TOKENS[first : first + size]))
        while len(found) < len(PARTS) and PARTS[len(found)][1][-1] < first + size:
            part = PARTS[len(found)][0]
            found.append((part, taken(logprobs, part)))
    return found


@pytest.mark.parametrize("size", [1, 2, 7])  # with these sizes no step has the end of the call and text after it
def test_a_part_takes_its_own_tokens_and_no_part_takes_the_tokens_of_tags(size: int) -> None:
    assert take_all(size) == PARTS


def test_a_token_that_ends_in_a_part_belongs_to_it() -> None:
    logprobs = PartLogprobs()
    texts = [">Hel", "lo<"]
    tokens = tuple(TokenLogprob(i, -0.5, 1) for i in range(2))
    logprobs.feed(ChoiceEvent(0, "".join(texts), (0, 1), logprobs=tokens, offsets=(0, 4)))
    assert taken(logprobs, "Hello") == [0, 1]
    assert taken(logprobs, "<") == []  # the text before already has its token


def test_text_that_was_shown_before_is_no_part_of_a_later_step() -> None:
    logprobs = PartLogprobs()
    logprobs.feed(event(0, TOKENS[:9]))
    logprobs.feed(event(9, TOKENS[9:]))
    assert taken(logprobs, "is") == []
    assert taken(logprobs, "\nal") == [13, 14]


LISTED: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 5}


@pytest.mark.slow
@pytest.mark.anyio
async def test_log_probabilities_at_the_end_of_a_response_are_sent_in_pieces(
    serve: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug: the last events repeat the log-probabilities of all tokens four times, and were encoded at once."""
    served = await serve(lambda request, start: [*islice(cycle(hello(request, start)[:-1]), 50), 0])
    whole = plain(unstreamed(await post(served, **LISTED)))
    monkeypatch.setattr(json_pieces, "PIECE_BYTES", 5000)
    monkeypatch.setattr(json_pieces, "CHUNK_BYTES", 1000)
    sizes: list[int] = []
    close = ResponseEvents.close

    def watched(self: ResponseEvents, usage: Usage) -> list[bytes]:
        pieces = [*close(self, usage)]
        sizes.extend(map(len, pieces))
        return pieces

    monkeypatch.setattr(ResponseEvents, "close", watched)
    events = streamed(await post(served, stream=True, **LISTED))
    assert plain(final(events)) == whole
    assert sum(sizes) > 4 * 50 * 6 * 30
    assert max(sizes) < 8000
    (message,) = final(events).output
    for event in events:
        if event.type == "response.output_text.done":
            assert len(event.logprobs) == 50
    assert len(msgspec.json.encode(message.model_dump())) > 50 * 6 * 30


@pytest.mark.anyio
async def test_the_memory_of_a_response_is_limited_also_if_it_is_streamed(serve: Serving) -> None:
    served = await serve(max_open_answer_bytes=2000)
    assert_error(await post(served, **LISTED), status=400, code="answer_too_large")
    assert unstreamed(await post(served)).status == "completed"
    answer = await post(served, stream=True, **LISTED)
    assert b"answer_too_large" in answer.content and b"response.failed" in answer.content
