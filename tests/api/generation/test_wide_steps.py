"""Steps with many log-probabilities are written in parts, with turns of the event loop between them."""

from collections.abc import Sequence
from typing import Any

import pytest

from motet.api.generation import answer as answer_module
from motet.api.generation.answer_writer import FEED_LOGPROBS
from motet.api.generation.chunks import ChunkWriter
from motet.api.generation.collect import BodyWriter
from motet.policies.steering import GroupReport
from motet.text.choice import ChoiceEvent
from motet.text.text_group import GroupStep, split_step
from motet.types import PromptReport
from tests.api.http.test_answer_memory import with_logprobs
from tests.api.serving import PROMPT, Served, Serving, chunks, every_route, streamed_or_not

pytestmark = pytest.mark.anyio

N = 40
REPORT = GroupReport(id="g", n=5, started=5, finished=5, aborted=0, stopped_by=None)


def test_the_parts_of_a_step_have_its_events_in_order_and_the_rest_once() -> None:
    events = [ChoiceEvent(index, str(index), (index,)) for index in range(5)]
    step = GroupStep(events, PromptReport(3), 7, None, (5, 6), REPORT)
    parts = [*split_step(step, 2)]
    assert [[event.index for event in part.events] for part in parts] == [[0, 1], [2, 3], [4]]
    assert [part.prompt for part in parts] == [PromptReport(3), None, None]
    assert [(part.started, part.report) for part in parts] == [((), None), ((), None), ((5, 6), REPORT)]
    assert {part.group for part in parts} == {7}
    assert [*split_step(step, 5)] == [step]
    nothing = GroupStep((), PromptReport(3))
    assert [*split_step(nothing, 5)] == [nothing]


def choices_of(answer: Any, *, stream: bool) -> dict[int, list[object]]:
    """Returns the log-probabilities of each choice."""
    found: dict[int, list[object]] = {}
    for piece in chunks(answer) if stream else [answer.json()]:
        for choice in piece["choices"]:
            logprobs = choice["logprobs"] or {}
            found.setdefault(choice["index"], []).extend(logprobs.get("content") or logprobs.get("top_logprobs") or [])
    return found


@every_route
@streamed_or_not
async def test_parts_of_steps_make_the_answers_of_single_requests(
    serve: Serving, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool
) -> None:
    """The bug: 250 choices with 128 alternatives held the event loop for 85 ms in each step."""
    served = await serve()
    widths: list[int] = []
    for writer in (ChunkWriter, BodyWriter):
        feed = writer.feed

        def watched(self: Any, steps: Sequence[GroupStep], usage: Any, feed: Any = feed) -> bytes:
            listed = [len(one.top) for step in steps for event in step.events for one in event.logprobs or ()]
            widths.append(sum(listed))
            data: bytes = feed(self, steps, usage)
            return data

        monkeypatch.setattr(writer, "feed", watched)
    wide = await served.http.post(path, json=with_logprobs(path, n=N, num_top=20, stream=stream, max_tokens=4))
    assert 0 < max(widths) <= FEED_LOGPROBS < N * 20
    together = choices_of(wide, stream=stream)
    assert [*together] == [*range(N)]
    single = await served.http.post(path, json=with_logprobs(path, n=1, num_top=20, max_tokens=4))
    assert together[0] == choices_of(single, stream=False)[0]
    assert {len(entries) for entries in together.values()} == {4}


async def test_the_log_probabilities_of_a_repeated_prompt_are_written_in_a_thread(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    works: list[object] = []

    async def in_thread(work: Any, *, client: str) -> object:
        works.append(work)
        return work()

    monkeypatch.setattr(answer_module, "in_thread", in_thread)
    fields = {"echo": True, "logprobs": 1, "max_tokens": 2}
    first = chunks(await served.complete(PROMPT, stream=True, **fields))[0]["choices"][0]["logprobs"]
    assert len(works) == 1
    whole = (await served.complete(PROMPT, **fields)).json()["choices"][0]["logprobs"]
    assert first == {name: values[: len(PROMPT)] for name, values in whole.items()}
