"""The field `group`: choices end and start under a policy, on every route that has it, streamed and not streamed."""

import asyncio
from typing import Any

import pytest

from motet.types import LogprobsMode
from tests.api.serving import MODEL, PROMPT, ROUTES, Served, Serving, chunks, every_route, saying
from tests.error_response import assert_error

pytestmark = pytest.mark.anyio

ANSWERS = ("so\n4", "so\n5", "hm\n4", "well\n4", "in the end\n4")
AGREE: dict[str, object] = {"stop_when": {"agree": 2}, "extract": "last_line", "vote": True}


def body_for(path: str, n: int, group: object, **fields: object) -> dict[str, object]:
    """Returns a body for n choices that are steered."""
    body = ROUTES[path] | {"group": group} | fields
    return body | ({"sampling_params": {"n": n}} if path == "/inference/v1/generate" else {"n": n})


def ends(choices: list[dict[str, Any]]) -> dict[int, str]:
    return {choice["index"]: choice["finish_reason"] for choice in choices if choice["finish_reason"]}


@every_route
async def test_a_group_ends_when_its_answers_agree_and_reports_the_vote(serve: Serving, path: str) -> None:
    served = await serve(saying(*ANSWERS))
    answer = (await served.http.post(path, json=body_for(path, 5, AGREE))).json()
    assert ends(answer["choices"]) == {0: "stop", 1: "stop", 2: "stop", 3: "abort", 4: "abort"}
    (report,) = answer["groups"]
    assert report["id"] == served.engine.requests[0].request_id
    assert report["vote"] == {"majority": "4", "count": 2, "values": {"0": "4", "1": "5", "2": "4"}}
    counts = {name: report[name] for name in ("n", "begun", "finished", "aborted", "stopped_by")}
    assert counts == {"n": 5, "begun": 5, "finished": 3, "aborted": 2, "stopped_by": "agree"}
    streamed = chunks(await served.http.post(path, json=body_for(path, 5, AGREE, stream=True)))
    assert ends([choice for chunk in streamed for choice in chunk["choices"]]) == ends(answer["choices"])
    assert streamed[-1]["choices"] == []
    assert streamed[-1]["groups"] == [report | {"id": served.engine.requests[1].request_id}]


async def test_ended_choices_are_omitted_on_request_and_the_others_keep_their_indices(serve: Serving) -> None:
    served = await serve(saying("long answer", "ab", "longer answer", "ab"))
    answer = (await served.chat(n=4, group={"stop_when": {"finished": 2}, "keep": "finished"})).json()
    assert [choice["index"] for choice in answer["choices"]] == [1, 3]
    tokens = sum(len(sent.choices) * 3 for sent in served.engine.requests)
    assert answer["usage"]["completion_tokens"] == tokens


async def test_choices_that_never_started_are_not_in_the_answer(serve: Serving) -> None:
    served = await serve(saying("4"))
    group = {"stop_when": {"window": 2}, "extract": "last_number", "start": 2}
    answer = (await served.chat(n=40, group=group)).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    assert answer["groups"][0]["begun"] == 2
    streamed = chunks(await served.chat(n=40, group=group, stream=True))
    assert {choice["index"] for chunk in streamed for choice in chunk["choices"]} == {0, 1}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
async def test_a_choice_that_starts_later_streams_like_one_that_starts_at_once(serve: Serving, path: str) -> None:
    served = await serve(saying("a", "abcd", "abc"))
    fields = {"echo": True, "logprobs": 1} if path == "/v1/completions" else {}
    plain = chunks(await served.http.post(path, json=ROUTES[path] | {"n": 3, "stream": True} | fields))
    later = chunks(await served.http.post(path, json=body_for(path, 3, {"start": 1}, stream=True, **fields)))
    for index in range(3):
        assert of_choice(later, index) == of_choice(plain, index)


def of_choice(stream: list[dict[str, Any]], index: int) -> list[dict[str, Any]]:
    return [choice for chunk in stream for choice in chunk["choices"] if choice["index"] == index]


async def test_each_prompt_of_a_completion_is_steered_by_itself(serve: Serving) -> None:
    served = await serve(saying(*ANSWERS))
    answer = (await served.complete(["x", "y"], n=4, group=AGREE)).json()
    assert [report["stopped_by"] for report in answer["groups"]] == ["agree", "agree"]
    assert ends(answer["choices"]) == {
        0: "stop",
        1: "stop",
        2: "stop",
        3: "abort",
        4: "stop",
        5: "stop",
        6: "stop",
        7: "abort",
    }


async def test_the_reports_of_a_stream_have_the_order_of_the_prompts(serve: Serving) -> None:
    """The order is not that in which the groups ended."""
    served = await serve(lambda sent, _: [70] * (1 + 8 * sent.request_id.endswith("-0")) + [0])
    served.engine.scenario.gate = asyncio.Semaphore(20)  # both take their steps in turn
    streamed = chunks(await served.complete(["x", "y"], stream=True, group={"vote": True, "extract": "last_line"}))
    assert [report["id"] for report in streamed[-1]["groups"]] == [one.request_id for one in served.engine.requests]


async def test_confidence_takes_log_probabilities_that_the_answer_does_not_show(serve: Serving) -> None:
    served = await serve(saying("abcdefgh"))
    rule = {"window": 2, "below": 2.5, "top": 4}  # the fake's tokens all have 2.0
    answer = (await served.chat(n=2, group={"confidence": rule})).json()
    assert served.engine.requests[0].sampling.logprobs == 4
    assert ends(answer["choices"]) == {0: "abort", 1: "abort"}
    assert [choice["logprobs"] for choice in answer["choices"]] == [None, None]
    assert answer["groups"][0]["confidence"] == {"threshold": 2.5, "lowest": {"0": 2.0, "1": 2.0}}
    shown = (await served.chat(n=2, group={"confidence": rule}, logprobs=True, top_logprobs=1)).json()
    assert [len(entry["top_logprobs"]) for entry in shown["choices"][0]["logprobs"]["content"]] == [1, 1]


async def test_the_official_client_sends_a_policy_and_reads_the_report(serve: Serving) -> None:
    served = await serve(saying(*ANSWERS))
    answer = await served.openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "hi"}], n=5, extra_body={"group": AGREE}
    )
    assert answer.model_extra is not None
    assert answer.model_extra["groups"][0]["vote"]["majority"] == "4"


@pytest.mark.parametrize(
    ("group", "param"),
    [
        ({"stop_when": {}}, "group.stop_when"),
        ({"stop_when": {"finished": 1, "agree": 2}}, "group.stop_when"),
        ({"stop_when": {"finished": 0}}, "group.stop_when.finished"),
        ({"stop_when": {"finished": 5}}, "group.stop_when.finished"),
        ({"stop_when": {"agree": 5}, "extract": "boxed"}, "group.stop_when.agree"),
        ({"stop_when": {"agree": 2}}, "group.extract"),
        ({"stop_when": {"posterior": 1}, "extract": "boxed"}, "group.stop_when.posterior"),
        ({"stop_when": {"posterior": 0.5}, "extract": "boxed"}, "group.stop_when.posterior"),
        ({"stop_when": {"window": 1}, "extract": "boxed"}, "group.stop_when.window"),
        ({"stop_when": {"any_of": []}}, "group.stop_when.any_of"),
        ({"stop_when": {"any_of": [{"any_of": [{"finished": 1}]}]}}, "group.stop_when.any_of"),
        ({"stop_when": {"any_of": [{"finished": 1}, {"finished": 9}]}}, "group.stop_when.any_of[1].finished"),
        ({"vote": True}, "group.extract"),
        ({"extract": "first_line"}, "group.extract"),
        ({"extract": {"regex": "a", "json_pointer": "/a"}}, "group.extract"),
        ({"extract": {"regex": "(?=a)"}}, "group.extract.regex"),
        ({"extract": {"regex": 5}}, "group.extract.regex"),
        ({"extract": {"json_pointer": "a"}}, "group.extract.json_pointer"),
        ({"extract": "boxed", "stop_when": {"agree": 2, "extract": "last_line"}}, "group.extract"),
        ({"start": 0}, "group.start"),
        ({"start": 5}, "group.start"),
        ({"refill": "all"}, "group.refill"),
        ({"confidence": {"window": 8}}, "group.confidence"),
        ({"confidence": {"window": 8, "below": 1, "warm_up": 2}}, "group.confidence"),
        ({"confidence": {"window": 8, "warm_up": 5}}, "group.confidence.warm_up"),
        ({"confidence": {"window": 8, "below": 1, "top": 500}}, "group.confidence.top"),
        ({"keep": "some"}, "group.keep"),
        ({"keep": "finished", "stream": True}, "group.stream"),
        ({"unheard_of": 1}, "group.unheard_of"),
        ([], "group"),
    ],
    ids=str,
)
async def test_an_impossible_policy_is_refused_by_the_name_of_its_field(
    refusing: Served, group: object, param: str
) -> None:
    assert_error(await refusing.chat(n=4, group=group), status=400, param=param)


async def test_a_stream_cannot_take_back_choices(refusing: Served) -> None:
    assert_error(await refusing.chat(n=4, stream=True, group={"keep": "finished"}), status=400, param="group.keep")


async def test_started_choices_cannot_have_a_policy(refusing: Served) -> None:
    resumed = {"token_ids": PROMPT, "sampling_params": {}, "choices": [{"index": 3, "token_ids": [5]}]}
    answer = await refusing.http.post("/inference/v1/generate", json=resumed | {"group": {"start": 1}})
    assert_error(answer, status=400, param="group")


async def test_confidence_is_of_the_models_own_log_probabilities(serve: Serving) -> None:
    served = await serve(logprobs_mode=LogprobsMode.PROCESSED)
    group = {"confidence": {"window": 2, "below": 1.0}}
    assert_error(await served.chat(n=2, logprobs=True, top_logprobs=2, group=group), status=400, param="top_logprobs")
    assert (await served.chat(n=2, group=group)).status_code == 200
    assert served.engine.requests[0].sampling.logprobs_mode is LogprobsMode.RAW


async def test_the_best_of_several_cannot_be_steered(refusing: Served) -> None:
    answer = await refusing.complete(PROMPT, n=1, best_of=2, group={"start": 1})
    assert_error(answer, status=400, param="best_of")
