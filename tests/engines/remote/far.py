"""A prefill server as another server sees it: real ones, and ones that answer by a script."""

from collections.abc import Awaitable, Callable

import httpx

from motet.engines.fake import fake_info
from motet.engines.remote import RemotePrefill
from motet.ids import RequestId
from motet.transfer.ticket import Ticket, TransferAddress, params_of, prompt_digest
from motet.types import GenerateRequest, Role, SamplingParams, choice_starts

URL = "http://prefill.test"
PROMPT = (5, 6, 7, 8)
DECODE_INFO = fake_info(role=Role.DECODE, transfer=TransferAddress("decode", "127.0.0.1", 9))


def request(
    *, prompt: tuple[int, ...] = PROMPT, n: int = 8, trace: str = "trace-1", session_id: str = "session-1"
) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId("group-1"),
        prompt=prompt,
        choices=choice_starts(n, seed=7),
        sampling=SamplingParams(max_tokens=50, temperature=0.5, min_tokens=3, logprobs=2),
        cache_salt="salt",
        priority=3,
        trace=trace,
        session_id=session_id,
    )


TICKET = Ticket(
    remote_engine_id="far-1",
    remote_request_id="group-1",
    remote_host="10.0.0.1",
    remote_port=20000,
    remote_block_ids=(4,),
    num_tokens=len(PROMPT) - 1,
    prompt_digest=prompt_digest(PROMPT[:-1]),
    generations=(2,),
    lease_id=11,
    lease_slot=0,
    lease_s=60.0,
)


class Released:
    """What was given back through the side channel."""

    def __init__(self) -> None:
        self.tickets: list[Ticket] = []

    async def __call__(self, ticket: Ticket) -> None:
        self.tickets.append(ticket)


def remote(
    client: httpx.AsyncClient,
    *,
    url: str = URL,
    api_key: str | None = None,
    release_through: Callable[[Ticket], Awaitable[None]] | None = None,
) -> RemotePrefill:
    return RemotePrefill(
        url, info=DECODE_INFO, client=client, api_key=api_key, release_through=release_through or Released()
    )


Answer = Callable[[httpx.Request], httpx.Response]


class Scripted:
    """A server that answers by a function, and keeps what it was asked."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[httpx.Request] = []
        self.client = httpx.AsyncClient(transport=httpx.MockTransport(self._handle))

    def _handle(self, asked: httpx.Request) -> httpx.Response:
        self.asked.append(asked)
        return self.answer(asked)

    @property
    def paths(self) -> list[str]:
        return [asked.url.path for asked in self.asked]


def with_ticket(_: httpx.Request) -> httpx.Response:
    return httpx.Response(200, json={"kv_transfer_params": params_of(TICKET)})


def refused(status: int, message: str, code: str | None = None, **headers: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"message": message, "type": "t", "code": code}}, headers=headers)


def status_of(address: TransferAddress | None, *, state: str = "ready") -> httpx.Response:
    """The body of `GET /status` of a prefill server."""
    transfer = address and {"engine_id": address.engine_id, "host": address.host, "port": address.port}
    worker = {"id": "prefill-0", "role": "prefill", "state": state, "leases": 2, "transfer": transfer}
    totals = {"prefills": 5, "prefill_tokens": 700}
    return httpx.Response(200, json={"model": "m", "version": "1", "workers": [worker], "totals": totals})
