"""`kv_transfer_params`: the field of a request for prefill and decode on different servers.

    server     accepts                                                    returns
    prefill    an order: {"do_remote_decode": true}                       the ticket
    decode     a ticket, or vLLM's list with one for each choice          null; needs a cluster key
    any other  nothing

The role of the model's engine determines the kind of server.

A ticket reserves memory of its prefill worker, so it is always released. `request_context` owns the tickets of a
request while it is checked, then `TokenGroup` owns them, and the engine once it has the group."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated

import anyio
import msgspec

from motet.api.generation.request_fields import RequestFields
from motet.api.http.caller import Caller
from motet.api.http.failure import invalid_value, unsupported_parameter
from motet.api.served import ServedModel
from motet.api.service import Service
from motet.errors import MotetError, RequestError
from motet.transfer.ticket import Ticket, is_for_prompt, ticket_of
from motet.types import Role

PARAM = "kv_transfer_params"
MAX_READERS = 64


class PrefillOrder(msgspec.Struct, frozen=True, kw_only=True):
    """The order to compute the prompt's KV and to keep it for decode workers. Unknown keys are ignored: routers have
    their own, such as `transfer_id`."""

    do_remote_decode: bool
    do_remote_prefill: bool = False
    readers: Annotated[int, msgspec.Meta(ge=1, le=MAX_READERS)] = 1


TICKET_KEYS = frozenset(Ticket.__struct_fields__) - frozenset(PrefillOrder.__struct_fields__)


@dataclass(frozen=True, kw_only=True)
class RequestContext:
    """The caller and the model of a request, and its `order` or its `ticket`, if it has one."""

    served: ServedModel
    caller: Caller
    order: PrefillOrder | None = None
    ticket: Ticket | None = None
    closes_objects: bool = True
    """True if objects of JSON schemas have only the named properties, unless the schema allows others."""

    def check(self, prompts: Sequence[Sequence[int]]) -> None:
        """Raises RequestError unless the order or the ticket fits these prompts."""
        if self.order is None and self.ticket is None:
            return
        if len(prompts) != 1:
            raise invalid_value(PARAM, f"it is for one prompt, and this request has {len(prompts)}")
        (prompt,) = prompts
        if len(prompt) < 2:
            why = "it needs a prompt of at least two tokens, since decode computes the last one itself"
            raise invalid_value(PARAM, why)
        if self.ticket is not None and not is_for_prompt(self.ticket, prompt):
            raise invalid_value(PARAM, "the ticket is for another prompt")


@asynccontextmanager
async def request_context(
    service: Service, body: RequestFields, *, caller: Caller, num_choices: int
) -> AsyncIterator[RequestContext]:
    """Yields the context in which a request is checked. Releases the request's tickets if it is refused, even if only
    its model is unknown."""
    try:
        served = service.served(body.model)
    except MotetError as refusal:
        # Any engine can release the tickets, since each engine can reach all others.
        other = next((model for model in service.models().values() if isinstance(model, ServedModel)), None)
        if other is not None:
            with suppress(MotetError):
                async with _read(service, other, body=body, caller=caller, num_choices=num_choices):
                    raise refusal  # leaving `_read` with an error releases the tickets
        raise
    async with _read(service, served, body=body, caller=caller, num_choices=num_choices) as context:
        yield context


@asynccontextmanager
async def _read(
    service: Service, served: ServedModel, *, body: RequestFields, caller: Caller, num_choices: int
) -> AsyncIterator[RequestContext]:
    """Yields the context of a request. Releases its tickets at an error, also if a later ticket cannot be read."""
    given, role = body.kv_transfer_params, served.info.role
    context = RequestContext(served=served, caller=caller, closes_objects=not service.config.additional_properties)
    tickets: list[Ticket] = []
    try:
        if given is not None and role is Role.BOTH:
            raise unsupported_parameter(PARAM, "is for prefill servers and decode servers, and this server is neither")
        if given is not None and role is Role.PREFILL:
            context = replace(context, order=_order(given))
        elif given is not None and not service.takes_tickets:
            why = "without --cluster-key any client could make tickets, and their KV is kept for other clients"
            raise unsupported_parameter(PARAM, f"is not accepted here: {why}")
        elif given is not None:
            maximum = served.max_group(service.config)
            read = partial(_ticket, given, num_choices, max_choices=maximum, tickets=tickets)
            context = replace(context, ticket=await caller.in_thread_if_long(read))
        while len(tickets) > 1:  # the trunk is fetched once, with the first ticket
            await served.engine.release(tickets.pop(), trace=caller.trace)
        yield context
    except BaseException:
        with anyio.CancelScope(shield=True):
            while tickets:
                await served.engine.release(tickets.pop(), trace=caller.trace)
        raise


def _order(given: object) -> PrefillOrder:
    if not isinstance(given, Mapping):
        raise invalid_value(PARAM, "a prefill server accepts an object")
    if given.get("do_remote_prefill"):
        raise invalid_value(PARAM, "this is a prefill server: it makes tickets and accepts none")
    values = {name: value for name, value in given.items() if value is not None}
    if in_ticket := sorted(TICKET_KEYS & values.keys()):
        raise invalid_value(PARAM, f"{in_ticket[0]} is a key of tickets, and a prefill server makes them")
    try:
        order = msgspec.convert(values, PrefillOrder)
    except msgspec.ValidationError as error:
        raise invalid_value(PARAM, str(error)) from error
    except UnicodeEncodeError as error:  # half of a surrogate pair, which msgspec cannot read
        character = error.object[error.start : error.end]
        raise invalid_value(PARAM, f"it contains {character!r}, which is not a character") from error
    if not order.do_remote_decode:
        raise invalid_value(PARAM, "do_remote_decode is false, so it has no effect; leave it out")
    return order


def _ticket(given: object, num_choices: int, *, max_choices: int, tickets: list[Ticket]) -> Ticket:
    """Returns the first ticket, and adds all valid tickets to `tickets`, but only one for each lease."""
    if isinstance(given, Mapping) and given.get("do_remote_decode"):
        why = "this is a decode server: it accepts tickets; do_remote_decode is for prefill servers"
        raise invalid_value(PARAM, why)
    listed = given if isinstance(given, list) else [given]
    if len(listed) > max_choices:
        raise invalid_value(PARAM, f"a list of {len(listed)}, while a prompt has at most {max_choices} choices here")
    refusals: list[RequestError] = []
    for value in listed:
        try:
            ticket = ticket_of(value)
        except RequestError as error:
            refusals.append(error)
        else:
            lease = ticket.remote_engine_id, ticket.lease_id
            if all(lease != (other.remote_engine_id, other.lease_id) for other in tickets):
                tickets.append(ticket)
    if refusals:
        raise refusals[0]
    if isinstance(given, list) and len(listed) != num_choices:
        why = f"a list has one ticket for each choice, {num_choices} here, but this one has {len(listed)}"
        raise invalid_value(PARAM, why)
    return tickets[0]
