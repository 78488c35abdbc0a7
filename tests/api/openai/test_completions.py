"""Completions: prompts x n, token ids as prompts, echo, log-probabilities, best_of."""

from collections import defaultdict
from itertools import count
from typing import Any

import httpx
import pytest

from motet.testing.fake_engine import fake_info
from motet.types import ChoiceDelta, ChoiceStart, Finish, FinishReason, GenerateRequest, GroupDelta, TokenLogprob
from tests.api.serving import MODEL, SEED, Served, Serving, WatchedEngine, chunks, saying, streamed_or_not
from tests.error_response import assert_error
from tests.tiny_tokenizer import EOS_ID, fake_answer

pytestmark = pytest.mark.anyio


def prompt_and_number(request: GenerateRequest, start: ChoiceStart) -> list[int]:
    """Makes each choice generate the last token of the prompt and its own index."""
    return [request.prompt[-1], *fake_answer(str(start.index))]


async def test_choices_are_prompts_times_n_numbered_prompt_major(serve: Serving) -> None:
    served = await serve(prompt_and_number)
    answer = await served.openai.completions.create(model=MODEL, prompt=["x", "y", "z"], n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3, 4, 5]
    assert [choice.text for choice in answer.choices] == ["x0", "x1", "y0", "y1", "z0", "z1"]
    assert {choice.finish_reason for choice in answer.choices} == {"stop"}
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.system_fingerprint == served.engine.info.fingerprint
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3  # each prompt counts once, not once for each choice
    assert answer.usage.completion_tokens == 6 * 3


@pytest.mark.parametrize("n", [0, -1, -(2**63)])
@streamed_or_not
async def test_fewer_choices_than_one_are_refused(served: Served, n: int, stream: bool) -> None:
    answer = await served.http.post("/v1/completions", json={"prompt": ["x", "y"], "n": n, "stream": stream})
    assert_error(answer, status=400, param="n", code="integer_below_min_value")
    assert served.engine.requests == []


async def test_every_prompt_starts_at_the_same_seed(served: Served) -> None:
    await served.openai.completions.create(model=MODEL, prompt=["x", "y"], n=2, seed=5)
    assert [[c.seed for c in r.choices] for r in served.engine.requests] == [[5, 6], [5, 6]]


async def test_without_a_seed_a_prompt_that_is_given_twice_has_two_answers(serve: Serving) -> None:
    """All prompts of a request used to have the same seed, so lm-eval's repeats with a batch size were all equal."""
    served = await serve(draw_seed=count(SEED, 100).__next__)
    await served.openai.completions.create(model=MODEL, prompt=["x", "x"], n=2)
    assert [[c.seed for c in r.choices] for r in served.engine.requests] == [[SEED, SEED + 1], [SEED + 100, SEED + 101]]


async def test_prompt_of_token_ids_goes_to_the_engine_as_it_is(served: Served) -> None:
    await served.openai.completions.create(model=MODEL, prompt=[5, 6, 7])
    await served.openai.completions.create(model=MODEL, prompt=[[8], [9, 10]])
    assert [request.prompt for request in served.engine.requests] == [(5, 6, 7), (8,), (9, 10)]


async def test_all_prompts_share_the_lists_of_token_ids(served: Served) -> None:
    """A request has up to 250 prompts, and 16,000 ids in each list: a copy for each prompt took 60 ms of the event loop
    in garbage collections."""
    lists = {"allowed_token_ids": [5, 6, 7], "stop_token_ids": [8, 9]}
    await served.openai.completions.create(model=MODEL, prompt=[[8], [9, 10]], logit_bias={"5": 1}, extra_body=lists)
    first, second = (request.sampling for request in served.engine.requests)
    assert first.allowed_token_ids == (5, 6, 7)
    assert first.allowed_token_ids is second.allowed_token_ids
    assert first.stop_token_ids is second.stop_token_ids
    assert first.logit_bias is second.logit_bias


async def test_max_completion_tokens_takes_precedence_as_in_chats(served: Served) -> None:
    await served.complete(max_tokens=500, max_completion_tokens=2)
    await served.complete(max_completion_tokens=3)
    assert [request.sampling.max_tokens for request in served.engine.requests] == [2, 3]


async def test_without_max_tokens_a_choice_has_sixteen(serve: Serving) -> None:
    served = await serve(lambda request, start: fake_answer("abc", eos=False))
    answer = await served.openai.completions.create(model=MODEL, prompt="x")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16
    assert answer.choices[0].finish_reason == "length"


async def test_echo_puts_the_prompt_before_every_choice(served: Served) -> None:
    answer = await served.openai.completions.create(model=MODEL, prompt=["well, ", "so: "], n=2, echo=True)
    assert [c.text for c in answer.choices] == ["well, hello 0", "well, hello 1", "so: hello 0", "so: hello 1"]


async def test_echo_of_token_ids_is_their_text(served: Served) -> None:
    ids = fake_answer("héllo ", eos=False)
    answer = await served.openai.completions.create(model=MODEL, prompt=ids, echo=True)
    assert answer.choices[0].text == "héllo hello 0"


async def test_echo_of_token_ids_and_of_their_text_are_the_same(served: Served) -> None:
    """The echo of ids had no special tokens."""
    text = "<|im_start|>héllo<|im_end|>"
    ids = served.tokenizer.encode(text)
    fields = {"echo": True, "logprobs": 0, "max_tokens": 1}
    of_text, of_ids = [(await served.complete(prompt, **fields)).json()["choices"][0] for prompt in (text, ids)]
    assert of_text == of_ids
    assert of_text["text"].startswith(text)
    tokens, offsets = of_text["logprobs"]["tokens"], of_text["logprobs"]["text_offset"]
    for token, offset in zip(tokens, offsets, strict=True):
        assert "\ufffd" in token or of_text["text"].startswith(token, offset)


@pytest.mark.parametrize("stream", [False, True])
async def test_offsets_after_invalid_bytes_are_those_of_the_text(serve: Serving, stream: bool) -> None:
    """A token after a part of a character had the offset of that part."""
    half, letter = fake_answer("é", eos=False)[0], fake_answer("x", eos=False)[0]
    served = await serve(lambda request, start: [letter, half, letter, half, half, letter, EOS_ID])
    response = await served.complete("y", logprobs=0, stream=stream)
    parts = [chunk["choices"][0] for chunk in chunks(response)] if stream else response.json()["choices"]
    assert "".join(part["text"] for part in parts) == "x\ufffdx\ufffd\ufffdx"
    offsets = [offset for part in parts for offset in (part["logprobs"] or {"text_offset": []})["text_offset"]]
    assert offsets == [0, 1, 2, 3, 4, 5, 6]


async def test_streamed_choices_join_to_the_answer_with_and_without_echo(serve: Serving) -> None:
    served = await serve(prompt_and_number)
    for echo in (False, True):
        unstreamed = (await served.complete(["x", "yy"], n=2, echo=echo)).json()
        texts: dict[int, str] = defaultdict(str)
        ended: list[int] = []
        for chunk in chunks(await served.complete(["x", "yy"], n=2, echo=echo, stream=True)):
            (choice,) = chunk["choices"]
            assert choice["index"] not in ended
            texts[choice["index"]] += choice["text"]
            if choice["finish_reason"]:
                ended.append(choice["index"])
        assert [texts[i] for i in range(4)] == [choice["text"] for choice in unstreamed["choices"]]
        assert sorted(ended) == [0, 1, 2, 3]


async def test_stream_usage_sums_prompts_and_choices(served: Served) -> None:
    options = {"include_usage": True}
    *_, last = chunks(await served.complete(["x", "yy"], n=3, stream=True, stream_options=options))
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] == 3
    assert last["usage"]["completion_tokens"] == 6 * len(fake_answer("hello 0"))


async def test_logprobs_have_tokens_values_alternatives_and_offsets(serve: Serving) -> None:
    served = await serve(saying("ab"))
    answer = await served.openai.completions.create(model=MODEL, prompt="x", logprobs=2, max_tokens=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["a", "b"]
    assert logprobs.token_logprobs == [-0.5, -0.5]
    assert logprobs.text_offset == [0, 1]
    assert logprobs.top_logprobs is not None
    assert [len(top) for top in logprobs.top_logprobs] == [2, 2]


async def test_logprobs_of_a_stream_join_to_the_unstreamed_logprobs(serve: Serving) -> None:
    served = await serve(saying("abc def"))
    unstreamed = (await served.complete("x", logprobs=1)).json()["choices"][0]["logprobs"]
    parts = [c["choices"][0]["logprobs"] for c in chunks(await served.complete("x", logprobs=1, stream=True))]
    for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        assert [value for part in parts for value in part[key]] == unstreamed[key]


@pytest.mark.parametrize(
    ("requested", "num_top"), [(20, 20), (True, 1), (False, None)], ids=["twenty", "true is one", "false is none"]
)
async def test_logprobs_are_counted_as_vllm_counts_them(served: Served, requested: object, num_top: int | None) -> None:
    (choice,) = (await served.complete([5], logprobs=requested, max_tokens=1, return_tokens_as_token_ids=True)).json()[
        "choices"
    ]
    assert served.engine.requests[0].sampling.logprobs == num_top
    assert num_top == (choice["logprobs"] and len(choice["logprobs"]["top_logprobs"][0]))


async def test_the_server_sets_how_many_alternatives_there_are(serve: Serving) -> None:
    """Distillation requests a hundred alternatives to each token of a prompt."""
    served = await serve(max_logprobs=100)
    assert (await served.complete([5, 6], prompt_logprobs=100, logprobs=100)).status_code == 200
    assert (await served.chat(prompt_logprobs=100, logprobs=True, top_logprobs=100)).status_code == 200
    assert [request.sampling.prompt_logprobs for request in served.engine.requests] == [100, 100]
    refused = await served.chat(logprobs=True, top_logprobs=101)
    assert_error(refused, status=400, param="top_logprobs", code="integer_above_max_value")
    assert "<= 100" in refused.json()["error"]["message"]
    assert "--max-logprobs" in refused.json()["error"]["message"]
    assert_error(await served.complete([5], prompt_logprobs=101), status=400, param="prompt_logprobs")


@streamed_or_not
async def test_named_tokens_stand_in_place_of_the_likeliest(serve: Serving, stream: bool) -> None:
    served = await serve(saying("a"))
    (drawn, *_), fields = fake_answer("a"), {"logprob_token_ids": [9, 7], "max_tokens": 1, "stream": stream}

    async def logprobs_of(answer: httpx.Response) -> dict[str, Any]:
        parts = chunks(answer) if stream else [answer.json()]
        return next(one["choices"][0]["logprobs"] for one in parts if one["choices"][0].get("logprobs"))

    expected = [(f"token_id:{drawn}", -0.5), ("token_id:9", -1.0), ("token_id:7", -2.0)]
    entries = await logprobs_of(await served.complete([5], logprobs=1, return_tokens_as_token_ids=True, **fields))
    assert [*entries["top_logprobs"][0].items()] == expected
    entries = await logprobs_of(await served.chat(logprobs=True, return_tokens_as_token_ids=True, **fields))
    assert [(top["token"], top["logprob"]) for top in entries["content"][0]["top_logprobs"]] == expected
    sampling = {"logprob_token_ids": [9, 7], "max_tokens": 1}
    body = {"token_ids": [5], "sampling_params": sampling, "stream": stream}
    entries = await logprobs_of(await served.http.post("/inference/v1/generate", json=body))
    (entry,) = entries["content"]
    assert [(top["token"], top["logprob"]) for top in entry["top_logprobs"]] == expected
    assert {top["rank"] for top in entry["top_logprobs"]} == {None}
    logprobs_of_requests = [(one.sampling.logprobs, one.sampling.logprob_token_ids) for one in served.engine.requests]
    assert logprobs_of_requests == [(0, (9, 7))] * 3


@streamed_or_not
async def test_log_probabilities_name_tokens_by_id_if_requested(serve: Serving, stream: bool) -> None:
    """Trainers read the ids of sampled tokens from there, since two tokens can have the same text."""
    served = await serve(saying("aé"))
    ids = [f"token_id:{token}" for token in fake_answer("aé")]
    fields = {"return_tokens_as_token_ids": True, "stream": stream}
    answer = await served.complete([5], logprobs=1, **fields)
    logprobs = [one["choices"][0]["logprobs"] for one in (chunks(answer) if stream else [answer.json()])]
    assert [name for one in logprobs for name in one["tokens"]] == ids
    assert [name for one in logprobs for top in one["top_logprobs"] for name in top] == ids
    answer = await served.chat(logprobs=True, top_logprobs=1, **fields)
    logprobs = [one["choices"][0]["logprobs"] for one in (chunks(answer) if stream else [answer.json()])]
    entries = [entry for one in logprobs if one for entry in one["content"]]
    assert [entry["token"] for entry in entries] == ids
    assert [top["token"] for entry in entries for top in entry["top_logprobs"]] == ids


async def test_an_echoed_prompt_is_named_by_ids_too(served: Served) -> None:
    body = (await served.complete([5, 6], logprobs=0, echo=True, return_tokens_as_token_ids=True)).json()
    assert body["choices"][0]["logprobs"]["tokens"][:2] == ["token_id:5", "token_id:6"]


async def test_return_token_ids_gives_those_of_prompt_and_answer(served: Served) -> None:
    body = (await served.complete([5, 6], return_token_ids=True)).json()
    assert body["choices"][0]["prompt_token_ids"] == [5, 6]
    assert body["choices"][0]["token_ids"] == fake_answer("hello 0")
    received = chunks(await served.complete([5, 6], return_token_ids=True, stream=True))
    assert received[0]["choices"][0]["prompt_token_ids"] == [5, 6]
    ids = [token for chunk in received for token in chunk["choices"][0]["token_ids"]]
    assert ids == fake_answer("hello 0")


async def test_the_prompt_s_ids_are_in_the_first_chunk_of_each_choice(served: Served) -> None:
    """They had a chunk of their own, without log-probabilities, although the request had `logprobs`."""
    fields = {"return_token_ids": True, "logprobs": 1, "n": 2}
    received = chunks(await served.complete([[5, 6], [7]], stream=True, **fields))
    choices: dict[int, list[dict[str, Any]]] = {}
    for chunk in received:
        choices.setdefault(chunk["choices"][0]["index"], []).append(chunk["choices"][0])
    assert sorted(choices) == [0, 1, 2, 3]
    for index, (first, *others) in choices.items():
        assert first["prompt_token_ids"] == ([5, 6], [7])[index // 2]
        assert len(first["token_ids"]) == len(first["logprobs"]["tokens"]) == 1
        assert not any("prompt_token_ids" in choice for choice in others)


class RankedGroup:
    """A group of one step: choice i generates one token with log-probability -|i - 2|."""

    def __init__(self, request: GenerateRequest) -> None:
        self._request: GenerateRequest | None = request

    def __aiter__(self) -> "RankedGroup":
        return self

    async def __anext__(self) -> GroupDelta:
        if self._request is None:
            raise StopAsyncIteration
        request, self._request = self._request, None
        return GroupDelta(request.request_id, tuple(self._choice(start.index) for start in request.choices))

    async def aclose(self) -> None:
        self._request = None

    @staticmethod
    def _choice(index: int) -> ChoiceDelta:
        token = fake_answer(str(index))[0]
        entry = TokenLogprob(token, -abs(index - 2.0), 1)
        return ChoiceDelta(index, (token,), (entry,), Finish(FinishReason.LENGTH))


class RankedEngine(WatchedEngine):
    """An engine whose third choice is the most likely, followed by the second and the fourth."""

    def generate(self, request: GenerateRequest) -> RankedGroup:  # type: ignore[override]  # a stream of its own
        self.requests.append(request)
        return RankedGroup(request)


async def test_best_of_sends_the_n_most_likely_and_counts_all(serve: Serving) -> None:
    served = await serve(engine=RankedEngine())
    answer = await served.openai.completions.create(model=MODEL, prompt="x", n=2, best_of=5)
    assert [choice.text for choice in answer.choices] == ["2", "1"]
    assert [choice.index for choice in answer.choices] == [0, 1]
    assert answer.choices[0].logprobs is None  # only the ranking used them
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 5
    assert len(served.engine.requests[0].choices) == 5


async def test_best_of_equal_to_n_keeps_the_order(serve: Serving) -> None:
    served = await serve(engine=RankedEngine())
    answer = await served.openai.completions.create(model=MODEL, prompt="x", n=3, best_of=3)
    assert [choice.text for choice in answer.choices] == ["0", "1", "2"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 3, "stream": True}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"logprob_token_ids": [5]}, "logprob_token_ids"),
        ({"logprob_token_ids": [5], "logprobs": 0, "echo": True, "max_tokens": 0}, "logprob_token_ids"),
        ({"logprob_token_ids": [5] * 129, "logprobs": 0}, "logprob_token_ids"),
        ({"logprob_token_ids": [999], "logprobs": 0}, "logprob_token_ids"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": ["x", ""]}, "prompt[1]"),
        ({"prompt": [[5], []]}, "prompt[1]"),
        ({"prompt": [5, "x"]}, "prompt"),
        ({"prompt": [[5], [True]]}, "prompt[1]"),
        ({"prompt": [5, 999]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"min_tokens": 10**30}, "min_tokens"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    ],
)
async def test_a_refused_field_of_completions_is_named(served: Served, fields: dict[str, object], param: str) -> None:
    assert_error(await served.http.post("/v1/completions", json={"prompt": "x", **fields}), status=400, param=param)
    assert served.engine.requests == []


async def test_prompts_times_n_has_a_limit_of_its_own(serve: Serving) -> None:
    served = await serve(max_choices=6)
    assert (await served.complete(["x", "y", "z"], n=2)).status_code == 200
    response = await served.complete(["x", "y", "z"], n=3)
    assert response.status_code == 400
    assert "9" in response.json()["error"]["message"]


async def test_too_long_a_prompt_names_the_context_length(serve: Serving) -> None:
    engine = WatchedEngine()
    engine.info = fake_info(max_model_len=8)
    served = await serve(engine=engine)
    response = await served.complete([5] * 8)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 8 tokens" in error["message"]
    assert (await served.complete([5] * 7)).status_code == 200
    assert served.engine.requests[0].sampling.max_tokens == 1


async def test_end_of_sequence_has_no_text(serve: Serving) -> None:
    served = await serve(lambda request, start: [EOS_ID])
    body = (await served.complete("x")).json()
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("", "stop")
    assert body["usage"]["completion_tokens"] == 1


async def test_echo_with_logprobs_covers_prompt_and_answer(serve: Serving) -> None:
    served = await serve(saying("ab"))
    answer = await served.openai.completions.create(model=MODEL, prompt="xyz", echo=True, logprobs=0, max_tokens=2)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["x", "y", "z", "a", "b"]
    assert logprobs.token_logprobs == [None, -1.0, -2.0, -0.5, -0.5]
    assert logprobs.text_offset == [0, 1, 2, 3, 4]


async def test_streamed_echo_with_logprobs_joins_to_the_same(serve: Serving) -> None:
    served = await serve(saying("ab"))
    fields = {"echo": True, "logprobs": 1, "max_tokens": 2, "n": 2}
    unstreamed = (await served.complete(["xyz", "w"], **fields)).json()["choices"]
    parts = [chunk["choices"][0] for chunk in chunks(await served.complete(["xyz", "w"], stream=True, **fields))]
    for choice in unstreamed:
        mine = [part["logprobs"] for part in parts if part["index"] == choice["index"]]
        for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            assert [value for part in mine for value in part[key]] == choice["logprobs"][key]


@pytest.mark.parametrize("stream", [False, True])
async def test_no_tokens_and_an_echo_score_the_prompt(serve: Serving, stream: bool) -> None:
    """OpenAI's and lm-eval's original way of scoring: the answer is the prompt with the log-probability of each
    token."""
    served = await serve(saying("ab"))
    fields = {"echo": True, "logprobs": 1, "max_tokens": 0, "n": 2, "return_token_ids": True}
    answer = await served.complete(["xyz", "w"], stream=stream, **fields)
    assert answer.status_code == 200, answer.text
    parts = chunks(answer) if stream else [answer.json()]
    for index, text in enumerate(("xyz", "xyz", "w", "w")):
        mine = [c for part in parts for c in part["choices"] if c["index"] == index]
        assert "".join(c["text"] for c in mine) == text
        assert [c["finish_reason"] for c in mine if c["finish_reason"]] == ["length"]
        assert [token for c in mine for token in c["logprobs"]["tokens"]] == list(text)
        assert [id for c in mine for id in c["token_ids"]] == []
    if not stream:
        assert parts[0]["usage"]["completion_tokens"] == 0


async def test_no_tokens_without_an_echo_are_refused(served: Served) -> None:
    assert_error(await served.complete(max_tokens=0), status=400, param="max_tokens")
    assert_error(await served.complete(max_tokens=-1, echo=True), status=400, param="max_tokens")


async def test_prompt_logprobs_are_in_each_choice_in_addition_to_an_echo(served: Served) -> None:
    body = (await served.complete("xyz", n=2, prompt_logprobs=0, echo=True, logprobs=1, max_tokens=1)).json()
    _, y, z = served.engine.requests[-1].prompt
    for choice in body["choices"]:
        assert choice["prompt_logprobs"] == [
            None,
            {str(y): {"logprob": -1.0, "rank": 1, "decoded_token": "y"}},
            {str(z): {"logprob": -2.0, "rank": 1, "decoded_token": "z"}},
        ]
        assert choice["logprobs"]["tokens"][:3] == ["x", "y", "z"]
        assert len(choice["logprobs"]["top_logprobs"][1]) >= 1
    assert served.engine.requests[-1].sampling.prompt_logprobs == 1
    (choice,) = (await served.complete("xyz")).json()["choices"]
    assert {choice[name] for name in ("prompt_logprobs", "prompt_token_ids", "token_ids")} == {None}


async def test_prompt_logprobs_of_a_chat_are_next_to_its_choices(served: Served) -> None:
    body = (await served.chat(prompt_logprobs=1, n=2)).json()
    first, *scored = body["prompt_logprobs"]
    assert first is None
    assert [next(iter(entry)) for entry in scored] == [str(token) for token in served.engine.requests[-1].prompt[1:]]
    assert (await served.chat()).json()["prompt_logprobs"] is None


async def test_more_alternatives_to_prompt_tokens_than_the_server_allows_are_refused(served: Served) -> None:
    assert_error(await served.chat(prompt_logprobs=21), status=400, param="prompt_logprobs")


@pytest.mark.slow
async def test_log_probabilities_of_prompts_are_bounded_together(served: Served) -> None:
    """The log-probabilities are kept until the answer is sent: 250 prompts of 3900 tokens with 20 alternatives took 2
    GB."""
    prompts = [[5] * 3900] * 25
    assert (await served.complete(prompts, prompt_logprobs=18, max_tokens=1)).status_code == 200
    for fields in ({"prompt_logprobs": 20}, {"prompt_logprobs": 20, "echo": True, "logprobs": 1}):
        assert_error(await served.complete(prompts, max_tokens=1, **fields), status=400, param="prompt")
