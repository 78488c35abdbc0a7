"""The choices of a part on one worker, from the time the worker gets them until they end or the worker is lost
(`Placement`), and the checks of what a worker on another server generates for them (`ResponseCheck`)."""

import logging
from collections.abc import Iterable
from functools import partial

import msgspec

from motet.engine import GroupStream
from motet.errors import MotetError, WorkerFaultError
from motet.loop_budget import within_loop_budget
from motet.routing.choosing.survey import trunk_of
from motet.routing.groups.chooser import ChosenWorker, work_span
from motet.routing.groups.unfinished import Unfinished
from motet.routing.workers.fleet import Fleet
from motet.routing.workers.open_groups import OpenGroup
from motet.tracing.spans import Attributes, ChildSpan, Tracer
from motet.types import (
    SCORES_PER_PART,
    ChoiceDelta,
    GenerateRequest,
    GroupDelta,
    PromptReport,
    PromptScores,
    TokenLogprob,
)

logger = logging.getLogger(__name__)

MAX_SCORE_BYTES, MAX_TOP_BYTES = 40, 20
"""Maximum sizes of the encoded score of a prompt token, without alternatives, and of an alternative."""


class ResponseCheck:
    """Checks the deltas of a worker on another server against the group's request. Pure, and takes a fraction of a
    microsecond for each token.

    A server that has a defect, is of another version, or is hostile can send anything. The checks cover what the layers
    above rely on, and what would make a wrong answer or a wrong bill:

        index         a choice of the group that has not ended; deltas of a choice that was stopped can still arrive
        tokens        in the vocabulary, and at most `max_tokens` together with the tokens that the choice had
        logprobs      one for each token if they were requested, otherwise none, and of tokens in the vocabulary
        prompt        `cached_tokens` is at most its length; log-probabilities of all its tokens, or of all tokens from
                      `scored_from` on, if they were requested, otherwise none. They are in parts, which `check_part`
                      checks one by one
    """

    __slots__ = (
        *("_left", "_logprobs", "_num_prompt_top", "_num_scores"),
        *("_prompt_tokens", "_scored_from", "_vocab_size"),
    )

    def __init__(self, request: GenerateRequest, *, vocab_size: int) -> None:
        sampling = request.sampling
        self._left = {start.index: sampling.max_tokens - len(start.output_tokens) for start in request.choices}
        """Number of tokens that each choice that has not ended can still get."""
        self._vocab_size = vocab_size
        self._logprobs = sampling.logprobs is not None
        self._prompt_tokens = len(request.prompt)
        self._scored_from = request.scored_from
        self._num_scores = 0
        """Number of log-probabilities of the prompt in the report."""
        self._num_prompt_top = sampling.prompt_logprobs
        """Number of alternatives to each token of the prompt; None if no log-probabilities of the prompt are expected,
        or no longer."""

    def check(self, delta: GroupDelta) -> None:
        """Raises WorkerFaultError if the delta is invalid. Then the group must not continue on this worker."""
        if delta.prompt is not None or self._num_prompt_top is not None:
            self._check_prompt(delta.prompt)
        left, vocab_size, logprobs = self._left, self._vocab_size, self._logprobs
        for choice in delta.choices:
            tokens = choice.token_ids
            allowed = left.get(choice.index)
            if allowed is None:
                raise WorkerFaultError(f"the worker sent tokens of choice {choice.index}, which is not open")
            if len(tokens) > allowed:
                raise WorkerFaultError(f"the worker sent more than max_tokens tokens of choice {choice.index}")
            for token in tokens:
                if not 0 <= token < vocab_size:
                    raise WorkerFaultError(f"the worker sent the token {token}; its vocabulary has {vocab_size}")
            if logprobs or choice.logprobs is not None:
                self._check_logprobs(choice)
            if choice.finish is None:
                left[choice.index] = allowed - len(tokens)
            else:
                del left[choice.index]

    def _check_prompt(self, report: PromptReport | None) -> None:
        if report is not None and not 0 <= report.cached_tokens <= self._prompt_tokens:
            found = f"{report.cached_tokens} tokens of a prompt of {self._prompt_tokens}"
            raise WorkerFaultError(f"the worker found {found} in its cache")
        parts, num_top = () if report is None else report.parts or (), self._num_prompt_top
        if num_top is None:
            if parts:
                raise WorkerFaultError("the worker sent log-probabilities of the prompt, and none were requested")
            return
        scored_from = 0 if report is None else report.scored_from
        self._num_scores = self._prompt_tokens - scored_from
        if not 0 <= scored_from <= self._scored_from or len(parts) != -(-self._num_scores // SCORES_PER_PART):
            raise WorkerFaultError("the worker left out log-probabilities of the prompt")
        if max(map(len, parts), default=0) > SCORES_PER_PART * (MAX_SCORE_BYTES + MAX_TOP_BYTES * num_top):
            raise WorkerFaultError("the worker sent more log-probabilities of the prompt than were requested")
        self._num_prompt_top = None  # on the first delta only

    def check_part(self, number: int, part: bytes) -> None:
        """Checks a part of the log-probabilities of the prompt, whose delta has passed `check`."""
        try:
            scores = [*PromptScores([part])]
        except msgspec.MsgspecError as error:
            raise WorkerFaultError(f"log-probabilities of the prompt cannot be read: {error}") from error
        if len(scores) != min(SCORES_PER_PART, self._num_scores - SCORES_PER_PART * number):
            raise WorkerFaultError("the worker left out log-probabilities of the prompt")
        self._check_tokens(score for score in scores if score is not None)

    def _check_logprobs(self, choice: ChoiceDelta) -> None:
        logprobs = choice.logprobs or ()
        if len(logprobs) != (len(choice.token_ids) if self._logprobs else 0):
            raise WorkerFaultError(
                f"the worker sent {len(logprobs)} log-probabilities of {len(choice.token_ids)} tokens"
                + ("" if self._logprobs else ", and none were requested")
            )
        self._check_tokens(logprobs)

    def _check_tokens(self, logprobs: Iterable[TokenLogprob]) -> None:
        vocab_size = self._vocab_size
        for logprob in logprobs:
            for token in (logprob.token_id, *(other for other, _ in logprob.top)):
                if not 0 <= token < vocab_size:
                    which = f"the log-probability of token {token}"
                    raise WorkerFaultError(f"the worker sent {which}; its vocabulary has {vocab_size}")


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
            client=request.client,
            weight=request.client_weight,
            trunk=trunk_of(request, fleet, member=member),
            prompt_tokens=0 if request.ticket else chosen.backlog.own_tokens,
        )
        choices = unfinished.choices.values()
        for choice in choices:
            choice.count_blocks(self._block_size)
        self.group.add_tail_blocks(sum(choice.tail_blocks for choice in choices))

    def record(self, delta: GroupDelta) -> None:
        """Records the tokens of a delta, and the ends of choices."""
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
            for number, part in enumerate((delta.prompt and delta.prompt.parts) or ()):
                await within_loop_budget(partial(check.check_part, number, part))
        except (MotetError, StopAsyncIteration):
            raise
        except Exception as error:
            logger.exception("an answer of %s cannot be processed", self.member.id)
            why = f"its answer cannot be processed ({type(error).__name__}): the log has more"
            raise WorkerFaultError(why) from error
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
        """Records that the worker has the prompt, and adds the transfer of the prompt's KV to the trace. A worker on
        another server traces its transfers itself."""
        self._span.event("first_delta")
        pull = None if report is None or not self.worker.local else report.pull
        if pull is not None:
            attributes: Attributes = {"motet.worker": self.member.id, "motet.transfer.bytes": pull.num_bytes}
            self._span.add(ChildSpan("transfer", pull.start_ns, pull.end_ns, attributes, error=pull.failure))
        cached_tokens = 0 if report is None else report.cached_tokens
        computed_tokens = 0 if self.request.ticket else len(self.request.prompt) - cached_tokens
        self.group.finish_prompt(computed_tokens=computed_tokens)

    async def _end(self, _: MotetError) -> None:
        await self.stream.aclose()
