"""`/v1/files`: files with the lines of batches, and the results of batches.

    POST   /v1/files                 uploads a file (`multipart/form-data`); it is written to disk while it arrives
    GET    /v1/files                 a page of the list
    GET    /v1/files/{id}            one file
    GET    /v1/files/{id}/content    its content
    DELETE /v1/files/{id}            deletes it, unless a batch reads it

An owner is an API key, or all requests without one. A file of another owner is a 404."""

import logging
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from motet.api.batches.multipart import FormReader, PartEnd, PartHead, invalid_form
from motet.api.batches.records import FilePurpose, FileRecord
from motet.api.batches.store import FLAG_OFF, BatchStore, Download, Upload
from motet.api.http.caller import caller_of
from motet.api.http.failure import invalid_value, missing_parameter, unknown_parameter
from motet.api.http.routes import json_response, new_router
from motet.api.http.streaming import while_client_stays
from motet.api.service import Service
from motet.errors import NotFoundError, OverloadedError, RequestError

log = logging.getLogger(__name__)

MAX_FIELD_BYTES = 1024
MAX_FILENAME_CHARS = 255
MAX_PAGE = 10_000
"""OpenAI's maximum of `limit`."""
PAGE = 1_000
"""Maximum number of files in one answer, whatever `limit` is; `has_more` is True if there are more."""
MIN_KEEP_S, MAX_KEEP_S = 3600, 30 * 24 * 3600
"""OpenAI's range of `expires_after[seconds]`."""
FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
ANCHOR = "created_at"


def store_of(service: Service) -> BatchStore:
    """Returns the store. Raises NotFoundError if the server has none."""
    if service.batches is None:
        raise NotFoundError(FLAG_OFF, code="batches_off")
    return service.batches


def owner_of(service: Service, request: Request) -> str:
    """Returns the owner of the files that a request can see."""
    return service.rights(caller_of(request).client).client_id


def file_router(service: Service) -> APIRouter:
    router = new_router()

    @router.post("/v1/files", openapi_extra={"requestBody": UPLOAD_BODY})
    async def upload(request: Request) -> Response:
        """Uploads a file with the lines of a batch."""
        store = store_of(service)
        await store.remove_expired()
        file = Upload(store, owner_of(service, request))
        try:
            await file.start()
            record = await UploadedForm(store, file).read(request)
        except OSError as error:
            log.error("an uploaded file could not be stored: %s", error)
            raise OverloadedError("The server could not store the file. Try again later.") from error
        finally:
            await file.drop()
        return json_response(record.shown())

    @router.get("/v1/files")
    async def list_files(
        request: Request,
        *,
        after: str | None = None,
        limit: Annotated[int, Query(ge=1, le=MAX_PAGE)] = MAX_PAGE,
        order: Literal["asc", "desc"] = "desc",
        purpose: str | None = None,
    ) -> Response:
        """Lists the files, the youngest first."""
        store, owner, ascending = store_of(service), owner_of(service, request), order == "asc"
        size, now_s = min(limit, PAGE), store.clock()
        found = await store.call(
            lambda folder: folder.files.page(
                owner, after=after, limit=size + 1, ascending=ascending, purpose=purpose, now_s=now_s
            )
        )
        if found is None:
            raise NotFoundError(f"No such File object: {str(after)[:100]}", param="after", code="file_not_found")
        return await store.call(lambda _: page_response([file.shown() for file in found], size))

    @router.get("/v1/files/{id}")
    async def get_file(id: str, request: Request) -> Response:
        record = await store_of(service).file(id, owner=owner_of(service, request))
        return json_response(record.shown())

    @router.get("/v1/files/{id}/content", responses={200: {"content": {"application/octet-stream": {}}}})
    async def get_content(id: str, request: Request) -> Response:
        store = store_of(service)
        return ContentResponse(store, await store.file(id, owner=owner_of(service, request)))

    @router.delete("/v1/files/{id}")
    async def delete_file(id: str, request: Request) -> Response:
        store = store_of(service)
        record = await store.file(id, owner=owner_of(service, request))
        await store.delete(record)
        return json_response({"id": record.id, "object": "file", "deleted": True})

    return router


UPLOAD_BODY = {
    "required": True,
    "content": {
        "multipart/form-data": {
            "schema": {
                "type": "object",
                "required": ["file", "purpose"],
                "properties": {
                    "file": {"type": "string", "format": "binary"},
                    "purpose": {"const": FilePurpose.BATCH.value},
                    "expires_after": {
                        "type": "object",
                        "properties": {
                            "anchor": {"const": ANCHOR},
                            "seconds": {"type": "integer", "minimum": MIN_KEEP_S, "maximum": MAX_KEEP_S},
                        },
                    },
                },
            }
        }
    },
}
"""The body of an upload, for the OpenAPI document."""


def page_response(shown: list[dict[str, object]], size: int) -> Response:
    """Returns a page of a list in OpenAI's form. `shown`: the objects, one more than `size` if there are more."""
    page = shown[:size]
    ends = {"first_id": page[0]["id"] if page else None, "last_id": page[-1]["id"] if page else None}
    return json_response({"object": "list", "data": page, **ends, "has_more": len(shown) > size})


class ContentResponse(Response):
    """The content of a file, which is sent while it is read, until the client leaves. A file that is deleted during
    this time is sent completely."""

    def __init__(self, store: BatchStore, file: FileRecord) -> None:
        super().__init__(media_type="application/octet-stream", headers={"x-content-type-options": "nosniff"})
        self.headers["content-length"] = str(file.num_bytes)
        self._download = Download(store, file)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._download.open()
            await while_client_stays(receive, self._send(send))
        finally:
            self._download.close()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        while piece := await self._download.read():
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class UploadedForm:
    """The form of an upload: the content of its file is passed on, and its other fields are kept."""

    def __init__(self, store: BatchStore, file: Upload) -> None:
        self._store = store
        self._file = file
        self._fields: dict[str, bytes] = {}
        self._part: PartHead | None = None
        """The part that is being read."""
        self._filename: str | None = None
        """The name of the file; None before its part."""

    async def read(self, request: Request) -> FileRecord:
        """Reads the body, and adds the file. Raises RequestError for a wrong field."""
        parser = FormReader(request.headers.get("content-type", ""))
        try:
            async for piece in request.stream():
                for event in parser.feed(piece):
                    if isinstance(event, bytes):
                        await self._content(event)
                    elif isinstance(event, PartHead):
                        self._start(event)
                    elif isinstance(event, PartEnd):
                        self._end()
        except ClientDisconnect as error:
            raise RequestError("The client left before the body was complete.") from error
        parser.close()
        for name, present in (("file", self._filename is not None), ("purpose", "purpose" in self._fields)):
            if not present:
                raise missing_parameter(name)
        return await self._file.commit(filename=self._filename or "", keep_s=self._keep_s())

    def _start(self, part: PartHead) -> None:
        self._part = part
        if part.name == "file":
            if self._filename is not None:
                raise invalid_value("file", "expected one file")
            self._filename = (part.filename or "upload.jsonl")[:MAX_FILENAME_CHARS]
        elif part.name not in FIELDS:
            raise unknown_parameter(part.name)
        elif part.name in self._fields:
            raise invalid_form(f"it has the field {part.name!r} twice")
        else:
            self._fields[part.name] = b""

    async def _content(self, piece: bytes) -> None:
        assert self._part is not None  # content follows the head of a part
        name = self._part.name
        if name == "file":
            await self._file.write(piece)
            return
        self._fields[name] += piece
        if len(self._fields[name]) > MAX_FIELD_BYTES:
            raise invalid_value(name, f"it has more than {MAX_FIELD_BYTES} bytes")

    def _end(self) -> None:
        if self._part is not None and self._part.name == "purpose" and self._field("purpose") != FilePurpose.BATCH:
            why = f"Invalid value: {self._field('purpose')[:100]!r}. This server only has files for batches: 'batch'."
            raise RequestError(why, param="purpose", code="invalid_value")

    def _field(self, name: str) -> str:
        return self._fields.get(name, b"").decode(errors="replace")

    def _keep_s(self) -> int:
        """Returns the time after which the file expires."""
        anchor, seconds = self._field("expires_after[anchor]"), self._field("expires_after[seconds]")
        if not (anchor or seconds):
            return self._store.keep_s
        if anchor != ANCHOR:
            raise invalid_value("expires_after[anchor]", f"expected {ANCHOR!r}")
        if not (seconds.isascii() and seconds.isdigit() and MIN_KEEP_S <= int(seconds) <= MAX_KEEP_S):
            raise invalid_value("expires_after[seconds]", f"expected an integer from {MIN_KEEP_S} to {MAX_KEEP_S}")
        return min(int(seconds), self._store.keep_s)
