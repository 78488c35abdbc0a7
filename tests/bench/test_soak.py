"""The soak run sends the requests of its seed, finds wrong answers, and finds what grows or remains."""

import asyncio
import json
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from bench.chaos.faults import KILLED, FaultInjector, WorkerStatus
from bench.chaos.mixed_requests import CHAT, COMPLETIONS, RepeatedRequest
from bench.chaos.received_answers import ReceivedAnswer, receive_answer
from bench.soak.__main__ import SoakReport, main, open_clients
from bench.soak.policy_groups import (
    KEEP_S,
    MESSAGES,
    GroupCourse,
    SteeredRequest,
    known_groups,
    large_groups,
    load_dependent_requests,
    message_requests,
    mismatches,
)
from bench.soak.samples import SHARED_MEMORY, HeldResources, ServerSample, ServerWatcher, slope_per_hour
from bench.soak.seeded_requests import (
    GENERATE,
    RESPONSES,
    StatusCall,
    fresh_request,
    refused_calls,
    seeded_requests,
    short_calls,
)
from bench.soak.soak_client import ClientConnections, ExpectedAnswers, SoakClient, Tally, is_expected, send
from motet.models.smollm2 import Smollm2
from motet.settings.server_config import cache_folder, environment
from tests.bench.conftest import talkative
from tests.fake_server import MODEL, FakeServer
from tests.tiny_tokenizer import save_tiny_tokenizer

KEY = "key-0"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yields the URL of a server that requires a key."""
    with FakeServer(save_tiny_tokenizer(tmp_path_factory.mktemp("model")), talkative, api_key=KEY) as server:
        yield server.url


def test_seeded_requests_follow_from_the_seed_and_go_to_every_route_that_generates() -> None:
    requests = seeded_requests(1)
    assert requests == seeded_requests(1) != seeded_requests(2)
    assert {request.path for request in requests} == {CHAT, COMPLETIONS, RESPONSES, GENERATE}
    assert {(request.path, request.stream) for request in requests} >= {
        (path, stream) for path in (CHAT, COMPLETIONS, RESPONSES, GENERATE) for stream in (True, False)
    }
    assert {request.n for request in requests} >= {1, 2, 4, 8, 16, 32, 64}
    bodies = json.dumps([request.body for request in requests])
    for field in ("logprobs", "stop", "penalty", "regex", "choice", "json_schema", '"auto"', '"required"', "best_of"):
        assert field in bodies
    sampling = [request.body.get("sampling_params", request.body) for request in requests]
    assert all(isinstance(fields, dict) and "seed" in fields for fields in sampling)


def test_fresh_requests_follow_from_the_dice_and_differ() -> None:
    dice, again = random.Random(1), random.Random(1)
    some = [fresh_request(dice) for _ in range(50)]
    assert some == [fresh_request(again) for _ in range(50)]
    assert len({json.dumps(fresh.request.body) for fresh in some}) == 50


def test_a_fresh_answer_must_match_its_pattern_if_it_is_complete() -> None:
    dice = random.Random(1)
    fresh = next(one for one in iter(lambda: fresh_request(dice), None) if one.request.name == "fresh regex")
    assert fresh.pattern is not None
    right = fresh.pattern.pattern.replace("[a-f]{2}", "ab")
    answers = [
        ReceivedAnswer(texts={0: text}, finishes={0: [reason]})
        for text, reason in ((right, "stop"), (right + "!", "stop"), (right[:4], "length"))
    ]
    assert [fresh.matches(answer) for answer in answers] == [True, False, True]


BODIES: dict[str, dict[str, object]] = {
    CHAT: {"messages": [{"role": "user", "content": "x"}], "n": 2, "max_tokens": 12},
    COMPLETIONS: {"prompt": ["x", "y"], "n": 2, "max_tokens": 12},
    RESPONSES: {"input": "x", "max_output_tokens": 12},
    GENERATE: {"token_ids": [5, 6], "sampling_params": {"n": 2, "max_tokens": 12}},
}


@pytest.mark.anyio
@pytest.mark.parametrize("path", BODIES)
async def test_an_answer_is_read_alike_whether_it_is_streamed_or_not(url: str, path: str) -> None:
    usage = {} if path == RESPONSES else {"stream_options": {"include_usage": True}}
    async with httpx.AsyncClient(base_url=url) as http:
        complete = await receive_answer(http, RepeatedRequest("not streamed", path, BODIES[path]))
        streamed = await receive_answer(
            http, RepeatedRequest("streamed", path, BODIES[path] | {"stream": True} | usage)
        )
    assert complete.error is None
    assert complete.lost(RepeatedRequest("not streamed", path, BODIES[path]).n) == 0
    assert all(complete.texts.values())
    assert streamed.same_as(complete)
    assert streamed.done == 1


@pytest.mark.slow
@pytest.mark.anyio
async def test_every_call_gets_its_status_and_its_error_code(guarded: str) -> None:
    async with open_clients(guarded, [KEY]) as (http,):
        for call in [*short_calls(MODEL), *refused_calls()]:
            response = await send(http, call)
            assert is_expected(call, response), (call.name, response.status_code, response.text[:200])


def test_another_status_or_error_code_is_unexpected() -> None:
    call = StatusCall("wrong", "GET", "/x", 404, "unknown_url")
    right = httpx.Response(404, json={"error": {"code": "unknown_url"}})
    others = [
        httpx.Response(404, json={"error": {"code": "model_not_found"}}),
        httpx.Response(500, json={"error": {"code": "unknown_url"}}),
    ]
    assert [is_expected(call, response) for response in (right, *others)] == [True, False, False]


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_client_performs_all_kinds_of_acts_and_leaves_nothing_open(guarded: str) -> None:
    """Relies on the server, which checks at its end that every group has ended."""
    tally = Tally()
    request = RepeatedRequest("chat", CHAT, BODIES[CHAT])
    async with open_clients(guarded, [KEY, KEY]) as (own, burst):
        steered, large = load_dependent_requests(1), large_groups(1)
        expected = ExpectedAnswers(
            [(request, await receive_answer(own, request))],
            [(one, await receive_answer(own, one.without_policy)) for one in steered],
            [(one, await receive_answer(own, one)) for one in large],
        )
        clients = [SoakClient(tally, expected, dice=random.Random(s), pause_s=0.001, model=MODEL) for s in range(6)]
        while len(tally.acts) < 7 or not tally.outcome.finished:  # one round, unless the machine is very slow
            until_s = time.monotonic() + 1.0
            await asyncio.gather(*(client.run(ClientConnections(own, burst), until_s=until_s) for client in clients))
    assert tally.malformed == tally.unexpected == []
    assert tally.outcome.identical == tally.outcome.finished
    assert tally.sent == sum(tally.acts.values())


@pytest.mark.anyio
async def test_a_message_is_read_as_the_chat_that_has_the_same_answer(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as http:
        for message, chat in message_requests(1)[:4]:
            assert message.path == MESSAGES
            answer, expected = await receive_answer(http, message), await receive_answer(http, chat)
            assert answer.error is None
            assert answer.same_as(expected), (message.name, answer, expected)


@pytest.mark.slow
@pytest.mark.anyio
async def test_a_course_of_a_group_finds_nothing_wrong_and_the_group_is_known_for_its_time(url: str) -> None:
    (large, *_) = large_groups(1)
    async with httpx.AsyncClient(base_url=url) as http:
        complete = await receive_answer(http, large)
        for seed in range(3):
            course = GroupCourse(http, large, complete, random.Random(seed))
            await course.run()
            assert course.faults == []
            assert await known_groups(http, [course.id]) == ([] if course.forgotten else [course.id])
    assert KEEP_S > 1


def test_choices_that_do_not_start_like_the_complete_group_are_found() -> None:
    complete = ReceivedAnswer(texts={0: "abc", 1: "de"}, finishes={0: ["stop"], 1: ["length"]})
    ended = ReceivedAnswer(texts={0: "ab", 1: "de"}, finishes={0: ["abort"], 1: ["length"]})
    assert mismatches(ended, complete) == []
    for wrong in (
        ReceivedAnswer(texts={0: "ax"}, finishes={0: ["abort"]}),
        ReceivedAnswer(texts={0: "ab"}, finishes={0: ["stop"]}),
        ReceivedAnswer(texts={1: "de"}, finishes={1: ["stop"]}),
        ReceivedAnswer(texts={2: ""}, finishes={2: ["abort"]}),
    ):
        assert len(mismatches(wrong, complete)) == 1


def test_a_report_that_disagrees_with_the_answer_is_a_fault() -> None:
    steered = SteeredRequest(RepeatedRequest("sum", CHAT, {"n": 3}))
    complete = ReceivedAnswer(texts={0: "5", 1: "6"}, finishes={0: ["stop"], 1: ["stop"]})
    report = {"id": "g", "n": 3, "begun": 2, "finished": 1, "aborted": 1, "stopped_by": "finished"}
    answer = ReceivedAnswer(texts={0: "5", 1: "6"}, finishes={0: ["stop"], 1: ["abort"]}, groups=[report])
    assert steered.faults(answer, complete) == []
    for wrong in ({"begun": 3}, {"finished": 2}, {"stopped_by": None}, {"vote": {"values": {"0": "6"}}}):
        answer.groups = [report | wrong]
        assert len(steered.faults(answer, complete)) == 1, wrong


@pytest.mark.anyio
async def test_a_spared_worker_gets_no_faults() -> None:
    workers = [
        {"id": name, "role": role, "state": "ready", "pid": 1}
        for name, role in (("prefill-0", "prefill"), ("decode-0", "decode"), ("decode-1", "decode"))
    ]
    hit: list[object] = []
    enough = asyncio.Event()

    async def inject(worker: WorkerStatus, _: object) -> None:
        hit.append(worker["id"])
        if len(hit) >= 30:
            enough.set()

    transport = httpx.MockTransport(lambda _: httpx.Response(200, json={"workers": workers}))
    async with httpx.AsyncClient(base_url="http://cell", transport=transport) as http:
        injector = FaultInjector(http, (0, 0), {KILLED: 1.0}, random.Random(1), inject, spared=frozenset({"decode-1"}))
        injecting = asyncio.create_task(injector.run())
        await enough.wait()
        injecting.cancel()
        await asyncio.gather(injecting, return_exceptions=True)
    assert set(hit) == {"prefill-0", "decode-0"}


def test_the_slope_of_a_line_is_found_through_noise() -> None:
    assert slope_per_hour([(minute, 3.0 + 2.0 * minute) for minute in range(5)]) == pytest.approx(120.0)
    assert slope_per_hour([(0, 1.0), (1, 2.0), (2, 1.0), (3, 2.0), (4, 1.0)]) == pytest.approx(0.0)
    assert slope_per_hour([(1.0, 5.0)]) is None


def test_a_sample_has_the_resources_of_a_process(tmp_path: Path) -> None:
    watcher = ServerWatcher(os.getpid(), tmp_path, spared="decode-1")
    workers: list[WorkerStatus] = [{"id": "decode-1", "pid": os.getpid()}, {"id": "decode-0", "pid": None}]
    before = watcher.sample(workers, tasks=4, minute=0.0, sent=0, left={})
    with (tmp_path / "file").open("w"), tempfile.NamedTemporaryFile(dir=SHARED_MEMORY) as shared:
        held = watcher.sample(workers, tasks=4, minute=1.0, sent=1, left={})
        assert Path(shared.name).name in watcher.shared()
    assert held.api.files == before.api.files + 2
    assert (before.temporary, held.temporary) == (0, 1)
    assert held.spared.threads == held.api.threads
    assert f"process {os.getpid()}" in watcher.alive()


HELD = HeldResources(rss_mb=200.0, files=50, threads=9, children=3)
SAMPLES = [
    ServerSample(
        minute,
        10,
        api=HELD,
        spared=HELD,
        sender=HELD,
        tasks=20,
        engines_mb=3000.0,
        temporary=0,
        shared=8,
        left={"leases": 0},
    )
    for minute in range(0, 61, 2)
]


def report_of(samples: list[ServerSample], *, after: Sequence[str] = (), errors: Sequence[str] = ()) -> SoakReport:
    tally = Tally()
    tally.statuses["burst: 429"] += 3
    totals = {"migrations": 1, "choices_resumed": 2, "transfers": 3, "transfer_bytes": 4}
    return SoakReport({}, 60.0, 1.0, samples, tally, {"decode killed": 150}, totals, errors, after)


def missed(report: SoakReport) -> list[str]:
    return [target.what for target in report.targets if not target.met]


def test_a_run_in_which_nothing_grows_meets_all_targets() -> None:
    early = replace(SAMPLES[0], api=replace(HELD, rss_mb=100.0, files=40, threads=5))  # the first minutes do not count
    assert missed(report_of([early, *SAMPLES[1:]])) == []


def test_growth_and_leftovers_miss_their_targets() -> None:
    growing = [
        replace(
            s, api=replace(HELD, rss_mb=200 + s.minute / 2, files=50 + int(s.minute // 10)), tasks=20 + int(s.minute)
        )
        for s in SAMPLES
    ]
    assert missed(report_of(growing)) == [
        "API process: open files, more",
        "API process: tasks, more",
        "API process: MB an hour",
    ]
    left = [*SAMPLES[:5], replace(SAMPLES[5], left={"leases": 1}), *SAMPLES[6:]]
    assert missed(report_of(left)) == ["left on engines at rest"]
    assert missed(report_of(SAMPLES, after=["process 7"])) == ["left after the server"]
    assert missed(report_of(SAMPLES, errors=["Traceback"])) == ["unhandled errors in the log"]


def test_a_report_has_a_table_and_json_on_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    report = report_of(SAMPLES)
    report.tally.unexpected.append("burst: 500")
    assert report.print(check=True) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("MISSED unexpected statuses") for line in lines)
    record = json.loads(lines[-1])
    assert (len(record["samples"]), record["unexpected"]) == (len(SAMPLES), ["burst: 500"])
    assert record["growth"]["API process: threads"] == {"settled": 9, "last": 9, "per_hour": 0}


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.real
def test_a_short_run_finds_nothing_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    if not Smollm2(cache_folder(environment())).folder.is_dir():
        pytest.skip("the default model is not here: motet models pull")
    assert main(["--minutes", "1", "--pause", "0.2"]) == 0
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (record["unexpected"], record["malformed"], record["outcome"]["different"], record["after"]) == (
        [],
        [],
        [],
        [],
    )
    assert record["outcome"]["identical"] == record["outcome"]["finished"] > 0
    assert all(not any(sample["left"].values()) for sample in record["samples"])
