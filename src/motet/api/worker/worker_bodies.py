"""Reads the bodies that a gateway sends to a worker, and checks them like any other external input.

A body can contain only values that the public routes accept too, so a gateway cannot make an engine do anything that a
request of a client could not."""

from collections.abc import Iterable
from itertools import chain
from typing import TypeVar

import msgspec
from fastapi import Request, Response

from motet.api.generation.plan import check_prompt_logprobs
from motet.api.generation.request_fields import MAX_BAD_WORDS, MAX_KEEP_S
from motet.api.http.failure import invalid_value
from motet.api.http.routes import body_of, drop_body
from motet.api.served import ServedModel
from motet.engines.wire import MSGPACK, PROTOCOL, PROTOCOL_HEADER, UNREADABLE
from motet.errors import RequestError
from motet.session_ids import is_id
from motet.settings.parsed_values import MAX_WEIGHT, MIN_WEIGHT
from motet.transfer.ticket import Ticket, is_for_prompt, params_of, ticket_of
from motet.types import SAMPLING_FIELDS, GenerateRequest, Role

T = TypeVar("T")

GROUP = msgspec.msgpack.Decoder(GenerateRequest)
TICKET = msgspec.msgpack.Decoder(Ticket)


def msgpack_response(body: object) -> Response:
    return Response(msgspec.msgpack.encode(body), media_type=MSGPACK)


def check_protocol(request: Request) -> None:
    """Raises RequestError unless the request uses the engine protocol of this server."""
    used = request.headers.get(PROTOCOL_HEADER)
    if used != str(PROTOCOL):
        raise RequestError(
            f"This worker speaks engine protocol {PROTOCOL}, and the request "
            f"{'uses engine protocol ' + used if used else f'has no {PROTOCOL_HEADER} header'}. These routes are for "
            "gateways: run the same version of Motet on both sides.",
            code="engine_protocol",
        )


async def read_body(request: Request, decoder: "msgspec.msgpack.Decoder[T]", *, kind: str = "") -> T:
    """Returns the body. Raises RequestError for another protocol, and for a body of another type. `kind`: name of the
    type in the message; empty for the name of the class."""
    check_protocol(request)
    body = await body_of(request)
    drop_body(request)
    try:
        return decoder.decode(body)
    except UNREADABLE as error:
        name = kind or decoder.type.__name__
        raise RequestError(f"The body is not a {name} in msgpack: {error}", code="invalid_body") from error


async def read_group(request: Request) -> GenerateRequest:
    """Returns the group in the body without its `traceparent`: `caller_of` reads and checks the trace context."""
    body = await read_body(request, GROUP)
    return body if body.traceparent is None else msgspec.structs.replace(body, traceparent=None)


def checked_ticket(ticket: Ticket) -> Ticket:
    """Returns the ticket. Raises RequestError if no worker can have made it; an invalid ticket is not released."""
    return ticket_of(params_of(ticket))


def check_group(served: ServedModel, request: GenerateRequest) -> None:
    """Raises RequestError, which names the field, for a group that this worker cannot run."""
    _check_envelope(served, request)
    served.preparer.check_prompt(request.prompt, param="prompt")
    _check_sampling(served, request)
    served.preparer.max_tokens(len(request.prompt), request.sampling.max_tokens, default=None, param="prompt")
    _check_choices(served, request)
    if request.ticket is not None:
        if served.info.role is not Role.DECODE:
            raise invalid_value("ticket", f"this worker has the role {served.info.role}, and takes no tickets")
        if not is_for_prompt(request.ticket, request.prompt):
            raise invalid_value("ticket", "it is for another prompt")


def _check_envelope(served: ServedModel, request: GenerateRequest) -> None:
    """Checks the fields that concern neither the prompt nor the choices."""
    for name in ("request_id", "trace", "session_id", "client"):
        value = getattr(request, name)
        if not (is_id(value) or (value == "" and name != "request_id")):
            raise invalid_value(name, "up to 200 printable characters without spaces are allowed")
    if not -(2**63) <= request.priority < 2**63:
        raise invalid_value("priority", f"{request.priority} has more than 64 bits")
    for name, low, high in (("keep_s", 0.0, MAX_KEEP_S), ("client_weight", MIN_WEIGHT, MAX_WEIGHT)):
        if not low <= getattr(request, name) <= high:
            raise invalid_value(name, f"{getattr(request, name)} is not from {low:g} to {high:g}")


def _check_sampling(served: ServedModel, request: GenerateRequest) -> None:
    sampling = request.sampling
    for name, field in SAMPLING_FIELDS.items():
        value = getattr(sampling, name)
        for number in value.values() if isinstance(value, dict) else () if value is None else (value,):
            if not field.allows(number):
                raise invalid_value(name, f"{number}; {field.words} is allowed")
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        raise invalid_value("min_tokens", f"{sampling.min_tokens}; 0 to max_tokens, {sampling.max_tokens}, is allowed")
    if not 0 <= request.scored_from <= len(request.prompt):
        raise invalid_value("scored_from", f"{request.scored_from} is not from 0 to {len(request.prompt)}")
    check_prompt_logprobs(len(request.prompt), sampling.prompt_logprobs, prompt_param="prompt")
    for name in ("stop_token_ids", "logit_bias", "logprob_token_ids", "allowed_token_ids"):
        _check_tokens(name, getattr(sampling, name), served=served)
    if len(sampling.bad_word_ids) > 2 * MAX_BAD_WORDS or not all(sampling.bad_word_ids):
        raise invalid_value("bad_word_ids", f"up to {2 * MAX_BAD_WORDS} words with tokens are allowed")
    _check_tokens("bad_word_ids", chain.from_iterable(sampling.bad_word_ids), served=served)


def _check_choices(served: ServedModel, request: GenerateRequest) -> None:
    choices, maximum, max_tokens = request.choices, served.info.max_num_seqs, request.sampling.max_tokens
    if not 1 <= len(choices) <= maximum:
        raise invalid_value("choices", f"{len(choices)} of them; 1 to {maximum} are allowed")
    if len({choice.index for choice in choices}) < len(choices):
        raise invalid_value("choices", "two have the same index")
    for choice in choices:
        if not 0 <= choice.index < 2**31:
            raise invalid_value("choices", f"index {choice.index}")
        if not 0 <= choice.seed < 2**64:
            raise invalid_value("choices", f"seed {choice.seed} is not an unsigned number of 64 bits")
        if len(choice.output_tokens) >= max_tokens:
            raise invalid_value("choices", f"choice {choice.index} has its {max_tokens} output tokens already")
        _check_tokens("choices", choice.output_tokens, served=served)


def _check_tokens(param: str, tokens: Iterable[int], *, served: ServedModel) -> None:
    """Raises RequestError unless all tokens are in the model's vocabulary."""
    if ordered := sorted(tokens):
        served.preparer.check_prompt((ordered[0], ordered[-1]), param=param)
