"""The groups of one request while they run: each is opened, read step by step, accounted for, and closed.

    TokenGroup        one prompt: turns the engine's tokens into events of choices, or only prefills the prompt
    WorkerGroup       a group that a gateway has sent, as the engine's own deltas (`worker.engine_routes`)
    UpstreamPrompts   all prompts of a request to a text upstream (`texts.text_requests`)

`answer.GeneratedResponse` owns the groups of a request: it opens all or none, runs them, and closes them together."""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Generic, Self, TypeVar

from motet.api.generation.plan import Plan
from motet.api.http.admission import AdmissionSlot, AnswerBytes
from motet.api.http.request_spans import end_group_span, error_of, group_span_of
from motet.api.known_groups import ChoiceReport, ChoiceState, KnownGroup, choice_state
from motet.api.served import ServedModel, TextModel
from motet.api.service import Service
from motet.errors import MotetError
from motet.log import cut
from motet.merge import Take
from motet.metrics.group_metrics import SENT, ShownChoice
from motet.text.choice import ChoiceEvent
from motet.text.text_group import GroupStep, TextGroup
from motet.tracing.spans import NO_SPAN, Span
from motet.transfer.ticket import Ticket
from motet.types import FinishReason, GenerateRequest, PromptReport, Usage

log = logging.getLogger("motet.api")

StepT = TypeVar("StepT")
UsedT = TypeVar("UsedT")

MAX_ERROR_CHARS = 300
"""Maximum number of characters of an error in the log line of a group."""


class AnswerGroup(ABC, Generic[StepT, UsedT]):
    """A group of a request."""

    num_prompts = 1
    """Number of prompts. Each counts in admission as a group that waits for its first token."""
    error: MotetError | None = None
    """Error that ended the group, for its line in the log."""

    @property
    @abstractmethod
    def usage(self) -> UsedT:
        """Usage of the group so far."""

    @property
    @abstractmethod
    def worker(self) -> str:
        """Id of the worker that generates the group; empty while it is not known."""

    @property
    def prefill_worker(self) -> str:
        """Id of the worker that computed the prompt for another worker; empty if none did, or while it is not known."""
        return ""

    @abstractmethod
    def open(self, slot: AdmissionSlot) -> None:
        """Submits the group. Raises the error if it is refused."""

    @abstractmethod
    def run(self, take: Take[StepT]) -> Coroutine[None, None, None]:
        """Reads an open group to its end."""

    @abstractmethod
    async def close(self, *, status: int) -> None:
        """Frees the group, counts it and logs it. Must be called once, also if `open` failed or was not called."""


class GroupAccount:
    """The accounting of one submitted group, until `end`: its slot in admission, its metrics, its line in the log."""

    def __init__(
        self,
        service: Service,
        served: ServedModel | TextModel,
        *,
        slot: AdmissionSlot,
        request_id: str,
        group: str,
        num_choices: int,
        span: Span,
        prompt_tokens: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        """`request_id`: the client's id of the request; `group`: Motet's id of the group; `span`: span of the group,
        which `end` ends. `prompt_tokens`, `max_tokens`: None if only another server knows them."""
        self._slot = slot
        self._span = span
        self._metrics = service.metrics.of(served.parent or served.name)
        self._record = self._metrics.group_opened(
            num_choices, clock=service.clock, prompt_tokens=prompt_tokens, max_tokens=max_tokens, on_first=slot.started
        )
        self.step: Callable[[Sequence[ShownChoice], bool], None] = self._record.step
        """Must be called with the events of each step, and True if a choice can have ended in it."""
        self.start_choices: Callable[[Sequence[int]], None] = self._record.start_choices
        """Must be called with choices that start later than the group."""
        self.finish_reasons: Mapping[int, FinishReason] = self._record.finish_reasons
        """Finish reason of each choice that has ended, by index."""
        model, adapter = (served.parent, served.name) if served.parent else (served.name, None)
        self._names = {"request_id": request_id, "group": group, "model": model, "adapter": adapter}
        if span.context is not None:
            self._names["trace_id"] = span.context.trace_id

    @classmethod
    def of_tokens(
        cls, service: Service, served: ServedModel, *, request: GenerateRequest, slot: AdmissionSlot, span: Span
    ) -> Self:
        return cls(
            service,
            served,
            slot=slot,
            span=span,
            request_id=request.trace,
            group=request.request_id,
            num_choices=len(request.choices),
            prompt_tokens=len(request.prompt),
            max_tokens=request.sampling.max_tokens,
        )

    def end(
        self,
        *,
        status: int,
        worker: str,
        usage: Usage | None,
        tokens: Mapping[int, int] | None = None,
        prefill_worker: str = "",
        queue_s: float = 0.0,
        error: MotetError | None = None,
    ) -> None:
        """Leaves admission, counts the group and logs it. Must be called once. `usage`: None if it was not reported.
        `tokens`: number of output tokens of each choice, if known. `queue_s`: time for which the group waited for
        capacity. `error`: the error that ended the group; clients do
        not get its complete message if it is about a worker on another server."""
        worker = (error.worker if error is not None else "") or worker
        self._slot.leave()
        record = self._record
        self._metrics.group_ended(record, status=status, tokens=tokens or {}, queue_s=queue_s)
        end_group_span(self._span, record, status=status, worker=worker, usage=usage, tokens=tokens or {})
        fields = {
            **self._names,
            "worker": worker,
            "prefill_worker": prefill_worker or None,
            "status": status,
            "n": record.num_choices,
            **{name: getattr(usage, name, None) for name in ("prompt_tokens", "cached_tokens", "completion_tokens")},
            "finished": len(record.finished_s),
            "first_token_s": _rounded(record.first_token_s),
            "last_choice_first_token_s": _rounded(record.last_choice_first_token_s),
            "total_s": _rounded(record.age_s),
        }
        if error is not None:
            fields["error"] = cut(error.message, MAX_ERROR_CHARS)
        log.info("group ended", extra={"fields": fields})


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


class TokenGroup(AnswerGroup[GroupStep, Usage]):
    """One prompt of a request: its group in the engine, its account, and the ticket that it starts or ends with."""

    def __init__(self, service: Service, plan: Plan, *, number: int, known: KnownGroup | None = None) -> None:
        """`number`: number of the prompt in the request. `known`: None if the client cannot find the group later."""
        self._service = service
        self._plan = plan
        self._request = plan.groups[number]
        self._number = number
        self._known = known
        self._text: TextGroup | None = None
        """None before `open`, and if the group is only prefilled."""
        self._ticket: Ticket | None = None
        self._account: GroupAccount | None = None
        """None before `open`."""
        self._span: Span = NO_SPAN
        self._waiting_bytes = AnswerBytes(service.key_limits.answers, plan.client)
        """The memory of tokens that wait for slower choices."""

    def open(self, slot: AdmissionSlot) -> None:
        plan, served, number = self._plan, self._plan.served, self._number
        self._service.check_pause()
        self._span = span = group_span_of(plan.span, self._request, model=served.name)
        request = self._request = span.placed(self._request)
        if plan.order is None:
            self._text = TextGroup(
                served.engine,
                request,
                tokenizer=served.tokenizer,
                rules=plan.rules_of(number),
                policy=plan.policy,
                number=number,
                count_waiting_bytes=self._waiting_bytes.set,
            )
        self._account = GroupAccount.of_tokens(self._service, served, request=request, slot=slot, span=span)
        if self._text is not None:
            self._text.on_step, self._text.on_start = self._account.step, self._account.start_choices
            if self._known is not None:
                self._service.groups.opened(self._known, self)

    def choices(self) -> Iterator[ChoiceReport]:
        text, account = self._text, self._account
        if text is None or account is None:
            return
        reasons, unfinished, waiting = dict(account.finish_reasons), text.unfinished, text.waiting
        only_worker, workers = self._service.only_worker, dict(text.workers.of_choice)
        for index, tokens in sorted(text.num_tokens.items()):
            state = choice_state(index, ended=reasons, unfinished=unfinished, waiting=waiting)
            started = state in (ChoiceState.WRITING, ChoiceState.OVER)
            worker = (workers.get(index, only_worker) or None) if started else None
            yield ChoiceReport(index, state, tokens, reasons.get(index), worker)

    def has_choice(self, index: int) -> bool:
        return self._text is not None and any(start.index == index for start in self._request.choices)

    def is_named(self, ids: Collection[str], *, sender: str) -> bool:
        request = self._request
        return self._plan.head.id in ids or (request.client == sender and request.trace in ids)

    async def end_choice(self, index: int) -> bool:
        return self._text is not None and await self._text.end_choice(index)

    async def end_all(self) -> None:
        if self._text is not None:
            await self._text.end_all()

    def run(self, take: Take[GroupStep]) -> Coroutine[None, None, None]:
        return self._prefill(take) if self._text is None else self._text.run(take)

    async def _prefill(self, take: Take[GroupStep]) -> None:
        """Delivers one step with the ticket, in which the choice ends without a token."""
        assert self._plan.order is not None and self._account is not None  # the group is open, and only prefilled
        self._ticket = await self._plan.served.engine.prefill(self._request, readers=self._plan.order.readers)
        ended = ChoiceEvent(self._request.choices[0].index, "", (), finish=FinishReason.LENGTH)
        self._account.step((ended,), True)
        step = GroupStep((ended,), PromptReport(self._ticket.cached_tokens), self._number, self._ticket)
        if (pending := take((step,))) is not None:
            await pending

    @property
    def usage(self) -> Usage:
        if self._text is not None:
            return self._text.usage
        cached_tokens = self._ticket.cached_tokens if self._ticket else 0
        return Usage(prompt_tokens=len(self._request.prompt), completion_tokens=0, cached_tokens=cached_tokens)

    @property
    def worker(self) -> str:
        return (self._text.workers.last if self._text else "") or self._service.only_worker

    @property
    def prefill_worker(self) -> str:
        return self._text.workers.prefill if self._text else ""

    async def close(self, *, status: int) -> None:
        """Frees the group, the request's ticket if no engine has received it, and the ticket of a prefill if the client
        has not received it."""
        text, request = self._text, self._request
        unused = request.ticket if text is None else None
        if self._known is not None and text is None:
            self._known.further.put_back(request.choices)
        if status != SENT:
            unused = self._ticket or unused
        tokens = text.num_tokens if text else {start.index: 0 for start in request.choices}
        async with AsyncExitStack() as closing:  # each step runs even if an earlier step fails
            if unused is not None:
                closing.push_async_callback(self._plan.served.engine.release, unused, trace=request.trace)
            closing.callback(self._waiting_bytes.free)
            if text is not None:
                closing.push_async_callback(text.aclose)
            if self._account is None:
                self._span.end(error=error_of(status))
            else:
                self._account.end(
                    status=status,
                    worker=self.worker,
                    usage=self.usage,
                    tokens=tokens,
                    prefill_worker=self.prefill_worker,
                    queue_s=0.0 if text is None else text.queue_s,
                    error=self.error,
                )
                if self._known is not None and text is not None:
                    await self._service.groups.closed(self._known, self)
