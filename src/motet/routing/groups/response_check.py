"""Checks what a worker elsewhere writes for a group against what the group asked for. Pure.

A server that is broken, of another version or hostile may send anything. What is checked here is what the parts above
build upon, and what would make a wrong answer or a wrong bill:

    index           one of the group's choices that has not ended; one that the reader has stopped may still come
    tokens          in the vocabulary, and no more than `max_tokens` with those that the choice had before
    log-probabilities   one for each token if they were asked for, and none if not, of tokens in the vocabulary
    prompt          `cached_tokens` of its length at most, and log-probabilities of all its tokens if asked for
"""

from collections.abc import Iterable

from motet.errors import WorkerFaultError
from motet.types import ChoiceDelta, GenerateRequest, GroupDelta, PromptReport, TokenLogprob


class ResponseCheck:
    """What one worker has promised for one group. It costs a fraction of a microsecond for each token."""

    __slots__ = ("_left", "_logprobs", "_prompt_logprobs", "_prompt_tokens", "_vocab_size")

    def __init__(self, request: GenerateRequest, *, vocab_size: int) -> None:
        sampling = request.sampling
        self._left = {start.index: sampling.max_tokens - len(start.output_tokens) for start in request.choices}
        """For each choice that has not ended, how many tokens it may still have."""
        self._vocab_size = vocab_size
        self._logprobs = sampling.logprobs is not None
        self._prompt_tokens = len(request.prompt)
        self._prompt_logprobs = sampling.prompt_logprobs is not None

    def check(self, delta: GroupDelta) -> None:
        """Raises WorkerFaultError if the delta cannot be right; then the group must not go on there."""
        if delta.prompt is not None or self._prompt_logprobs:
            self._check_prompt(delta.prompt)
        left, vocab_size, logprobs = self._left, self._vocab_size, self._logprobs
        for told in delta.choices:
            tokens = told.token_ids
            allowed = left.get(told.index)
            if allowed is None:
                raise WorkerFaultError(f"the worker sent tokens of choice {told.index}, which it has not open")
            if len(tokens) > allowed:
                raise WorkerFaultError(f"the worker sent more than max_tokens tokens of choice {told.index}")
            for token in tokens:
                if not 0 <= token < vocab_size:
                    raise WorkerFaultError(f"the worker sent the token {token}; its vocabulary has {vocab_size}")
            if logprobs or told.logprobs is not None:
                self._check_logprobs(told)
            if told.finish is None:
                left[told.index] = allowed - len(tokens)
            else:
                del left[told.index]

    def _check_prompt(self, report: PromptReport | None) -> None:
        told = None if report is None else report.logprobs
        if report is not None and not 0 <= report.cached_tokens <= self._prompt_tokens:
            raise WorkerFaultError(
                f"the worker found {report.cached_tokens} tokens of a prompt of {self._prompt_tokens} in its cache"
            )
        if self._prompt_logprobs:
            if told is None or len(told) != self._prompt_tokens:
                raise WorkerFaultError("the worker left out log-probabilities of the prompt")
            self._prompt_logprobs = False  # on the first delta only
        self._check_tokens(one for one in told or () if one is not None)

    def _check_logprobs(self, told: ChoiceDelta) -> None:
        logprobs = told.logprobs or ()
        if len(logprobs) != (len(told.token_ids) if self._logprobs else 0):
            raise WorkerFaultError(
                f"the worker sent {len(logprobs)} log-probabilities of {len(told.token_ids)} tokens"
                + ("" if self._logprobs else ", and none were asked for")
            )
        self._check_tokens(logprobs)

    def _check_tokens(self, logprobs: Iterable[TokenLogprob]) -> None:
        for one in logprobs:
            for token in (one.token_id, *(other for other, _ in one.top)):
                if not 0 <= token < self._vocab_size:
                    raise WorkerFaultError(f"the worker sent the log-probability of token {token}, which there is not")
