"""The text of one group: the engine's deltas in, the events of all its choices out, step by step.

1. Submits the request at once.
2. Each step: feeds every choice its delta; skips steps in which no choice has anything to show.
3. A stop string ends the choice here; the engine is told to stop it too, and its later tokens are ignored.
4. When the last choice has ended the engine's stream is closed, before the reader gets the last events.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from motet.engines.base import Engine, GroupStream
from motet.errors import AnswerParserError, EngineError
from motet.text.choice import ChoiceEvent, ChoiceStream, TextRules
from motet.text.tokenizer import Tokenizer
from motet.transfer.ticket import Ticket
from motet.types import FIRST_VERSION, GenerateRequest, GroupDelta, PromptReport, Usage, WeightSpan

log = logging.getLogger("motet.text")


class GroupStep(msgspec.Struct, frozen=True, gc=False):
    """The events of one step of a group, all choices together; never empty."""

    events: Sequence[ChoiceEvent]
    prompt: PromptReport | None = None
    """Set on the first step of a group, if at all."""
    group: int = 0
    """Number of the prompt inside its request."""
    ticket: Ticket | None = None
    """The ticket of a group that is only prefilled."""


class TextGroup:
    """Read it to the end or call `aclose`: it owns the engine's stream.

    Reading raises what the engine's stream raises, and `AnswerParserError`; then the group is over.
    """

    def __init__(
        self, engine: Engine, request: GenerateRequest, *, tokenizer: Tokenizer, rules: TextRules, number: int = 0
    ) -> None:
        """`number`: of the prompt inside its request."""
        self._tokenizer, self._rules = tokenizer, rules
        self._choices: dict[int, ChoiceStream] = {}
        """Empty before the first delta and after the end: a request may have thousands of groups, and few that run."""
        self._unfinished = {start.index for start in request.choices}
        self._num_tokens = dict.fromkeys(self._unfinished, 0)
        self._reasoning_tokens = 0
        """The counts before the first delta, and after the end."""
        if any(start.written for start in request.choices):
            self._begin(request)
        self._ended_before = [index for index, choice in self._choices.items() if choice.ended]
        """Choices that were resumed after a stop string; the engine is told after its first step."""
        self._num_known = {start.index: len(start.written) if rules.written_known else 0 for start in request.choices}
        self._tells_all_ends = rules.written_known
        """True if the reader does not know of the ends of such choices either."""
        self._versions: list[tuple[str, dict[int, int]]] = []
        """Versions of weights after those of the start, and how many tokens each choice had by then."""
        self._request = request
        self._number = number
        self._engine = engine
        self._cached_tokens = 0
        self.worker = ""
        """Name of the worker that wrote last, once the engine has said it; engines need not say it."""
        self.on_step: Callable[[Sequence[ChoiceEvent], bool], None] = lambda _, ended: None
        """Called with the events of every step, before the step is read, and True if they may end a choice."""
        self._stream: GroupStream | None = engine.generate(request)
        """None once it is closed: what it consists of need not stay for as long as the request."""

    async def run(  # noqa: C901 (in one piece, since every token passes here)
        self, take: Callable[[Sequence[GroupStep]], Awaitable[None] | None]
    ) -> None:
        """Reads the group to its end. Gives `take` each step that has something to show, and awaits what it returns. If
        `take` raises, the group may be run on."""
        if not self._unfinished or self._stream is None:
            return
        on_step = self.on_step
        async for delta in self._stream:
            if not self._choices:
                self._begin(self._request)
            events: list[ChoiceEvent] = []
            ended = self._ended_before
            if delta.weight_version:
                self._versions.append((delta.weight_version, self.num_tokens))
            if ended and self._tells_all_ends:
                events += [self._choices[index].last_event for index in ended]
            try:
                for added in delta.choices:
                    event = self._choices[added.index].feed(added)
                    if event is not None:
                        if event.finish is not None and self._versions:
                            event = self._with_versions(event)
                        events.append(event)
                        if event.finish is not None:
                            ended = [*ended, event.index]
            except AnswerParserError:  # a bug of ours, whose place the client does not learn
                log.exception("an answer could not be read", extra={"fields": {"request_id": self._request.request_id}})
                await self.aclose()  # nobody reads on, so the engine must not write on
                raise
            prompt = delta.prompt
            if prompt is not None or delta.worker:
                self.worker = delta.worker or self.worker
                self._cached_tokens = self._cached_tokens if prompt is None else prompt.cached_tokens
            over = False
            if ended:
                over = True
                await self._end(ended, delta)
            if events or prompt is not None:
                on_step(events, over)
                if (taking := take((GroupStep(events, prompt, self._number),))) is not None:
                    await taking
            if not self._unfinished:
                return
        left = sorted(self._unfinished)
        raise EngineError(f"the engine ended group {self._request.request_id} before its choices {left} had ended")

    def _begin(self, request: GenerateRequest) -> None:
        for start in request.choices:
            stream = ChoiceStream(start, request.prompt, tokenizer=self._tokenizer, rules=self._rules)
            self._choices[start.index] = stream

    def _with_versions(self, event: ChoiceEvent) -> ChoiceEvent:
        """Returns the last event of a choice with the versions of the weights that have written its tokens."""
        index, spans = event.index, list[WeightSpan]()
        begins = [(FIRST_VERSION, 0), *((version, tokens[index]) for version, tokens in self._versions)]
        ends = [*(begin for _, begin in begins[1:]), self.num_tokens[index]]
        for (version, begin), end in zip(begins, ends, strict=True):
            if end > begin and spans and spans[-1].version == version:
                spans[-1] = WeightSpan(version, spans[-1].start, end)
            elif end > begin:
                spans.append(WeightSpan(version, begin, end))
        told = () if {span.version for span in spans} <= {FIRST_VERSION} else tuple(spans)
        return msgspec.structs.replace(event, weight_versions=told)

    async def aclose(self) -> None:
        """Ends the group if it is not over. May be called at any time, twice too."""
        if self._stream is not None:
            await self._stream.aclose()
            self._stream = None

    @property
    def usage(self) -> Usage:
        """Token counts so far, without the tokens that the reader brought."""
        return Usage(
            prompt_tokens=len(self._request.prompt),
            completion_tokens=sum(self.num_tokens.values()),
            cached_tokens=self._cached_tokens,
            reasoning_tokens=self._reasoning_tokens + sum(one.reasoning_tokens for one in self._choices.values()),
        )

    @property
    def num_tokens(self) -> dict[int, int]:
        """The number of output tokens of each choice so far, without those that the reader brought."""
        begun = {index: choice.num_tokens - self._num_known[index] for index, choice in self._choices.items()}
        return self._num_tokens | begun

    async def _end(self, indices: Sequence[int], delta: GroupDelta) -> None:
        """Ends choices, which `delta` has ended in the engine too, or which have ended only here."""
        known = {choice.index for choice in delta.choices if choice.finish is not None}
        self._ended_before = []
        self._unfinished.difference_update(indices)
        for index in indices:
            if index not in known:
                await self._engine.stop_choice(self._request.request_id, index)
        if not self._unfinished:
            self._num_tokens, self._reasoning_tokens = self.num_tokens, self.usage.reasoning_tokens or 0
            self._choices = {}
            await self.aclose()
