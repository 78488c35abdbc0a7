"""However a text upstream behaves, and wherever its bytes are cut, each choice reads as if from a correct server."""

import itertools
from dataclasses import replace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from motet.engines.openai import DONE, EventSplitter
from motet.engines.upstream.bodies import PieceReader
from motet.engines.upstream.text_source import TextRoute
from tests.engines.upstream.fake_upstream import GroupAnswer
from tests.peers.openai_script import CHAT, Behaviour, OpenAIRequest, Script, UsagePlace

behaviour = st.builds(
    Behaviour,
    finishes_at_end=st.booleans(),
    finish_twice=st.booleans(),
    usage=st.sampled_from(UsagePlace),
    no_done=st.booleans(),
    line_end=st.sampled_from([b"\n", b"\r\n", b"\r"]),
    comments=st.booleans(),
    role_everywhere=st.booleans(),
    no_role=st.booleans(),
)


def requested(route: TextRoute, n: int, seed: int) -> OpenAIRequest:
    prompt: dict[str, Any] = {"messages": [{"content": "hi"}]} if route == CHAT else {"prompt": "hi"}
    return OpenAIRequest(route, {}, {**prompt, "n": n, "seed": seed, "stream_options": {"include_usage": True}})


def read(data: bytes, cuts: list[int], pieces: PieceReader) -> GroupAnswer:
    """Returns the answer that a client gets from a stream that arrives in pieces, cut at `cuts`."""
    reader, answer = EventSplitter(), GroupAnswer()
    bounds = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    for begin, end in itertools.pairwise(bounds):
        for event in reader.feed(data[begin:end]):
            if event != DONE and (step := pieces.chunk(event)) is not None:
                answer.take(step)
    pieces.close()
    return answer


def stream_of(script: Script) -> bytes:
    return b"".join(event for event in script.events() if event is not None)


@given(
    how=behaviour,
    route=st.sampled_from(TextRoute),
    n=st.integers(1, 4),
    seed=st.integers(-5, 5),
    cuts=st.lists(st.integers(0, 10_000), max_size=20),
)
def test_a_stream_of_n_choices_equals_n_streams_of_one(
    how: Behaviour, route: TextRoute, n: int, seed: int, cuts: list[int]
) -> None:
    chat = route is TextRoute.CHAT
    together = read(stream_of(Script(requested(route, n, seed), how)), cuts, PieceReader(0, n, chat=chat))
    alone = GroupAnswer()
    for number in range(n):
        ignoring = replace(how, ignores_n=True)
        single = read(
            stream_of(Script(requested(route, 1, seed + number), ignoring)), cuts, PieceReader(number, 1, chat=chat)
        )
        alone.choices |= single.choices
    correct = Script(requested(route, n, seed), Behaviour()).complete()
    assert together.choices == alone.choices
    texts = [(choice.get("message") or {"content": choice.get("text")})["content"] for choice in correct["choices"]]
    assert together.texts == texts
    assert [together.choices[number].finish for number in range(n)] == [c["finish_reason"] for c in correct["choices"]]
