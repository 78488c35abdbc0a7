"""SGLang's routes: slime's requests, the shapes that it reads, and answers equal to the answers of the other routes."""

import asyncio
import json
from itertools import pairwise
from typing import Any

import httpx
import pytest
from starlette.types import Message

from motet.types import PauseMode
from tests.api.noted_control import BAD, NotedControl
from tests.api.serving import SEED, Served, Serving, WatchedEngine, events, hello, post_to
from tests.clock import turn
from tests.error_response import assert_error
from tests.tiny_tokenizer import EOS_ID, fake_answer

pytestmark = pytest.mark.anyio

PROMPT = [5, 6, 7]
# `generate` in slime/rollout/sglang_rollout.py (slime 624b824a, 2026-08-21), with the defaults of slime's arguments.
OF_SLIME: dict[str, Any] = {
    "sampling_params": {
        "temperature": 1.0,
        "top_p": 1.0,
        "top_k": -1,
        "max_new_tokens": 100,
        "stop": None,
        "stop_token_ids": None,
        "skip_special_tokens": True,
        "no_stop_trim": True,
        "spaces_between_special_tokens": False,
        "sampling_seed": 44,
    },
    "return_logprob": True,
    "input_ids": PROMPT,
}


async def generate(served: Served, **fields: Any) -> httpx.Response:
    return await served.http.post("/generate", json=fields)


async def test_a_sample_of_slime_is_answered_as_slime_reads_it(served: Served) -> None:
    answer = (await generate(served, **OF_SLIME)).json()
    tokens = fake_answer("hello 0")
    meta = answer["meta_info"]
    name = meta.pop("id")
    assert name.startswith("generate-")
    assert answer == {
        "text": "hello 0",
        "output_ids": tokens,
        "meta_info": {
            "finish_reason": {"type": "stop", "matched": EOS_ID},
            "prompt_tokens": len(PROMPT),
            "weight_version": "0",
            "input_token_logprobs": [],
            "output_token_logprobs": [[-0.5, token, None] for token in tokens],
            "output_token_logprobs_length": len(tokens),
            "completion_tokens": len(tokens),
            "cached_tokens": 0,
            "weight_versions": [{"version": "0", "start": 0, "end": len(tokens)}],
        },
    }
    (request,) = served.engine.requests
    assert (request.prompt, request.choices[0].seed, request.sampling.max_tokens) == (tuple(PROMPT), 44, 100)


async def test_the_calls_of_slime_s_engine_are_answered(trained: Served, control: NotedControl) -> None:
    """slime/backends/sglang_utils/sglang_engine.py and server_control.py (slime 624b824a), in the order of a step."""
    http = trained.http
    assert (await http.get("/health_generate", headers={"authorization": "Bearer None"})).status_code == 200
    assert (await http.post("/abort_request", json={"abort_all": True})).status_code == 200
    loads = (await http.get("/v1/loads?include=core")).json()["loads"]
    assert loads == [{"num_running_reqs": 0, "num_waiting_reqs": 0, "num_total_reqs": 0}]
    assert (await http.post("/pause_generation", json={})).json()["status"] == "ok"
    update = {"model_path": "/step-3", "load_format": "auto", "weight_version": "3"}
    assert (await http.post("/update_weights_from_disk", json=update)).json()["success"] is True
    assert (await http.post("/continue_generation", json={})).json()["status"] == "ok"
    assert (await http.get("/get_weight_version")).json() == {"weight_version": "3"}
    assert control.calls[:2] == [None, PauseMode.ABORT]
    assert not control.engines.paused


async def test_other_calls_of_trainers_reach_the_weights(trained: Served, control: NotedControl) -> None:
    for mode in ("in_place", "retract"):
        await trained.http.post("/pause_generation", json={"mode": mode})
    await trained.http.post("/abort_request", json={"rid": "mine"})
    await trained.http.post("/update_weights_from_disk", json={"model_path": "/x", "abort_all_requests": True})
    assert control.calls[:4] == [PauseMode.KEEP, PauseMode.KEEP, ["mine"], None]
    for path in ("/get_model_info", "/model_info"):
        info = (await trained.http.get(path)).json()
        assert (info["is_generation"], info["weight_version"]) == (True, "1")


async def test_weights_that_cannot_be_used_are_refused_by_sglang_s_name(trained: Served) -> None:
    refused = await trained.http.post("/update_weights_from_disk", json={"model_path": str(BAD)})
    assert_error(refused, status=400, param="model_path")
    assert "'model_path'" in refused.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/abort_request", "/pause_generation", "/continue_generation"])
async def test_trainers_routes_need_rl(served: Served, path: str) -> None:
    assert_error(await served.http.post(path, json={}), status=404, code="rl_off")


async def test_trainers_routes_need_the_admin_key_and_generate_an_api_key(serve: Serving) -> None:
    served = await serve(rl=True, api_keys=("client",), admin_key="admin")
    served.service.control = NotedControl()
    keys = {name: {"authorization": f"Bearer {name}"} for name in ("client", "admin")}
    for path in ("/abort_request", "/pause_generation", "/continue_generation"):
        statuses = [(await served.http.post(path, json={}, headers=keys[name])).status_code for name in keys]
        assert statuses == [401, 200]
    for path in ("/get_weight_version", "/get_model_info", "/model_info", "/v1/loads"):
        statuses = [(await served.http.get(path, headers=keys[name])).status_code for name in keys]
        assert statuses == [401, 200]
    body = {"input_ids": PROMPT}
    statuses = [(await served.http.post("/generate", json=body, headers=keys[name])).status_code for name in keys]
    assert statuses == [200, 401]
    assert (await served.http.get("/health_generate")).status_code == 200


async def test_a_batch_with_several_choices_is_a_list_of_what_completions_answer(serve: Serving) -> None:
    served = await serve(lambda request, start: fake_answer(f"{request.prompt[0]} {start.seed}"))
    prompts = [[5, 6], [7]]
    fields = {"n": 3, "ignore_eos": False}
    answers = (await generate(served, input_ids=prompts, sampling_params=fields | {"sampling_seed": 9}, rid="r")).json()
    expected = (await served.complete(prompts, seed=9, max_tokens=100, return_token_ids=True, n=3)).json()["choices"]
    assert [one["text"] for one in answers] == [one["text"] for one in expected]
    assert [one["output_ids"] for one in answers] == [one["token_ids"] for one in expected]
    assert [one["meta_info"]["id"] for one in answers] == [f"r_{place}" for place in range(6)]
    assert [one["meta_info"]["prompt_tokens"] for one in answers] == [2, 2, 2, 1, 1, 1]


@pytest.mark.parametrize(
    ("prompt", "listed"),
    [({"text": "hi"}, False), ({"text": ["hi"]}, True), ({"input_ids": [5]}, False), ({"input_ids": [[5]]}, True)],
)
async def test_a_prompt_in_a_list_gets_a_list(served: Served, prompt: dict[str, object], listed: bool) -> None:
    answer = (await generate(served, **prompt)).json()
    assert isinstance(answer, list) == listed
    (one,) = answer if listed else [answer]
    assert one["text"] == "hello 0"


async def test_events_that_a_client_cannot_receive_yet_are_one_event(serve: Serving) -> None:
    """The bug: each event repeats the choice, so a slow client of 500 tokens with 128 log-probabilities each got 500
    events of up to 2 MB."""
    engine = WatchedEngine(gated=True)
    served = await serve(engine=engine)
    sampling = {"max_new_tokens": 8, "n": 2, "ignore_eos": True}
    body = {"input_ids": PROMPT, "sampling_params": sampling, "stream": True}
    unread: list[Message] = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]
    received: list[bytes] = []
    reading = asyncio.Semaphore(0)

    async def receive() -> Message:
        if not unread:
            await asyncio.Event().wait()  # the client stays
        return unread.pop()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            received.append(message["body"])
            await reading.acquire()

    answering = asyncio.create_task(served.app({**post_to("/generate"), "state": {}}, receive, send))
    engine.go(8)
    await engine.submitted.acquire()
    await turn(200)
    assert (len(received), len(engine.open)) == (1, 0)
    for _ in range(9):
        reading.release()
    await answering
    data = [json.loads(event.removeprefix("data: ")) for event in b"".join(received).decode().split("\n\n")[:-2]]
    assert len(data) <= 4  # of 16
    for index in range(2):
        *_, last = [event for event in data if event["index"] == index]
        assert (last["output_ids"], last["meta_info"]["completion_tokens"]) == (fake_answer(f"hello {index}") * 2, 8)


@pytest.mark.parametrize("start", [0, 2, 39])
async def test_the_prompt_is_scored_from_a_token_on_also_in_streams(served: Served, start: int) -> None:
    """The first listed token has no log-probability, and every event of a stream repeats the list, as in SGLang."""
    ids = [*range(5, 45)]
    fields = {"input_ids": ids, "return_logprob": True, "logprob_start_len": start, "top_logprobs_num": 1, "rid": "a"}
    unstreamed = (await generate(served, **fields)).json()
    meta = unstreamed["meta_info"]
    scored = [[-float(place), token, None] for place, token in enumerate(ids)][start + 1 :]
    assert meta["input_token_logprobs"] == [[None, ids[start], None], *scored]
    assert meta["input_top_logprobs"] == [None, *[[]] * len(scored)]
    *data, end = events(await generate(served, **fields, stream=True))
    assert (json.loads(data[-1]), end) == (unstreamed, "[DONE]")
    assert json.loads(data[0])["meta_info"]["input_token_logprobs"] == meta["input_token_logprobs"]


async def test_each_event_of_a_stream_has_the_choice_so_far(served: Served) -> None:
    sampling = {"n": 2, "max_new_tokens": 3}
    fields = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "rid": "r"}
    unstreamed = (await generate(served, **fields)).json()
    *data, end = events(await generate(served, **fields, stream=True))
    assert end == "[DONE]"
    events_of: dict[int, list[dict[str, Any]]] = {0: [], 1: []}
    for event in map(json.loads, data):
        events_of[event.pop("index")].append(event)
    for index, choice_events in events_of.items():
        assert choice_events[-1] == unstreamed[index]
        assert choice_events[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 3}
        for before, after in pairwise(choice_events):
            assert before["meta_info"]["finish_reason"] is None
            assert after["text"].startswith(before["text"])
            assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
            logprobs = [one["meta_info"]["output_token_logprobs"] for one in (before, after)]
            assert logprobs[1][: len(logprobs[0])] == logprobs[0]
            assert len(logprobs[0]) == len(before["output_ids"]) == before["meta_info"]["completion_tokens"]


async def test_log_probabilities_have_sglang_s_forms(served: Served) -> None:
    fields = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
    meta = (await generate(served, **fields, logprob_start_len=0, top_logprobs_num=2)).json()["meta_info"]
    (token,) = [entry[1] for entry in meta["output_token_logprobs"]]
    assert meta["input_token_logprobs"] == [[None, 5, None], [-1.0, 6, None], [-2.0, 7, None]]
    assert meta["input_top_logprobs"] == [None, [], []]
    assert meta["output_top_logprobs"] == [[[-0.5, token, None], [-1.5, token + 1, None]]]
    meta = (await generate(served, **fields, token_ids_logprob=[9, token])).json()["meta_info"]
    assert meta["output_token_ids_logprobs"] == [[[-1.0, 9, None], [-0.5, token, None]]]
    meta = (await generate(served, **fields, logprob_start_len=0, return_text_in_logprobs=True)).json()["meta_info"]
    assert meta["output_token_logprobs"] == [[-0.5, token, served.tokenizer.token_text(token)]]
    texts = [text for _, _, text in meta["input_token_logprobs"]]  # the first token has one too
    assert texts == [served.tokenizer.token_text(token) for token in PROMPT]


async def test_named_tokens_are_scored_next_to_the_likeliest_ones_and_in_the_prompt(served: Served) -> None:
    """SGLang's clients combine these fields, and each combination was refused."""
    fields = {"sampling_params": {"max_new_tokens": 1}, "return_logprob": True, "logprob_start_len": 0}
    both = {"top_logprobs_num": 1, "token_ids_logprob": [9, 8]}
    meta = (await generate(served, input_ids=PROMPT, **fields, **both)).json()["meta_info"]
    (token,) = [entry[1] for entry in meta["output_token_logprobs"]]
    assert meta["output_top_logprobs"] == [[[-0.5, token, None]]]
    assert meta["output_token_ids_logprobs"] == [[[-1.0, 9, None], [-2.0, 8, None]]]
    assert meta["input_token_logprobs"] == [[None, 5, None], [-1.0, 6, None], [-2.0, 7, None]]
    assert meta["input_token_ids_logprobs"] == [None, *[[[-1.0, 9, None], [-2.0, 8, None]]] * 2]
    (request,) = served.engine.requests
    sampling = request.sampling
    assert (sampling.logprobs, sampling.logprob_token_ids, sampling.prompt_logprob_token_ids) == (1, (9, 8), (9, 8))


async def test_each_prompt_can_name_its_own_tokens(served: Served) -> None:
    fields = {"sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
    named = {"input_ids": [[5, 6], [7, 8], [9]], "token_ids_logprob": [[9], [4, 3], []]}
    answers = (await generate(served, **named, **fields)).json()
    listed = [answer["meta_info"]["output_token_ids_logprobs"] for answer in answers]
    assert [[id for _, id, _ in tokens] for (tokens,) in listed] == named["token_ids_logprob"]


async def test_a_prompt_alone_is_scored_as_slime_s_teachers_do(served: Served) -> None:
    """slime/rollout/on_policy_distillation.py."""
    sampling = {"temperature": 0, "max_new_tokens": 0, "skip_special_tokens": False}
    fields = {"input_ids": PROMPT, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
    answer = (await generate(served, **fields)).json()
    assert (answer["text"], answer["output_ids"]) == ("", [])
    meta = answer["meta_info"]
    assert meta["input_token_logprobs"][1:] == [[-1.0, 6, None], [-2.0, 7, None]]
    assert (meta["output_token_logprobs"], meta["finish_reason"]) == ([], {"type": "length", "length": 0})


async def test_each_prompt_of_a_batch_is_scored(served: Served) -> None:
    fields = {"input_ids": [[5, 6], [7, 8, 9]], "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
    answers = (await generate(served, **fields, logprob_start_len=0)).json()
    assert [one["meta_info"]["input_token_logprobs"] for one in answers] == [
        [[None, 5, None], [-1.0, 6, None]],
        [[None, 7, None], [-1.0, 8, None], [-2.0, 9, None]],
    ]


async def test_stop_strings_are_kept_or_cut(served: Served) -> None:
    for trim, text in ((False, "he"), (True, "hell")):
        sampling = {"stop": ["ll"], "no_stop_trim": trim}
        answer = (await generate(served, input_ids=PROMPT, sampling_params=sampling)).json()
        assert (answer["text"], answer["meta_info"]["finish_reason"]) == (text, {"type": "stop", "matched": "ll"})


async def test_new_weights_are_reported(serve: Serving) -> None:
    served = await serve(hello)
    served.engine.scenario.new_weights = {2: "7"}
    sampling = {"max_new_tokens": 5, "ignore_eos": True}
    meta = (await generate(served, input_ids=PROMPT, sampling_params=sampling)).json()["meta_info"]
    assert meta["weight_version"] == "7"
    assert meta["weight_versions"] == [{"version": "0", "start": 0, "end": 2}, {"version": "7", "start": 2, "end": 5}]


async def test_a_rid_names_the_request_also_of_each_prompt(serve: Serving) -> None:
    served = await serve()
    await generate(served, input_ids=PROMPT, rid="one")
    await generate(served, input_ids=[[5], [6]], rid=["a", "b"])
    await generate(served, input_ids=[[5], [6]], rid="both")
    assert [request.trace for request in served.engine.requests] == ["one", "a", "b", "both", "both"]
    assert [request.choices[0].seed for request in served.engine.requests] == [SEED] * 5


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input_ids"),
        ({"text": "a", "input_ids": [5]}, "text"),
        ({"text": [5]}, "text"),
        ({"input_ids": "a"}, "input_ids"),
        ({"input_ids": [[5], []]}, "input_ids[1]"),
        ({"input_ids": [9999]}, "input_ids"),
        ({"sampling_params": {"max_tokens": 5}}, "sampling_params.max_tokens"),
        ({"sampling_params": {"max_new_tokens": 10**9}}, "input_ids"),
        ({"sampling_params": {"min_new_tokens": 9, "max_new_tokens": 5}}, "sampling_params.min_new_tokens"),
        ({"sampling_params": {"n": 0}}, "sampling_params.n"),
        ({"sampling_params": {"n": 1000}}, "sampling_params.n"),
        ({"sampling_params": {"ebnf": "root ::= ("}}, "sampling_params.ebnf"),
        ({"sampling_params": {"regex": "a", "ebnf": 'root ::= "a"'}}, "sampling_params.ebnf"),
        ({"sampling_params": {"stop_regex": "a"}}, "sampling_params.stop_regex"),
        ({"sampling_params": {"regex": "a", "json_schema": "{}"}}, "sampling_params.json_schema"),
        ({"sampling_params": {"json_schema": "{"}}, "sampling_params.json_schema"),
        ({"sampling_params": {"custom_params": {"return_top_p_token_ids": True}}}, "sampling_params.custom_params"),
        ({"image_data": ["data:image/png;base64,AA=="]}, "image_data"),
        ({"sampling_params": []}, "sampling_params"),
        ({"sampling_params": [{}, {}]}, "sampling_params"),
        ({"sampling_params": [{"max_new_tokens": -1}]}, "sampling_params[0].max_new_tokens"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"max_new_tokens": 5000}]}, "text"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"min_new_tokens": 500}]}, "sampling_params[1].min_new_tokens"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"logit_bias": {"9999": 1}}]}, "sampling_params[1].logit_bias"),
        ({"text": ["a", "b"], "sampling_params": [{}, {"regex": "("}]}, "sampling_params[1].regex"),
        ({"text": ["a", "b"], "sampling_params": [{"n": 2}, {}]}, "sampling_params[1].n"),
        ({"return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        ({"return_logprob": True, "logprob_start_len": 3, "input_ids": [[5] * 4, [6] * 3]}, "logprob_start_len"),
        (
            {
                "return_logprob": True,
                "logprob_start_len": 0,
                "top_logprobs_num": 1,
                "stream": True,
                "input_ids": [5] * 3900,
            },
            "stream",
        ),
        ({"return_logprob": True, "top_logprobs_num": 21}, "top_logprobs_num"),
        ({"return_logprob": True, "token_ids_logprob": [9999]}, "token_ids_logprob"),
        ({"return_logprob": True, "token_ids_logprob": [[5], [9999]], "input_ids": [[5], [6]]}, "token_ids_logprob"),
        ({"return_logprob": True, "token_ids_logprob": [[5]], "input_ids": [[5], [6]]}, "token_ids_logprob"),
        ({"return_logprob": True, "token_ids_logprob": [[5], 6]}, "token_ids_logprob"),
        ({"return_logprob": True, "token_ids_logprob": [True]}, "token_ids_logprob"),
        ({"return_logprob": True, "token_ids_logprob": [*range(129)]}, "token_ids_logprob"),
        ({"token_ids_logprob": [5]}, "token_ids_logprob"),
        ({"top_logprobs_num": 1}, "top_logprobs_num"),
        ({"return_routed_experts": True}, "return_routed_experts"),
        ({"stream": True, "sampling_params": {"n": 8, "max_new_tokens": 3000}}, "stream"),
        ({"stream": True, "return_logprob": True, "sampling_params": {"n": 2, "max_new_tokens": 3000}}, "stream"),
        (
            {
                "stream": True,
                "return_logprob": True,
                "token_ids_logprob": [*range(128)],
                "sampling_params": {"max_new_tokens": 60},
            },
            "stream",
        ),
        ({"image_data": ["x"]}, "image_data"),
        ({"lora_path": "x"}, "lora_path"),
        ({"priority": 1}, "priority"),
        ({"rid": "a b"}, "rid"),
        ({"rid": ["a", "b"]}, "rid"),
    ],
)
async def test_a_field_that_is_not_honoured_is_refused_by_name(
    refusing: Served, fields: dict[str, object], param: str
) -> None:
    prompt = {} if not fields or "text" in fields else {"input_ids": [5]}
    assert_error(await generate(refusing, **prompt | fields), status=400, param=param)


async def test_each_prompt_can_have_its_own_parameters(serve: Serving) -> None:
    served = await serve(lambda request, start: fake_answer("one. two. three."), max_open_answer_bytes=100_000)
    each = [
        {"sampling_seed": 3, "max_new_tokens": 100, "stop": "two"},
        {"sampling_seed": 8, "temperature": 0, "max_new_tokens": 4},
        {"max_new_tokens": 0},
    ]
    answers = (await generate(served, text=["a", "b", "c"], rid=["x", "y", "z"], sampling_params=each)).json()
    assert [answer["meta_info"]["id"] for answer in answers] == ["x", "y", "z"]
    for number, sampling in enumerate(each):
        alone = (await generate(served, text="abc"[number], sampling_params=sampling)).json()
        assert (alone["text"], alone["output_ids"]) == (answers[number]["text"], answers[number]["output_ids"])
        assert alone["meta_info"]["finish_reason"] == answers[number]["meta_info"]["finish_reason"]
    together, apart = served.engine.requests[:3], served.engine.requests[3:]
    assert len({request.request_id for request in together}) == 3
    assert [request.sampling for request in together] == [request.sampling for request in apart]
    assert [request.choices[0].seed for request in together[:2]] == [3, 8]
    many = {"return_logprob": True, "sampling_params": [{"max_new_tokens": 2000, "ignore_eos": True}] * 3}
    refused = await generate(served, text=["a", "b", "c"], **many)
    assert_error(refused, status=400, code="answer_too_large")
