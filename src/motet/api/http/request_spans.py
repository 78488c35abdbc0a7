"""The spans of requests, groups and choices. Attributes have the names of OpenTelemetry's conventions if there are any.

    POST /v1/chat/completions     the request, from its head to the end of its answer
        chat smollm2              a group: one prompt and its choices
            choice                a span for each choice that has output

No span contains text of a prompt or of an answer. The router adds the events of a group that happen in the router."""

from collections.abc import Mapping
from http import HTTPStatus
from typing import NamedTuple

from starlette.datastructures import Headers
from starlette.types import Scope

from motet.api.http.dialect import route_of
from motet.errors import MotetError
from motet.log import cut
from motet.metrics.group_metrics import GroupRecord
from motet.tracing.context import TRACEPARENT, TRACESTATE, TraceContext, context_in
from motet.tracing.spans import NO_SPAN, Attributes, ChildSpan, Span
from motet.types import GenerateRequest, Usage

OPERATIONS = {"/v1/chat/completions": "chat", "/v1/responses": "chat", "/v1/messages": "chat"}
OTHER_OPERATION = "text_completion"
WORKER_ROUTES = ("/engine/generate", "/engine/prefill")
"""The routes on which a gateway requests answers."""
PROVIDER = "motet"
FIRST_TOKEN = "first_token"
MAX_NAME_CHARS = 200
"""Maximum number of characters of a path. Spans wait in memory, and a client's path can have thousands."""
NS = 1_000_000_000


class RequestSpan(NamedTuple):
    """The span of a request, the parent of the spans of its groups."""

    span: Span = NO_SPAN
    operation: str = OTHER_OPERATION
    """OpenTelemetry's name of the operation."""


NO_REQUEST_SPAN = RequestSpan()


def request_span_of(scope: Scope) -> RequestSpan:
    return RequestSpan(scope["state"].get("span", NO_SPAN), OPERATIONS.get(route_of(scope), OTHER_OPERATION))


def sent_context(headers: Headers) -> TraceContext | None:
    """Returns the span of the client, if it sent exactly one."""
    parents = headers.getlist(TRACEPARENT)
    return context_in(parents[0], ",".join(headers.getlist(TRACESTATE))) if len(parents) == 1 else None


def end_request_span(scope: Scope, route: str, *, status: int) -> None:
    """Ends the span of a request. `route`: empty for a request that was refused before its route was known."""
    state = scope["state"]
    span: Span = state["span"]
    if not span.recorded:
        return
    error, method = state.get("error"), scope["method"]
    code = error.code if isinstance(error, MotetError) else None
    code = code and cut(code, MAX_NAME_CHARS)  # another server can have sent the code
    failure = error_of(status) and (code or error_of(status))
    span.rename(f"{method} {route}" if route else method)
    span.note(
        {
            "http.request.method": method,
            "http.route": route or None,
            "url.scheme": scope["scheme"],
            "url.path": cut(scope["path"], MAX_NAME_CHARS),
            "http.response.status_code": status,
            "motet.request_id": state["trace"],
            "motet.error.code": code,
            "error.type": failure or None,
        }
    )
    span.end(error=failure)


def group_span_of(parent: RequestSpan, request: GenerateRequest, *, model: str) -> Span:
    """Starts the span of a group of tokens."""
    if not parent.span.recorded:
        return parent.span
    sampling = request.sampling
    span = group_span(parent, model=model, num_choices=len(request.choices), group=request.request_id)
    span.note(
        {
            "gen_ai.conversation.id": request.session_id or None,
            "gen_ai.request.max_tokens": sampling.max_tokens,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.top_k": sampling.top_k or None,
            "gen_ai.request.presence_penalty": sampling.presence_penalty or None,
            "gen_ai.request.frequency_penalty": sampling.frequency_penalty or None,
            # OpenTelemetry has no unsigned numbers of 64 bits.
            "gen_ai.request.seed": (request.choices[0].seed + 2**63) % 2**64 - 2**63 if request.seeded else None,
        }
    )
    return span


def group_span(parent: RequestSpan, *, model: str, num_choices: int, group: str) -> Span:
    """Starts the span of a group. `group`: its id."""
    span, operation = parent
    if not span.recorded:
        return span
    return span.child(
        f"{operation} {model}",
        {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": model,
            "gen_ai.request.choice.count": num_choices,
            "gen_ai.response.id": group,
            "gen_ai.response.model": model,
        },
    )


def end_group_span(
    span: Span, record: GroupRecord, *, status: int, worker: str, usage: Usage | None, tokens: Mapping[int, int]
) -> None:
    """Ends the span of a group, and adds the spans of its choices. `tokens`: the known numbers of output tokens."""
    if not span.recorded:
        return
    reasons = record.finish_reasons
    span.note(
        {
            "gen_ai.response.finish_reasons": tuple(reasons[index] for index in sorted(reasons)),
            "motet.worker": worker or None,
            "motet.status": status,
            "error.type": error_of(status) or None,
        }
    )
    if usage is not None:
        span.note(
            {
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": usage.completion_tokens,
                "gen_ai.usage.cache_read.input_tokens": usage.cached_tokens,
                "gen_ai.usage.reasoning.output_tokens": usage.reasoning_tokens,
            }
        )
    _add_choices(span, record, tokens=tokens)
    span.end(error=error_of(status))


def _add_choices(span: Span, record: GroupRecord, *, tokens: Mapping[int, int]) -> None:
    """Adds the spans of the choices that have started. A choice that has not finished ends with its group."""
    reasons, finished_s, first_s = record.finish_reasons, record.finished_s, record.first_seen_s
    late_starts_s, over_s = record.late_starts_s, record.started_s + record.age_s
    zero_ns = span.start_ns - int(record.started_s * NS)
    """Unix time at which the record's clock was 0."""
    for index in sorted(first_s.keys() | finished_s.keys()):
        start_s, first_token_s, reason = late_starts_s.get(index), first_s.get(index), reasons.get(index)
        attributes: Attributes = {
            "motet.choice.index": index,
            "motet.choice.output_tokens": tokens.get(index),
            "gen_ai.response.finish_reasons": None if reason is None else (reason,),
        }
        start_ns = span.start_ns if start_s is None else zero_ns + int(start_s * NS)
        first = None if first_token_s is None else (FIRST_TOKEN, zero_ns + int(first_token_s * NS))
        span.add(ChildSpan("choice", start_ns, zero_ns + int(finished_s.get(index, over_s) * NS), attributes, first))


def error_of(status: int) -> str:
    """Returns the error of a span with this status; empty unless the server failed, so also for a client's error."""
    return str(status) if status >= HTTPStatus.INTERNAL_SERVER_ERROR else ""
