"""Scores of the default model in float32 equal the log-probabilities of transformers and of echoed prompts. A second
request for the same scores computes almost nothing."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from motet.deploy.child import ChildServer
from motet.models.smollm2 import DEFAULT_MODEL, Smollm2
from motet.settings.server_config import cache_folder, environment
from tests.forked import ForkingProcess
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.real, pytest.mark.usefixtures("default_weights")]

PROMPT = "Paris is in France, Berlin is in Germany, and Madrid is in Spain. " * 5 + "The capital of Italy is "
CONTINUATIONS = ["Rome.", "the city of Milan.", "Venice, as every child knows."]
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def server(default_weights: None, forking: ForkingProcess) -> Iterator[ChildServer]:
    with forking.server([DEFAULT_MODEL, "--dtype", "float32", "--kv-cache-gb", "0.5"]) as running:
        yield running


def post(server: ChildServer, path: str, **body: object) -> dict[str, Any]:
    response = httpx.post(server.url + path, json=body, timeout=PATIENCE_S)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def of_transformers(prompts: list[list[int]]) -> list[list[tuple[float, bool]]]:
    """Returns the log-probability of each token but the first, and whether it is the most likely one."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = Smollm2(cache_folder(environment())).folder
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    known = []
    with torch.no_grad():
        for ids in prompts:
            scores = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)  # [num_tokens - 1, vocab_size] f32
            own, best = scores.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist(), scores.argmax(-1).tolist()
            known.append([*zip(own, [a == b for a, b in zip(best, ids[1:], strict=True)], strict=True)])
    return known


def test_scores_equal_echoed_log_probabilities_and_transformers_and_are_cached(server: ChildServer) -> None:
    first = post(server, "/v1/score", prompt=PROMPT, continuations=CONTINUATIONS)
    second = post(server, "/v1/score", prompt=PROMPT, continuations=CONTINUATIONS)
    assert second["scores"] == first["scores"]
    cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in (first, second)]
    total = first["usage"]["prompt_tokens"]
    assert cached[0] >= 0.5 * total, "the continuations of one request share their prefix"
    assert cached[1] >= total - 3 * 17, "only the last block of each prompt is computed again"

    texts = [PROMPT + continuation for continuation in CONTINUATIONS]
    prompts = [post(server, "/tokenize", prompt=text)["tokens"] for text in texts]
    echoed = post(server, "/v1/completions", prompt=texts, echo=True, logprobs=0, max_tokens=0)
    assert echoed["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0.5 * total, "its scores were not known"
    for score, ids, choice, known in zip(
        first["scores"], prompts, echoed["choices"], of_transformers(prompts), strict=True
    ):
        length = score["num_tokens"]
        assert score["token_ids"] == ids[-length:]
        assert score["token_logprobs"] == choice["logprobs"]["token_logprobs"][-length:]
        assert score["token_logprobs"] == pytest.approx([value for value, _ in known[-length:]], abs=TOLERANCE)
        assert score["is_greedy"] is all(best for _, best in known[-length:])
        assert score["logprob"] == pytest.approx(sum(score["token_logprobs"]))
    assert max(first["scores"], key=lambda score: score["mean_logprob"])["index"] == 0


def test_a_chat_s_scores_are_the_log_probabilities_of_its_answer(server: ChildServer) -> None:
    chat = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    answer = post(
        server, "/v1/chat/completions", **chat, temperature=0, max_tokens=8, logprobs=True, return_token_ids=True
    )
    (choice,) = answer["choices"]
    (score,) = post(server, "/v1/score", **chat, continuations=[choice["token_ids"]])["scores"]
    sampled = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert score["token_logprobs"] == pytest.approx(sampled, abs=TOLERANCE)
    assert score["is_greedy"] is True
