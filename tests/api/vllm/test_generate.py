"""The routes that take tokens, in vLLM's shapes: `/inference/v1/generate`, `/tokenize`, `/detokenize`."""

from collections import defaultdict
from typing import Any

import httpx
import pytest

from motet.types import LogprobsMode
from tests.api.serving import SEED, Served, Serving, chunks, saying, streamed_or_not
from tests.error_response import assert_error
from tests.tiny_tokenizer import EOS_ID, fake_answer

pytestmark = pytest.mark.anyio


async def generate(served: Served, sampling: dict[str, object], **fields: object) -> httpx.Response:
    body = {"token_ids": [5, 6, 7], "sampling_params": sampling, **fields}
    return await served.http.post("/inference/v1/generate", json=body)


async def test_token_ids_go_in_and_out(served: Served) -> None:
    response = await generate(served, {"n": 2}, request_id="mine")
    assert response.status_code == 200
    assert response.json() == {
        "request_id": "mine",
        "choices": [
            {
                "index": 0,
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": fake_answer("hello 0"),
                "weight_versions": [{"version": "0", "start": 0, "end": len(fake_answer("hello 0"))}],
            },
            {
                "index": 1,
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
                "token_ids": fake_answer("hello 1"),
                "weight_versions": [{"version": "0", "start": 0, "end": len(fake_answer("hello 1"))}],
            },
        ],
        "prompt_logprobs": None,
        "kv_transfer_params": None,
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 2 * len(fake_answer("hello 0")),
            "total_tokens": 3 + 2 * len(fake_answer("hello 0")),
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    (request,) = served.engine.requests
    assert request.prompt == (5, 6, 7)
    assert [choice.seed for choice in request.choices] == [SEED, SEED + 1]
    assert request.sampling.max_tokens == served.engine.info.max_model_len - 3


async def test_a_stream_has_one_choice_a_chunk_and_joins_to_the_answer(served: Served) -> None:
    received = chunks(await generate(served, {"n": 2}, request_id="mine", stream=True))
    ids: dict[int, list[int]] = defaultdict(list)
    reasons: dict[int, list[str | None]] = defaultdict(list)
    for chunk in received:
        assert chunk["request_id"] == "mine"
        assert chunk["usage"] is None
        (choice,) = chunk["choices"]
        ids[choice["index"]].extend(choice["token_ids"])
        reasons[choice["index"]].append(choice["finish_reason"])
    assert ids == {0: fake_answer("hello 0"), 1: fake_answer("hello 1")}
    assert all(r[-1] == "stop" and set(r[:-1]) == {None} for r in reasons.values())


async def test_a_body_that_vllm_has_rendered_is_taken(served: Served) -> None:
    sampling = {"stop": [], "stop_token_ids": [], "max_tokens": 5, "bad_words": [], "skip_reading_prefix_cache": False}
    fields = {"output_mode": "tokens", "stream": False, "priority": 0, "model": "tiny", "features": None}
    assert (await generate(served, sampling, **fields)).status_code == 200


@streamed_or_not
async def test_the_mode_text_adds_texts_to_choices_and_logprobs(serve: Serving, stream: bool) -> None:
    """An answer repeats the mode, as in vLLM. The text ends before a stop string, whose tokens stay."""
    served = await serve(saying("one two END"))
    sampling = {"n": 2, "stop": ["END"], "logprobs": 1}
    answer = await generate(served, sampling, output_mode="text", stream=stream)
    pieces = chunks(answer) if stream else [answer.json()]
    texts: dict[int, str] = defaultdict(str)
    tokens: dict[int, list[int]] = defaultdict(list)
    named: dict[int, str] = defaultdict(str)
    for piece in pieces:
        assert piece["output_mode"] == "text"
        for choice in piece["choices"]:
            texts[choice["index"]] += choice["text"]
            tokens[choice["index"]] += choice["token_ids"]
            entries = choice["logprobs"]["content"]
            named[choice["index"]] += "".join(entry["token"] for entry in entries)
            assert [entry["token_id"] for entry in entries] == choice["token_ids"]
            assert {entry["rank"] for entry in entries} <= {1}
    assert texts == {0: "one two ", 1: "one two "}
    assert tokens == {index: fake_answer("one two END", eos=False) for index in range(2)}
    assert named == {0: "one two END", 1: "one two END"}


@streamed_or_not
async def test_the_mode_tokens_adds_no_text_and_is_repeated_if_it_is_named(served: Served, stream: bool) -> None:
    for fields, repeated in (({}, None), ({"output_mode": "tokens"}, "tokens")):
        answer = await generate(served, {}, stream=stream, **fields)
        for piece in chunks(answer) if stream else [answer.json()]:
            assert piece.get("output_mode") == repeated
            assert all("text" not in choice for choice in piece["choices"])


async def test_the_prompt_s_token_ids_are_returned_if_requested(served: Served) -> None:
    """A trainer reads all tokens of a choice from one answer."""
    assert "prompt_token_ids" not in (await generate(served, {})).json()
    assert (await generate(served, {}, return_token_ids=True)).json()["prompt_token_ids"] == [5, 6, 7]
    received = chunks(await generate(served, {"n": 2}, return_token_ids=True, stream=True))
    assert [chunk.get("prompt_token_ids") for chunk in received] == [[5, 6, 7]] + [None] * (len(received) - 1)


@streamed_or_not
async def test_the_stop_string_or_token_that_ended_a_choice_is_reported(serve: Serving, stream: bool) -> None:
    served = await serve(saying("one END two"))
    cases: list[tuple[dict[str, object], object]] = [
        ({"stop": ["END"]}, "END"),
        ({"stop_token_ids": [fake_answer("one")[0]]}, fake_answer("one")[0]),
    ]
    for sampling, reason in cases:
        answer = await generate(served, sampling, stream=stream)
        (choice,) = (chunks(answer)[-1] if stream else answer.json())["choices"]
        assert choice["stop_reason"] == reason


async def test_a_stream_has_usage_at_the_end_if_requested(served: Served) -> None:
    *_, last = chunks(await generate(served, {}, stream=True, stream_options={"include_usage": True}))
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens"] == 3


async def test_logprobs_name_tokens_by_id(serve: Serving) -> None:
    served = await serve(saying("a"))
    body = (await generate(served, {"logprobs": 1, "max_tokens": 1})).json()
    token = fake_answer("a")[0]
    entry = {"token_id": token, "logprob": -0.5, "rank": 1, "token": f"token_id:{token}", "bytes": None}
    assert body["choices"][0]["logprobs"] == {"content": [{**entry, "top_logprobs": [entry]}]}


async def test_prompt_logprobs_have_vllm_s_shape(served: Served) -> None:
    body: dict[str, Any] = (await generate(served, {"prompt_logprobs": 0})).json()
    text = served.tokenizer.token_text
    assert body["prompt_logprobs"] == [
        None,
        {"6": {"logprob": -1.0, "rank": 1, "decoded_token": text(6)}},
        {"7": {"logprob": -2.0, "rank": 1, "decoded_token": text(7)}},
    ]


async def test_the_server_and_a_request_determine_the_mode_of_log_probabilities(serve: Serving) -> None:
    raw, processed = LogprobsMode.RAW, LogprobsMode.PROCESSED
    served = await serve(logprobs_mode=processed)
    await generate(served, {"logprobs": 0})
    await generate(served, {"logprobs": 0, "logprobs_mode": "raw_logprobs"})
    await generate(served, {})
    await served.chat(logprobs=True)
    await served.complete("x", logprobs=0)
    assert [one.sampling.logprobs_mode for one in served.engine.requests] == [processed, raw, raw, processed, processed]
    served = await serve()
    await generate(served, {"logprobs": 0})
    await generate(served, {"logprobs": 0, "logprobs_mode": "processed_logprobs"})
    assert [one.sampling.logprobs_mode for one in served.engine.requests] == [raw, processed]
    refused = await generate(served, {"logprobs_mode": "raw_logits"})
    assert_error(refused, status=400, param="sampling_params.logprobs_mode")


async def test_the_allowed_tokens_reach_the_engine_from_every_route(served: Served) -> None:
    await generate(served, {"allowed_token_ids": [5, 7]})
    await served.chat(allowed_token_ids=[5, 7])
    await served.complete("x", allowed_token_ids=[5, 7])
    assert [request.sampling.allowed_token_ids for request in served.engine.requests] == [(5, 7)] * 3


async def test_sampling_params_reach_the_engine(served: Served) -> None:
    await generate(served, {"seed": 3, "temperature": 0.0, "max_tokens": 2, "detokenize": False}, cache_salt="s")
    (request,) = served.engine.requests
    assert request.choices[0].seed == 3
    assert request.sampling.greedy
    assert request.sampling.max_tokens == 2
    assert request.cache_salt == "s"


@pytest.mark.parametrize(
    ("sampling", "fields", "param"),
    [
        ({"temperature": 3}, {}, "sampling_params.temperature"),
        ({"logprob_token_ids": [5, 6], "logprobs": 1}, {}, "sampling_params.logprob_token_ids"),
        ({"allowed_token_ids": []}, {}, "sampling_params.allowed_token_ids"),
        ({"allowed_token_ids": [9999]}, {}, "sampling_params.allowed_token_ids"),
        ({"logprobs": 21}, {}, "sampling_params.logprobs"),
        ({"prompt_logprobs": 21}, {}, "sampling_params.prompt_logprobs"),
        ({}, {"features": {}}, "features"),
        ({}, {"token_ids": []}, "token_ids"),
        ({}, {"token_ids": [9999]}, "token_ids"),
        ({}, {"token_ids": "x"}, "token_ids"),
    ],
)
async def test_a_refused_field_is_named(
    served: Served, sampling: dict[str, object], fields: dict[str, object], param: str
) -> None:
    assert_error(await generate(served, sampling, **fields), status=400, param=param)


async def test_token_ids_and_log_probabilities_are_equally_long_at_a_stop_string(serve: Serving) -> None:
    """Tokens that a stop string cut off used to have ids but no log-probabilities: 11 and 10."""
    served = await serve(saying("one END two"))
    tokens = fake_answer("one END")[:-1]  # without the end of the sequence
    for stream in (False, True):
        for answer, entries in (
            (await served.complete("x", stop="END", return_token_ids=True, logprobs=1, stream=stream), "tokens"),
            (await served.chat(stop="END", return_token_ids=True, logprobs=True, stream=stream), "content"),
            (await generate(served, {"stop": ["END"], "logprobs": 1}, stream=stream), "content"),
        ):
            assert answer.status_code == 200, answer.text
            parts = chunks(answer) if stream else [answer.json()]
            choices = [c for part in parts for c in part["choices"] if "token_ids" in c and c["logprobs"] is not None]
            assert [token for choice in choices for token in choice["token_ids"]] == tokens
            assert [len(c["logprobs"][entries]) for c in choices] == [len(c["token_ids"]) for c in choices]


async def test_text_becomes_tokens(served: Served) -> None:
    response = await served.http.post("/tokenize", json={"prompt": "hello there"})
    ids = fake_answer("hello there", eos=False)
    assert response.json() == {"count": len(ids), "max_model_len": 4096, "tokens": ids, "token_strs": None}


async def test_token_strings_are_from_the_vocabulary(served: Served) -> None:
    response = await served.http.post("/tokenize", json={"prompt": "hello the", "return_token_strs": True})
    assert response.json()["token_strs"] == ["hello", "Ġthe"]


async def test_chat_becomes_the_tokens_that_a_chat_request_has(served: Served) -> None:
    messages = [{"role": "user", "content": "hi"}]
    tokens = (await served.http.post("/tokenize", json={"messages": messages})).json()["tokens"]
    await served.http.post("/v1/chat/completions", json={"messages": messages})
    assert tuple(tokens) == served.engine.requests[0].prompt


async def test_generation_prompt_can_be_left_out(served: Served) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": False}
    tokens = (await served.http.post("/tokenize", json=body)).json()["tokens"]
    text = served.tokenizer.decode(tokens, skip_special_tokens=False)
    assert text == "<|im_start|>user\nhi<|im_end|>\n"


async def test_tokens_become_text_with_special_ones(served: Served) -> None:
    response = await served.http.post("/detokenize", json={"tokens": [*fake_answer("héllo", eos=False), EOS_ID]})
    assert response.json() == {"prompt": "héllo<|eos|>"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "hi"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "other": 1}, "other"),
        ("/detokenize", {"tokens": [512]}, "tokens"),
        ("/detokenize", {"tokens": [5] * 4097}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": ["x"]}, "tokens[0]"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_refused_texts_and_tokens_are_named(
    served: Served, path: str, body: dict[str, object], param: str
) -> None:
    assert_error(await served.http.post(path, json=body), status=400, param=param)


async def test_every_sampling_field_has_a_default(served: Served) -> None:
    """A body without `sampling_params` was refused."""
    bodies: list[dict[str, object]] = [{}, {"sampling_params": None}, {"sampling_params": {}}]
    for fields in bodies:
        answer = await served.http.post("/inference/v1/generate", json={"token_ids": [5, 6, 7], **fields})
        assert answer.json()["choices"][0]["finish_reason"] == "stop"
        assert served.engine.requests[-1].sampling.temperature == 1.0


async def test_no_alternatives_are_the_sampled_token_alone(serve: Serving) -> None:
    served = await serve(saying("a"))
    body = (await generate(served, {"logprobs": 0, "max_tokens": 1})).json()
    token = fake_answer("a")[0]
    (entry,) = body["choices"][0]["logprobs"]["content"]
    own = {name: entry[name] for name in ("token_id", "logprob", "rank", "token", "bytes")}
    assert (own["token_id"], own["logprob"], entry["top_logprobs"]) == (token, -0.5, [own])


async def test_the_tokenizer_is_described_in_vllm_s_shape(served: Served) -> None:
    """lm-eval's remote tokenizer reads these names."""
    info = (await served.http.get("/tokenizer_info")).json()
    assert info == {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|eos|>",
        "pad_token": "<|eos|>",
        "unk_token": None,
        "chat_template": served.tokenizer.chat_template,
        "model_max_length": served.engine.info.max_model_len,
    }


async def test_the_input_of_a_response_is_counted_as_its_answer_counts_it(served: Served) -> None:
    body = {"input": [{"role": "user", "content": "hi"}], "instructions": "be brief"}
    counted = (await served.http.post("/v1/responses/input_tokens", json=body)).json()
    answer = (await served.http.post("/v1/responses", json=body)).json()
    assert counted == {"object": "response.input_tokens", "input_tokens": answer["usage"]["input_tokens"]}
    assert_error(
        await served.http.post("/v1/responses/input_tokens", json={"input": [1]}), status=400, param="input[0]"
    )


TOKENS = fake_answer("one two END")
"""The output tokens of the choices of `started` if nothing interrupts them."""


def started(*counts: int, **fields: object) -> list[dict[str, object]]:
    """Returns choices; number i already has the i-th of these numbers of output tokens."""
    return [{"index": i, "token_ids": TOKENS[:count], **fields} for i, count in enumerate(counts)]


@streamed_or_not
async def test_choices_continue_after_the_tokens_that_they_have(serve: Serving, stream: bool) -> None:
    served = await serve(saying("one two END"))
    choices = [*started(1, 0), {"index": 5, "seed": -1, "token_ids": TOKENS[:2]}]
    fields = {"choices": choices, "stream": stream, "stream_options": {"include_usage": True} if stream else None}
    answer = await generate(served, {"seed": 40, "logprobs": 0}, **fields)
    ids: dict[int, list[int]] = defaultdict(list)
    scored: dict[int, list[int]] = defaultdict(list)
    for part in chunks(answer) if stream else [answer.json()]:
        for choice in part["choices"]:
            ids[choice["index"]] += choice["token_ids"]
            scored[choice["index"]] += [entry["token_id"] for entry in choice["logprobs"]["content"]]
    assert ids == scored == {0: TOKENS[1:], 1: TOKENS, 5: TOKENS[2:]}
    assert part["usage"]["completion_tokens"] == 3 * len(TOKENS) - 3
    (request,) = served.engine.requests
    starts = [(start.index, start.seed, start.output_tokens) for start in request.choices]
    assert starts == [(0, 40, tuple(TOKENS[:1])), (1, 41, ()), (5, 2**64 - 1, tuple(TOKENS[:2]))]
    assert request.seeded


@pytest.mark.parametrize("count", range(len(TOKENS)))
async def test_an_interrupted_choice_ends_where_the_undisturbed_one_does(serve: Serving, count: int) -> None:
    """It also ends at a stop string that started in the earlier tokens, whose text was held back."""
    served = await serve(saying("one two END"))
    for sampling in (
        {"stop": ["D"]},
        {"stop": ["two END"]},
        {"max_tokens": len(TOKENS) - 1},
        {"stop": ["one two END"]},
    ):
        (undisturbed,) = (await generate(served, dict(sampling))).json()["choices"]
        if count < len(undisturbed["token_ids"]):
            body = (await generate(served, dict(sampling), choices=started(count))).json()
            rest = undisturbed["token_ids"][count:]
            versions = [{"version": "0", "start": 0, "end": len(rest)}]
            assert body["choices"] == [{**undisturbed, "token_ids": rest, "weight_versions": versions}]
            assert body["usage"]["completion_tokens"] == len(undisturbed["token_ids"]) - count


@streamed_or_not
async def test_a_choice_that_a_stop_string_had_ended_ends_at_once(serve: Serving, stream: bool) -> None:
    served = await serve(saying("one two END"))
    answer = await generate(served, {"stop": ["one"]}, choices=started(3, 0), stream=stream)
    parts = chunks(answer) if stream else [answer.json()]
    ends = {
        c["index"]: (c["finish_reason"], c["stop_reason"]) for p in parts for c in p["choices"] if c["finish_reason"]
    }
    assert ends == {0: ("stop", "one"), 1: ("stop", "one")}
    assert [token for part in parts for c in part["choices"] if c["index"] == 0 for token in c["token_ids"]] == []


@pytest.mark.parametrize(
    ("sampling", "choices", "param"),
    [
        ({}, [], "choices"),
        ({}, [{"index": 0}], "choices[0].token_ids"),
        ({}, [{"token_ids": []}], "choices[0].index"),
        ({}, [{"index": -1, "token_ids": []}], "choices[0].index"),
        ({}, [*started(1), *started(2)], "choices[1].index"),
        ({}, [*started(1), {"index": 1, "token_ids": [5, "x"]}], "choices[1].token_ids[1]"),
        ({}, [*started(1), {"index": 1, "token_ids": [5, 6, 7, 9999]}], "choices[1].token_ids[3]"),
        ({}, [*started(1), {"index": 1, "token_ids": [5, EOS_ID]}], "choices[1].token_ids[1]"),
        ({"stop_token_ids": [6]}, [{"index": 0, "token_ids": [5, 6]}], "choices[0].token_ids[1]"),
        ({"max_tokens": 2}, started(1, 2), "choices[1].token_ids"),
        ({}, started(0, text="x"), "choices[0].text"),
        ({}, started(0, seed=2**64), "choices[0].seed"),
        ({"n": 3}, started(0, 0), "sampling_params.n"),
        ({}, [{"index": i, "token_ids": []} for i in range(257)], "choices"),
    ],
)
async def test_a_mistake_in_a_started_choice_is_named(
    served: Served, sampling: dict[str, object], choices: list[dict[str, object]], param: str
) -> None:
    assert_error(await generate(served, sampling, choices=choices), status=400, param=param)
    assert served.engine.requests == []
