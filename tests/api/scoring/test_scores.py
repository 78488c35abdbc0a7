"""Scores of continuations: how they are joined with the prompt, their fields, and what is refused."""

from collections.abc import Mapping
from typing import Any

import httpx
import msgspec
import pytest

from motet.api.generation.plan import AnswerHead, Plan
from motet.api.generation.request_fields import SAMPLING_NAMES, SamplingFields
from motet.api.scoring import continuations
from motet.api.scoring.scores import NOT_SAMPLED, ScoreWriter
from motet.errors import EngineError
from motet.text.choice import TextRules
from motet.text.text_group import GroupStep
from motet.types import SCORES_PER_PART, GenerateRequest, PromptReport, TokenLogprob, Usage
from tests.api.serving import MODEL, Served, Serving, WatchedEngine, group_lines
from tests.engines.native.drive import group
from tests.error_response import assert_error

pytestmark = pytest.mark.anyio

HELLO, THE = 272, 264
"""The tokens `hello` and ` the` of the tiny tokenizer."""


def byte_ids(text: str) -> list[int]:
    return [3 + byte for byte in text.encode()]


async def score(served: Served, prompt: object, scored: object, **fields: object) -> httpx.Response:
    body = {"prompt": prompt, "continuations": scored, **fields}
    return await served.http.post("/v1/score", json=body)


def scores_of(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    scores: list[dict[str, Any]] = response.json()["scores"]
    return scores


async def test_each_continuation_has_its_own_tokens_and_their_log_probabilities(served: Served) -> None:
    response = await score(served, [5, 6, 7], [[8], [9, 10]])
    body = response.json()
    assert body["scores"] == [
        {
            "index": 0,
            "logprob": -3.0,
            "mean_logprob": -3.0,
            "is_greedy": True,
            "num_tokens": 1,
            "token_ids": [8],
            "token_logprobs": [-3.0],
        },
        {
            "index": 1,
            "logprob": -7.0,
            "mean_logprob": -3.5,
            "is_greedy": True,
            "num_tokens": 2,
            "token_ids": [9, 10],
            "token_logprobs": [-3.0, -4.0],
        },
    ]
    assert (body["object"], body["model"], body["id"][:6]) == ("score", MODEL, "score-")
    assert body["usage"] == {
        "prompt_tokens": 9,
        "completion_tokens": 0,
        "total_tokens": 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert [request.prompt for request in served.engine.requests] == [(5, 6, 7, 8), (5, 6, 7, 9, 10)]
    assert [request.sampling.prompt_logprobs for request in served.engine.requests] == [0, 0]
    assert [request.sampling.max_tokens for request in served.engine.requests] == [1, 1]


@pytest.mark.parametrize(
    ("prompt", "continuation", "ids", "first"),
    [
        ("hel", "lo", [HELLO], None),
        ("x", " the", [*byte_ids("x"), THE], 1),
        ("x ", "the", [*byte_ids("x"), THE], 1),
        ("x \n", "the", [*byte_ids("x \n"), 260], 1),
        ("x ", [9], [*byte_ids("x "), 9], 2),
        ([5, 6], " the", [5, 6, THE], 2),
        ("hello", "<|im_end|>", [HELLO, 2], 1),
    ],
)
async def test_texts_are_tokenised_together_and_token_ids_follow(
    served: Served, prompt: object, continuation: object, ids: list[int], first: int | None
) -> None:
    response = await score(served, prompt, [continuation])
    if first is None:
        assert_error(response, status=400, param="continuations[0]", code="invalid_value")
        assert "start it with a space" in response.json()["error"]["message"]
        return
    assert scores_of(response)[0]["token_ids"] == ids[first:]
    assert [*served.engine.requests[-1].prompt] == ids


async def test_continuations_of_a_chat_follow_the_generation_prompt(served: Served) -> None:
    chat = {"messages": [{"role": "user", "content": "a<|im_end|>b"}]}
    tokens = (await served.http.post("/tokenize", json=chat)).json()["tokens"]
    body = {**chat, "continuations": ["the", [9]]}
    scores = scores_of(await served.http.post("/v1/score", json=body))
    assert [score["token_ids"] for score in scores] == [[*byte_ids("\n"), 260], [9]]
    assert [[*request.prompt] for request in served.engine.requests] == [[*tokens, 260], [*tokens, 9]]


NOT_HERE = sorted(NOT_SAMPLED - {"n", "stream"})


@pytest.mark.parametrize("name", [*NOT_HERE, "text_1", "label_token_ids"])
async def test_sampling_fields_are_refused_by_name(served: Served, name: str) -> None:
    response = await score(served, "x", ["y"], **{name: 1})
    assert_error(response, status=400, param=name, code="unsupported_parameter")


def test_all_sampling_fields_are_refused() -> None:
    assert {*SamplingFields.model_fields, *SAMPLING_NAMES, "stream", "stream_options"} <= NOT_SAMPLED


REFUSED: Mapping[str, tuple[Mapping[str, object], str, str]] = {
    "n": ({"n": 2}, "n", "unsupported_parameter"),
    "stream": ({"stream": True}, "stream", "unsupported_parameter"),
    "no prompt": ({"prompt": None}, "prompt", "invalid_value"),
    "prompt and chat": ({"messages": [{"role": "user", "content": "x"}]}, "prompt", "invalid_value"),
    "several prompts": ({"prompt": ["x", "y"]}, "prompt", "invalid_value"),
    "no continuations": ({"continuations": None}, "continuations", "missing_required_parameter"),
    "empty list": ({"continuations": []}, "continuations", "invalid_value"),
    "text": ({"continuations": "y"}, "continuations", "invalid_type"),
    "empty text": ({"continuations": ["y", ""]}, "continuations[1]", "invalid_value"),
    "no token ids": ({"continuations": ["y", []]}, "continuations[1]", "invalid_value"),
    "number": ({"continuations": ["y", 5]}, "continuations[1]", "invalid_type"),
    "texts in ids": ({"continuations": [[5, "y"]]}, "continuations[0]", "invalid_type"),
    "white space": ({"prompt": " "}, "prompt", "invalid_value"),
    "ticket": ({"kv_transfer_params": {"do_remote_decode": True}}, "kv_transfer_params", "unsupported_parameter"),
    "too many": ({"continuations": ["y"] * 1025}, "continuations", "too_many_choices"),
    "too long": ({"continuations": [[5] * 4096]}, "continuations", "context_length_exceeded"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_wrong_requests_are_refused_before_the_engine_has_them(served: Served, name: str) -> None:
    fields, param, code = REFUSED[name]
    response = await served.http.post("/v1/score", json={"prompt": "x", "continuations": ["y"], **fields})
    assert_error(response, status=400, param=param, code=code)
    assert served.engine.requests == []


async def test_more_tokens_together_than_prompts_can_have_are_refused_before_continuations_are_tokenised(
    serve: Serving,
) -> None:
    served = await serve(max_waiting_groups=1000)
    assert_error(await score(served, "x" * 4000, ["y"] * 600), status=400, param="continuations", code="invalid_value")
    assert served.engine.requests == []


async def test_more_characters_than_texts_can_have_together_are_refused(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(continuations, "MAX_JOINED_CHARS", 100)
    assert_error(await score(served, "x" * 33, ["y"] * 3), status=400, param="continuations", code="invalid_value")
    assert served.engine.requests == []
    assert len(scores_of(await score(served, "x" * 32, ["y"] * 3))) == 3
    assert len(scores_of(await score(served, [5] * 40, [[6]] * 3))) == 3


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/score", {"prompt": [900], "continuations": [[5]]}, "prompt"),
        ("/v1/score", {"prompt": [5], "continuations": [[6], [900]]}, "continuations[1]"),
        ("/v1/completions", {"prompt": [[5], [900]]}, "prompt[1]"),
        ("/generate", {"input_ids": [900]}, "input_ids"),
        ("/inference/v1/generate", {"token_ids": [900], "sampling_params": {}}, "token_ids"),
    ],
)
async def test_tokens_that_the_model_does_not_have_are_refused(
    served: Served, path: str, body: Mapping[str, object], param: str
) -> None:
    assert_error(await served.http.post(path, json=body), status=400, param=param, code="invalid_value")
    assert served.engine.requests == []


async def test_a_server_that_is_full_refuses_scores_before_it_tokenises(serve: Serving) -> None:
    served = await serve(engine=WatchedEngine(gated=True), max_waiting_groups=2)
    first = await served.engine.start_request(score(served, "x", ["a", "b"]))
    response = await score(served, "x" * 100_000, ["y"])
    assert response.status_code == 503
    served.engine.go()
    assert [one["num_tokens"] for one in scores_of(await first)] == [1, 1]


async def test_limits_of_a_key_priority_salt_and_ids_are_those_of_other_routes(
    serve: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="motet.api")
    served = await serve(api_keys=("a",), key_max_choices=2)
    served.http.headers["authorization"] = "Bearer a"
    assert_error(await score(served, "x", ["a", "b", "c"]), status=429)
    response = await score(served, "x", ["a", "b"], priority=3, cache_salt="s", request_id="mine", keep_s=5)
    assert response.json()["id"].startswith("score-mine-")
    first, second = served.engine.requests
    assert (first.priority, first.cache_salt[-1:], first.keep_s, first.trace) == (3, "s", 5.0, "mine")
    assert first.request_id != second.request_id
    assert [line["status"] for line in group_lines(caplog)] == [200, 200]
    assert "/v1/score" in await served.metrics()


def scored(*logprobs: tuple[float, int]) -> PromptReport:
    """Returns the report on a prompt of the tokens 1, 2, ... `logprobs`: values and ranks of the tokens from 2 on."""
    known = (TokenLogprob(token, value, rank, ()) for token, (value, rank) in enumerate(logprobs, 2))
    return PromptReport.scored(0, (None, *known))


def no_usage() -> Usage:
    return Usage(prompt_tokens=0, completion_tokens=0)


def writer_of(served: Served, request: GenerateRequest, *, first: int) -> ScoreWriter:
    head = AnswerHead(id="score-1", created=1, model=MODEL)
    plan = Plan(head=head, served=served.service.only_model(), groups=(request,), rules=TextRules())
    return ScoreWriter(plan, [first])


async def test_a_token_that_is_not_the_most_likely_one_makes_a_continuation_not_greedy(served: Served) -> None:
    for ranks, greedy in (((2, 1, 1), True), ((1, 1, 2), False)):
        writer = writer_of(served, group("g", [1, 2, 3, 4]), first=2)
        report = scored(*zip((-1.0, -2.0, float("-inf")), ranks, strict=True))
        assert writer.feed([GroupStep((), report)], no_usage) == b""
        (found,) = msgspec.json.decode(b"".join(writer.close(Usage(prompt_tokens=4, completion_tokens=0))))["scores"]
        assert (found["token_ids"], found["token_logprobs"]) == ([3, 4], [-2.0, -9999.0])
        assert (found["logprob"], found["is_greedy"]) == (-10001.0, greedy)


async def test_a_report_without_scores_is_an_error_of_the_engine(served: Served) -> None:
    for report in (PromptReport(0), scored((-1.0, 1))):
        writer = writer_of(served, group("g", [1, 2, 3]), first=1)
        writer.feed([GroupStep((), report)], no_usage)
        with pytest.raises(EngineError):
            writer.close(Usage(prompt_tokens=3, completion_tokens=0))


async def test_only_the_scores_of_continuations_are_kept(served: Served) -> None:
    """The scores of a trunk of 8,000 tokens with 200 continuations would take 50 MB until the end of the answer."""
    length = 10 * SCORES_PER_PART
    scores = scored(*[(-1.0, 1)] * (length - 1)).logprobs
    assert scores is not None
    kept = scores.since(length - 3)
    assert (len(kept), len(vars(kept)["_parts"])) == (3, 1)
    writer = writer_of(served, group("g", range(1, length + 1)), first=length - 3)
    assert writer.held_bytes < 1000
