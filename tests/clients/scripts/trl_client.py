"""TRL's VLLMClient as it is: texts and ids with n, log-probabilities, chats with tools, scores of given sequences.

TRL asks whether vLLM is installed before it makes a client. That one check is answered with yes here.
"""

import math

from scene import URL, WEATHER
from trl.generation import vllm_client
from trl.generation.vllm_client import VLLMClient

N, MAX_TOKENS = 3, 6
TOP = 100
PROMPTS = ["A boat is", "The sea"]
CHATS = [[{"role": "user", "content": "Name a boat."}], [{"role": "user", "content": "Name a sea."}]]


def main() -> None:
    vllm_client.is_vllm_available = lambda min_version=None: True
    client = VLLMClient(base_url=URL.removesuffix("/v1"), connection_timeout=60)
    generate(client)
    chat(client)
    score(client)


def generate(client: VLLMClient) -> None:
    ids = client.generate(PROMPTS, max_tokens=1)["prompt_ids"]
    for prompts in (PROMPTS, ids):
        for logprobs, width in ((0, 1), (5, 5), (None, None)):
            got = client.generate(prompts, n=N, max_tokens=MAX_TOKENS, logprobs=logprobs)
            assert got["prompt_ids"] == ids
            check(got, width)
    same = {"n": N, "max_tokens": MAX_TOKENS, "generation_kwargs": {"seed": 7}}
    assert client.generate(ids, **same) == client.generate(PROMPTS, **same)
    sure = client.generate(ids, max_tokens=MAX_TOKENS, temperature=0.0, top_k=5, top_p=0.9, min_p=0.01)
    assert len(sure["completion_ids"]) == len(PROMPTS)
    client.generate(PROMPTS, max_tokens=MAX_TOKENS, structured_outputs_regex="[a-z]+ [a-z]+")


def chat(client: VLLMClient) -> None:
    for logprobs, width in ((0, 1), (5, 5), (None, None)):
        check(client.chat(CHATS, n=N, max_tokens=MAX_TOKENS, logprobs=logprobs), width)
    plain, told = (client.chat(CHATS, max_tokens=1, tools=tools)["prompt_ids"][0] for tools in (None, [WEATHER]))
    assert len(told) >= len(plain)
    client.chat(CHATS, max_tokens=1, chat_template_kwargs={"enable_thinking": False})


def score(client: VLLMClient) -> None:
    """The server's word about a sequence that it has written is what it said as it wrote it."""
    got = client.generate(PROMPTS, max_tokens=MAX_TOKENS, generation_kwargs={"ignore_eos": True})
    sequences = [[*prompt, *answer] for prompt, answer in zip(got["prompt_ids"], got["completion_ids"], strict=True)]
    lengths = [len(prompt) for prompt in got["prompt_ids"]]
    for chunk_size in (0, 1):
        scores = client.get_sequence_logprobs(sequences, lengths, top_logprobs=TOP, chunk_size=chunk_size)
        for i, drawn in enumerate(got["logprobs"]):
            assert [len(row) for row in scores["logprobs"][i]] == [TOP] * MAX_TOKENS
            assert scores["actual_token_ids"][i] == [[token] for token in got["completion_ids"][i]]
            for (told,), (again,) in zip(drawn, scores["actual_logprobs"][i], strict=True):
                assert math.isclose(told, again, abs_tol=0.05)


def check(got: dict[str, list], width: int | None) -> None:
    """Checks that there are n answers to each prompt, and the number of log-probabilities of each token."""
    assert len(got["completion_ids"]) == len(PROMPTS) * N
    if width is None:
        assert got["logprobs"] is None
        return
    for tokens, rows, ids in zip(got["completion_ids"], got["logprobs"], got["logprob_token_ids"], strict=True):
        assert 0 < len(tokens) == len(rows) == len(ids)
        assert all(token in row and len(row) in (width, width + 1) for token, row in zip(tokens, ids, strict=True))
        assert all(row == sorted(row, reverse=True) and row[-1] <= 0 for row in rows)


main()
