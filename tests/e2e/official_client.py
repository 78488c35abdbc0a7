"""Requests to a server with the official client. Each returns the texts of the choices in order of their index."""

from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "hello there, and then?"}]
TOKENS = 40
ALL_TOKENS = {"ignore_eos": True}


def chat(client: OpenAI, *, n: int, seed: int, tokens: int = TOKENS, **more: object) -> list[str]:
    """`more` are further fields of the body, as in `streamed_chat`."""
    answer = client.chat.completions.create(
        model="tiny", messages=MESSAGES, n=n, seed=seed, max_tokens=tokens, extra_body=ALL_TOKENS | more
    )
    return [choice.message.content or "" for choice in sorted(answer.choices, key=lambda choice: choice.index)]


def streamed_chat(client: OpenAI, *, n: int, seed: int, tokens: int = TOKENS, **more: object) -> list[str]:
    texts = [""] * n
    stream = client.chat.completions.create(
        model="tiny", messages=MESSAGES, n=n, seed=seed, max_tokens=tokens, stream=True, extra_body=ALL_TOKENS | more
    )
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    return texts


def completions(client: OpenAI, prompts: list[str], *, n: int, seed: int) -> list[str]:
    answer = client.completions.create(
        model="tiny", prompt=prompts, n=n, seed=seed, max_tokens=TOKENS, top_p=0.9, extra_body=ALL_TOKENS
    )
    assert answer.usage is not None and answer.usage.completion_tokens == len(prompts) * n * TOKENS
    assert [choice.index for choice in answer.choices] == list(range(len(prompts) * n))
    return [choice.text for choice in answer.choices]


def streamed_completions(client: OpenAI, prompts: list[str], *, n: int, seed: int) -> list[str]:
    texts = [""] * (len(prompts) * n)
    stream = client.completions.create(
        model="tiny", prompt=prompts, n=n, seed=seed, max_tokens=TOKENS, top_p=0.9, stream=True, extra_body=ALL_TOKENS
    )
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    return texts
