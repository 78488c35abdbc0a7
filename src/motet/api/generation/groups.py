"""The groups of one request while they run: each is opened, read step by step, accounted for, and closed.

    TokenGroup        one prompt as text: tokens of the engine in, events of its choices out; or its prefill alone
    EngineGroup       what a gateway sent, as the engine's own deltas (`engine_routes`)
    UpstreamRequest   all prompts of a request to a text upstream (`upstream`)

`answer.GeneratedResponse` owns the groups of a request: it opens all or none and closes them together. With one group
the group hands its steps over itself; with several, a `Merge` of them.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Generic, Self, TypeVar

from motet.api.generation.plan import Plan
from motet.api.http.admission import AdmissionSlot
from motet.api.http.request_spans import end_group_span, error_of, group_span_of
from motet.api.known_groups import ChoiceReport, ChoiceState, KnownGroup, choice_state
from motet.api.served import ServedModel, TextModel
from motet.api.service import Service
from motet.merge import Take
from motet.metrics.group_metrics import ShownChoice
from motet.text.choice import ChoiceEvent
from motet.text.text_group import GroupStep, TextGroup
from motet.tracing.spans import NO_SPAN, Span
from motet.transfer.ticket import Ticket
from motet.types import FinishReason, GenerateRequest, PromptReport, Usage

log = logging.getLogger("motet.api")

StepT = TypeVar("StepT")
UsedT = TypeVar("UsedT")

SENT = 200
"""The status of a request whose whole answer has been sent."""


class AnswerGroup(ABC, Generic[StepT, UsedT]):
    """One group of a request."""

    num_prompts = 1
    """Each prompt counts as a group that waits for its first token."""

    @property
    @abstractmethod
    def usage(self) -> UsedT:
        """The usage of the group so far."""

    @property
    @abstractmethod
    def worker(self) -> str:
        """The id of the worker that writes the group; empty while that is not known."""

    @abstractmethod
    def open(self, place: AdmissionSlot) -> None:
        """Submits the group. Raises the error if it is refused."""

    @abstractmethod
    def run(self, take: Take[StepT]) -> Coroutine[None, None, None]:
        """Reads the group, once it is open, to its end."""

    @abstractmethod
    async def close(self, *, status: int) -> None:
        """Frees the group, counts and logs it, once. Must follow, also if `open` failed or never came."""


class GroupAccount:
    """The account of one group: its place among those that wait, its figures, and its line in the access log. It begins
    when the group has been submitted; `end` must follow, once."""

    def __init__(
        self,
        service: Service,
        served: ServedModel | TextModel,
        *,
        place: AdmissionSlot,
        request_id: str,
        group: str,
        num_choices: int,
        span: Span,
        prompt_tokens: int | None = None,
        max_tokens: int | None = None,
    ) -> None:
        """`request_id`: the client's name for the request; `group`: ours for the group; `span`: ends with the account.
        `prompt_tokens`, `max_tokens`: None if only another server knows them."""
        self._place = place
        self._span = span
        self._metrics = service.metrics.of(served.name)
        self._record = self._metrics.group_opened(
            num_choices, clock=service.clock, prompt_tokens=prompt_tokens, max_tokens=max_tokens, on_first=place.started
        )
        self.step: Callable[[Sequence[ShownChoice], bool], None] = self._record.step
        """To be called with what each step shows, and True if a choice may have ended in it."""
        self.start_choices: Callable[[Sequence[int]], None] = self._record.start_choices
        """To be called with choices that begin later than the group."""
        self._names = {
            "request_id": request_id,
            "group": group,
            "model": served.parent or served.name,
            "adapter": served.name if served.parent else None,
        }
        if span.context is not None:
            self._names["trace_id"] = span.context.trace_id

    @classmethod
    def of_tokens(
        cls, service: Service, served: ServedModel, *, request: GenerateRequest, place: AdmissionSlot, span: Span
    ) -> Self:
        return cls(
            service,
            served,
            place=place,
            span=span,
            request_id=request.trace,
            group=request.request_id,
            num_choices=len(request.choices),
            prompt_tokens=len(request.prompt),
            max_tokens=request.sampling.max_tokens,
        )

    @property
    def finish_reasons(self) -> Mapping[int, FinishReason]:
        """Why choices have ended, for those that have."""
        return self._record.finish_reasons

    def end(self, *, status: int, worker: str, usage: Usage | None, tokens: Mapping[int, int] | None = None) -> None:
        """Leaves the place; counts and logs the group. `usage`: None if it was not told. `tokens`: the number of
        output tokens of each choice, where that is known."""
        self._place.leave()
        record = self._record
        self._metrics.group_ended(record, status=status, tokens=tokens or {})
        end_group_span(self._span, record, status=status, worker=worker, usage=usage, tokens=tokens or {})
        fields = {
            **self._names,
            "worker": worker,
            "status": status,
            "n": record.num_choices,
            "prompt_tokens": usage.prompt_tokens if usage else None,
            "cached_tokens": usage.cached_tokens if usage else None,
            "completion_tokens": usage.completion_tokens if usage else None,
            "finished": len(record.finished_s),
            "first_token_s": _rounded(record.first_token_s),
            "last_choice_first_token_s": _rounded(record.last_choice_first_token_s),
            "total_s": _rounded(record.age_s),
        }
        log.info("group ended", extra={"fields": fields})


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 4)


class TokenGroup(AnswerGroup[GroupStep, Usage]):
    """One prompt of a request: its group in the engine, its account, and the ticket it brings or comes to."""

    def __init__(self, service: Service, plan: Plan, *, number: int, known: KnownGroup | None = None) -> None:
        """`number`: of the prompt inside the request. `known`: where its client finds the group, if it may."""
        self._service = service
        self._plan = plan
        self._request = plan.groups[number]
        self._number = number
        self._known = known
        self._text: TextGroup | None = None
        """None while the group is not open, and for one that is only prefilled."""
        self._ticket: Ticket | None = None
        """The ticket of a prefill."""
        self._account: GroupAccount | None = None
        self._span: Span = NO_SPAN

    def open(self, place: AdmissionSlot) -> None:
        plan, served, number = self._plan, self._plan.served, self._number
        self._span = span = group_span_of(plan.span, self._request, model=served.name)
        request = self._request = span.placed(self._request)
        if plan.order is None:
            self._text = TextGroup(
                served.engine,
                request,
                tokenizer=served.tokenizer,
                rules=plan.rules,
                policy=plan.policy,
                number=number,
            )
        self._account = GroupAccount.of_tokens(self._service, served, request=request, place=place, span=span)
        if self._text is not None:
            self._text.on_step, self._text.on_start = self._account.step, self._account.start_choices
            if self._known is not None:
                self._service.groups.opened(self._known, self)

    def choices(self) -> Sequence[ChoiceReport]:
        text, account = self._text, self._account
        if text is None or account is None:
            return ()
        reasons, unfinished, waiting = account.finish_reasons, text.unfinished, text.waiting
        only_worker = self._service.only_worker
        reports = []
        for index, tokens in sorted(text.num_tokens.items()):
            state = choice_state(index, ended=reasons, unfinished=unfinished, waiting=waiting)
            begun = state in (ChoiceState.WRITING, ChoiceState.OVER)
            worker = (text.workers.of_choice.get(index, only_worker) or None) if begun else None
            reports.append(ChoiceReport(index, state, tokens, reasons.get(index), worker))
        return reports

    async def end_choice(self, index: int) -> bool:
        return self._text is not None and await self._text.end_choice(index)

    async def end_all(self) -> None:
        if self._text is not None:
            await self._text.end_all()

    def run(self, take: Take[GroupStep]) -> Coroutine[None, None, None]:
        return self._prefill(take) if self._text is None else self._text.run(take)

    async def _prefill(self, take: Take[GroupStep]) -> None:
        """Gives one step: the choice ends without a token, and there is a ticket."""
        assert self._plan.order is not None and self._account is not None  # it is open, and is not to be written
        self._ticket = await self._plan.served.engine.prefill(self._request, readers=self._plan.order.readers)
        ended = ChoiceEvent(self._request.choices[0].index, "", (), finish=FinishReason.LENGTH)
        self._account.step((ended,), True)
        step = GroupStep((ended,), PromptReport(self._ticket.cached_tokens), self._number, self._ticket)
        if (taking := take((step,))) is not None:
            await taking

    @property
    def usage(self) -> Usage:
        if self._text is not None:
            return self._text.usage
        cached_tokens = self._ticket.cached_tokens if self._ticket else 0
        return Usage(prompt_tokens=len(self._request.prompt), completion_tokens=0, cached_tokens=cached_tokens)

    @property
    def worker(self) -> str:
        return (self._text.workers.last if self._text else "") or self._service.only_worker

    async def close(self, *, status: int) -> None:
        """Gives back a ticket that the client brought and the engine never got, and one that was made and the client
        never got."""
        unused = self._request.ticket if self._text is None else None
        if self._known is not None and self._text is None:
            self._known.give_back(self._request.choices)
        if status != SENT:
            unused = self._ticket or unused
        tokens = self._text.num_tokens if self._text else {start.index: 0 for start in self._request.choices}
        try:
            if self._account is not None:
                if self._known is not None and self._text is not None:
                    self._service.groups.closed(self._known, self)
                self._account.end(status=status, worker=self.worker, usage=self.usage, tokens=tokens)
            else:
                self._span.end(error=error_of(status))
        finally:  # each step comes, whatever happens in the one before
            try:
                if self._text is not None:
                    await self._text.aclose()
            finally:
                if unused is not None:
                    await self._plan.served.engine.release(unused, trace=self._request.trace)
