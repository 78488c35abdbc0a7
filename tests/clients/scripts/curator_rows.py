"""Curator: an answer for each row, through its LiteLLM backend. It reads one choice of each request."""

import os
from typing import Any

from bespokelabs import curator
from scene import KEY, MODEL, SEED, URL


class Boats(curator.LLM):
    def prompt(self, row: dict[str, Any]) -> str:
        return str(row["question"])

    def parse(self, row: dict[str, Any], response: str) -> list[dict[str, Any]]:
        return [{"question": row["question"], "answer": response}]


def main() -> None:
    os.environ["HOSTED_VLLM_API_KEY"] = KEY  # noqa: TID251  this program has no settings of ours
    boats = Boats(
        model_name=f"hosted_vllm/{MODEL}",
        backend="litellm",
        backend_params={
            "base_url": URL,
            "max_retries": 1,
            "require_all_responses": True,
            "invalid_finish_reasons": ["content_filter"],
        },
        generation_params={"max_tokens": 8, "seed": SEED},
    )
    made = boats([{"question": f"Name boat {number}."} for number in range(3)])
    assert len([row["answer"] for row in made.dataset if row["answer"]]) == 3


if __name__ == "__main__":
    main()
