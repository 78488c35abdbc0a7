"""The text of one group: the engine's deltas in, the events of all its choices out, step by step.

1. Submits the request at once.
2. Each step: `GroupChoices` turns the deltas into events. Steps in which no choice has anything to show are skipped.
3. A stop string ends its choice here. The engine is requested to stop the choice too, and its later tokens are ignored.
4. Under a policy, `PolicyDriver` decides after each step which choices end and which start. A client can also end a
   choice (`end_choice`). The reader gets a last event for each choice that ends in one of these ways.
5. When the last choice has ended, the engine's stream is closed, before the reader gets the last events.
"""

import logging
from collections.abc import Callable, Iterator, Sequence

import msgspec

from motet.engine import Engine, GroupStream
from motet.errors import AnswerParserError, EngineError
from motet.merge import Merge, Take
from motet.policies.driver import ChoiceOutput, PolicyDriver
from motet.policies.steering import NO_CHANGE, GroupPolicy, GroupReport
from motet.text.choice import ChoiceEvent, TextRules
from motet.text.group_choices import GroupChoices
from motet.text.parts import Content
from motet.text.steered import SteeredStream
from motet.text.tokenizer import Tokenizer
from motet.transfer.ticket import Ticket
from motet.types import ChoiceDelta, GenerateRequest, GroupDelta, PromptReport, Usage

log = logging.getLogger("motet.text")


class GroupStep(msgspec.Struct, frozen=True, gc=False):
    """The events of all choices in one step of a group. A step has an event or a report on the prompt."""

    events: Sequence[ChoiceEvent]
    prompt: PromptReport | None = None
    """Set on the first step of a group, if at all."""
    group: int = 0
    """Number of the prompt in its request."""
    ticket: Ticket | None = None
    """The ticket of a group that is only prefilled."""
    started: tuple[int, ...] = ()
    """Choices that start after this step, under a policy that limits the number of running choices."""
    report: GroupReport | None = None
    """Set on the last step of a group with a policy."""


def split_step(step: GroupStep, size: int) -> Iterator[GroupStep]:
    """Yields the step in parts of at most `size` events. The first part has what comes before the events, and the last
    one what comes after them."""
    num_parts = max(1, -(-len(step.events) // size))
    for number in range(num_parts):
        part, last = step.events[number * size : (number + 1) * size], number == num_parts - 1
        yield GroupStep(
            part,
            step.prompt if number == 0 else None,
            step.group,
            step.ticket if last else None,
            step.started if last else (),
            step.report if last else None,
        )


class WorkerNames:
    """The names of the workers that generate a group. Empty until the engine reports them, which it need not do."""

    def __init__(self, indices: Sequence[int]) -> None:
        """`indices`: indices of all choices."""
        self.last = ""
        """Name of the worker that was reported last."""
        self.of_choice: dict[int, str] = {}
        """Name of the worker that generated each choice last, by index."""
        self._indices = indices
        self.prefill = ""
        """Name of the worker that prefilled the prompt for another one; empty if none did."""

    def update(self, delta: GroupDelta) -> None:
        """Records the worker of a delta. All choices belong to the first worker until another worker sends deltas."""
        self.last = delta.worker
        brought = [one.index for one in delta.choices] if self.of_choice else self._indices
        self.of_choice |= dict.fromkeys(brought, delta.worker)


class TextGroup:
    """Owns the engine's stream of a group: run it to its end, or call `aclose`. `run` raises `AnswerParserError` and
    the errors of the engine's stream; the group has then ended."""

    def __init__(
        self,
        engine: Engine,
        request: GenerateRequest,
        *,
        tokenizer: Tokenizer,
        rules: TextRules,
        policy: GroupPolicy | None = None,
        number: int = 0,
        count_waiting_bytes: Callable[[int], None] = lambda _: None,
    ) -> None:
        """`number`: number of the prompt in its request. `count_waiting_bytes`: see `SteeredStream`. Raises the errors
        of `Engine.generate`."""
        indices = [start.index for start in request.choices]
        self._engine = engine
        self._request = request
        self._number = number
        self._choices = GroupChoices(request, tokenizer=tokenizer, rules=rules)
        self._driver = PolicyDriver(policy, indices)
        self._cached_tokens = 0
        self.queue_s = 0.0
        """Time for which the group waited for capacity on a worker."""
        self.workers = WorkerNames(indices)
        self.on_step: Callable[[Sequence[ChoiceEvent], bool], None] = lambda _, ended: None
        """Called with the events of every step, before the reader gets them, and True if a choice can have ended."""
        self.on_start: Callable[[Sequence[int]], None] = lambda _: None
        """Called with choices that start later than the group."""
        self._steered: SteeredStream | None = None
        """The stream, if choices start later, or if steps are not the engine's."""
        if policy is not None and (policy.deterministic or policy.start is not None):
            first = policy.num_first(len(indices))
            self._steered = SteeredStream(
                engine, request, first=first, lockstep=policy.deterministic, count_waiting_bytes=count_waiting_bytes
            )
        self._stream: GroupStream | None = self._steered or engine.generate(request)
        """None once it is closed, so that its memory is freed before the request ends."""

    async def run(self, take: Take[GroupStep]) -> None:
        """Reads the group to its end. Calls `take` with each step that has something to show, and awaits what it
        returns. If `take` raises, the group can be run again."""
        driver, id = self._driver, self._request.request_id
        try:
            while driver.unfinished:
                if self._stream is not None:
                    await self._read(self._stream, take)
                if driver.unfinished and not driver.cancelled:
                    left = sorted(driver.unfinished)
                    raise EngineError(f"the engine ended group {id} before its choices {left} had ended")
                if driver.cancelled:  # the client ended all running choices, so the engine sends no other step
                    last = Merge[GroupDelta](1)
                    last.put_nowait([GroupDelta(id, ())])
                    await self._read(last, take)
        except AnswerParserError:  # a bug of the parser; the client does not get the details
            log.exception("an answer could not be read", extra={"fields": {"request_id": id}})
            await self.aclose()  # the engine must not continue, since the group has no reader
            raise

    async def _read(self, stream: GroupStream, take: Take[GroupStep]) -> None:
        """Reads to the end of the stream, or until all choices have ended. Every token passes this loop."""
        feed, driver, unfinished = self._choices.feed, self._driver, self._driver.unfinished
        on_step, number = self.on_step, self._number
        async for delta in stream:
            events: list[ChoiceEvent] = []
            ended = feed(delta, events)
            prompt, over = delta.prompt, False
            started: tuple[int, ...] = ()
            if prompt is not None:
                self._cached_tokens, self.queue_s = prompt.cached_tokens, prompt.queue_s
                self.workers.prefill = prompt.prefill_worker
            if delta.worker:
                self.workers.update(delta)
            if driver.active:
                ended, started = await self._steer(events, ended, added=delta.choices)
            if ended:
                over = True
                await self._end(ended, delta)
            if events or prompt is not None:
                on_step(events, over)
                if started:
                    self.on_start(started)
                report = None if unfinished else driver.report(self._request.request_id)
                step = GroupStep(events, prompt, number, None, started, report)
                if (taking := take((step,))) is not None:
                    await taking
            if not unfinished:
                return

    async def _steer(
        self, events: list[ChoiceEvent], ended: Sequence[int], *, added: Sequence[ChoiceDelta]
    ) -> tuple[Sequence[int], tuple[int, ...]]:
        """Carries out the decision after a step: `events` of the deltas `added`, in which choices have `ended`. Adds
        the events of choices that are ended here. Returns all choices that have ended, and the choices that start."""
        choices, driver = self._choices, self._driver
        outputs = [
            ChoiceOutput(one.index, answer_text(one), one.finish)
            for one in events
            if driver.reads_answers or one.finish is not None
        ]
        if driver.reads_logprobs:
            outputs += [
                ChoiceOutput(one.index, "", None, one.logprobs, choices.length(one.index))
                for one in added
                if one.logprobs and one.index in driver.unfinished
            ]
        decision = await driver.step(outputs)
        if decision is NO_CHANGE:
            return ended, ()
        events += [last for index in decision.abort if (last := choices.abort(index)) is not None]
        if decision.start and self._steered is not None:
            self._steered.start(len(decision.start))
        return [*ended, *decision.abort], decision.start

    async def _end(self, indices: Sequence[int], delta: GroupDelta) -> None:
        """Ends choices in the engine, unless they ended there with `delta`. Frees the group with its last choice."""
        ended_there = {choice.index for choice in delta.choices if choice.finish is not None}
        self._driver.finished(indices)
        for index in indices:
            if index not in ended_there and self._driver.unfinished:  # else the group is closed
                await self._stop(index)
        if not self._driver.unfinished:
            self._choices.close()
            await self.aclose()

    async def _stop(self, index: int) -> None:
        if self._steered is not None:
            await self._steered.stop(index)
        else:
            await self._engine.stop_choice(self._request.request_id, index)

    async def end_choice(self, index: int) -> bool:
        """Ends a choice at its current position. The reader gets its last event with the next step. Returns False if
        the choice has ended, or if the group has no such choice."""
        if self._driver.withdraw(index):
            if self._steered is not None:
                self._steered.withdraw(index)
            return True
        cancelled = self._driver.cancel(index)
        if cancelled:
            await self._stop(index)
        return cancelled

    async def end_all(self) -> None:
        """Ends all choices at their current positions, as `end_choice` does."""
        self._driver.withdraw_all()
        for index in self._driver.unfinished:
            self._driver.cancel(index)
        await self.aclose()

    async def aclose(self) -> None:
        """Ends the group if it has not ended. Can be called at any time, also twice."""
        if self._stream is not None:
            await self._stream.aclose()
            self._stream = None

    @property
    def unfinished(self) -> frozenset[int]:
        """Choices whose last events the reader has not received yet."""
        return frozenset(self._driver.unfinished)

    @property
    def waiting(self) -> frozenset[int]:
        """Choices that have not started yet."""
        return self._driver.waiting

    @property
    def num_tokens(self) -> dict[int, int]:
        """Number of output tokens of each choice so far, without tokens that the client sent."""
        return self._choices.num_tokens

    @property
    def usage(self) -> Usage:
        """Token counts so far, without output tokens that the client sent."""
        return Usage(
            prompt_tokens=len(self._request.prompt),
            completion_tokens=sum(self.num_tokens.values()),
            cached_tokens=self._cached_tokens,
            reasoning_tokens=self._choices.reasoning_tokens,
        )


def answer_text(event: ChoiceEvent) -> str:
    """Returns the text of an event without reasoning and tool calls, if they are separated in it."""
    if event.parts is None:
        return event.text
    return "".join(part.text for part in event.parts if isinstance(part, Content))
