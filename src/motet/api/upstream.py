"""Requests for text models, which bypass our own schemas: the body's `model` is read first and decides which way to go.

1. `text_models_first`   no text model is meant: the route goes on as on every server, with our schemas
2. `check_fields`        what we have to understand is checked in our own words; the text upstream checks the rest
3. `UpstreamRequest`     all prompts are one group, admitted, counted and closed as groups of tokens are
4. `UpstreamChunks`, `UpstreamBody`
                         what the upstream wrote stays as it is; the rest of an answer is ours:
                         {id, object, created, model: as asked, choices: [{index, its fields, finish_reason}], what
                         stood beside the choices, usage: summed}
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial

import msgspec
from fastapi import Request, Response
from pydantic import ConfigDict, Field, ValidationError

from motet.api.admission import Place
from motet.api.answer import AnswerWriter, EventWriter, GeneratedResponse, head_json
from motet.api.body import SHORT_BYTES, check_counts, in_turn
from motet.api.caller import Handler, body_of, caller_of
from motet.api.collect import chat_usage_json
from motet.api.failure import schema_failure
from motet.api.groups import AnswerGroup, GroupAccount, Take
from motet.api.plan import Head
from motet.api.schemas.shared import MAX_SEED, MIN_SEED, SessionId, StreamingFields, StreamOptions
from motet.api.served import TextModel
from motet.api.service import Service
from motet.engines.upstream.base import Fields, TextGroupStream, TextPiece, TextRequest, TextRoute, TextStep
from motet.engines.wire import UNREADABLE
from motet.ids import new_request_id
from motet.types import Usage

ID_PREFIXES = {TextRoute.CHAT: "chatcmpl", TextRoute.COMPLETIONS: "cmpl"}
PROMPT_PARAMS = {TextRoute.CHAT: "messages", TextRoute.COMPLETIONS: "prompt"}


def text_models_first(service: Service, path: TextRoute, *, ours: Handler) -> Handler:
    """Returns what answers requests of this path: `ours` those for models that are asked in tokens."""

    async def handle(request: Request) -> Response:
        models = service.models()
        if not any(isinstance(model, TextModel) for model in models.values()):
            return await ours(request)
        body = await body_of(request)
        fields, name = _read(body) if len(body) <= SHORT_BYTES else await in_turn(partial(_read, body))
        model = next(iter(models.values())) if name is None and len(models) == 1 else models.get(name or "")
        if fields is None or not isinstance(model, TextModel):
            return await ours(request)
        return _answer(service, model, path=path, fields=fields, request=request)

    return handle


def _answer(service: Service, model: TextModel, *, path: TextRoute, fields: Fields, request: Request) -> Response:
    checked, config = check_fields(fields), service.config
    caller = caller_of(request, session=checked.session_id)
    asked = TextRequest(
        route=path,
        body=fields,
        model=model.name,
        n=checked.n,
        prompts=_prompts_in(fields, path),
        seed=checked.seed,
        stream=checked.stream,
        best_of=checked.best_of,
        trace=caller.trace,
        session_id=caller.session_id,
        # The client's own, unless it may be a key of this server.
        authorization="" if config.api_keys or config.admin_key else request.headers.get("authorization", ""),
    )
    num_prompts, most, param = asked.num_prompts, config.max_n, PROMPT_PARAMS[path]
    service.check_size(caller.client, num_prompts=num_prompts, n=asked.n, most=most, prompt_param=param)
    answer_id = new_request_id(ID_PREFIXES[path])
    head = Head(id=answer_id, created=int(time.time()), model=model.name)
    group = UpstreamRequest(service, model, request=asked, name=answer_id)
    writer = (
        UpstreamChunks(head, path, include_usage=checked.include_usage) if checked.stream else UpstreamBody(head, path)
    )
    return GeneratedResponse(service, [group], writer=writer, client=caller.client, num_choices=asked.num_choices)


class _UpstreamStreamOptions(StreamOptions):
    model_config = ConfigDict(extra="ignore")


class UpstreamFields(StreamingFields):
    """The fields that we have to understand."""

    model_config = ConfigDict(extra="ignore")

    n: int = Field(1, ge=1)
    best_of: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=MIN_SEED, le=MAX_SEED)
    session_id: SessionId = None
    stream_options: _UpstreamStreamOptions | None = None


def check_fields(fields: Fields) -> UpstreamFields:
    """Raises RequestError in the words of our own schemas."""
    values = {name: msgspec.json.decode(fields[name]) for name in UpstreamFields.model_fields if name in fields}
    try:
        return UpstreamFields.model_validate(values)
    except ValidationError as error:
        raise schema_failure(error) from None


def _read(body: bytes) -> tuple[Fields | None, str | None]:
    """Returns the fields (None if the body is no JSON object), and the `model` that it names, if any. Raises
    RequestError for a body of too many parts."""
    check_counts(body)
    fields = None
    try:
        fields = msgspec.json.decode(body, type=Fields)
        return fields, msgspec.json.decode(fields.get("model", b"null"), type=str | None)
    except UNREADABLE:
        return fields, None


def _prompts_in(fields: Fields, route: TextRoute) -> tuple[msgspec.Raw, ...]:
    """Returns each prompt. Anything but an array of texts or of arrays is one prompt: token ids, or a mistake."""
    if route is TextRoute.CHAT:
        return ()
    prompt = fields.get("prompt", msgspec.Raw(b"null"))
    if not bytes(prompt).startswith(b"["):
        return (prompt,)
    entries = msgspec.json.decode(prompt, type=list[msgspec.Raw])
    each = entries and all(bytes(entry)[:1] in (b'"', b"[") for entry in entries)
    return tuple(entries) if each else (prompt,)


class UpstreamRequest(AnswerGroup[TextStep, Usage | None]):
    """All prompts of the request are one group here: the upstream may be given them in one request."""

    def __init__(self, service: Service, model: TextModel, *, request: TextRequest, name: str) -> None:
        """`name`: the answer's id."""
        self.num_prompts = request.num_prompts
        self._service = service
        self._model = model
        self._request = request
        self._name = name
        self._group: TextGroupStream | None = None
        self._account: GroupAccount | None = None

    @property
    def worker(self) -> str:
        return self._group.worker if self._group is not None else ""

    @property
    def usage(self) -> Usage | None:
        return self._group.usage if self._group is not None else None

    def open(self, place: Place) -> None:
        request = self._request
        self._account = GroupAccount(
            self._service,
            self._model,
            place=place,
            request_id=request.trace,
            group=self._name,
            num_choices=request.num_choices,
        )
        self._group = self._model.source.generate(request)

    async def run(self, take: Take[TextStep]) -> None:
        assert self._group is not None and self._account is not None  # it has been opened
        while steps := await self._group.read():
            self._account.step([piece for step in steps for piece in step.pieces], True)
            if (taking := take(steps)) is not None:
                await taking

    async def close(self, *, status: int) -> None:
        async with AsyncExitStack() as closing:  # the group is closed also if the account cannot be
            if self._group is not None:
                closing.push_async_callback(self._group.aclose)
            if self._account is not None:
                self._account.end(status=status, worker=self.worker, usage=self.usage)


class UpstreamChunks(EventWriter[TextStep, Usage | None]):
    """Writes a stream: one chunk for each piece, with the fields that stood beside its choice."""

    def __init__(self, head: Head, route: TextRoute, *, include_usage: bool) -> None:
        kind = "chat.completion.chunk" if route is TextRoute.CHAT else "text_completion"
        super().__init__(head_json(head, kind), include_usage=include_usage, usage_json=chat_usage_json)

    def feed(self, steps: Sequence[TextStep], usage: Callable[[], Usage | None]) -> bytes:
        opening, closing = self._opening, self._without_usage
        return b"".join(
            opening + _rest_of_choice(piece) + b"]" + _members(step.extras) + closing
            for step in steps
            for piece in step.pieces
        )


class UpstreamBody(AnswerWriter[TextStep, Usage | None]):
    """Writes a whole answer. A field beside the choices is kept if all requests of the group have the same value."""

    content_type = "application/json"
    streams = False

    def __init__(self, head: Head, route: TextRoute) -> None:
        kind = "chat.completion" if route is TextRoute.CHAT else "text_completion"
        self._opening = head_json(head, kind) + b',"choices":['
        self._pieces: list[TextPiece] = []
        self._extras: list[Fields] = []

    def feed(self, steps: Sequence[TextStep], usage: Callable[[], Usage | None]) -> bytes:
        for step in steps:
            self._pieces += step.pieces
            self._extras.append(step.extras)
        return b""

    def close(self, usage: Usage | None) -> Sequence[bytes]:
        pieces = sorted(self._pieces, key=lambda piece: piece.index)
        choices = b",".join(b'{"index":' + _rest_of_choice(piece) for piece in pieces)
        agreed = _members(_agreed(self._extras))
        return [self._opening + choices + b"]" + agreed + b',"usage":' + chat_usage_json(usage) + b"}"]


def _rest_of_choice(piece: TextPiece) -> bytes:
    """Returns the JSON of a choice after its number."""
    return b'%d%b,"finish_reason":%b}' % (piece.index, _members(piece.fields), msgspec.json.encode(piece.finish))


def _members(fields: Fields) -> bytes:
    return b"".join(b",%b:%b" % (msgspec.json.encode(name), bytes(value)) for name, value in fields.items())


def _agreed(all_extras: Sequence[Fields]) -> Fields:
    """Returns the fields that have the same value in all of them."""
    first, *others = all_extras or [{}]
    return {
        name: value
        for name, value in first.items()
        if all(bytes(extras.get(name, msgspec.Raw())) == bytes(value) for extras in others)
    }
