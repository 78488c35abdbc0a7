"""What another server of ours sends to `/engine/...`: read and checked like anything that comes from outside.

It holds what the public routes let through and nothing else, so that no body can bring an engine to do what no request
of a client could.
"""

from collections.abc import Iterable
from typing import TypeVar

import msgspec
from fastapi import Request
from starlette.requests import ClientDisconnect

from motet.api.request_id import is_id
from motet.api.served import ServedModel
from motet.engines.wire import PROTOCOL, PROTOCOL_HEADER, UNREADABLE
from motet.errors import RequestError
from motet.transfer.ticket import Ticket, params_of, ticket_of
from motet.types import ChoiceStart, GenerateRequest, Role, SamplingParams

T = TypeVar("T")

_RANGES = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (0, 2**31),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (0, 2),
    "logprobs": (0, 20),
    "prompt_logprobs": (0, 20),
}
_ABOVE_ZERO = ("top_p", "repetition_penalty")
MAX_BIAS = 100
MAX_INDEX = 2**31


async def read_body(request: Request, kind: type[T]) -> T:
    """Raises RequestError for another protocol, and for what is no such body."""
    spoken = request.headers.get(PROTOCOL_HEADER)
    if spoken != str(PROTOCOL):
        raise RequestError(
            f"This worker speaks engine protocol {PROTOCOL}, and was asked in {spoken or 'none'}. These routes are for "
            "gateways: run the same version of Motet on both sides.",
            code="engine_protocol",
        )
    try:
        body = await request.body()
    except ClientDisconnect as error:
        raise RequestError("The sender left before the body was complete.") from error
    try:
        return msgspec.msgpack.decode(body, type=kind)
    except UNREADABLE as error:
        raise RequestError(f"The body is no {kind.__name__} in msgpack: {error}", code="invalid_body") from error


def checked_ticket(ticket: Ticket) -> Ticket:
    """Raises RequestError for one that cannot be; such a one is not used, not even to give it back."""
    return ticket_of(params_of(ticket))


def checked(request: GenerateRequest) -> GenerateRequest:
    """With a ticket, if any, that may be given back should the group be refused."""
    if request.ticket is not None:
        checked_ticket(request.ticket)
    return request


def check_group(served: ServedModel, request: GenerateRequest) -> None:
    """Raises RequestError, naming the field."""
    for name, value in (
        ("request_id", request.request_id),
        ("trace", request.trace),
        ("session_id", request.session_id),
    ):
        if not (is_id(value) or (value == "" and name != "request_id")):
            raise _refused(name, "up to 200 printable characters without spaces are allowed")
    if request.model not in ("", served.info.model):
        raise _refused("model", f"{request.model!r} is not here; this worker has {served.info.model!r}")
    if not -(2**63) <= request.priority < 2**63:
        raise _refused("priority", f"{request.priority} has more than 64 bits")
    sampling = request.sampling
    served.preparer.check_prompt(request.prompt, param="prompt")
    if sampling.max_tokens < 1:
        raise _refused("max_tokens", f"{sampling.max_tokens}; at least 1 is allowed")
    served.preparer.max_tokens(len(request.prompt), sampling.max_tokens, default=None, param="prompt")
    _check_sampling(sampling)
    _check_tokens("stop_token_ids", sampling.stop_token_ids, served)
    _check_tokens("logit_bias", sampling.logit_bias, served)
    _check_choices(served, request)
    _check_use_of_ticket(served, request)


def _check_sampling(sampling: SamplingParams) -> None:
    for name, (low, high) in _RANGES.items():
        value = getattr(sampling, name)
        if value is not None and not (low <= value <= high and (value > 0 or name not in _ABOVE_ZERO)):
            raise _refused(name, f"{value}; {low} to {high} is allowed")
    if not 0 <= sampling.min_tokens <= sampling.max_tokens:
        raise _refused("min_tokens", f"{sampling.min_tokens}; 0 to max_tokens, {sampling.max_tokens}, is allowed")
    if not all(abs(bias) <= MAX_BIAS for bias in sampling.logit_bias.values()):
        raise _refused("logit_bias", f"-{MAX_BIAS} to {MAX_BIAS} is allowed")


def _check_choices(served: ServedModel, request: GenerateRequest) -> None:
    choices, most = request.choices, served.info.max_num_seqs
    if not 1 <= len(choices) <= most:
        raise _refused("choices", f"{len(choices)} of them; 1 to {most} are allowed")
    if len({choice.index for choice in choices}) < len(choices):
        raise _refused("choices", "two have the same index")
    for choice in choices:
        _check_choice(choice, request.sampling.max_tokens)
        _check_tokens("choices", choice.written, served)


def _check_choice(choice: ChoiceStart, max_tokens: int) -> None:
    if not 0 <= choice.index < MAX_INDEX:
        raise _refused("choices", f"index {choice.index}")
    if not 0 <= choice.seed < 2**64:
        raise _refused("choices", f"seed {choice.seed} is no unsigned number of 64 bits")
    if len(choice.written) >= max_tokens:
        raise _refused("choices", f"choice {choice.index} has written its {max_tokens} tokens already")


def _check_use_of_ticket(served: ServedModel, request: GenerateRequest) -> None:
    ticket, role = request.ticket, served.info.role
    if ticket is None:
        return
    if role is not Role.DECODE:
        raise _refused("ticket", f"this is a worker with role {role}, and takes none")
    if not ticket.is_for(request.prompt):
        raise _refused("ticket", "it is for another prompt")


def _check_tokens(param: str, tokens: Iterable[int], served: ServedModel) -> None:
    """Raises unless they are of the model's vocabulary."""
    known = sorted(tokens)
    if known:
        served.preparer.check_prompt((known[0], known[-1]), param=param)


def _refused(param: str, why: str) -> RequestError:
    return RequestError(f"Invalid '{param}': {why}.", param=param, code="invalid_value")
