"""Requests to a gateway, and a check of its answers: each choice is sent once, ends once, and is counted correctly."""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from tests.fault.answers import Answer, Body, complete_answer
from tests.hosts.servers import Streaming
from tests.patience import PATIENCE_S


def check(answer: Answer, *, n: int, tokens: int) -> None:
    """Checks that the answer has n choices, and that each has this number of tokens."""
    assert list(answer.choices) == list(range(n))
    assert [choice.finish_reason for choice in answer.choices.values()] == ["length"] * n
    assert answer.usage is not None and answer.usage.completion_tokens == n * tokens


def request(url: str, route: str, body: Body) -> Answer:
    """Requests an answer, streamed if the body says so, and returns it when it is complete."""
    if body.get("stream"):
        with streaming(url, route, body) as stream:
            return stream.read_all()
    return complete_answer(httpx.post(f"{url}{route}", json=body, timeout=PATIENCE_S))


@contextmanager
def streaming(url: str, route: str, body: Body) -> Iterator[Streaming]:
    with httpx.stream("POST", f"{url}{route}", json=body, timeout=PATIENCE_S) as response:
        assert response.status_code == httpx.codes.OK, response.read()
        yield Streaming(response)
