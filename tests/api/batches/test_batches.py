"""Batches with OpenAI's official client."""

import asyncio
import json
import os
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from motet.api.batches import batch_run
from motet.api.batches.store import batch_store
from motet.errors import ConfigError, EngineDiedError
from motet.settings.batch_config import BatchConfig
from motet.settings.parsed_values import MIN_WEIGHT
from motet.types import BACKGROUND_PRIORITY
from tests.api.batches.batch_serving import CHAT, BatchServing, line
from tests.api.serving import Served, WatchedEngine
from tests.error_response import assert_error

pytestmark = pytest.mark.anyio


async def test_the_official_client_s_example_runs(serve_batches: BatchServing) -> None:
    async with serve_batches() as server:
        client = server.openai
        path = Path(serve_batches.folder).parent / "requests.jsonl"
        path.write_text("".join(json.dumps(line(f"request-{number}")) + "\n" for number in range(3)))
        file = await client.files.create(file=path, purpose="batch")
        assert (file.object, file.filename, file.bytes) == ("file", "requests.jsonl", path.stat().st_size)
        batch = await client.batches.create(
            input_file_id=file.id, endpoint=CHAT, completion_window="24h", metadata={"job": "night"}
        )
        assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"job": "night"})
        batch = await server.ended(batch)
        assert (batch.status, batch.errors, batch.error_file_id) == ("completed", None, None)
        assert batch.request_counts is not None and batch.usage is not None
        assert batch.request_counts.model_dump() == {"total": 3, "completed": 3, "failed": 0}
        results = await server.results(batch.output_file_id)
        assert sorted(results) == ["request-0", "request-1", "request-2"]
        answers = [result["response"] for result in results.values()]
        assert {answer["body"]["choices"][0]["message"]["content"] for answer in answers} == {"hello 0"}
        assert all(answer["status_code"] == 200 and answer["request_id"] for answer in answers)
        assert batch.usage.output_tokens == sum(answer["body"]["usage"]["completion_tokens"] for answer in answers)
        assert [listed.id async for listed in client.batches.list()] == [batch.id]
        assert [listed.id async for listed in client.files.list()] == [batch.output_file_id, file.id]


async def test_failed_requests_are_in_the_error_file(serve_batches: BatchServing) -> None:
    async with serve_batches() as server:
        lines = [line("right"), line("wrong", temperature=-1), line("unknown", model="other")]
        batch = await server.ended(await server.create(*lines))
        assert batch.status == "completed" and batch.request_counts is not None
        assert batch.request_counts.model_dump() == {"total": 3, "completed": 1, "failed": 2}
        assert [*await server.results(batch.output_file_id)] == ["right"]
        errors = await server.results(batch.error_file_id)
        statuses = {custom_id: item["response"]["status_code"] for custom_id, item in errors.items()}
        assert statuses == {"wrong": 400, "unknown": 404}
        assert errors["wrong"]["response"]["body"]["error"]["param"] == "temperature"


@pytest.mark.parametrize(
    ("lines", "codes"),
    [
        ([b"{", line("a"), b"[]"], {1: "invalid_json_line", 3: "invalid_json_line"}),
        ([line("a"), line("b"), line("a")], {3: "duplicate_custom_id"}),
        ([{**line("a"), "url": "/v1/completions"}], {1: "url_mismatch"}),
        ([{**line("a"), "url": "/drain"}], {1: "invalid_url"}),
        ([line("a", stream=True)], {1: "unsupported_value"}),
        ([b"", b"  "], {None: "empty_file"}),
        ([line(str(number)) for number in range(5)], {None: "too_many_lines"}),
        ([line("a", "x" * 30_000)], {1: "line_too_long"}),
    ],
    ids=lambda value: "-".join(value.values()) if isinstance(value, dict) else "",
)
async def test_a_batch_with_an_invalid_line_fails(
    serve_batches: BatchServing, lines: list[object], codes: dict[int | None, str]
) -> None:
    async with serve_batches(batch_max_lines=4, max_body_bytes=20_000) as server:
        batch = await server.ended(await server.create(*lines))
        assert (batch.status, batch.output_file_id, server.served.engine.requests) == ("failed", None, [])
        assert batch.errors is not None and batch.errors.data is not None
        assert {error.line: error.code for error in batch.errors.data} == codes


async def test_a_cancelled_batch_keeps_its_results(serve_batches: BatchServing) -> None:
    engine = WatchedEngine(gated=True)
    async with serve_batches(engine=engine, batch_concurrency=1) as server:
        waiting = await server.create(line("later"))
        batch = await server.create(line("first"), line("second"))
        await engine.submitted.acquire()
        assert (await server.openai.batches.cancel(batch.id)).status == "cancelling"
        ended = await server.ended(batch)
        assert (ended.status, ended.output_file_id) == ("cancelled", None)
        assert ended.cancelled_at is not None
        engine.go()
        assert (await server.ended(waiting)).status == "completed"
        again = await server.served.http.post(f"/v1/batches/{batch.id}/cancel")
        assert_error(again, status=400, code="batch_not_cancellable")


async def test_an_expired_batch_names_the_lines_that_did_not_run(serve_batches: BatchServing) -> None:
    engine = WatchedEngine(gated=True)
    async with serve_batches(engine=engine, batch_concurrency=1) as server:
        batch = await server.create(line("done"), line("running"), line("waiting"))
        await engine.submitted.acquire()
        engine.go(20)
        await engine.submitted.acquire()  # the second line
    serve_batches.clock.now_s += 24 * 60 * 60
    async with serve_batches() as server:
        ended = await server.ended(batch)
        assert (ended.status, ended.expired_at) == ("expired", int(serve_batches.clock.now_s))
        assert [*await server.results(ended.output_file_id)] == ["done"]
        errors = await server.results(ended.error_file_id)
        assert {custom_id: item["error"]["code"] for custom_id, item in errors.items()} == {
            "running": "batch_expired",
            "waiting": "batch_expired",
        }
        assert ended.request_counts is not None
        assert ended.request_counts.model_dump() == {"total": 3, "completed": 1, "failed": 2}


async def test_lines_that_run_at_the_expiry_are_ended(serve_batches: BatchServing) -> None:
    engine = WatchedEngine(gated=True)
    async with serve_batches(engine=engine) as server:
        batch = await server.create(line("running"))
        await engine.submitted.acquire()
        serve_batches.clock.now_s += 24 * 60 * 60
        server.store.open[batch.id].stop.set()  # the runner's timer does it in a day
        ended = await server.ended(batch)
        assert (ended.status, ended.output_file_id) == ("expired", None)
        assert [*await server.results(ended.error_file_id)] == ["running"]
        await server.served.until_empty()


@pytest.mark.parametrize("cut", [0, 1, 40, None], ids=["whole", "feed", "torn", "garbage"])
async def test_a_restarted_server_runs_only_the_missing_lines(serve_batches: BatchServing, cut: int | None) -> None:
    engine = WatchedEngine(gated=True)
    async with serve_batches(engine=engine, batch_concurrency=1) as server:
        batch = await server.create(*(line(str(number)) for number in range(4)))
        for _ in range(2):
            await engine.submitted.acquire()
            engine.go(20)
        await engine.submitted.acquire()
        record = server.store.open[batch.id].record
        assert record.counts.completed == 2
        path = serve_batches.folder / "files" / record.output_id
    content = path.read_bytes()
    path.write_bytes(content + b"\0\0\0\n{" if cut is None else content[: len(content) - cut])
    async with serve_batches() as server:
        ended = await server.ended(batch)
        assert ended.status == "completed"
        results = await server.results(ended.output_file_id)
        assert sorted(results) == ["0", "1", "2", "3"]
        assert len(server.served.engine.requests) == (3 if cut else 2)
        assert ended.usage is not None
        usages = [result["response"]["body"]["usage"] for result in results.values()]
        assert ended.usage.total_tokens == sum(usage["total_tokens"] for usage in usages)


async def test_a_result_is_durable_before_other_lines_end(
    serve_batches: BatchServing, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, synced, fsync = asyncio.get_running_loop(), asyncio.Event(), os.fsync

    def seen(descriptor: int) -> None:
        fsync(descriptor)
        loop.call_soon_threadsafe(synced.set)

    monkeypatch.setattr(os, "fsync", seen)
    monkeypatch.setattr(batch_run, "SYNC_INTERVAL_S", 0.01)
    engine = WatchedEngine(gated=True)
    async with serve_batches(engine=engine, batch_concurrency=1) as server:
        await server.create(line("a"), line("b"))
        await engine.submitted.acquire()
        synced.clear()  # the upload has set it
        engine.go(20)
        await engine.submitted.acquire()  # the second line
        await synced.wait()


async def test_a_second_server_cannot_use_the_folder(serve_batches: BatchServing) -> None:
    async with serve_batches():
        await refuses_to_start(serve_batches.folder, f"--batch-dir {serve_batches.folder}: another server uses it")


async def refuses_to_start(folder: Path, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        async with batch_store(BatchConfig(batch_dir=str(folder))):
            pass


async def test_a_folder_that_is_something_else_is_refused_with_its_name(tmp_path: Path) -> None:
    names = ("a file", "other contents", "no database", "another form")
    file, contents, database, form = (tmp_path / name for name in names)
    file.write_text("")
    (contents / "files" / "photos").mkdir(parents=True)
    database.mkdir()
    (database / "batches.sqlite").write_bytes(b"x" * 5000)
    form.mkdir()
    with closing(sqlite3.connect(form / "batches.sqlite")) as connection:
        connection.execute("PRAGMA user_version = 99")
    for folder in (file, contents, database):
        await refuses_to_start(folder, f"--batch-dir {folder}: it cannot be used")
    await refuses_to_start(form, f"--batch-dir {form}: it has the form 99")
    assert (contents / "files" / "photos").is_dir()


async def test_each_key_sees_only_its_own(serve_batches: BatchServing) -> None:
    async with serve_batches(api_keys=("one", "two")) as server:
        one, two = server.as_key("one"), server.as_key("two")
        batch = await server.ended(await server.create(line("a"), client=one), client=one)
        assert batch.status == "completed"
        for id in (batch.input_file_id, batch.output_file_id):
            for method, path in (("GET", ""), ("GET", "/content"), ("DELETE", "")):
                answer = await server.served.http.request(
                    method, f"/v1/files/{id}{path}", headers={"authorization": "Bearer two"}
                )
                assert_error(answer, status=404, code="file_not_found")
        headers = {"authorization": "Bearer two"}
        for method, path in (("GET", ""), ("POST", "/cancel")):
            answer = await server.served.http.request(method, f"/v1/batches/{batch.id}{path}", headers=headers)
            assert_error(answer, status=404, code="batch_not_found")
        assert (await two.files.list()).data == [] and (await two.batches.list()).data == []
        stolen = {"input_file_id": batch.input_file_id, "endpoint": CHAT, "completion_window": "24h"}
        assert_error(
            await server.served.http.post("/v1/batches", json=stolen, headers=headers),
            status=400,
            param="input_file_id",
        )
        assert_error(
            await server.served.http.get(f"/v1/files?after={batch.input_file_id}", headers=headers), status=404
        )


@pytest.mark.parametrize("keys", [("two",), ()], ids=["another key", "no keys"])
async def test_lines_of_a_removed_key_are_refused(serve_batches: BatchServing, keys: tuple[str, ...]) -> None:
    async with serve_batches(engine=WatchedEngine(gated=True), api_keys=("one",), batch_concurrency=1) as server:
        batch = await server.create(line("a"), line("b"), client=server.as_key("one"))
        await server.served.engine.submitted.acquire()
    async with serve_batches(api_keys=keys) as server:
        if (running := server.store.open.get(batch.id)) is not None:
            await running.ended.wait()
        assert server.served.engine.requests == []
    async with serve_batches(api_keys=("two", "one")) as server:  # its number is another one
        one = server.as_key("one")
        errors = await server.results((await one.batches.retrieve(batch.id)).error_file_id, client=one)
        assert {item["response"]["status_code"] for item in errors.values()} == {401}


async def test_lines_run_as_another_client_with_the_lowest_share(serve_batches: BatchServing) -> None:
    async with serve_batches(api_keys=("one",), key_share=("one=2",)) as server:
        headers = {"authorization": "Bearer one"}
        body = line("a", priority=-5)["body"]
        assert (await server.served.http.post(CHAT, json=body, headers=headers)).status_code == 200
        one = server.as_key("one")
        batch = await server.create(line("a", priority=-5), client=one)
        assert (await server.ended(batch, client=one)).error_file_id is None
        online, background = server.served.engine.requests
        assert (online.priority, online.client_weight) == (-5, 2)
        assert (background.priority, background.client_weight) == (BACKGROUND_PRIORITY, MIN_WEIGHT)
        assert online.client != background.client
        assert online.cache_salt == background.cache_salt


async def test_lines_that_are_refused_because_of_load_run_again(serve_batches: BatchServing) -> None:
    async with serve_batches(key_max_choices=2, batch_concurrency=4) as server:
        batch = await server.create(*(line(str(number), n=2) for number in range(4)))
        ended = await server.ended(batch)
        assert ended.request_counts is not None and ended.request_counts.completed == 4


async def test_a_line_whose_worker_is_lost_runs_three_times(serve_batches: BatchServing) -> None:
    engine = WatchedEngine(fail_after=dict.fromkeys(range(9), EngineDiedError("gone")))
    async with serve_batches(engine=engine) as server:
        batch = await server.ended(await server.create(line("a")))
        errors = await server.results(batch.error_file_id)
        assert errors["a"]["response"]["status_code"] == 503
        assert len(engine.requests) == 3


async def test_without_a_folder_the_routes_name_the_flag(served: Served) -> None:
    for method, path in (
        *(
            ("GET", path)
            for path in ("/v1/files", "/v1/files/a", "/v1/files/a/content", "/v1/batches", "/v1/batches/a")
        ),
        *(("POST", path) for path in ("/v1/files", "/v1/batches/a/cancel")),
        ("DELETE", "/v1/files/a"),
    ):
        answer = await served.http.request(method, path)
        assert_error(answer, status=404, code="batches_off")
        assert "--batch-dir" in answer.text


async def test_metrics_count_the_lines_of_batches(serve_batches: BatchServing) -> None:
    async with serve_batches() as server:
        await server.ended(await server.create(line("right"), line("wrong", temperature=-1)))
        metrics = await server.served.metrics()
        for expected in (
            'motet:batch_lines_total{outcome="completed"} 1.0',
            'motet:batch_lines_total{outcome="failed"} 1.0',
            "motet:batches_unfinished 0.0",
            f"motet:batch_stored_bytes {float(server.store.usage.num_bytes(''))}",
            'motet:http_requests_total{handler="/v1/chat/completions",method="POST",status="200"} 1.0',
        ):
            assert expected in metrics


@pytest.mark.parametrize(
    ("endpoint", "body", "kind"),
    [
        ("/v1/completions", {"prompt": "hi", "n": 2, "max_tokens": 5}, "text_completion"),
        ("/v1/responses", {"input": "hi"}, "response"),
    ],
)
async def test_other_endpoints_have_batches(
    serve_batches: BatchServing, endpoint: str, body: dict[str, object], kind: str
) -> None:
    async with serve_batches() as server:
        item = {"custom_id": "a", "method": "POST", "url": endpoint, "body": body}
        batch = await server.ended(await server.create(item, endpoint=endpoint))
        results = await server.results(batch.output_file_id)
        assert results["a"]["response"]["body"]["object"] == kind
        assert batch.usage is not None and batch.usage.output_tokens > 0
