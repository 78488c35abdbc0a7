"""vLLM's `kv_transfer_params` as tickets of ours. Pure.

vLLM's are opaque: what they hold is between the KV connectors of the two servers. So they travel as the JSON they came
in, inside a ticket of ours that says who made them and for which prompt.
"""

from collections.abc import Mapping, Sequence

import msgspec

from motet.engines.wire import UNREADABLE
from motet.errors import EngineError
from motet.transfer.ticket import Ticket, prompt_digest

KVParams = dict[str, object]
"""A JSON object; what is in it is not ours to know."""

LEASE_S = 30.0
"""What a NIXL connector is configured for by default (`kv_lease_duration`); the ticket does not tell."""

UNKNOWN_PORT = 1


class _Prefilled(msgspec.Struct):
    kv_transfer_params: KVParams | list[KVParams] | None = None


def kv_params_in(body: bytes, server: str = "vLLM") -> list[KVParams]:
    """Of the answer to a prefill: one object for each request that may use it. Raises EngineError if there is none.
    `server` names who answers in messages."""
    try:
        params = msgspec.json.decode(body, type=_Prefilled).kv_transfer_params
    except UNREADABLE as error:
        raise EngineError(f"what {server} answered is no answer to a prefill: {error}") from error
    found = [params] if isinstance(params, dict) else params
    if not found or not all(found):
        raise EngineError(
            f"{server} computed the prompt, but made no ticket (kv_transfer_params): start it with a KV connector, as "
            """--kv-transfer-config '{"kv_connector": "NixlConnector", "kv_role": "kv_both"}'"""
        )
    return found


def ticket_from(params: Mapping[str, object], *, engine_id: str, prompt: Sequence[int]) -> Ticket:
    """`engine_id`: of the report of the server that made it (`EngineReport.engine_id`)."""
    host, port = params.get("remote_host"), params.get("remote_port")
    request_id = params.get("remote_request_id")
    return Ticket(
        remote_engine_id=engine_id,
        remote_request_id=request_id if isinstance(request_id, str) else "",
        remote_host=host if isinstance(host, str) else "",
        remote_port=port if isinstance(port, int) and 0 < port < 2**16 else UNKNOWN_PORT,
        remote_block_ids=(),
        num_tokens=len(prompt),
        prompt_digest=prompt_digest(prompt),
        generations=(),
        lease_id=1,
        lease_slot=0,
        lease_s=LEASE_S,
        readers=1,
        foreign=msgspec.json.encode(params).decode(),
    )


def params_from(ticket: Ticket) -> KVParams:
    """What vLLM wrote, as it wrote it. Raises EngineError for a ticket that is not vLLM's."""
    try:
        return msgspec.json.decode(ticket.foreign, type=KVParams)
    except UNREADABLE as error:
        raise EngineError(f"a ticket of {ticket.remote_engine_id} is none that vLLM could use") from error
