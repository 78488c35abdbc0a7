"""The interface between an answer and its bytes, and what the writers of several routes share: server-sent events, and
`usage` in OpenAI's shape.

Each route has one `AnswerWriter` for streamed answers and one for unstreamed answers; `answer.GeneratedResponse` feeds
it and sends what it returns."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Generic, TypeVar

import msgspec

from motet.api.generation.json_pieces import Buffer, EncodedJson, JsonArray, encode_arrays, encode_json
from motet.api.generation.plan import Plan
from motet.api.generation.request_fields import PromptLogprobs, SamplingFields
from motet.api.http import event_stream
from motet.api.http.failure import error_json
from motet.text.logprobs import ranked_logprobs
from motet.text.text_group import GroupStep, split_step
from motet.text.tokenizer import Tokenizer
from motet.types import PromptReport, Usage

StepT = TypeVar("StepT")
UsedT = TypeVar("UsedT")
ValueT = TypeVar("ValueT")

Divide = Callable[[Sequence[StepT]], Iterable[Sequence[StepT]]]
"""Divides steps into parts, each for one `feed`. The feeds of all such answers share the time of an iteration of the
event loop (`loop_budget`)."""

FEED_LOGPROBS = 512
"""Approximate number of log-probabilities in one `feed`. They take about a millisecond."""
LOGPROB_BYTES = 110
"""Approximate memory of a log-probability of a prompt, or of a Response, that is kept until the end of the answer."""
DONE = b"data: [DONE]\n\n"


class AnswerWriter(ABC, Generic[StepT, UsedT]):
    """Turns the steps of one request into bytes, without I/O. Each answer has its own writer, which is fed in order."""

    content_type = event_stream.CONTENT_TYPE
    streams = True
    """True if there are bytes before the end. If not, an error at any time still has its HTTP status."""
    starts_at_once = False
    """True if the headers are sent as soon as the groups are open."""
    takes_all_steps = False
    """True if each `feed` gets all steps since the last one."""
    keeps_answer = False
    """True if the writer keeps the answer until its end."""
    divide: Divide[StepT] | None = None
    """Divides steps before they are fed. None if feeding steps is always short work."""

    @property
    def sends_events(self) -> bool:
        """True if the body is server-sent events, each piece one or more complete ones until `close`."""
        return self.content_type == event_stream.CONTENT_TYPE

    @abstractmethod
    def feed(self, steps: Sequence[StepT], usage: Callable[[], UsedT]) -> bytes:
        """Returns the bytes to send after these steps; empty if there are none. `usage` returns the usage of the
        request so far; it adds up all choices, so a writer calls it only for a chunk that reports the usage."""

    @abstractmethod
    def close(self, usage: UsedT) -> Iterable[bytes]:
        """Returns the end of a stream, or the entire answer, in pieces. Other streams are served between two pieces."""

    def fail(self, error: Exception) -> bytes:
        """Returns the end of a stream that has started and fails."""
        return b"data: " + error_json(error) + b"\n\n" + DONE

    def feed_is_long(self, steps: Sequence[StepT]) -> bool:
        """True if feeding these steps can take long enough to delay other streams, and must run in a thread."""
        return False

    @property
    def held_bytes(self) -> int:
        """Approximate memory of the answer so far, if the writer keeps it."""
        return 0

    @property
    def close_is_long(self) -> bool:
        """True if `close` can take long enough to delay other streams, and must run in a thread."""
        return False

    @property
    def complete(self) -> bool:
        """True if the answer is complete for a client that leaves now, before the end of the body."""
        return False


GroupsWriter = AnswerWriter[GroupStep, Usage]


def undivided(steps: Sequence[StepT]) -> Iterable[Sequence[StepT]]:
    """Divides nothing, for steps that must be fed together."""
    return (steps,)


def divide_logprobs(plan: Plan) -> Divide[GroupStep] | None:
    """Returns a function that divides steps by the number of their log-probabilities; None if they have few."""
    listed, scored = plan.num_listed, plan.groups[0].sampling.prompt_logprobs is not None
    if listed * plan.num_choices < FEED_LOGPROBS and not scored:
        return None
    size = max(1, FEED_LOGPROBS // max(1, listed))
    return lambda steps: ((part,) for step in steps for part in split_step(step, size))


class OncePerPrompt(Generic[ValueT]):
    """Makes a value once for each prompt, such as its encoded log-probabilities, because all choices repeat it. Keeps
    only the value of the last prompt: answers are encoded prompt by prompt."""

    def __init__(self) -> None:
        self._last: tuple[int, ValueT] | None = None

    def value(self, number: int, make: Callable[[], ValueT]) -> ValueT:
        """Returns the value of the prompt with this number, which `make` makes once."""
        if self._last is None or self._last[0] != number:
            self._last = number, make()
        return self._last[1]


def encode_prompt_logprobs(report: PromptReport, fields: PromptLogprobs, *, tokenizer: Tokenizer) -> EncodedJson:
    """Returns the requested log-probabilities of a prompt in vLLM's form."""
    sent, ranked = report.scores_since(fields.prompt_logprobs_from), partial(ranked_logprobs, tokenizer)
    num_top = fields.prompt_logprobs or 0
    arrays = encode_arrays(len(sent), lambda part: {"": ranked(sent[part], num_top=num_top)})
    return arrays[""].json() if arrays else JsonArray().json()


def streamed_prompt_logprobs(report: PromptReport | None, fields: PromptLogprobs, *, tokenizer: Tokenizer) -> bytes:
    """Returns the field `prompt_logprobs` after other fields of a chunk; empty if the request does not have it."""
    if fields.prompt_logprobs is None or report is None or report.logprobs is None:
        return b""
    encoded = encode_prompt_logprobs(report, fields, tokenizer=tokenizer)
    return b"".join([b',"prompt_logprobs":', *encoded.pieces])


class NamedEvent(msgspec.Struct, frozen=True):
    """An event with a name, which its data repeats as `type`."""

    name: str
    fields: Mapping[str, object] = {}

    def pieces(self, **numbers: int) -> Iterator[Buffer]:
        """Yields the event's bytes in pieces. `numbers`: members that come first in its data."""
        yield b"event: %b\ndata: " % self.name.encode()
        yield from encode_json({**numbers, "type": self.name, **self.fields})
        yield b"\n\n"

    def encode(self, **numbers: int) -> bytes:
        return b"".join(self.pieces(**numbers))


def encode_events(events: Iterable[NamedEvent]) -> bytes:
    return b"".join(event.encode() for event in events)


def num_listed(sampling: SamplingFields, num_top: int | None) -> int | None:
    """Returns the number of tokens listed with each sampled token, None without log-probabilities: the `num_top` most
    likely tokens, or the sampled token followed by `logprob_token_ids`."""
    named = len(sampling.logprob_token_ids)
    return 1 + named if named and num_top is not None else num_top


def usage_shape(usage: Usage, *, reasoning: bool = False) -> dict[str, object]:
    """Returns `usage` in OpenAI's shape, without details that were not reported. `reasoning`: True to include the
    number of reasoning tokens, even if it is 0, as OpenAI's chats do."""
    shape: dict[str, object] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
    if usage.cached_tokens is not None:
        shape["prompt_tokens_details"] = {"cached_tokens": usage.cached_tokens}
    if reasoning and usage.reasoning_tokens is not None:
        shape["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return shape


def usage_json(usage: Usage) -> bytes:
    return msgspec.json.encode(usage_shape(usage))


def chat_usage_json(usage: Usage | None) -> bytes:
    """Returns null if a text upstream has not reported its usage."""
    return b"null" if usage is None else msgspec.json.encode(usage_shape(usage, reasoning=True))
