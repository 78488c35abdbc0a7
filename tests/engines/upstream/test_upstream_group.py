"""A group on a text upstream equals the same group on a correct server, however the server behaves."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from motet import types
from motet.engines.upstream.text_source import TextPiece, TextRoute
from motet.engines.upstream.upstream_server import UpstreamOptions
from motet.errors import EngineClosedError, EngineDiedError, EngineError, MotetError, RequestError, UpstreamRefusalError
from tests.engines.upstream.fake_upstream import ROUTES, GroupAnswer, fake_upstream, read_all, request_for
from tests.pairwise import pairwise
from tests.peers.openai_script import COMPLETIONS, Behaviour, Break, FixedAnswer, Index, UsagePlace

pytestmark = pytest.mark.anyio

every_route = pytest.mark.parametrize("route", ROUTES, ids=[route.name.lower() for route in ROUTES])
streamed_or_not = pytest.mark.parametrize("stream", [False, True], ids=["unstreamed", "streamed"])

MANNERS = {
    "n ignored": Behaviour(ignores_n=True),
    "all numbered 0": Behaviour(index=Index.ZERO),
    "no numbers": Behaviour(index=Index.ABSENT),
    "n refused": Behaviour(refuses=frozenset({"n"})),
    "stream_options refused": Behaviour(refuses=frozenset({"stream_options"})),
    "all end together": Behaviour(finishes_at_end=True),
    "ends sent twice": Behaviour(finish_twice=True),
    "ignores n, all end together": Behaviour(ignores_n=True, finishes_at_end=True),
    "no [DONE]": Behaviour(no_done=True),
    "CRLF": Behaviour(line_end=b"\r\n"),
    "CR": Behaviour(line_end=b"\r", ignores_n=True),
    "comments": Behaviour(comments=True),
    "role in every chunk": Behaviour(role_everywhere=True),
    "no role": Behaviour(no_role=True, ignores_n=True),
    "usage with each choice": Behaviour(usage=UsagePlace.EACH, ignores_n=True),
}


async def honest(route: TextRoute, *, n: int, prompts: tuple[str, ...], stream: bool = True) -> GroupAnswer:
    async with fake_upstream() as fake:
        return await fake.answer(request_for(route, n=n, prompts=prompts, stream=stream, max_tokens=4))


@pytest.mark.parametrize(("name", "route", "stream"), pairwise(list(MANNERS), ROUTES, [False, True]))
async def test_a_group_is_the_same_however_the_server_behaves(name: str, route: TextRoute, stream: bool) -> None:
    prompts = ("hi",) if route is TextRoute.CHAT else ("hi", "you")
    expected = await honest(route, n=4, prompts=prompts)
    async with fake_upstream(replace(MANNERS[name])) as fake:
        got = await fake.answer(request_for(route, n=4, prompts=prompts, stream=stream, max_tokens=4))
    assert got.texts == expected.texts == [f"{p} {s}{w}" for p in prompts for s, w in WORDS.items()]
    assert [c.finish for c in got.choices.values()].count("length") == 1 * len(prompts)
    for number, choice in got.choices.items():
        assert choice.finish == expected.choices[number].finish
        assert choice.pieces_after_finish == 0
        assert choice.roles == (1 if route is TextRoute.CHAT else 0)
    if stream and route is TextRoute.CHAT:
        assert [c.logprobs for c in got.choices.values()] == [c.logprobs for c in expected.choices.values()]
    if "stream_options" not in name:
        assert got.usage == expected.usage


WORDS = {5: " w0", 6: " w0 w1", 7: " w0 w1", 8: ""}
"""Words of the answer for each seed with at most 4 tokens. Without this limit, seed 7 has three words."""


async def test_a_correct_server_gets_one_request_for_all_choices() -> None:
    async with fake_upstream() as fake:
        await fake.answer(request_for(n=4))
        assert [(request.body["n"], request.body["seed"]) for request in fake.peer.requests] == [(4, 5)]


async def test_unknown_fields_reach_the_server_unchanged() -> None:
    fields: dict[str, Any] = {
        "tools": [{"type": "function"}],
        "x_strange": {"a": 1.50},
        "session_id": 7,
        "temperature": 0.7,
    }
    async with fake_upstream(Behaviour(ignores_n=True)) as fake:
        await fake.answer(request_for(n=1, **fields))
        body = fake.peer.requests[0].body
    assert {name: body[name] for name in fields} == fields


@every_route
@pytest.mark.parametrize(
    ("seed", "sent"),
    [
        (5, [5, 6, 7]),
        (2**63 - 2, [2**63 - 2, 2**63 - 1, -(2**63)]),
        (2**64 - 1, [-1, 0, 1]),
        (-3, [-3, -2, -1]),
        (None, [None] * 3),
    ],
)
async def test_a_server_that_ignores_n_gets_a_request_per_choice_with_a_signed_seed(
    route: TextRoute, seed: int | None, sent: list[int | None]
) -> None:
    async with fake_upstream(Behaviour(ignores_n=True)) as fake:
        await fake.answer(request_for(route, n=3, seed=seed, session_id=7))
        bodies = [request.body for request in fake.peer.requests]
    assert sorted(map(str, (body.get("seed") for body in bodies))) == sorted(map(str, sent))
    assert all("n" not in body and "session_id" not in body for body in bodies)


async def test_the_number_of_single_requests_at_once_is_limited() -> None:
    async with fake_upstream(Behaviour(ignores_n=True), options=UpstreamOptions(max_singles=3)) as fake:
        answer = await fake.answer(request_for(n=10))
        assert len(answer.texts) == 10
        assert fake.peer.max_running == 3


async def test_single_requests_stream_side_by_side_and_not_one_after_the_other() -> None:
    async with fake_upstream(Behaviour(ignores_n=True), gated=True) as fake:
        group = fake.upstream.generate(request_for(n=2))
        reading = asyncio.create_task(group.read())
        for _ in range(2):
            await fake.peer.arrived.acquire()
        assert fake.peer.gate is not None
        pieces: list[TextPiece] = []
        while {piece.index for piece in pieces} != {0, 1}:
            fake.peer.gate.release()
            pieces += [piece for step in await reading for piece in step.pieces]
            reading = asyncio.create_task(group.read())
        assert all(piece.finish is None for piece in pieces)
        reading.cancel()
        await group.aclose()


@streamed_or_not
async def test_usage_is_not_guessed_if_a_choice_lacks_it(stream: bool) -> None:
    async with fake_upstream(Behaviour(ignores_n=True, usage=UsagePlace.NONE)) as fake:
        assert (await fake.answer(request_for(n=2, stream=stream))).usage is None


async def test_usage_counts_each_prompt_once_and_sums_the_choices() -> None:
    async with fake_upstream(Behaviour(ignores_n=True)) as fake:
        answer = await fake.answer(request_for(TextRoute.COMPLETIONS, n=3, prompts=("abc", "defgh"), seed=4))
    # For each prompt, seed 4 gives 2 words, seed 5 gives 3, seed 6 gives 4.
    assert answer.usage == types.Usage(prompt_tokens=8, completion_tokens=18, cached_tokens=2, reasoning_tokens=None)


async def test_prompts_are_sent_one_by_one_if_the_servers_indices_are_unreliable() -> None:
    async with fake_upstream(Behaviour(index=Index.ZERO)) as fake:
        answer = await fake.answer(request_for(TextRoute.COMPLETIONS, prompts=("a", "b"), seed=4))
        assert answer.texts == ["a 4", "b 4"]
        assert [request.body["prompt"] for request in fake.peer.requests] == ["a", "b"]


async def test_a_group_that_is_too_large_for_the_server_is_sent_as_single_requests() -> None:
    async with fake_upstream() as fake:
        fake.peer.behaviour.refuses = frozenset({"n"})  # it honours n, but not of this size
        answer = await fake.answer(request_for(n=3))
        assert len(answer.texts) == 3
        assert len(fake.peer.requests) == 4


async def test_a_refusal_is_passed_on_if_single_requests_cannot_help() -> None:
    async with fake_upstream() as fake:
        fake.peer.behaviour.refuses = frozenset({"best_of"})
        with pytest.raises(UpstreamRefusalError, match="no best_of here"):
            await fake.answer(request_for(TextRoute.COMPLETIONS, n=2, best_of=3))


@streamed_or_not
@pytest.mark.parametrize("n", [1, 3])
async def test_a_refusal_has_the_servers_own_message(n: int, stream: bool) -> None:
    async with fake_upstream(Behaviour(refuses=frozenset({"tools"}))) as fake:
        with pytest.raises(UpstreamRefusalError) as caught:
            await fake.answer(request_for(n=n, stream=stream, tools=[1]))
    error = caught.value
    assert (error.status, error.message, error.param, error.code) == (
        400,
        "no tools here",
        "tools",
        "unsupported_value",
    )


@pytest.mark.parametrize("how", list(Break))
@pytest.mark.parametrize("honours_n", [False, True])
async def test_a_stream_that_breaks_ends_the_group_and_names_the_server(how: Break, honours_n: bool) -> None:
    async with fake_upstream(Behaviour(ignores_n=not honours_n, breaks={7: how})) as fake:
        with pytest.raises(EngineError) as caught:
            await fake.answer(request_for(n=3, seed=5))
        assert fake.upstream.server.name in caught.value.message
        assert ("Choice 2" if not honours_n else "Choices 0 to 2") in caught.value.message
        assert isinstance(caught.value, EngineDiedError) == (how is not Break.EVENT)
        assert "No other server can continue" in caught.value.message or how is Break.EVENT


@streamed_or_not
async def test_an_answer_without_a_finish_reason_counts_as_cut_off(stream: bool) -> None:
    async with fake_upstream(Behaviour(ignores_n=True)) as fake:
        fake.peer.behaviour.never_finishes = True
        with pytest.raises(EngineDiedError, match="finish_reason of choice 0"):
            await fake.answer(request_for(stream=stream))


async def test_choices_that_a_server_leaves_out_are_noticed() -> None:
    async with fake_upstream() as fake:
        fake.peer.behaviour.ignores_n = True  # another server has started at its address
        with pytest.raises(EngineDiedError, match="finish_reason of choices 1 to 2"):
            await fake.answer(request_for(n=3, stream=False))


async def test_a_single_request_that_a_busy_server_refuses_is_sent_again() -> None:
    async with fake_upstream(Behaviour(ignores_n=True), options=UpstreamOptions(max_singles=1)) as fake:
        group = fake.upstream.generate(request_for(n=3))
        first = await group.read()
        assert {piece.index for step in first for piece in step.pieces} == {0}
        fake.peer.behaviour.next_errors.append(FixedAnswer(503))
        answer = GroupAnswer()
        for step in first:
            answer.take(step)
        rest = await read_all(group)
        assert sorted({*answer.choices, *rest.choices}) == [0, 1, 2]
        assert len(fake.peer.requests) == 4


async def test_a_refusal_after_other_choices_have_started_names_its_choice() -> None:
    async with fake_upstream(Behaviour(ignores_n=True), options=UpstreamOptions(max_singles=1)) as fake:
        group = fake.upstream.generate(request_for(n=2))
        await group.read()
        fake.peer.behaviour.next_errors.append(FixedAnswer.error(400, "not you", code="c"))
        with pytest.raises(UpstreamRefusalError, match="Choice 1: not you") as caught:
            await read_all(group)
        assert (caught.value.status, caught.value.code) == (400, "c")


async def test_a_group_that_a_busy_server_refuses_at_once_is_left_to_routing() -> None:
    async with fake_upstream(Behaviour(next_errors=[]), learn=False) as fake:
        fake.peer.behaviour.next_errors.append(FixedAnswer(503, b"busy", (("retry-after", "7"),)))
        with pytest.raises(MotetError) as caught:
            await fake.answer(request_for())
        assert (caught.value.status, caught.value.retry_after_s) == (503, 7)
        assert len(fake.peer.requests) == 1


async def test_leaving_closes_every_connection_at_once() -> None:
    async with fake_upstream(Behaviour(ignores_n=True), gated=True) as fake:
        group = fake.upstream.generate(request_for(n=4))
        reading = asyncio.create_task(group.read())
        for _ in range(4):
            await fake.peer.arrived.acquire()
        reading.cancel()
        await group.aclose()
        await fake.peer.until_idle()


async def test_choices_start_when_requested_and_end_alone() -> None:
    async with fake_upstream(Behaviour(hangs=frozenset({5, 7}))) as fake:
        group = fake.upstream.generate(request_for(n=4, start=(0, 1)))
        answer = GroupAnswer()
        while 1 not in answer.choices or answer.choices[1].finish is None:
            answer.take_all(await group.read())
        assert [request.body["seed"] for request in fake.peer.requests] == [5, 6]
        group.end_choice(0)
        answer.take_all(await group.read())
        assert answer.choices[0].finish == "abort"
        await fake.peer.until_idle()
        group.start([2])
        group.end_choice(2)  # before it is requested
        answer.take_all(await group.read())
        group.start([3])
        rest = await read_all(group)
        assert [request.body["seed"] for request in fake.peer.requests] == [5, 6, 8]
        assert {index: one.finish for index, one in (answer.choices | rest.choices).items()} == {
            0: "abort",
            1: "stop",
            2: "abort",
            3: "stop",
        }
        assert rest.usage is None


async def test_a_reader_that_waits_gets_the_end_of_a_choice_at_once() -> None:
    async with fake_upstream(gated=True) as fake:
        group = fake.upstream.generate(request_for(n=2, start=(0, 1)))
        reading = asyncio.create_task(group.read())
        for _ in range(2):
            await fake.peer.arrived.acquire()
        group.end_choice(1)
        assert [(one.index, one.finish) for step in await reading for one in step.pieces] == [(1, "abort")]
        await group.aclose()


async def test_losing_the_server_ends_its_groups_for_their_readers() -> None:
    async with fake_upstream(gated=True) as fake:
        group = fake.upstream.generate(request_for())
        reading = asyncio.create_task(group.read())
        await fake.peer.arrived.acquire()
        fake.upstream.lost(EngineDiedError("gone"))
        with pytest.raises(EngineDiedError, match="gone"):
            await reading
        await group.aclose()


async def test_a_reader_of_a_closed_group_gets_an_error() -> None:
    async with fake_upstream(gated=True) as fake:
        group = fake.upstream.generate(request_for())
        reading = asyncio.create_task(group.read())
        await fake.peer.arrived.acquire()
        await group.aclose()
        for late in (reading, group.read()):
            with pytest.raises(EngineClosedError):
                await late


async def test_best_of_is_refused_where_choices_are_single_requests() -> None:
    async with fake_upstream(Behaviour(ignores_n=True)) as fake:
        with pytest.raises(RequestError) as caught:
            fake.upstream.generate(request_for(TextRoute.COMPLETIONS, n=2, best_of=3))
        assert caught.value.param == "best_of"


async def test_a_route_that_the_server_lacks_is_refused_without_a_request() -> None:
    async with fake_upstream(Behaviour(no_routes=frozenset({COMPLETIONS}))) as fake:
        with pytest.raises(RequestError, match="no such route"):
            fake.upstream.generate(request_for(TextRoute.COMPLETIONS))
        assert fake.peer.requests == []
