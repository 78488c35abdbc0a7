"""Streams eight choices of one prompt with the official client, and shows them side by side.

Needs `pip install openai` and a running server (make serve).
Usage: python examples/side_by_side.py "A name for a boat?"
"""

import argparse

from openai import OpenAI

CLEAR, TOP = "\x1b[2J", "\x1b[H"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", help="the prompt of all choices")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="base URL of the API")
    parser.add_argument("--n", type=int, default=8, help="number of choices")
    parser.add_argument("--live", action="store_true", help="redraw the screen at every token")
    arguments = parser.parse_args()

    client = OpenAI(base_url=arguments.url, api_key="none")
    model = client.models.list().data[0].id
    texts = [""] * arguments.n

    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": arguments.question}],
        n=arguments.n,
        max_tokens=60,
        temperature=0.6,
        seed=1,  # choice i is the n=1 request with seed 1 + i
        stream=True,
        stream_options={"include_usage": True},
    )
    for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
        if arguments.live:
            print(CLEAR + TOP + rows(texts), flush=True)
        if chunk.usage:
            print(rows(texts))
            print(f"prompt {chunk.usage.prompt_tokens} tokens, counted once; answers {chunk.usage.completion_tokens}")


def rows(texts: list[str]) -> str:
    return "\n".join(f"{index}: {' '.join(text.split())}" for index, text in enumerate(texts))


if __name__ == "__main__":
    main()
