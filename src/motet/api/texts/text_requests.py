"""Requests for text models, which are not checked against the schemas of their routes.

1. `pass_through`        reads the body's `model`. If the model takes tokens, the route continues with its schema
2. `answer_from_texts`   checks the fields that Motet has to understand; the text upstream checks the rest
3. `UpstreamPrompts`     all prompts as one group, which is admitted, counted and closed like groups of tokens
4. `UpstreamChunks`, `UpstreamBody`
                         the upstream's fields stay unchanged, and the rest of an answer is Motet's: {id, object,
                         created, model, choices: [{index, the choice's fields, finish_reason}], the fields next to
                         the choices, usage: summed}

Motet handles the field `group` and never sends it to the upstream: `SteeredPrompt` applies it to each prompt."""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import NamedTuple, Self

import msgspec
from fastapi import Request, Response
from pydantic import ConfigDict, Field, ValidationError, model_validator

from motet.api.generation.answer import GeneratedResponse
from motet.api.generation.answer_writer import AnswerWriter, chat_usage_json
from motet.api.generation.chunks import ChunkTemplate
from motet.api.generation.group_schema import PARAM, GroupFields, check_keep
from motet.api.generation.groups import AnswerGroup, GroupAccount
from motet.api.generation.json_pieces import PIECE_BYTES
from motet.api.generation.plan import AnswerHead
from motet.api.generation.request_fields import Seed, SessionId, StreamingFields, StreamOptions
from motet.api.http.admission import AdmissionSlot
from motet.api.http.body import MAX_TOKEN_IDS, check_counts
from motet.api.http.caller import Caller, caller_of
from motet.api.http.failure import invalid_value, schema_failure, unsupported_parameter
from motet.api.http.request_spans import group_span
from motet.api.http.routes import body_of
from motet.api.known_groups import ChoiceReport, KnownGroup, choice_state
from motet.api.served import TextModel
from motet.api.service import Service
from motet.engines.upstream.text_source import Fields, TextGroupStream, TextPiece, TextRequest, TextRoute, TextStep
from motet.engines.wire import UNREADABLE
from motet.ids import new_request_id
from motet.merge import Take
from motet.policies.driver import ChoiceOutput, PolicyDriver
from motet.policies.steering import GroupPolicy, GroupReport, Keep
from motet.types import FinishReason, Usage


class PassThrough(NamedTuple):
    """A request for a model that a third-party server serves as texts."""

    model: TextModel
    fields: Fields


async def pass_through(service: Service, request: Request) -> PassThrough | None:
    """Reads the body's `model`. Returns None if the model takes tokens, or if the body cannot be read: the route's
    schema then refuses it. Raises RequestError for a body with too many parts."""
    models = service.models()
    if not any(isinstance(model, TextModel) for model in models.values()):
        return None
    body = await body_of(request)
    fields, name = await caller_of(request).in_thread_if_long(partial(_read, body))
    model = next(iter(models.values())) if not name and len(models) == 1 else models.get(name or "")
    return PassThrough(model, fields) if fields is not None and isinstance(model, TextModel) else None


async def answer_from_texts(service: Service, passed: PassThrough, *, route: TextRoute, request: Request) -> Response:
    """Returns the answer of a model's text upstream. Raises RequestError for wrong values of `UpstreamFields`."""
    model, fields = passed
    checked, prompts = await caller_of(request).in_thread_if_long(partial(_checked, fields, route))
    policy, caller, config = _policy(checked), caller_of(request, session=checked.session_id), service.config
    id_prefix, prompt_param = ("chatcmpl", "messages") if route is TextRoute.CHAT else ("cmpl", "prompt")
    text_request = TextRequest(
        route=route,
        body={name: value for name, value in fields.items() if name != PARAM},
        model=model.name,
        n=checked.n,
        prompts=prompts,
        seed=checked.seed,
        stream=checked.stream,
        best_of=checked.best_of,
        trace=caller.trace,
        session_id=caller.session_id,
        # If this server has keys, the header can contain one of them.
        authorization="" if config.api_keys or config.admin_key else request.headers.get("authorization", ""),
    )
    service.check_size(
        caller.client,
        num_prompts=text_request.num_prompts,
        n=text_request.n,
        max_n=config.max_n,
        prompt_param=prompt_param,
    )
    head = AnswerHead(id=new_request_id(id_prefix, named=caller.own_id), created=int(time.time()), model=model.name)
    group = UpstreamPrompts(service, model, request=text_request, head=head, caller=caller, policy=policy)
    writer = (
        UpstreamChunks(
            head, route, include_usage=checked.include_usage or config.enable_force_include_usage, reports=group.reports
        )
        if checked.stream
        else UpstreamBody(head, route, reports=group.reports, keep=Keep.ALL if policy is None else policy.keep)
    )
    return GeneratedResponse(
        service, [group], writer=writer, client=caller.client, num_choices=text_request.num_choices
    )


def _policy(checked: "UpstreamFields") -> GroupPolicy | None:
    """Returns the policy of each prompt. Raises RequestError for a policy that needs more than texts."""
    group, where = checked.group, "the model is on a server that takes texts"
    if group is None:
        return None
    if group.deterministic:
        why = f"depends on numbers of tokens: {where}, which are not reported before the end of an answer"
        raise unsupported_parameter(f"{PARAM}.deterministic", why)
    if group.confidence is not None:
        why = f"needs the log-probabilities of every token: {where}, which need not report any"
        raise unsupported_parameter(f"{PARAM}.confidence", why)
    if checked.best_of is not None and checked.best_of > checked.n:
        raise invalid_value("best_of", f"greater than 'n' it cannot be used with '{PARAM}'")
    return group.policy(checked.n, max_top=0)


class _UpstreamStreamOptions(StreamOptions):
    model_config = ConfigDict(extra="ignore")


class UpstreamFields(StreamingFields):
    """The fields that Motet has to understand. Other fields are passed to the upstream."""

    model_config = ConfigDict(extra="ignore")

    n: int = Field(1, ge=1)
    best_of: int | None = Field(None, ge=1)
    seed: Seed | None = None
    session_id: SessionId = None
    stream_options: _UpstreamStreamOptions | None = None
    group: GroupFields | None = None

    @model_validator(mode="after")
    def check_group(self) -> Self:
        check_keep(self, self.group)
        return self


def check_fields(fields: Fields) -> UpstreamFields:
    """Raises RequestError for a wrong value, with the same message as the schemas of the routes."""
    values = {name: msgspec.json.decode(fields[name]) for name in UpstreamFields.model_fields if name in fields}
    try:
        return UpstreamFields.model_validate(values)
    except ValidationError as error:
        raise schema_failure(error) from None


def _read(body: bytes) -> tuple[Fields | None, str | None]:
    """Returns the fields of the body, None unless it is a JSON object, and its `model`, if any. Raises RequestError for
    a body with too many parts."""
    check_counts(body, max_values=MAX_TOKEN_IDS)
    fields = None
    try:
        fields = msgspec.json.decode(body, type=Fields)
        return fields, msgspec.json.decode(fields.get("model", b"null"), type=str | None)
    except UNREADABLE:
        return fields, None


def _checked(fields: Fields, route: TextRoute) -> tuple[UpstreamFields, tuple[msgspec.Raw, ...]]:
    return check_fields(fields), _prompts_in(fields, route)


def _prompts_in(fields: Fields, route: TextRoute) -> tuple[msgspec.Raw, ...]:
    """Returns each prompt of a completions request. A field that is not an array of texts or of arrays is one prompt: a
    text, token ids, or a mistake."""
    if route is TextRoute.CHAT:
        return ()
    prompt = fields.get("prompt", msgspec.Raw(b"null"))
    if not bytes(prompt).startswith(b"["):
        return (prompt,)
    entries = msgspec.json.decode(prompt, type=list[msgspec.Raw])
    each = entries and all(bytes(entry)[:1] in (b'"', b"[") for entry in entries)
    return tuple(entries) if each else (prompt,)


class UpstreamPrompts(AnswerGroup[TextStep, Usage | None]):
    """All prompts of a request as one group, since the upstream can get them in one request."""

    def __init__(
        self,
        service: Service,
        model: TextModel,
        *,
        request: TextRequest,
        head: AnswerHead,
        caller: Caller,
        policy: GroupPolicy | None,
    ) -> None:
        """`policy`: policy of each prompt; the caller's client then finds each prompt as a group of its own."""
        self.num_prompts = request.num_prompts
        self._service = service
        self._model = model
        self._request = request
        self._head = head
        self._caller = caller
        self._policy = policy
        self._group: TextGroupStream | None = None
        self._account: GroupAccount | None = None
        self._steered: list[tuple[KnownGroup, SteeredPrompt]] = []
        """Prompts under a policy, once they are open."""

    @property
    def worker(self) -> str:
        return self._group.worker if self._group is not None else ""

    @property
    def usage(self) -> Usage | None:
        return self._group.usage if self._group is not None else None

    def reports(self) -> list[GroupReport]:
        reports = [prompt.report(known.id) for known, prompt in self._steered]
        return [report for report in reports if report is not None]

    def open(self, slot: AdmissionSlot) -> None:
        request, policy = self._request, self._policy
        if policy is not None:
            first, size = range(policy.num_first(request.n)), request.num_prompts
            start = tuple(prompt * request.n + index for prompt in range(size) for index in first)
            request = msgspec.structs.replace(request, start=start)
        caller, model, size = self._caller, self._model, request.num_choices
        span = group_span(caller.span, model=model.name, num_choices=size, group=self._head.id)
        request = span.placed(request)
        self._account = GroupAccount(
            self._service, model, slot=slot, request_id=request.trace, group=self._head.id, num_choices=size, span=span
        )
        self._group = self._model.generate(request)
        if policy is not None:
            self._steer(self._group, policy)

    def _steer(self, stream: TextGroupStream, policy: GroupPolicy) -> None:
        head, n = self._head, self._request.n
        for number in range(self.num_prompts):
            known = KnownGroup(
                id=head.id if self.num_prompts == 1 else f"{head.id}-{number}",
                client=self._caller.client,
                model=head.model,
                created=head.created,
                prompt_tokens=None,
            )
            prompt = SteeredPrompt(policy, stream, first=number * n, n=n)
            self._service.groups.opened(known, prompt)
            self._steered.append((known, prompt))

    async def run(self, take: Take[TextStep]) -> None:
        assert self._group is not None and self._account is not None  # it has been opened
        while steps := await self._group.read():
            pieces = [piece for step in steps for piece in step.pieces]
            self._account.step(pieces, True)
            if self._steered:
                await self._feed(pieces)
            if (pending := take(steps)) is not None:
                await pending

    async def _feed(self, pieces: Sequence[TextPiece]) -> None:
        by_prompt: dict[int, list[TextPiece]] = {}
        for piece in pieces:
            by_prompt.setdefault(piece.index // self._request.n, []).append(piece)
        for number in sorted(by_prompt):
            _, prompt = self._steered[number]
            started = await prompt.feed(by_prompt[number])
            if started and self._account is not None:
                self._account.start_choices(started)

    async def close(self, *, status: int) -> None:
        for known, prompt in self._steered:
            await self._service.groups.closed(known, prompt)
        async with AsyncExitStack() as closing:  # the group is closed also if ending the account fails
            if self._group is not None:
                closing.push_async_callback(self._group.aclose)
            if self._account is not None:
                self._account.end(status=status, worker=self.worker, usage=self.usage, error=self.error)


class SteeredPrompt:
    """An `OpenAnswer` for one prompt. Its choices are numbered from 0, in the request from `first`."""

    def __init__(self, policy: GroupPolicy, stream: TextGroupStream, *, first: int, n: int) -> None:
        self._stream = stream
        self._first = first
        self._n = n
        self._driver = PolicyDriver(policy, range(n))
        self._reasons: dict[int, FinishReason] = {}
        """Finish reason of each choice that has ended, by index."""

    async def feed(self, pieces: Sequence[TextPiece]) -> Sequence[int]:
        """Passes this prompt's pieces to the policy, and ends and starts choices as it decides. Returns the numbers of
        the started choices in the request."""
        driver, outputs = self._driver, []
        for piece in pieces:
            if piece.finish is FinishReason.ABORT:
                continue  # Motet has ended the choice, so the driver knows
            index = piece.index - self._first
            outputs.append(ChoiceOutput(index, piece.text if driver.reads_answers else "", piece.finish))
            if piece.finish is not None:
                self._reasons[index] = piece.finish
        decision = await driver.step(outputs)
        for index in decision.abort:
            self._end(index)
        started = [self._first + index for index in decision.start]
        if started:
            self._stream.start(started)
        return started

    def choices(self) -> Iterator[ChoiceReport]:
        reasons, unfinished, waiting = dict(self._reasons), frozenset(self._driver.unfinished), self._driver.waiting
        for index in range(self._n):
            state = choice_state(index, ended=reasons, unfinished=unfinished, waiting=waiting)
            yield ChoiceReport(index, state, None, reasons.get(index))

    def has_choice(self, index: int) -> bool:
        return index < self._n

    def is_named(self, ids: Collection[str], *, sender: str) -> bool:
        """Returns False: the answer is found by the ids of its groups."""
        return False

    async def end_choice(self, index: int) -> bool:
        if self._driver.withdraw(index):
            return True
        if index in self._reasons or not self._driver.cancel(index):
            return False
        self._end(index)
        return True

    async def end_all(self) -> None:
        self._driver.withdraw_all()
        for index in range(self._n):
            await self.end_choice(index)

    def report(self, id: str) -> GroupReport | None:
        return self._driver.report(id)

    def _end(self, index: int) -> None:
        """Closes the request of a choice, unless the client has ended the choice before."""
        if index not in self._reasons:
            self._reasons[index] = FinishReason.ABORT
            self._stream.end_choice(self._first + index)


class UpstreamChunks(AnswerWriter[TextStep, Usage | None]):
    """Writes a stream: one chunk for each piece, with the upstream's fields next to its choice."""

    def __init__(
        self, head: AnswerHead, route: TextRoute, *, include_usage: bool, reports: Callable[[], list[GroupReport]]
    ) -> None:
        """`reports`: returns the reports on steered prompts, once these have ended."""
        kind = "chat.completion.chunk" if route is TextRoute.CHAT else "text_completion"
        self._template = ChunkTemplate(head.json(kind), null_usage=include_usage)
        self._include_usage = include_usage
        self._reports = reports

    def feed(self, steps: Sequence[TextStep], usage: Callable[[], Usage | None]) -> bytes:
        opening, closing = self._template.opening, self._template.closing
        return b"".join(
            opening + _rest_of_choice(piece) + b"]" + _members(step.extras) + closing
            for step in steps
            for piece in step.pieces
        )

    def close(self, usage: Usage | None) -> Sequence[bytes]:
        usage_json = chat_usage_json(usage) if self._include_usage else None
        return self._template.end(usage=usage_json, reports=self._reports())


class UpstreamBody(AnswerWriter[TextStep, Usage | None]):
    """Writes an unstreamed answer. A field next to the choices is kept if all answers of the upstream agree on it."""

    content_type = "application/json"
    streams = False
    keeps_answer = True

    def __init__(
        self, head: AnswerHead, route: TextRoute, *, reports: Callable[[], list[GroupReport]], keep: Keep
    ) -> None:
        """`reports`: see `UpstreamChunks`. `keep`: choices that the answer contains."""
        kind = "chat.completion" if route is TextRoute.CHAT else "text_completion"
        self._opening = head.json(kind) + b',"choices":['
        self._reports = reports
        self._keep = keep
        self._pieces: list[TextPiece] = []
        self._extras: list[Fields] = []
        self._num_bytes = 0

    def feed(self, steps: Sequence[TextStep], usage: Callable[[], Usage | None]) -> bytes:
        for step in steps:
            self._pieces += step.pieces
            self._num_bytes += sum(len(memoryview(value)) for piece in step.pieces for value in piece.fields.values())
            # A step with aborted choices only is made by Motet, not by the upstream.
            if any(piece.finish is not FinishReason.ABORT for piece in step.pieces):
                self._extras.append(step.extras)
        return b""

    @property
    def held_bytes(self) -> int:
        return self._num_bytes

    @property
    def close_is_long(self) -> bool:
        return self._num_bytes >= PIECE_BYTES

    def close(self, usage: Usage | None) -> Sequence[bytes]:
        left_out = {FinishReason.ABORT} if self._keep is Keep.FINISHED else set()
        sent = (piece for piece in self._pieces if piece.finish not in left_out)
        pieces = sorted(sent, key=lambda piece: piece.index)
        choices = b",".join(b'{"index":' + _rest_of_choice(piece) for piece in pieces)
        closing = b"]" + _members(_agreed(self._extras)) + b',"usage":' + chat_usage_json(usage)
        if reports := self._reports():
            closing += b',"groups":' + msgspec.json.encode(reports)
        return [self._opening + choices + closing + b"}"]


def _rest_of_choice(piece: TextPiece) -> bytes:
    """Returns the JSON of a choice after its number."""
    return b'%d%b,"finish_reason":%b}' % (piece.index, _members(piece.fields), msgspec.json.encode(piece.finish))


def _members(fields: Fields) -> bytes:
    return b"".join(b",%b:%b" % (msgspec.json.encode(name), bytes(value)) for name, value in fields.items())


def _agreed(all_extras: Sequence[Fields]) -> Fields:
    """Returns the fields that have the same value in all these objects."""
    first, *others = all_extras or [{}]
    return {
        name: value
        for name, value in first.items()
        if all(bytes(extras.get(name, msgspec.Raw())) == bytes(value) for extras in others)
    }
