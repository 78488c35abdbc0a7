"""Reads answers of a gateway and checks them: each choice is sent once, ends once, and is counted correctly."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import httpx

TIMEOUT_S = 90.0
Body = dict[str, object]


@dataclass
class Choice:
    """One choice of an answer."""

    text: str = ""
    finish_reasons: list[str] = field(default_factory=list)


@dataclass
class Answer:
    """The part of an answer that has arrived."""

    n: int
    choices: dict[int, Choice] = field(default_factory=dict)
    usage: dict[str, int] | None = None
    error: dict[str, object] | None = None

    @property
    def texts(self) -> list[str]:
        return [self.choices[index].text for index in sorted(self.choices)]

    def take(self, event: Body) -> None:
        """Adds a complete answer, or one chunk."""
        if "error" in event:
            assert isinstance(event["error"], dict)
            self.error = event["error"]
            return
        assert isinstance(event["choices"], list)
        for found in event["choices"]:
            choice = self.choices.setdefault(found["index"], Choice())
            choice.text += text_of(found)
            if found["finish_reason"] is not None:
                choice.finish_reasons.append(found["finish_reason"])
        usage = event.get("usage")
        if isinstance(usage, dict):
            self.usage = usage

    def check(self, num_tokens: int) -> None:
        """Checks that the answer has all n choices, and that each has this number of tokens."""
        assert self.error is None, self.error
        assert sorted(self.choices) == list(range(self.n))
        assert [choice.finish_reasons for choice in self.choices.values()] == [["length"]] * self.n
        assert self.usage is not None and self.usage["completion_tokens"] == self.n * num_tokens


def text_of(choice: dict[str, dict[str, str]]) -> str:
    if "text" in choice:
        return str(choice["text"])
    return choice.get("message", choice.get("delta", {})).get("content") or ""


def request(url: str, route: str, body: Body) -> Answer:
    """Requests an answer, streamed if the body says so, and returns it when it is complete."""
    n = body.get("n", 1)
    assert isinstance(n, int)
    answer = Answer(n)
    if body.get("stream"):
        with streaming(url, route, body) as events:
            for event in events:
                answer.take(event)
        return answer
    response = httpx.post(f"{url}{route}", json=body, timeout=TIMEOUT_S)
    answer.take(response.json())
    return answer


@contextmanager
def streaming(url: str, route: str, body: Body) -> Iterator[Iterator[Body]]:
    with httpx.stream("POST", f"{url}{route}", json=body, timeout=TIMEOUT_S) as response:
        assert response.status_code == httpx.codes.OK, response.read()
        yield (json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: {"))
