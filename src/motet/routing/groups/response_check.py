"""Checks what a worker on another server generates for a group against the group's request. Pure.

A server that has a defect, is of another version, or is hostile can send anything. The checks cover what the layers
above rely on, and what would make a wrong answer or a wrong bill:

    index           one of the group's choices that has not ended; deltas of a choice that was stopped can still arrive
    tokens          in the vocabulary, and at most `max_tokens` together with the output tokens that the choice had
    log-probabilities   one for each token if they were requested, otherwise none, and of tokens in the vocabulary
    prompt          `cached_tokens` is at most its length; log-probabilities of all its tokens if they were requested
"""

from collections.abc import Iterable

from motet.errors import WorkerFaultError
from motet.types import ChoiceDelta, GenerateRequest, GroupDelta, PromptReport, TokenLogprob


class ResponseCheck:
    """The checks of one worker's deltas for one group. They take a fraction of a microsecond for each token."""

    __slots__ = ("_left", "_logprobs", "_prompt_logprobs", "_prompt_tokens", "_vocab_size")

    def __init__(self, request: GenerateRequest, *, vocab_size: int) -> None:
        sampling = request.sampling
        self._left = {start.index: sampling.max_tokens - len(start.output_tokens) for start in request.choices}
        """Number of tokens that each choice that has not ended can still get."""
        self._vocab_size = vocab_size
        self._logprobs = sampling.logprobs is not None
        self._prompt_tokens = len(request.prompt)
        self._prompt_logprobs = sampling.prompt_logprobs is not None
        """True while log-probabilities of the prompt are expected."""

    def check(self, delta: GroupDelta) -> None:
        """Raises WorkerFaultError if the delta is invalid. Then the group must not continue on this worker."""
        if delta.prompt is not None or self._prompt_logprobs:
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
        logprobs = None if report is None else report.logprobs
        if report is not None and not 0 <= report.cached_tokens <= self._prompt_tokens:
            raise WorkerFaultError(
                f"the worker found {report.cached_tokens} tokens of a prompt of {self._prompt_tokens} in its cache"
            )
        if self._prompt_logprobs:
            if logprobs is None or len(logprobs) != self._prompt_tokens:
                raise WorkerFaultError("the worker left out log-probabilities of the prompt")
            self._prompt_logprobs = False  # on the first delta only
        self._check_tokens(logprob for logprob in logprobs or () if logprob is not None)

    def _check_logprobs(self, choice: ChoiceDelta) -> None:
        logprobs = choice.logprobs or ()
        if len(logprobs) != (len(choice.token_ids) if self._logprobs else 0):
            raise WorkerFaultError(
                f"the worker sent {len(logprobs)} log-probabilities of {len(choice.token_ids)} tokens"
                + ("" if self._logprobs else ", and none were requested")
            )
        self._check_tokens(logprobs)

    def _check_tokens(self, logprobs: Iterable[TokenLogprob]) -> None:
        for logprob in logprobs:
            for token in (logprob.token_id, *(other for other, _ in logprob.top)):
                if not 0 <= token < self._vocab_size:
                    raise WorkerFaultError(
                        f"the worker sent the log-probability of token {token}; its vocabulary has {self._vocab_size}"
                    )
