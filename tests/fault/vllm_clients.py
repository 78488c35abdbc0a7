"""Clients of fake vLLM servers and of a text upstream: their requests, and the checks of their answers."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import httpx

from motet.engines.vllm.requests import resumed_seed, signed_seed
from tests.fault.answers import Answer, Body, Choice, Reader, complete_answer, lines_of, read
from tests.fault.fault_requests import CHAT, COMPLETIONS, STREAMED
from tests.fault.vllm_fleet import TEXTS
from tests.peers.fake_vllm import MODEL
from tests.peers.vllm_tokens import EOS, Kind, expected_tokens, is_continuation, state_of
from tests.tiny_tokenizer import FIRST_BYTE_ID

STOPS = ("e", "a", "7")
STOP_IDS = {FIRST_BYTE_ID + ord(stop) for stop in STOPS}
REFUSED = {"no_worker", "overloaded"}
"""Error codes that clients can get before the first byte, while no worker can answer."""


@dataclass
class Clients:
    """The clients of one run."""

    http: httpx.AsyncClient
    ends: Counter[str] = field(default_factory=Counter)
    """Number of requests by how they ended."""
    _number: int = 0

    async def send_request(self, random: Random) -> None:
        """Sends one request, reads the answer, and raises if it is wrong."""
        self._number += 1
        if random.random() < 0.2:
            route, body = CHAT, text_request(self._number, random)
        else:
            route, body = COMPLETIONS, token_request(self._number, random)
        leaves_s = random.uniform(0.0, 0.4) if random.random() < 0.25 else None
        try:
            async with asyncio.timeout(leaves_s):
                answer = await self._answer(route, body)
        except TimeoutError:
            self.ends["left"] += 1
            return
        if answer is not None:
            self.ends["answered"] += 1
            check(body, answer)

    async def _answer(self, route: str, body: Body) -> Answer | None:
        """Returns the answer, or None if the request was refused with an expected error."""
        if not body.get("stream"):
            response = await self.http.post(route, json=body)
            return complete_answer(response) if response.status_code == 200 else self._refused(response)
        async with self.http.stream("POST", route, json=body) as response:
            if response.status_code != 200:
                await response.aread()
                return self._refused(response)
            return (await read(lines_of(response), Reader())).complete()

    def _refused(self, response: httpx.Response) -> Answer | None:
        code = response.json()["error"]["code"]
        assert response.status_code == 503 and code in REFUSED, response.text
        self.ends[code] += 1
        return None


def token_request(number: int, random: Random) -> Body:
    """Returns a request. All prompts start with the same tokens, and end differently."""
    num_prompts = random.choice((1, 1, 1, 3))
    tails = [random.choices(range(3, 259), k=random.randint(1, 40)) for _ in range(num_prompts)]
    body: Body = {
        "model": MODEL,
        "prompt": [
            [*range(10, 50), 3 + number // 256, 3 + number % 256, 3 + at, *tail] for at, tail in enumerate(tails)
        ],
        "n": random.choice((1, 3, 8)),
        "max_tokens": random.randint(1, 60),
        "ignore_eos": random.random() < 0.5,
        "return_token_ids": True,
    }
    body |= random.choice(({"temperature": 0}, {}, {"seed": random.randrange(1000)}))
    return body | random.choice((STREAMED, {})) | random.choice(({"stop": list(STOPS)}, {}, {}))


def text_request(number: int, random: Random) -> Body:
    message = {"role": "user", "content": f"prompt {number}"}
    body: Body = {"model": TEXTS, "messages": [message], "n": random.choice((1, 3)), "seed": random.randrange(9)}
    return body | random.choice((STREAMED, {}))


def check(body: Body, answer: Answer) -> None:
    """Raises if this cannot be the answer to the request."""
    if body["model"] == TEXTS:
        _check_texts(body, answer)
        return
    prompts, n = body["prompt"], body["n"]
    assert isinstance(prompts, list) and isinstance(n, int)
    assert sorted(answer.choices) == list(range(len(prompts) * n)), "choices are missing"
    for index, choice in answer.choices.items():
        _check_choice(body, prompts[index // n], index % n, choice)
    usage = answer.usage
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (sum(map(len, prompts)), sum(answer.lengths)), usage


def _check_choice(body: Body, prompt: list[int], index: int, choice: Choice) -> None:
    tokens, seed, max_tokens = choice.token_ids, body.get("seed"), body["max_tokens"]
    assert isinstance(max_tokens, int) and 0 < len(tokens) <= max_tokens
    if "temperature" in body:
        assert tokens == expected_tokens(prompt, len(tokens)), (tokens, expected_tokens(prompt, len(tokens)))
    elif isinstance(seed, int):
        assert continues_seeded(prompt, tokens, seed + index), (prompt, tokens, seed + index)
    else:
        assert is_continuation(prompt, tokens), (prompt, tokens)
    ends = STOP_IDS if "stop" in body else set()
    ends = ends if body["ignore_eos"] else ends | {EOS}
    assert not ends.intersection(tokens[:-1]), "it continued after its end"
    assert choice.finish_reason == ("stop" if tokens[-1] in ends else "length")
    assert tokens[-1] in ends or len(tokens) == max_tokens


def continues_seeded(prompt: list[int], tokens: list[int], seed: int) -> bool:
    """Returns True if these can be the tokens of a seeded choice: it uses its seed, and another seed after each
    move."""
    state = state_of(prompt)
    started = {0: Kind(seed=signed_seed(seed))}
    for position, token in enumerate(tokens):
        if position:
            started[position] = Kind(seed=signed_seed(resumed_seed(seed, position)))
        started = {start: kind for start, kind in started.items() if kind.token(state, position - start) == token}
        if not started:
            return False
        state = state_of([token], state)
    return True


def _check_texts(body: Body, answer: Answer) -> None:
    n, seed, number = body["n"], body["seed"], answer.choices[0].text.split()[1]
    assert isinstance(n, int) and isinstance(seed, int)
    words = [f"prompt {number} {seed + i}" + "".join(f" w{k}" for k in range((seed + i) % 4)) for i in range(n)]
    assert answer.texts == words
