"""`kv_transfer_params`: what a request says about prefill and decode on different servers.

    server     takes                                                      answers
    prefill    an order: {"do_remote_decode": true}                       the ticket
    decode     a ticket, or vLLM's list with one for each choice          null
    any other  neither

Which of them a server is, the engine of the model says that is asked for.

A ticket binds memory of its prefill worker, so it is never just dropped. While a request is being checked its tickets
belong to `read_kv_params`, then to `OpenGroups`, and to the engine once it has the group.
"""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Annotated

import anyio
import msgspec

from motet.api.schema_shared import GeneratingFields
from motet.api.served import ServedModel
from motet.api.service import Service
from motet.config import ServerConfig
from motet.engines.base import Engine
from motet.errors import MotetError, RequestError
from motet.transfer.ticket import Ticket, ticket_of
from motet.types import Role

PARAM = "kv_transfer_params"
MAX_READERS = 64


class PrefillOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Compute the prompt's KV and keep it for others."""

    do_remote_decode: bool
    do_remote_prefill: bool = False
    readers: Annotated[int, msgspec.Meta(ge=1, le=MAX_READERS)] = 1


@dataclass(frozen=True)
class KVParams:
    """One of the two, or nothing."""

    order: PrefillOrder | None = None
    ticket: Ticket | None = None

    def check(self, prompts: Sequence[Sequence[int]]) -> None:
        """Raises RequestError unless they can be meant for these prompts."""
        if self.order is None and self.ticket is None:
            return
        if len(prompts) != 1:
            raise _refused(f"it is for one prompt, and this request has {len(prompts)}")
        (prompt,) = prompts
        if len(prompt) < 2:
            raise _refused("it needs a prompt of at least two tokens, for decode runs the last one itself")
        if self.ticket is not None and not self.ticket.is_for(prompt):
            raise _refused("the ticket is for another prompt")


@dataclass(frozen=True)
class Asked:
    """What a request is about."""

    served: ServedModel
    kv_params: KVParams


@asynccontextmanager
async def read_kv_params(service: Service, body: GeneratingFields, *, num_choices: int) -> AsyncIterator[Asked]:
    """Surrounds the checks of a request: if it is refused, be it for its model, its tickets are released."""
    given = body.kv_transfer_params
    try:
        served = service.served(body.model)
    except MotetError:
        await _give_back(service, given, num_choices)
        raise
    tickets: list[Ticket] = []
    try:
        params = _read(served, given, num_choices, service.config, tickets)
        while len(tickets) > 1:  # the trunk is fetched once, with the first
            await served.engine.release(tickets.pop())
        yield Asked(served, params)
    except BaseException:
        await _release(served.engine, tickets)
        raise


async def _give_back(service: Service, given: object, num_choices: int) -> None:
    """Releases what a request without a model brought, through any engine: each reaches the leases of all."""
    served = next((model for model in service.models.all() if isinstance(model, ServedModel)), None)
    if served is None:
        return
    tickets: list[Ticket] = []
    with suppress(MotetError):
        _read(served, given, num_choices, service.config, tickets)
    await _release(served.engine, tickets)


async def _release(engine: Engine, tickets: list[Ticket]) -> None:
    with anyio.CancelScope(shield=True):
        while tickets:
            await engine.release(tickets.pop())


def _read(
    served: ServedModel, given: object, num_choices: int, config: ServerConfig, tickets: list[Ticket]
) -> KVParams:
    """Puts what it finds into `tickets`, also if it raises RequestError after all."""
    if given is None:
        return KVParams()
    match served.info.role:
        case Role.PREFILL:
            return KVParams(order=_order(given))
        case Role.DECODE:
            return KVParams(ticket=_ticket(given, num_choices, served.max_group(config), tickets))
        case Role.BOTH:
            raise RequestError(
                f"Unsupported parameter: '{PARAM}' is for prefill servers and decode servers, and this one is neither.",
                param=PARAM,
                code="unsupported_parameter",
            )


def _order(given: object) -> PrefillOrder:
    if not isinstance(given, Mapping):
        raise _refused("a prefill server takes an object")
    if given.get("do_remote_prefill"):
        raise _refused("this is a prefill server: it makes tickets and takes none")
    try:
        order = msgspec.convert({name: value for name, value in given.items() if value is not None}, PrefillOrder)
    except msgspec.ValidationError as error:
        raise _refused(str(error)) from error
    if not order.do_remote_decode:
        raise _refused("do_remote_decode is false, so it asks for nothing; leave it out")
    return order


def _ticket(given: object, num_choices: int, max_choices: int, tickets: list[Ticket]) -> Ticket:
    """The first one. All are read, whatever is wrong with some. A lease that is named twice is one ticket."""
    if isinstance(given, Mapping) and given.get("do_remote_decode"):
        raise _refused("this is a decode server: it takes tickets; do_remote_decode is for prefill servers")
    listed = given if isinstance(given, list) else [given]
    if len(listed) > max_choices:
        raise _refused(f"a list of {len(listed)}, while a prompt has at most {max_choices} choices here")
    refusals: list[RequestError] = []
    for one in listed:
        try:
            ticket = ticket_of(one)
        except RequestError as error:
            refusals.append(error)
        else:
            if all(_lease(ticket) != _lease(other) for other in tickets):
                tickets.append(ticket)
    if refusals:
        raise refusals[0]
    if isinstance(given, list) and len(listed) != num_choices:
        raise _refused(f"a list has one ticket for each choice, {num_choices} here, but this one has {len(listed)}")
    return tickets[0]


def _lease(ticket: Ticket) -> tuple[str, int]:
    return ticket.remote_engine_id, ticket.lease_id


def _refused(why: str) -> RequestError:
    return RequestError(f"Invalid '{PARAM}': {why}.", param=PARAM, code="invalid_value")
