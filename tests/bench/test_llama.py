"""The requests for llama.cpp's server, sent to a script that answers like build 11434."""

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from bench.client.load import TimedLoad
from bench.servers.llama import for_llama
from motet.errors import EngineError

pytestmark = pytest.mark.anyio
MAX_TOKENS = 3


class Llama(BaseHTTPRequestHandler):
    """Generates `MAX_TOKENS` tokens for each choice, and reports the usage of a single choice at the end."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        answer = answer_of(body) if self.path == "/completion" else stream_of(body)
        all_tokens = (body["top_k"], body["top_p"], body["min_p"]) == (0, 1.0, 0.0)
        self.send_response(200 if all_tokens else 400)
        self.send_header("content-length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, *_: object) -> None: ...


def answer_of(body: dict[str, int]) -> bytes:
    tokens = list(range(body["max_tokens"])) if body["return_tokens"] else []
    return json.dumps({"index": 0, "content": "so on", "tokens": tokens}).encode()


def stream_of(body: dict[str, int]) -> bytes:
    lines = []
    for place in range(MAX_TOKENS):
        last = place == MAX_TOKENS - 1
        usage = {"usage": {"prompt_tokens": 4, "completion_tokens": MAX_TOKENS}} if last else {}
        for index in range(body["n"]):
            choice = {"index": index, "text": "so ", "finish_reason": "length" if last else None}
            lines.append(f"data: {json.dumps({'choices': [choice]} | usage)}\n\n")
    return "".join([*lines, "data: [DONE]\n\n"]).encode()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Llama) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


async def test_choices_and_token_ids_are_read(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as client:
        load = for_llama(TimedLoad(client, MAX_TOKENS, count_blocks=False))
        timing = await load.group([1, 2, 3, 4], 2, seed=0)
        assert (timing.tokens, await load.answer([1, 2, 3, 4], seed=0)) == (2 * MAX_TOKENS, [0, 1, 2])


@pytest.mark.slow
async def test_an_answer_that_ended_early_is_an_error(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as client:
        load = for_llama(TimedLoad(client, MAX_TOKENS + 1, count_blocks=False))
        with pytest.raises(EngineError, match="requested 4 tokens, but the server reported"):
            await load.group([1, 2, 3, 4], 2, seed=0)
