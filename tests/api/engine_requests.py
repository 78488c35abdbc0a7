"""Requests to a worker over raw HTTP, as a gateway sends them."""

import httpx
import msgspec
from msgspec.structs import replace

from motet.engines.wire import PROTOCOL, PROTOCOL_HEADER
from motet.ids import RequestId
from motet.types import GenerateRequest, SamplingParams, choice_starts
from tests.api.serving import Served

HEADERS = {PROTOCOL_HEADER: str(PROTOCOL)}
POSTS = {
    "/engine/generate": "GenerateRequest",
    "/engine/prefill": "GenerateRequest",
    "/engine/release": "Ticket",
    "/engine/stop": "StopChoice",
    "/engine/order": "WorkerOrder",
}


def group(**fields: object) -> GenerateRequest:
    request = GenerateRequest(
        request_id=RequestId("g"),
        prompt=(5, 6, 7),
        choices=choice_starts(2, 7),
        sampling=SamplingParams(max_tokens=9),
        trace="trace-g",
    )
    return replace(request, **fields)


async def post(served: Served, path: str, body: object) -> httpx.Response:
    content = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    return await served.http.post(path, content=content, headers=HEADERS)


def message(response: httpx.Response) -> str:
    text: str = response.json()["error"]["message"]
    return text
