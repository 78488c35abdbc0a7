"""`/v1/groups`: the state of a group, the end of single choices, and more choices."""

import asyncio
import gc
from collections.abc import Collection, Iterator
from contextlib import suppress
from typing import Any

import pytest

from motet.api.generation.answer_form import StructuredOutputs
from motet.api.http.admission import ANONYMOUS
from motet.api.known_groups import REPORTS, ChoiceReport, ChoiceState, FurtherChoices, KnownGroup, KnownGroups
from motet.api.openai.chat_schema import Message
from motet.errors import NotFoundError, OverloadedError, RequestError
from motet.ids import RequestId
from motet.loop_budget import BUDGET
from tests.api.serving import ROUTES, SEED, Served, Serving, WatchedEngine, chunks, every_route, saying
from tests.clock import CountedBudget
from tests.error_response import assert_error
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.anyio

ONE, OTHER = {"authorization": "Bearer sk-one"}, {"authorization": "Bearer sk-other"}


async def gated(serve: Serving, *answers: str, **settings: Any) -> Served:
    engine = WatchedEngine(saying(*answers), gated=True)
    return await serve(engine=engine, **settings)


async def until(served: Served, id: str, tokens: int) -> dict[str, Any]:
    """Returns the group once its choices have at least `tokens` tokens in total."""
    while True:
        shown: dict[str, Any] = (await served.http.get(f"/v1/groups/{id}")).json()
        if sum(choice["tokens"] for choice in shown["choices"]) >= tokens:
            return shown


async def test_a_group_can_be_inspected_while_it_generates(serve: Serving) -> None:
    served = await gated(serve, "abcd", "a")
    answering = await served.engine.start_request(served.chat(n=2))
    id = served.engine.requests[0].request_id
    served.engine.go(2)
    shown = await until(served, id, 4)
    assert (shown["id"], shown["object"], shown["state"], shown["kept_s"]) == (id, "group", "writing", None)
    assert shown["choices"] == [
        {"index": 0, "state": "writing", "tokens": 2, "finish_reason": None, "worker": "engine-0"},
        {"index": 1, "state": "over", "tokens": 2, "finish_reason": "stop", "worker": "engine-0"},
    ]
    served.engine.go()
    assert (await answering).json()["id"] == id
    assert_error(await served.http.get(f"/v1/groups/{id}"), status=404, code="group_not_found")


async def test_a_choice_can_be_ended_by_another_request(serve: Serving) -> None:
    served = await gated(serve, "abcd", "efgh")
    answering = await served.engine.start_request(served.chat(n=2))
    id = served.engine.requests[0].request_id
    served.engine.go(2)
    await until(served, id, 4)
    for ended in (True, False):
        answer = await served.http.delete(f"/v1/groups/{id}/choices/1")
        assert answer.json() == {"id": id, "object": "group.choice", "index": 1, "ended": ended}
    assert set(served.engine.open[RequestId(id)].unfinished) == {0}
    assert_error(await served.http.delete(f"/v1/groups/{id}/choices/2"), status=404, code="choice_not_found")
    assert_error(await served.http.delete(f"/v1/groups/{id}/choices/x"), status=404, code="choice_not_found")
    served.engine.go()
    shown = [(one["message"]["content"], one["finish_reason"]) for one in (await answering).json()["choices"]]
    assert shown == [("abcd", "stop"), ("ef", "abort")]


async def test_a_group_can_be_ended_by_another_request(serve: Serving) -> None:
    served = await gated(serve, "abcd", "efgh")
    answering = await served.engine.start_request(served.chat(n=2, stream=True))
    id = served.engine.requests[0].request_id
    served.engine.go(1)
    await until(served, id, 2)
    assert (await served.http.delete(f"/v1/groups/{id}")).json() == {
        "id": id,
        "object": "group.deleted",
        "deleted": True,
    }
    finishes = [
        one["finish_reason"] for chunk in chunks(await answering) for one in chunk["choices"] if one["finish_reason"]
    ]
    assert finishes == ["abort", "abort"]


@pytest.mark.parametrize("named", ["answer", "request"])
async def test_answers_in_progress_are_aborted_by_their_ids(serve: Serving, named: str) -> None:
    served = await gated(serve, "abcd")
    body = {"token_ids": [5, 6], "request_id": "mine", "stream": True}
    answering = await served.engine.start_request(served.http.post("/inference/v1/generate", json=body))
    id = served.engine.requests[0].request_id
    served.engine.go(1)
    await until(served, id, 1)
    path = "/inference/v1/abort_requests"
    for ids, aborted in ((["unknown"], 0), ([], 0), (["mine" if named == "request" else id, "unknown"], 1)):
        answer = await served.http.post(path, json={"request_ids": ids})
        assert answer.json() == {"status": "aborted", "aborted": aborted}
    received = chunks(await answering)
    assert received[-1]["choices"][0]["finish_reason"] == "abort"
    assert {chunk["request_id"] for chunk in received} == {"mine"}
    assert_error(await served.http.post(path, json={}), status=400, param="request_ids")


async def test_only_answers_of_the_same_client_are_aborted() -> None:
    groups = KnownGroups(lambda: 0.0)
    for id, client, sender in (("a-1", "a", "x"), ("a-2", "a", "y"), ("b-1", "b", "x")):
        groups.opened(known(id, 0, client=client), Part(0, sender=sender))
    for ids, found in (({"guessed"}, ["a-1"]), ({"guessed", "a-2", "b-1"}, ["a-1", "a-2"])):
        assert [group.id for group in groups.in_progress(ids, client="a", sender="x")] == found


async def test_more_choices_are_those_that_a_larger_group_would_have_had(serve: Serving) -> None:
    served = await serve(lambda _, start: [70 + start.seed - SEED, 0])
    first = (await served.chat(n=2, keep_s=60)).json()
    path = f"/v1/groups/{first['id']}/more"
    more = (await served.http.post(path, json={"n": 2})).json()
    streamed = chunks(await served.http.post(path, json={"n": 1, "stream": True}))
    large = (await served.chat(n=5)).json()
    assert more["choices"] == large["choices"][2:4]
    assert more["id"] == first["id"]
    assert streamed[-1]["choices"][0]["index"] == 4
    shown = (await served.http.get(f"/v1/groups/{first['id']}")).json()
    assert [choice["index"] for choice in shown["choices"]] == [0, 1, 2, 3, 4]
    assert (shown["state"], 0 < shown["kept_s"] <= 60) == ("over", True)
    prompts = {sent.prompt for sent in served.engine.requests}
    assert len(prompts) == 1


async def test_a_group_that_is_not_kept_can_have_no_more(serve: Serving) -> None:
    served = await serve()
    first = (await served.chat(n=2)).json()
    answer = await served.http.post(f"/v1/groups/{first['id']}/more", json={"n": 2})
    assert_error(answer, status=404, code="group_not_found")


async def test_more_choices_are_limited_as_those_of_a_request(serve: Serving) -> None:
    served = await serve(max_n=3)
    first = (await served.chat(n=2, keep_s=60)).json()
    path = f"/v1/groups/{first['id']}/more"
    assert_error(await served.http.post(path, json={"n": 4}), status=400, param="n")
    assert_error(await served.http.post(path, json={"n": 0}), status=400, param="n")
    assert_error(await served.http.post(path, json={}), status=400, param="n")
    assert_error(await served.http.post(path, json={"n": 1, "temperature": 0}), status=400, param="temperature")
    assert [one["index"] for one in (await served.http.post(path, json={"n": 1})).json()["choices"]] == [2]


async def test_a_request_with_several_prompts_has_a_group_for_each_and_no_more(serve: Serving) -> None:
    served = await serve()
    first = (await served.complete(["x", "y"], n=2, keep_s=60)).json()
    shown = (await served.http.get(f"/v1/groups/{first['id']}-1")).json()
    assert [choice["index"] for choice in shown["choices"]] == [0, 1]
    assert_error(await served.http.post(f"/v1/groups/{first['id']}-1/more", json={"n": 1}), status=400, param="n")


async def test_a_group_of_another_key_is_not_found(serve: Serving) -> None:
    served = await serve(api_keys=("sk-one", "sk-other"))
    body = {"messages": [{"role": "user", "content": "hi"}], "keep_s": 60}
    first = (await served.http.post("/v1/chat/completions", json=body, headers=ONE)).json()
    path = f"/v1/groups/{first['id']}"
    assert (await served.http.get(path, headers=ONE)).status_code == 200
    assert_error(await served.http.get(path, headers=OTHER), status=404, code="group_not_found")
    assert_error(
        await served.http.post(f"{path}/more", json={"n": 1}, headers=OTHER), status=404, code="group_not_found"
    )
    assert_error(await served.http.delete(path, headers=OTHER), status=404, code="group_not_found")
    assert_error(await served.http.delete(f"{path}/choices/0", headers=OTHER), status=404, code="group_not_found")
    assert (await served.http.get(path)).status_code == 401


async def test_a_group_ended_while_it_generates_is_forgotten_despite_keep_s(serve: Serving) -> None:
    served = await gated(serve, "abcd")
    answering = await served.engine.start_request(served.chat(n=2, keep_s=60))
    id = served.engine.requests[0].request_id
    served.engine.go(1)
    await until(served, id, 2)
    assert (await served.http.delete(f"/v1/groups/{id}")).json()["deleted"]
    assert [choice["finish_reason"] for choice in (await answering).json()["choices"]] == ["abort", "abort"]
    assert_error(await served.http.get(f"/v1/groups/{id}"), status=404, code="group_not_found")


async def test_the_choices_of_a_client_that_has_left_have_ended(serve: Serving) -> None:
    served = await gated(serve, "abcd", "efgh")
    answering = await served.engine.start_request(served.chat(n=2, keep_s=60, group={"start": 1}))
    id = served.engine.requests[0].request_id
    served.engine.go(2)
    await until(served, id, 2)
    answering.cancel()
    await asyncio.wait([answering])
    await served.service.admission.empty()
    shown = (await served.http.get(f"/v1/groups/{id}")).json()
    assert shown["state"] == "over"
    assert [(one["state"], one["tokens"]) for one in shown["choices"]] == [("over", 2), ("dropped", 0)]
    assert not (await served.http.delete(f"/v1/groups/{id}/choices/0")).json()["ended"]
    assert_error(await served.http.delete(f"/v1/groups/{id}/choices/{'9' * 5000}"), status=404, code="choice_not_found")


async def test_numbers_of_choices_that_were_refused_are_used_again(
    serve: Serving, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = await serve()
    first = (await served.chat(n=2, keep_s=60)).json()
    path = f"/v1/groups/{first['id']}/more"
    with monkeypatch.context() as patched:
        patched.setattr(served.engine, "generate", full)
        assert (await served.http.post(path, json={"n": 2})).status_code == 503
    assert [one["index"] for one in (await served.http.post(path, json={"n": 1})).json()["choices"]] == [2]


def full(_: object) -> None:
    raise OverloadedError("The engine is full.")


async def test_more_choices_are_streamed_as_their_own_request_requires(serve: Serving) -> None:
    served = await serve()
    counted = {"include_usage": True, "continuous_usage_stats": True}
    first = chunks(await served.chat(n=1, keep_s=60, stream=True, stream_options=counted))
    path = f"/v1/groups/{first[0]['id']}/more"
    plain = chunks(await served.http.post(path, json={"n": 1, "stream": True}))
    assert {"usage" in chunk for chunk in plain} == {False}
    more = chunks(await served.http.post(path, json={"n": 1, "stream": True, "stream_options": counted}))
    assert all(chunk["usage"] for chunk in more)


class Part:
    """An answer in progress with these choices."""

    def __init__(self, *indices: int, sender: str = "") -> None:
        self.indices = indices
        self.sender = sender
        self.num_reported = 0
        self.asked: list[int] = []

    def choices(self) -> Iterator[ChoiceReport]:
        for index in self.indices:
            self.num_reported += 1
            yield ChoiceReport(index, ChoiceState.WRITING, index, None)

    def has_choice(self, index: int) -> bool:
        return index in self.indices

    def is_named(self, ids: Collection[str], *, sender: str) -> bool:
        return self.sender == sender and "guessed" in ids

    async def end_choice(self, index: int) -> bool:
        self.asked.append(index)
        return True

    async def end_all(self) -> None:
        raise AssertionError


def known(id: str, keep_s: float, *, client: str = "a") -> KnownGroup:
    return KnownGroup(
        id=id,
        client=client,
        model="m",
        created=0,
        prompt_tokens=1,
        keep_s=keep_s,
        further=FurtherChoices(first_seed=2**64 - 1, next_index=1),
        body_bytes=1000,
    )


async def test_a_group_of_thousands_of_choices_is_reported_in_turns_of_the_event_loop(served: Served) -> None:
    """The bug: a look at 16,384 choices held the loop for 28 ms, and the end of one choice for as long."""
    group, first, second = known("g", 60, client=ANONYMOUS), Part(*range(9000, 12_000)), Part(*range(20, 30))
    others = [index for index in reversed(range(9000)) if index not in second.indices]
    group.over = {index: ChoiceReport(index, ChoiceState.OVER, 3, None) for index in others}
    for part in (first, second):
        served.service.groups.opened(group, part)
    BUDGET.set(budget := CountedBudget())
    shown = (await served.http.get("/v1/groups/g")).json()
    assert budget.num_pieces >= 2 * 11_000 // 512
    indices = [choice["index"] for choice in shown["choices"]]
    assert indices == [*range(12_000)]
    last = {"index": 11_999, "state": "writing", "tokens": 11_999, "finish_reason": None, "worker": None}
    assert shown["choices"][-1] == last
    assert [*shown][-1] == "choices"
    reported = first.num_reported
    assert (await served.http.delete("/v1/groups/g/choices/9500")).json()["ended"]
    assert not (await served.http.delete("/v1/groups/g/choices/10")).json()["ended"]
    assert (await served.http.delete("/v1/groups/g/choices/12000")).status_code == 404
    assert (first.asked, first.num_reported) == ([9500], reported)


async def ended(groups: KnownGroups, group: KnownGroup) -> None:
    part = Part()
    groups.opened(group, part)
    await groups.closed(group, part)


def names(groups: KnownGroups, *ids: str, client: str = "a") -> list[str]:
    """Returns which of these groups are known."""
    found = []
    for id in ids:
        with suppress(NotFoundError):
            found.append(groups.find(id, client=client).id)
    return found


async def test_the_reports_on_ended_choices_are_made_in_turns_of_the_event_loop() -> None:
    """The bug: the end of an answer with 16,384 choices held the loop for 8 ms and more."""
    groups, group = KnownGroups(lambda: 0.0), known("g", 60)
    first, second = Part(*range(3000)), Part(3000)
    for part in (first, second):
        groups.opened(group, part)
    BUDGET.set(budget := CountedBudget())
    await groups.closed(group, first)
    assert budget.num_pieces > 3000 // REPORTS
    assert (group.open, len(group.over)) == ([second], 3000)
    group.keep_s = 0.0
    await groups.closed(group, second)
    assert (len(groups), second.num_reported) == (0, 0), "no later report can be requested"


@pytest.mark.slow
@every_route
async def test_a_kept_group_holds_no_large_fields_of_its_request(served: Served, path: str) -> None:
    """The bug: 200 kept groups held two million objects, and full garbage collections stopped the loop for 40 ms."""

    def num_objects() -> int:
        return sum(isinstance(found, Message | StructuredOutputs) for found in gc.get_objects())

    gc.collect()
    before = num_objects()  # of earlier tests
    form = {"structured_outputs": {"choice": ["hello"]}}
    body = {**ROUTES[path], "keep_s": 60} | ({"sampling_params": form} if "sampling_params" in ROUTES[path] else form)
    assert (await served.http.post(path, json=body)).status_code == 200
    assert len(served.service.groups) == 1
    async with asyncio.timeout(PATIENCE_S):
        while num_objects() > before:  # until the request has let go of them
            await served.http.get("/version")


async def test_kept_groups_are_forgotten_when_their_time_is_up() -> None:
    now = [0.0]
    groups = KnownGroups(lambda: now[0])
    for number, keep_s in enumerate((10.0, 30.0, 0.0)):
        await ended(groups, known(str(number), keep_s))
    assert names(groups, "0", "1", "2") == ["0", "1"]
    now[0] = 10.0
    assert names(groups, "0", "1", "2") == ["1"]
    assert len(groups) == 1
    assert groups.find("1", client="a").further.take(2)[0].seed == 0
    with pytest.raises(RequestError, match="end before 16384"):
        groups.find("1", client="a").further.take(16_382)


async def test_a_client_with_many_kept_groups_displaces_only_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = KnownGroups(lambda: 0.0)
    monkeypatch.setattr("motet.api.known_groups.MAX_KEPT", 3)
    await ended(groups, known("other", 60.0, client="b"))
    for number in range(4):
        await ended(groups, known(str(number), 60.0))
    assert names(groups, "0", "1", "2", "3") == ["2", "3"]
    assert names(groups, "other", client="b") == ["other"]
    heavy = known("heavy", 60.0, client="c")
    heavy.body_bytes *= 100
    await ended(groups, heavy)
    assert names(groups, "heavy", client="c") == ["heavy"]
    assert names(groups, "2", "3") == ["3"], "the client with the most groups loses one"
    groups.forget(heavy)
    await ended(groups, known("2", 60.0))
    size = groups.find("3", client="a").num_bytes
    monkeypatch.setattr("motet.api.known_groups.MAX_KEPT_BYTES", 2 * size)
    await ended(groups, known("4", 60.0))
    assert names(groups, "2", "3", "4") == ["4"]
    assert names(groups, "other", client="b") == ["other"]


def test_choices_that_could_not_start_are_available_again() -> None:
    further = known("0", 60.0).further
    first, second = further.take(2), further.take(1)
    further.put_back(first)
    assert further.take(1)[0].index == 4, "others were taken after them"
    further.put_back(second)
    assert further.next_index == 5


async def test_a_group_is_forgotten_when_its_client_leaves(serve: Serving) -> None:
    served = await gated(serve, "abcd")
    answering = await served.engine.start_request(served.chat(n=2))
    assert len(served.service.groups) == 1
    await served.abandon(answering)
    assert len(served.service.groups) == 0
