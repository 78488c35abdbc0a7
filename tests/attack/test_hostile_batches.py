"""Files and batches of hostile clients: access, disk, turns, and the event loop."""

import asyncio
import json
import threading
from collections.abc import Awaitable
from pathlib import Path

import pytest

from motet.api.batches import line_calls
from motet.api.batches.input_lines import PIECE_BYTES, PIECE_LINES, Place, id_digest, read_piece
from motet.api.batches.line_calls import LineAnswer
from motet.api.batches.records import BatchRecord, BatchStatus, BatchTokens, FileRecord, reached
from motet.api.batches.results import MAX_DECODED_BYTES, last_bytes, result_pieces, scan, tokens_in
from motet.api.batches.store import BatchStore, Download, Upload, batch_store
from motet.api.batches.turns import LineMemory, LineTurns
from motet.api.batches.usage import MAX_OWN_DOWNLOADS, MAX_OWN_UPLOADS
from motet.api.http.admission import Admission
from motet.batch.line_file import LineFile
from motet.batch.lines import BatchLine, result_line
from motet.errors import RequestError
from motet.settings.batch_config import BatchConfig
from tests.api.batches.batch_serving import CHAT, BatchServing, line
from tests.api.serving import WatchedEngine
from tests.attack.test_gate import bearer
from tests.clock import TurnCounter
from tests.error_response import assert_error

pytestmark = [pytest.mark.anyio, pytest.mark.every_case]

ROUTES = [
    *(("POST", path) for path in ("/v1/files", "/v1/batches", "/v1/batches/a/cancel")),
    *(("GET", path) for path in ("/v1/files", "/v1/files/a", "/v1/files/a/content", "/v1/batches", "/v1/batches/a")),
    ("DELETE", "/v1/files/a"),
]
FORM = "content-type: multipart/form-data; boundary=x\r\n"


@pytest.mark.parametrize("prefix", ["", "/llm", "//"])
async def test_every_route_needs_an_api_key(serve_batches: BatchServing, prefix: str) -> None:
    async with serve_batches(api_keys=("client",), admin_key="boss", worker_key="worker", root_path="/llm") as server:
        for method, path in ROUTES:
            for headers in ({}, bearer("boss"), bearer("worker"), bearer("?")):
                answer = await server.served.http.request(method, f"{prefix}{path}", headers=headers)
                assert answer.status_code == 401, answer.text
            passed = await server.served.http.request(method, path, headers=bearer("client"))
            assert passed.status_code in (200, 400, 404)


async def test_a_web_page_of_another_site_uploads_nothing(serve_batches: BatchServing) -> None:
    async with serve_batches() as server:
        for page in ({"origin": "https://evil.example"}, {"sec-fetch-site": "cross-site"}):
            form = {"files": {"file": ("a", b"{}")}, "data": {"purpose": "batch"}}
            refused = await server.served.http.post("/v1/files", headers=page, **form)  # type: ignore[arg-type]
            assert_error(refused, status=400, code="invalid_content_type")
        assert server.store.usage.num_files("") == 0


async def test_uploads_that_never_end_take_a_limited_number_of_places(serve_batches: BatchServing) -> None:
    async with serve_batches(api_keys=("hostile", "other")) as server:
        head = f"POST /v1/files HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer hostile\r\n{FORM}"
        writers = []
        for _ in range(MAX_OWN_UPLOADS):
            _, writer = await asyncio.open_connection("127.0.0.1", server.served.port)
            writer.write(f"{head}content-length: 100000\r\n\r\n--x\r\n".encode())
            writers.append(writer)
        form = {"file": ("a", b"{}\n")}
        while True:  # until the server has read all heads
            refused = await server.served.http.post(
                "/v1/files", files=form, data={"purpose": "batch"}, headers=bearer("hostile")
            )
            if refused.status_code != 200:
                break
        assert_error(refused, status=429)
        passed = await server.served.http.post(
            "/v1/files", files=form, data={"purpose": "batch"}, headers=bearer("other")
        )
        assert passed.status_code == 200
        for writer in writers:
            writer.close()
            await writer.wait_closed()


async def test_lines_of_one_key_that_are_refused_delay_no_other_key(serve_batches: BatchServing) -> None:
    """Lines that wait for another attempt hold no slots."""
    engine = WatchedEngine(gated=True)
    keys = ("hostile", "other")
    async with serve_batches(engine=engine, api_keys=keys, batch_concurrency=2, key_max_choices=1) as server:
        hostile, other = server.as_key("hostile"), server.as_key("other")
        await server.create(*(line(str(number)) for number in range(8)), client=hostile)
        await engine.submitted.acquire()  # one line runs, and all others are refused because of the key's limit
        batch = await server.create(line("a"), client=other)
        await engine.submitted.acquire()
        engine.go()
        assert (await server.ended(batch, client=other)).status == "completed"


def test_a_file_is_read_in_pieces_of_limited_size(tmp_path: Path) -> None:
    path = tmp_path / "lines"
    path.write_bytes(b"[]\n" * 10_000 + b'{"a": "' + b"x" * (3 * PIECE_BYTES))
    place: Place | None = Place()
    num_pieces = 0
    while place is not None:
        piece = read_piece(path, place, endpoint=CHAT, max_body_bytes=1000)
        assert len(piece.lines) <= PIECE_LINES
        place, num_pieces = piece.next, num_pieces + 1
    assert num_pieces == 10_000 // PIECE_LINES + 1
    assert piece.lines[-1].number == 10_001


async def test_the_event_loop_continues_while_lines_are_checked(serve_batches: BatchServing) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 1000}], "nested": [[]] * 100}
    item = {"custom_id": "same", "method": "POST", "url": CHAT, "body": body}
    lines = b"\n".join([json.dumps(item).encode()] * 2000)
    async with serve_batches() as server:
        with TurnCounter() as counter:
            batch = await server.ended(await server.create(lines))
        assert batch.status == "failed" and counter.turns > 10


async def test_a_deleted_file_counts_until_its_last_download_ends(serve_batches: BatchServing) -> None:
    async with serve_batches() as server:
        store, id = server.store, await server.upload(line("a"))
        file = await store.file(id, owner="")
        downloads = [Download(store, file) for _ in range(2)]
        for download in downloads:
            await download.open()
        await server.openai.files.delete(id)
        for download in downloads:
            assert (store.usage.num_files(""), store.usage.num_bytes("")) == (1, file.num_bytes)
            download.close()
        assert (store.usage.num_files(""), store.usage.num_bytes("")) == (0, 0)


async def test_a_key_has_a_limited_number_of_downloads(serve_batches: BatchServing) -> None:
    async with serve_batches() as server:
        store, id = server.store, await server.upload(line("a"))
        file = await store.file(id, owner="")
        downloads = [Download(store, file) for _ in range(MAX_OWN_DOWNLOADS)]
        for download in downloads:
            await download.open()
        assert_error(await server.served.http.get(f"/v1/files/{id}/content"), status=429)
        for download in downloads:
            download.close()
        assert (await server.served.http.get(f"/v1/files/{id}/content")).status_code == 200


async def test_the_results_of_batches_count_as_files(serve_batches: BatchServing) -> None:
    async with serve_batches(batch_max_files=2) as server:
        batch = await server.ended(await server.create(line("a")))
        body = {"input_file_id": batch.input_file_id, "endpoint": CHAT, "completion_window": "24h"}
        refused = await server.served.http.post("/v1/batches", json=body)
        assert_error(refused, status=400, code="too_many_files")


async def uploaded(store: BatchStore) -> FileRecord:
    upload = Upload(store, "a")
    await upload.start()
    await upload.write(b"{}")
    return await upload.commit(filename="a", keep_s=100)


def batch_of(file: FileRecord) -> BatchRecord:
    return BatchRecord(
        id="a",
        owner=file.owner,
        endpoint=CHAT,
        input_id=file.id,
        output_id="b",
        error_id="c",
        created_s=0,
        expires_s=2**40,
    )


async def cancel_late(store: BatchStore, call: Awaitable[object]) -> None:
    """Cancels a call that has run in the store's thread, before the event loop has its result."""
    goes_on, has_run = threading.Event(), threading.Event()
    before = asyncio.create_task(store.call(lambda _: goes_on.wait(60)))
    await asyncio.sleep(0)
    calling = asyncio.ensure_future(call)
    for _ in range(3):  # it comes to the store's thread
        await asyncio.sleep(0)
    after = asyncio.create_task(store.call(lambda _: has_run.set()))
    await asyncio.sleep(0)
    goes_on.set()
    assert has_run.wait(60)
    calling.cancel()
    await asyncio.gather(before, after)
    with pytest.raises(asyncio.CancelledError):
        await calling


async def test_calls_that_are_cancelled_leave_nothing_open_or_uncounted(tmp_path: Path) -> None:
    async with batch_store(BatchConfig(batch_dir=str(tmp_path))) as store:
        assert store is not None
        file, other = await uploaded(store), await uploaded(store)
        for _ in range(MAX_OWN_DOWNLOADS + 1):
            download = Download(store, file)
            await cancel_late(store, download.open())
            download.close()
        for _ in range(MAX_OWN_UPLOADS + 1):
            upload = Upload(store, "a")
            await cancel_late(store, upload.start())
            await cancel_late(store, upload.drop())
        upload = Upload(store, "a")
        await upload.start()
        await cancel_late(store, upload.commit(filename="a", keep_s=100))
        await upload.drop()
        await cancel_late(store, store.delete(other))
        await cancel_late(store, store.add(batch_of(file)))
        await cancel_late(store, store.cancel("a", owner="a"))
        assert store.open["a"].stop.is_set()
        assert await store.call(lambda folder: folder.usage()) == [("a", 2, file.num_bytes)]
        assert (store.usage.num_files("a"), store.usage.num_bytes("a")) == (2, file.num_bytes)
        assert len([*(tmp_path / "files").iterdir()]) == 2


async def test_a_batch_cannot_be_cancelled_while_its_end_is_stored(tmp_path: Path) -> None:
    goes_on = threading.Event()
    async with batch_store(BatchConfig(batch_dir=str(tmp_path))) as store:
        assert store is not None
        record = batch_of(await uploaded(store))
        batch = await store.add(record)
        waiting = asyncio.create_task(store.call(lambda _: goes_on.wait(60)))
        ended = reached(record, BatchStatus.FAILED, now_s=store.clock())
        ending = asyncio.create_task(store.change(batch, ended))
        cancelling = asyncio.create_task(store.cancel("a", owner="a"))
        await asyncio.sleep(0)  # each task has come to its first wait
        goes_on.set()
        results = await asyncio.gather(waiting, ending, cancelling, return_exceptions=True)
        assert isinstance(results[-1], RequestError)
        assert (await store.batch("a", owner="a")).status is BatchStatus.FAILED


def test_a_large_answer_is_stored_in_its_pieces(tmp_path: Path) -> None:
    """One call that copies or decodes a large answer would delay the event loop."""
    asked = BatchLine("a", CHAT, b"{}")
    opening, closing = b'{"choices":["\\"usage\\":{"', b'],"usage":{"prompt_tokens":3},"metadata":{"usage":"x"}}'
    content = [b',"xxxx"' * 10_000] * 30
    answer = LineAnswer(200, "id", [], complete=True)
    for piece in (opening, *content, closing):
        answer.add(piece)
    assert answer.num_bytes > MAX_DECODED_BYTES
    pieces = result_pieces(asked, answer)
    assert all(stored is sent for stored, sent in zip(pieces[1:-1], answer.pieces, strict=True))
    body = b"".join(answer.pieces)
    assert b"".join(pieces) == result_line(asked.id, custom_id="a", status_code=200, request_id="id", body=body)
    assert len(last_bytes(answer.pieces)) < MAX_DECODED_BYTES + len(content[0])
    assert tokens_in(last_bytes(answer.pieces)) == tokens_in(body) == BatchTokens(input_tokens=3)

    path = tmp_path / "results"
    path.write_bytes(b"".join(pieces) * 2 + b"".join(pieces)[:-20])  # the server was killed
    file = LineFile(path)
    first = scan(file, 0)
    second = scan(file, first.next or 0)
    last = scan(file, second.next or 0)
    assert [piece.tokens.input_tokens for piece in (first, second, last)] == [3, 3, 0] and last.next is None
    assert [*first.ids, *second.ids] == [id_digest("a")] * 2
    assert file.num_bytes == path.stat().st_size == 2 * sum(map(len, pieces))
    file.close()


async def test_an_answer_that_is_too_large_is_not_kept(
    serve_batches: BatchServing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_calls, "MAX_ANSWER_BYTES", 100)
    async with serve_batches() as server:
        batch = await server.ended(await server.create(line("a")))
        assert batch.output_file_id is None
        assert (await server.results(batch.error_file_id))["a"]["error"]["code"] == "answer_too_large"


async def test_lines_of_cancelled_batches_do_not_wait_any_more() -> None:
    turns, memory = LineTurns(Admission(9), maximum=1), LineMemory(1)
    assert await memory.take("a", 1)
    for _ in range(3):
        waiting = [asyncio.create_task(turns.take("a")), asyncio.create_task(memory.take("a", 1))]
        await asyncio.sleep(0)
        assert turns.num_waiting == memory.num_waiting == 1
        for task in waiting:
            task.cancel()
        await asyncio.wait(waiting)
        assert turns.num_waiting == memory.num_waiting == 0
