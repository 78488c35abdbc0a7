"""The text of one group: the engine's deltas in, the events of all its choices out, step by step.

1. Submits the request at once.
2. Each step: feeds every choice its delta; skips steps in which no choice has anything to show.
3. A stop string ends the choice here; the engine is told to stop it too, and its later tokens are ignored.
4. Under a policy the steering looks at each step: it ends choices, and lets more begin (`motet.policies`). A choice may
   also be ended from outside (`end_choice`). Both are told to the reader as the end of that choice.
5. When the last choice has ended the engine's stream is closed, before the reader gets the last events.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from operator import attrgetter

import msgspec

from motet.engine import Engine, GroupStream
from motet.errors import AnswerParserError, EngineError
from motet.merge import Take
from motet.policies.steering import GroupPolicy, GroupReport, Steering
from motet.text.choice import ChoiceEvent, ChoiceStream, TextRules
from motet.text.parts import Content
from motet.text.steered import SteeredStream
from motet.text.tokenizer import Tokenizer
from motet.transfer.ticket import Ticket
from motet.types import (
    FIRST_VERSION,
    ChoiceDelta,
    Finish,
    FinishReason,
    GenerateRequest,
    GroupDelta,
    PromptReport,
    Usage,
    WeightSpan,
)

log = logging.getLogger("motet.text")

_INDEX = attrgetter("index")


class GroupStep(msgspec.Struct, frozen=True, gc=False):
    """The events of one step of a group, all choices together; never empty."""

    events: Sequence[ChoiceEvent]
    prompt: PromptReport | None = None
    """Set on the first step of a group, if at all."""
    group: int = 0
    """Number of the prompt inside its request."""
    ticket: Ticket | None = None
    """The ticket of a group that is only prefilled."""
    begun: tuple[int, ...] = ()
    """Choices that begin after this step, under a policy that has held them back."""
    report: GroupReport | None = None
    """On the last step of a group with a policy."""


class TextGroup:
    """Read it to the end or call `aclose`: it owns the engine's stream.

    Reading raises what the engine's stream raises, and `AnswerParserError`; then the group is over.
    """

    def __init__(
        self,
        engine: Engine,
        request: GenerateRequest,
        *,
        tokenizer: Tokenizer,
        rules: TextRules,
        policy: GroupPolicy | None = None,
        number: int = 0,
    ) -> None:
        """`number`: of the prompt inside its request."""
        self._tokenizer, self._rules = tokenizer, rules
        self._choices: dict[int, ChoiceStream] = {}
        """Empty before the first delta and after the end: a request may have thousands of groups, and few that run."""
        self._unfinished = {start.index for start in request.choices}
        self._num_tokens = dict.fromkeys(self._unfinished, 0)
        self._reasoning_tokens = 0
        """The counts before the first delta, and after the end."""
        if any(start.output_tokens for start in request.choices):
            self._begin(request)
        self._ended_before = [index for index, choice in self._choices.items() if choice.ended]
        """Choices that were resumed after a stop string; the engine is told after its first step."""
        self._num_known = {
            start.index: len(start.output_tokens) if rules.written_known else 0 for start in request.choices
        }
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
        self.workers: dict[int, str] = {}
        """The name of the worker that wrote each choice last; empty until the engine has said it."""
        self.on_step: Callable[[Sequence[ChoiceEvent], bool], None] = lambda _, ended: None
        """Called with the events of every step, before the step is read, and True if they may end a choice."""
        self.on_begin: Callable[[Sequence[int]], None] = lambda _: None
        """Called with choices that a policy lets begin later."""
        self._steering = None if policy is None else Steering(policy, [start.index for start in request.choices])
        self._to_end: set[int] = set()
        """Choices that were ended from outside, and whose reader does not know it yet."""
        self._steered: SteeredStream | None = None
        """Set if choices begin later, or if the steps are not the engine's."""
        if policy is not None and (policy.deterministic or policy.start is not None):
            start = policy.num_first(len(request.choices))
            self._steered = SteeredStream(engine, request, start=start, lockstep=policy.deterministic)
        self._stream: GroupStream | None = self._steered or engine.generate(request)
        """None once it is closed: what it consists of need not stay for as long as the request."""

    async def run(self, take: Take[GroupStep]) -> None:
        """Reads the group to its end. Gives `take` each step that has something to show, and awaits what it returns. If
        `take` raises, the group may be run on."""
        while self._unfinished:
            if self._stream is not None:
                await self._run_on(self._stream, take)
            if self._unfinished:
                await self._end_without_step(take)

    async def _run_on(  # noqa: C901 (in one piece, since every token passes here)
        self, stream: GroupStream, take: Take[GroupStep]
    ) -> None:
        """Reads as far as the stream goes, or until no choice is left."""
        on_step = self.on_step
        async for delta in stream:
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
                self._note_worker(delta)
                self._cached_tokens = self._cached_tokens if prompt is None else prompt.cached_tokens
            begun: tuple[int, ...] = ()
            if self._steering is not None or self._to_end:
                await self._take_in(events)
                ended, begun = self._steer(delta.choices, events=events, ended=ended)
            over = False
            if ended:
                over = True
                await self._end(ended, delta)
            if events or prompt is not None:
                on_step(events, over)
                if begun:
                    self.on_begin(begun)
                step = GroupStep(events, prompt, self._number, None, begun, self._report())
                if (taking := take((step,))) is not None:
                    await taking
            if not self._unfinished:
                return

    def _begin(self, request: GenerateRequest) -> None:
        for start in request.choices:
            stream = ChoiceStream(start, request.prompt, tokenizer=self._tokenizer, rules=self._rules)
            self._choices[start.index] = stream

    def _note_worker(self, delta: GroupDelta) -> None:
        """The first worker has all choices, until others bring some of them."""
        if delta.worker:
            self.worker = delta.worker
            brought = [one.index for one in delta.choices] if self.workers else self._num_tokens
            self.workers |= dict.fromkeys(brought, delta.worker)

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

    async def end_choice(self, index: int) -> bool:
        """Ends a choice where it is; its reader gets what it has written, and that end, with the next step. Returns
        False if it has ended already, or is no choice of this group."""
        if index not in self._unfinished or index in self._to_end:
            return False
        if self._steering is not None and self._steering.withdraw(index):
            self._unfinished.discard(index)
            if self._steered is not None:
                self._steered.withdraw(index)
            return True
        self._to_end.add(index)
        await self._stop(index)
        return True

    async def end_all(self) -> None:
        """Ends all choices where they are, as `end_choice` does."""
        if self._steering is not None:
            self._unfinished.difference_update(self._steering.withdraw_all())
        self._to_end |= self._unfinished
        await self.aclose()

    @property
    def unfinished(self) -> frozenset[int]:
        """The choices that have not ended, as far as the reader knows."""
        return frozenset(self._unfinished)

    @property
    def waiting(self) -> frozenset[int]:
        """The choices that have not begun, and may."""
        return frozenset() if self._steering is None else self._steering.waiting

    async def _stop(self, index: int) -> None:
        """Ends a choice in the engine."""
        if self._steered is not None:
            await self._steered.stop(index)
        else:
            await self._engine.stop_choice(self._request.request_id, index)

    async def _take_in(self, events: Sequence[ChoiceEvent]) -> None:
        """Tells the steering the texts of a step. Between two answers that are whole then others have their turn: to
        find a value may take milliseconds, for a client's pattern."""
        steering = self._steering
        if steering is None or not steering.reads_answers:
            return
        for event in events:
            steering.wrote(event.index, answer_text(event))
            if event.finish is not None:
                steering.find_value(event.index)
                await asyncio.sleep(0)

    def _steer(
        self, added: Sequence[ChoiceDelta], *, events: list[ChoiceEvent], ended: list[int]
    ) -> tuple[list[int], tuple[int, ...]]:
        """Looks at a step: `added` by the engine, shown in `events`, in which the choices `ended` have ended. Returns
        all that have ended then, with events for those that are ended here, and the choices that begin."""
        steering, begun = self._steering, tuple[int, ...]()
        abort = [index for index in sorted(self._to_end) if index not in ended]
        self._to_end.clear()
        if steering is not None:
            for one in added:
                if one.logprobs and one.index in self._unfinished:
                    steering.scored(one.index, one.logprobs, num_tokens=self._choices[one.index].num_tokens)
            for event in sorted(events, key=_INDEX):
                if event.finish is not None:
                    steering.ended(event.index, event.finish)
            for index in abort:
                steering.ended(index, None)
            decision = steering.decide()
            abort += decision.abort
            begun = decision.begin
            self._unfinished.difference_update(decision.drop)
            if begun and self._steered is not None:
                self._steered.begin(len(begun))
        for index in abort:
            last = self._choices[index].feed(ChoiceDelta(index, (), None, Finish(FinishReason.ABORT)))
            if last is not None:
                events.append(self._with_versions(last) if self._versions else last)
        return [*ended, *abort], begun

    async def _end_without_step(self, take: Take[GroupStep]) -> None:
        """Called when the engine's stream is over: tells the reader of the choices that were ended from outside; others
        may begin then. Raises EngineError if there are none to tell of."""
        if not self._to_end:
            left = sorted(self._unfinished)
            raise EngineError(f"the engine ended group {self._request.request_id} before its choices {left} had ended")
        if not self._choices:
            self._begin(self._request)
        events = list[ChoiceEvent]()
        ended, begun = self._steer((), events=events, ended=[])
        await self._end(ended, GroupDelta(self._request.request_id, ()))
        self.on_step(events, True)
        if begun:
            self.on_begin(begun)
        if (taking := take((GroupStep(events, None, self._number, None, begun, self._report()),))) is not None:
            await taking

    def _report(self) -> GroupReport | None:
        """Returns the report on a group with a policy, once it is over."""
        if self._steering is None or self._unfinished:
            return None
        return self._steering.report(self._request.request_id)

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
            if index not in known and self._unfinished:  # else the whole group is closed
                await self._stop(index)
        if not self._unfinished:
            self._num_tokens, self._reasoning_tokens = self.num_tokens, self.usage.reasoning_tokens or 0
            self._choices = {}
            await self.aclose()


def answer_text(event: ChoiceEvent) -> str:
    """Returns the text of an event without thoughts and calls, if they are told apart in it."""
    if event.parts is None:
        return event.text
    return "".join(part.text for part in event.parts if isinstance(part, Content))
