"""The answer to `POST /engine/prefill`: a ticket. It lives like any other answer: admitted, counted, and cancelled,
with its lease, when the sender leaves."""

from collections.abc import Callable, Sequence

import msgspec

from motet.api.engine_body import check_group
from motet.api.kv_params import PrefillOrder
from motet.api.open_groups import GroupsAnswer, OpenGroups, Step
from motet.api.plan import Head, Plan
from motet.api.served import ServedModel
from motet.api.service import Service
from motet.engines.wire import MSGPACK
from motet.errors import RequestError
from motet.ids import new_request_id
from motet.text.choice import TextRules
from motet.text.usage import Usage
from motet.transfer.ticket import Ticket
from motet.types import ChoiceStart, GenerateRequest, Role


def prefill_answer(service: Service, request: GenerateRequest, *, readers: int) -> GroupsAnswer:
    """Raises RequestError. Of the choices, whose tokens are for the reader to write, one stands for all."""
    served = service.only_model()
    if served.info.role is not Role.PREFILL:
        raise RequestError(
            f"This is a worker with role {served.info.role}; it prefills nothing for others.", code="wrong_role"
        )
    group = msgspec.structs.replace(
        request, request_id=new_request_id("prefill"), choices=(ChoiceStart(0, 0),), ticket=None
    )
    check_group(served, group)
    if len(group.prompt) < 2:
        raise RequestError("A prompt of one token is run by who decodes it, and not prefilled.", param="prompt")
    answer = GroupsAnswer(OpenGroups(service, _plan(served, group, readers)), TicketWriter())
    answer.headers["content-type"] = MSGPACK
    return answer


def _plan(served: ServedModel, group: GenerateRequest, readers: int) -> Plan:
    return Plan(
        head=Head(
            id=group.request_id,
            created=served.created,
            model=served.name,
            fingerprint=served.info.fingerprint,
        ),
        served=served,
        groups=(group,),
        order=PrefillOrder(do_remote_decode=True, readers=readers),
        rules=TextRules(),
        stream=False,
        include_usage=False,
        continuous_usage=False,
    )


class TicketWriter:
    """Sends the ticket of the one step there is."""

    streams = False

    def __init__(self) -> None:
        self._ticket: Ticket | None = None

    def feed(self, steps: Sequence[Step], usage: Callable[[], Usage]) -> bytes:
        for step in steps:
            self._ticket = step.ticket
        return b""

    def close(self, usage: Usage) -> bytes:
        return msgspec.msgpack.encode(self._ticket)
