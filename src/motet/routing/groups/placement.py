"""The choices of a part on one worker, from the moment when the worker gets them until it has lost or ended them."""

import logging

from motet.engine import GroupStream
from motet.errors import MotetError, WorkerFaultError
from motet.routing.choosing.survey import trunk_of
from motet.routing.groups.chooser import ChosenWorker, work_span
from motet.routing.groups.response_check import ResponseCheck
from motet.routing.groups.unfinished import Unfinished
from motet.routing.workers.fleet import Fleet
from motet.routing.workers.open_groups import OpenGroup
from motet.tracing.spans import Attributes, ChildSpan, Tracer
from motet.types import GenerateRequest, GroupDelta, PromptReport

logger = logging.getLogger(__name__)


class Placement:
    """A stream of one worker, and what its deltas mean for the unfinished choices and for the worker's load."""

    def __init__(
        self, chosen: ChosenWorker, fleet: Fleet, *, request: GenerateRequest, unfinished: Unfinished, tracer: Tracer
    ) -> None:
        """Raises what the worker's engine raises."""
        self.member = member = chosen.member
        self.worker = worker = chosen.worker
        info = worker.engine.info
        self._span = work_span("decode", chosen, request=request, tracer=tracer)
        self.request = request = self._span.placed(request)
        self.started = False
        """True once the first delta has come, so the prompt has been computed or fetched."""
        try:
            self.stream: GroupStream = worker.engine.generate(request)
        except MotetError as error:
            self._span.fail(error)
            raise
        self._unfinished = unfinished
        self.renamed = request.request_id != unfinished.reader_id
        """True if the group has another id on this worker than its reader knows."""
        self.response_check = None if worker.local else ResponseCheck(request, vocab_size=info.vocab_size)
        """Checks the deltas of a worker on another server."""
        self._block_size = info.block_size
        self._groups = member.groups
        self.group = OpenGroup(
            member.load,
            member.groups,
            choices=len(unfinished),
            end=self._end,
            use_weights=unfinished.use_weights,
            trunk=trunk_of(request, fleet, member=member),
            prompt_tokens=0 if request.ticket else chosen.backlog.own_tokens,
        )
        choices = unfinished.choices.values()
        for choice in choices:
            choice.count_blocks(self._block_size)
        self.group.add_tail_blocks(sum(choice.tail_blocks for choice in choices))

    def take(self, delta: GroupDelta) -> None:
        """Notes the tokens and ends of a delta."""
        self._groups.received = True
        if not self.started:
            self.started = True
            if self.group.is_open:
                self._take_prompt(delta.prompt)
        choices = self._unfinished.choices
        for change in delta.choices:
            choice = choices.get(change.index)
            if choice is None:
                continue
            if change.finish is not None:
                self.remove(change.index)
                continue
            choice.output += change.token_ids
            if len(choice.output) > choice.block_tokens:
                before = choice.tail_blocks
                choice.count_blocks(self._block_size)
                self.group.add_tail_blocks(choice.tail_blocks - before)

    async def checked(self, check: ResponseCheck) -> GroupDelta:
        """Returns the next delta, after `check`. Raises MotetErrors of the stream, or WorkerFaultError."""
        self.group.waits = True
        try:
            delta = await self.stream.__anext__()
            self.group.note_delta()
            check.check(delta)
        except (MotetError, StopAsyncIteration):
            raise
        except Exception as error:
            logger.exception("an answer of %s cannot be processed", self.member.id)
            raise WorkerFaultError(
                f"its answer cannot be processed ({type(error).__name__}): the log has more"
            ) from error
        finally:
            self.group.waits = False
        return delta

    def remove(self, index: int) -> None:
        """Removes a choice that has finished or was stopped."""
        choice = self._unfinished.choices.pop(index, None)
        if choice is None:
            return
        self.group.remove_choices(1, tail_blocks=choice.tail_blocks)
        if not self._unfinished:
            self.close()

    def close(self, error: MotetError | None = None) -> None:
        """Removes the choices from the worker's load: it sends nothing more of them. A second call changes nothing.
        `error`: why it sends nothing more. None if it has sent everything."""
        if self.group.is_open:
            self._span.fail(error)
            self.group.close()

    def _take_prompt(self, report: PromptReport | None) -> None:
        """Notes that the worker has the prompt."""
        self._trace_prompt(report)
        cached_tokens = 0 if report is None else report.cached_tokens
        computed_tokens = 0 if self.request.ticket else len(self.request.prompt) - cached_tokens
        self.group.finish_prompt(computed_tokens=computed_tokens)

    def _trace_prompt(self, report: PromptReport | None) -> None:
        """Adds to the trace that the first tokens have come, and the transfer of the prompt's KV. A worker on another
        server does that itself."""
        self._span.event("first_delta")
        pull = None if report is None or not self.worker.local else report.pull
        if pull is not None:
            attributes: Attributes = {"motet.worker": self.member.id, "motet.transfer.bytes": pull.num_bytes}
            self._span.add(ChildSpan("transfer", pull.start_ns, pull.end_ns, attributes, error=pull.failure))

    async def _end(self, _: MotetError) -> None:
        await self.stream.aclose()
