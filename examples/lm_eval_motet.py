"""lm-evaluation-harness with /v1/score: one request for all options of a question, instead of a prompt for each.

The command line is lm-eval's, with the additional model `motet`. Texts are generated as with `local-completions`, and
`num_concurrent` is the number of concurrent requests:

    pip install 'lm-eval[api]==0.4.13'
    python examples/lm_eval_motet.py run --model motet --tasks arc_easy \\
        --model_args model=smollm2,base_url=http://127.0.0.1:8000/v1/completions,num_concurrent=8,max_length=8192
"""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from aiohttp import ClientSession, ClientTimeout
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.openai_completions import LocalCompletionsAPI
from tenacity import retry, stop_after_attempt, wait_exponential

MAX_CONTINUATIONS = 128
"""Maximum number of continuations in a request. By default, a server accepts 256 (`--max-waiting-groups`)."""

TokenRequest = tuple[tuple[str, str] | None, list[int], list[int]]
"""lm-eval's request: the key for its cache, the tokens of the context, and the tokens of the continuation."""
Score = tuple[float, bool]
"""Log-probability of a continuation, and True if each of its tokens is the most likely one."""


@register_model("motet")
class MotetScores(LocalCompletionsAPI):  # type: ignore[misc]
    """Sends the continuations of each context in one request."""

    def _loglikelihood_tokens(self, requests: Sequence[TokenRequest], **options: Any) -> list[Score]:
        by_context: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for index, (_, context, continuation) in enumerate(requests):
            # As in lm-eval, the start of a prompt that exceeds the model's context is truncated.
            surplus = max(0, len(context) + len(continuation) - self.max_length)
            by_context[tuple(context[surplus:])].append(index)
        # Contexts are sorted, so that contexts with a common prefix share its cached KV.
        parts = [
            (context, indices[start : start + MAX_CONTINUATIONS])
            for context, indices in sorted(by_context.items())
            for start in range(0, len(indices), MAX_CONTINUATIONS)
        ]
        results = asyncio.run(self._send([(c, [requests[index][2] for index in indices]) for c, indices in parts]))
        scores: dict[int, Score] = {}
        for (_, indices), found in zip(parts, results, strict=True):
            scores.update(zip(indices, found, strict=True))
        for index, (key, _, _) in enumerate(requests):
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, scores[index])
        return [scores[index] for index in range(len(requests))]

    async def _send(self, parts: Sequence[tuple[tuple[int, ...], list[list[int]]]]) -> list[list[Score]]:
        limit = asyncio.Semaphore(max(1, self._concurrent))
        async with ClientSession(headers=self.header, timeout=ClientTimeout(total=self.timeout)) as session:

            async def send(context: tuple[int, ...], continuations: list[list[int]]) -> list[Score]:
                body = {"model": self.model, "prompt": [*context], "continuations": continuations}
                async with limit, session.post(self.base_url.replace("/completions", "/score"), json=body) as answer:
                    if not answer.ok:
                        raise OSError(f"{answer.url} answered {answer.status}: {await answer.text()}")
                    scores = (await answer.json())["scores"]
                return [(score["logprob"], score["is_greedy"]) for score in scores]

            again = retry(stop=stop_after_attempt(self.max_retries), wait=wait_exponential(max=10), reraise=True)
            results: list[list[Score]] = await asyncio.gather(*(again(send)(*part) for part in parts))
            return results


if __name__ == "__main__":
    cli_evaluate()
