"""Files: uploads, lists, contents, limits, and hostile clients."""

import json
import stat
from collections.abc import Mapping
from pathlib import Path

import httpx
import pytest
from openai import AsyncOpenAI

from motet.api.batches.multipart import FormReader, PartEnd, PartHead
from motet.api.batches.store import Upload, batch_store
from motet.errors import RequestError
from motet.settings.batch_config import BatchConfig
from tests.api.batches.batch_serving import BatchServing, line
from tests.api.serving import WatchedEngine
from tests.error_response import assert_error

pytestmark = pytest.mark.anyio

FOR_BATCH = {"purpose": "batch"}
TYPE = "multipart/form-data; boundary=xyz"
BODY = (
    b'--xyz\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b"--xyz\r\nContent-Type: text/plain\r\n"
    b'content-disposition: form-data; name="file"; filename="a\\"%22.jsonl"\r\n\r\n'
    b"one\r\n--xy\r\ntwo\r\n"
    b'\r\n--xyz\r\nContent-Disposition: form-data; name="empty"\r\n\r\n\r\n--xyz--\r\nepilogue --xyz'
)
PARTS = {("purpose", None): b"batch", ("file", 'a"%22.jsonl'): b"one\r\n--xy\r\ntwo\r\n", ("empty", None): b""}


def parts_of(*pieces: bytes) -> dict[tuple[str, str | None], bytes]:
    parser, parts, current = FormReader(TYPE), {}, b""
    for piece in pieces:
        for event in parser.feed(piece):
            match event:
                case PartHead(name, filename):
                    part, current = (name, filename), b""
                case PartEnd():
                    parts[part] = current
                case bytes():
                    current += event
    parser.close()
    return parts


def test_a_form_is_parsed_however_it_is_divided() -> None:
    assert parts_of(BODY) == PARTS
    assert parts_of(*(BODY[place : place + 1] for place in range(len(BODY)))) == PARTS
    for place in range(len(BODY)):
        assert parts_of(BODY[:place], BODY[place:]) == PARTS


@pytest.mark.parametrize(
    "body",
    [
        b"",
        BODY[:-20],
        b"--xyz\r\n\r\n\r\n\r\n--xyz--",
        b"--xyz\r\nContent-Disposition: form-data\r\n\r\n\r\n--xyz--",
        b"--xyzabc\r\n",
        b"--xyz\r\n" + b"a: b\r\n" * 5000,
        b'--xyz\r\ncontent-disposition: form-data; name="a"\r\n\r\n\r\n' * 99,
    ],
)
def test_an_invalid_form_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        parts_of(body)


async def test_files_are_listed_in_pages_and_can_be_deleted(serve_batches: BatchServing) -> None:
    async with serve_batches() as server:
        ids = [await server.upload(line(str(number))) for number in range(5)]
        assert [file.id async for file in server.openai.files.list(limit=2)] == ids[::-1]
        assert [file.id async for file in server.openai.files.list(limit=2, order="asc")] == ids
        assert (await server.openai.files.list(purpose="batch_output")).data == []
        page = await server.openai.files.list(after=ids[3], limit=2)
        assert [file.id for file in page.data] == [ids[2], ids[1]] and page.has_more
        assert (await server.openai.files.delete(ids[0])).deleted
        assert_error(await server.served.http.get(f"/v1/files/{ids[0]}"), status=404, code="file_not_found")
        assert (await server.openai.files.retrieve(ids[1])).filename == "lines.jsonl"


async def test_a_large_file_is_stored_and_sent_in_pieces(serve_batches: BatchServing) -> None:
    content = b'{"a": "' + b"x" * 3_000_000 + b'"}\n'
    async with serve_batches(max_body_bytes=1000) as server:
        file = await server.openai.files.create(file=("a", content), purpose="batch")
        assert (await server.openai.files.content(file.id)).content == content


async def test_a_file_that_is_deleted_while_it_is_sent_is_complete(serve_batches: BatchServing) -> None:
    content = b"x" * 20_000_000
    async with serve_batches() as server:
        file = await server.openai.files.create(file=("a", content), purpose="batch")
        async with server.served.http.stream("GET", f"/v1/files/{file.id}/content") as response:
            await server.openai.files.delete(file.id)
            assert sum([len(piece) async for piece in response.aiter_bytes()]) == len(content)


async def test_only_the_user_of_the_server_can_read_the_folder(serve_batches: BatchServing) -> None:
    async with serve_batches() as server:
        batch = await server.ended(await server.create(line("a")))
        assert batch.output_file_id is not None
        paths = [serve_batches.folder, *serve_batches.folder.rglob("*")]
        assert {batch.input_file_id, batch.output_file_id, "batches.sqlite"} < {path.name for path in paths}
        assert [path for path in paths if stat.S_IMODE(path.stat().st_mode) & 0o077] == []


async def post(
    client: AsyncOpenAI, http: httpx.AsyncClient, content: bytes = b"{}\n", fields: Mapping[str, str] = FOR_BATCH
) -> httpx.Response:
    headers = {"authorization": f"Bearer {client.api_key}"}
    return await http.post("/v1/files", files={"file": ("a", content)}, data=dict(fields), headers=headers)


WRONG_FIELDS: list[tuple[dict[str, str], str]] = [
    ({}, "purpose"),
    ({"purpose": "fine-tune"}, "purpose"),
    ({"purpose": "batch", "nonsense": "1"}, "nonsense"),
    ({"purpose": "batch", "expires_after[anchor]": "now"}, "expires_after[anchor]"),
    ({"purpose": "batch", "expires_after[anchor]": "created_at"}, "expires_after[seconds]"),
    (
        {"purpose": "batch", "expires_after[anchor]": "created_at", "expires_after[seconds]": "1"},
        "expires_after[seconds]",
    ),
    ({"purpose": "batch" * 1000}, "purpose"),
]


async def test_a_wrong_field_is_named(serve_batches: BatchServing) -> None:
    async with serve_batches() as server:
        for fields, param in WRONG_FIELDS:
            assert_error(await post(server.openai, server.served.http, fields=fields), status=400, param=param)
        assert server.store.usage.num_files("") == server.store.usage.num_bytes("") == 0
    assert [*(serve_batches.folder / "files").iterdir()] == []


async def test_files_expire(serve_batches: BatchServing) -> None:
    async with serve_batches(batch_keep_days=2) as server:
        expiry = {"anchor": "created_at", "seconds": 3600}
        early = await server.openai.files.create(file=b"{}\n", purpose="batch", expires_after=expiry)  # type: ignore[arg-type]
        late = await server.openai.files.create(file=b"{}\n", purpose="batch")
        assert (early.expires_at, late.expires_at) == (early.created_at + 3600, late.created_at + 2 * 86400)
        serve_batches.clock.now_s += 3600
        assert_error(await server.served.http.get(f"/v1/files/{early.id}"), status=404)
        await server.store.remove_expired()
        assert server.store.usage.num_files("") == 1
        assert [file.name for file in (serve_batches.folder / "files").iterdir()] == [late.id]


async def test_a_key_can_store_a_limited_number_of_files_and_bytes(serve_batches: BatchServing) -> None:
    async with serve_batches(
        api_keys=("one", "two"), batch_max_files=2, batch_max_bytes=2500, batch_max_file_bytes=2000
    ) as server:
        one, http = server.as_key("one"), server.served.http
        assert_error(await post(one, http, b"x" * 2001), status=413)
        assert (await post(one, http, b"x" * 2000)).status_code == 200
        assert_error(await post(one, http, b"x" * 501), status=400, code="storage_limit_exceeded")
        second = await post(one, http, b"x" * 500)
        assert second.status_code == 200
        assert_error(await post(one, http, b""), status=400, code="too_many_files")
        assert (await post(server.as_key("two"), http)).status_code == 200
        await one.files.delete(second.json()["id"])
        assert (await post(one, http, b"")).status_code == 200


async def test_the_results_of_a_batch_count_against_the_limit(serve_batches: BatchServing) -> None:
    async with serve_batches(batch_max_bytes=1500, batch_concurrency=1) as server:
        batch = await server.ended(await server.create(*(line(str(number)) for number in range(4))))
        assert batch.status == "failed" and batch.errors is not None and batch.errors.data is not None
        assert [error.code for error in batch.errors.data] == ["storage_limit_exceeded"]
        results = await server.results(batch.output_file_id)
        assert 0 < len(results) < 4
        assert server.store.usage.num_bytes("") <= 1500
        files = (serve_batches.folder / "files").iterdir()
        assert sum(file.stat().st_size for file in files) == server.store.usage.num_bytes("")


async def test_a_file_that_a_batch_reads_cannot_be_deleted(serve_batches: BatchServing) -> None:
    engine = WatchedEngine(gated=True)
    async with serve_batches(engine=engine, batch_max_open=1) as server:
        batch = await server.create(line("a"))
        refused = await server.served.http.delete(f"/v1/files/{batch.input_file_id}")
        assert_error(refused, status=400, code="file_in_use")
        body = {"input_file_id": batch.input_file_id, "endpoint": batch.endpoint, "completion_window": "24h"}
        assert_error(await server.served.http.post("/v1/batches", json=body), status=400, code="too_many_batches")
        engine.go()
        await server.ended(batch)
        assert (await server.openai.files.delete(batch.input_file_id)).deleted


WRONG_BATCHES: list[tuple[dict[str, object], str]] = [
    ({"input_file_id": "../batches.sqlite"}, "input_file_id"),
    ({"endpoint": "/v1/embeddings"}, "endpoint"),
    ({"completion_window": "1h"}, "completion_window"),
    ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
    ({"metadata": {"a": "x" * 513}}, "metadata.a"),
    ({"metadata": {"a": "\ud800"}}, "metadata.a"),
    ({"input_file_id": "\ud800"}, "input_file_id"),
    ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after.seconds"),
    ({"nonsense": 1}, "nonsense"),
]


async def test_a_wrong_batch_is_refused(serve_batches: BatchServing) -> None:
    async with serve_batches() as server:
        for wrong, param in WRONG_BATCHES:
            body = {"input_file_id": "file-1", "endpoint": "/v1/chat/completions", "completion_window": "24h"}
            content = json.dumps(body | wrong)
            assert_error(await server.served.http.post("/v1/batches", content=content), status=400, param=param)


async def test_no_id_of_a_client_becomes_a_path(serve_batches: BatchServing) -> None:
    async with serve_batches() as server:
        for id in ["..", "%2e%2e", "..%2fbatches.sqlite", "a%00b", "file-1'--", "x" * 5000]:
            for path in (f"/v1/files/{id}", f"/v1/files/{id}/content"):
                answer = await server.served.http.get(httpx.URL(server.served.url, raw_path=path.encode()))
                assert answer.status_code in (400, 404), answer.text


async def test_an_upload_that_breaks_off_leaves_nothing(serve_batches: BatchServing) -> None:
    async with serve_batches() as server:
        await server.served.break_off("/v1/files", "content-type: multipart/form-data; boundary=x\r\n")
        await server.served.until_empty()
    assert [*(serve_batches.folder / "files").iterdir()] == []


async def test_an_upload_that_ends_after_the_store_leaves_nothing(tmp_path: Path) -> None:
    async with batch_store(BatchConfig(batch_dir=str(tmp_path))) as store:
        assert store is not None
        upload = Upload(store, "a")
        await upload.start()
        await upload.write(b"{}")
    await upload.drop()
    assert [*(tmp_path / "files").iterdir()] == []
