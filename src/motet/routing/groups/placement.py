"""The choices of a part on one worker, from the time the worker gets them until they end or the worker is lost."""

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
    """The stream of one worker. Its deltas update the unfinished choices and the worker's load."""

    def __init__(
        self, chosen: ChosenWorker, fleet: Fleet, *, request: GenerateRequest, unfinished: Unfinished, tracer: Tracer
    ) -> None:
        """Raises the error of the worker's engine."""
        self.member = member = chosen.member
        self.worker = worker = chosen.worker
        info = worker.engine.info
        self._span = work_span("decode", chosen, request=request, tracer=tracer)
        self.request = request = self._span.placed(request)
        self.started = False
        """True once the first delta has arrived, so the prompt has been computed or fetched."""
        try:
            self.stream: GroupStream = worker.engine.generate(request)
        except MotetError as error:
            self._span.fail(error)
            raise
        self._unfinished = unfinished
        self.renamed = request.request_id != unfinished.reader_id
        """True if the id of the group on this worker is not the id that its reader knows."""
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

    def record(self, delta: GroupDelta) -> None:
        """Records the tokens and ends of a delta."""
        self._groups.received = True
        if not self.started:
            self.started = True
            if self.group.is_open:
                self._record_prompt(delta.prompt)
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
        """Returns the next delta after checking it. Raises the MotetErrors of the stream, or WorkerFaultError."""
        self.group.waits = True
        try:
            delta = await self.stream.__anext__()
            self.group.record_delta()
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
        """Removes the choices from the worker's load: the worker sends nothing more of them. A second call changes
        nothing. `error`: the reason. None if the worker has sent everything."""
        if self.group.is_open:
            self._span.fail(error)
            self.group.close()

    def _record_prompt(self, report: PromptReport | None) -> None:
        """Records that the worker has the prompt."""
        self._trace_prompt(report)
        cached_tokens = 0 if report is None else report.cached_tokens
        computed_tokens = 0 if self.request.ticket else len(self.request.prompt) - cached_tokens
        self.group.finish_prompt(computed_tokens=computed_tokens)

    def _trace_prompt(self, report: PromptReport | None) -> None:
        """Adds the first delta and the transfer of the prompt's KV to the trace. A worker on another server traces its
        transfers itself."""
        self._span.event("first_delta")
        pull = None if report is None or not self.worker.local else report.pull
        if pull is not None:
            attributes: Attributes = {"motet.worker": self.member.id, "motet.transfer.bytes": pull.num_bytes}
            self._span.add(ChildSpan("transfer", pull.start_ns, pull.end_ns, attributes, error=pull.failure))

    async def _end(self, _: MotetError) -> None:
        await self.stream.aclose()
