"""Mixed requests for runs with faults. Their answers (`bench.chaos.received_answers`) are compared with answers without
faults."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SUBJECTS = ("the sea", "a clock", "two brothers", "the last train", "bread", "a map of the city", "winter", "a choir")
SIZES = (1, 1, 2, 4, 8, 8, 16, 32)
LENGTHS = (24, 48, 96, 160)


@dataclass(frozen=True)
class RepeatedRequest:
    """One kind of request. It is sent many times, and its answer must always be the same."""

    name: str
    path: str
    body: dict[str, object]

    @property
    def n(self) -> int:
        """The number of choices of its answer: prompts x n."""
        prompts, sampling = self.body.get("prompt"), self.body.get("sampling_params", self.body)
        number = len(prompts) if isinstance(prompts, list) else 1
        assert isinstance(sampling, dict)
        n = sampling.get("n", 1)
        assert isinstance(n, int)
        return n * number

    @property
    def stream(self) -> bool:
        return bool(self.body.get("stream"))


def mixed_requests(
    number: int, *, seed: int, sizes: Sequence[int] = SIZES, lengths: Sequence[int] = LENGTHS
) -> list[RepeatedRequest]:
    """Returns chats and completions, streamed and not streamed, some with penalties, log-probabilities or stop strings.
    Each has one of the `sizes` as n, and one of the `lengths` as number of tokens."""
    dice = random.Random(seed)
    return [_request(place, dice, sizes=sizes, lengths=lengths) for place in range(number)]


def _request(place: int, dice: random.Random, *, sizes: Sequence[int], lengths: Sequence[int]) -> RepeatedRequest:
    subject = dice.choice(SUBJECTS)
    text = f"Tell me about {subject}. " * dice.choice((1, 8, 40))
    body: dict[str, object] = {
        "n": dice.choice(sizes),
        "seed": dice.randrange(2**31),
        "max_tokens": dice.choice(lengths),
        "temperature": dice.choice((0.0, 0.7, 1.0, 1.0)),
        "stream": dice.random() < 0.75,
    }
    if body["stream"]:
        body["stream_options"] = {"include_usage": True}
    if dice.random() < 0.3:
        body |= {"frequency_penalty": 0.4, "presence_penalty": 0.2, "repetition_penalty": 1.1}
    if dice.random() < 0.3:
        body["stop"] = [dice.choice((" and", ".\n", " the "))]
    if dice.random() < 0.3:
        body["top_p"] = 0.9
    chat = dice.random() < 0.6
    if chat:
        if dice.random() < 0.3:
            body |= {"logprobs": True, "top_logprobs": 2}
        body["messages"] = [{"role": "user", "content": text}]
    else:
        body["prompt"] = [text, f"{subject} is"] if dice.random() < 0.3 else text
    route = "chat" if chat else "completions"
    return RepeatedRequest(f"{place}: {route} n={body['n']}", CHAT if chat else COMPLETIONS, body)
