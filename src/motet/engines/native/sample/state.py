"""What the sampler must remember of one choice. There is no generator among it: draws are counter-based.

A sequence owns its `ChoiceSampling`, appends each token it writes, and drops it when the choice ends. A resumed choice
builds it anew from the tokens written so far and goes on as if it had never stopped.
"""

from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from motet.errors import GrammarError
from motet.grammar.compiled import Matcher
from motet.types import SamplingParams

_ROOM = 64
"""For tokens that are not in the prompt, at first."""


class PromptTokens:
    """The tokens of a prompt, each once: found when a choice needs them, and shared by all choices of a group."""

    def __init__(self, prompt: Sequence[int] = ()) -> None:
        self._prompt = prompt

    @cached_property
    def slots(self) -> dict[int, int]:
        """Where each stands in `ids`."""
        return {token_id: slot for slot, token_id in enumerate(dict.fromkeys(self._prompt))}

    @cached_property
    def ids(self) -> npt.NDArray[np.int64]:
        return np.fromiter(self.slots, np.int64, len(self.slots))


class ChoiceSampling:
    """Parameters, seed and past of one choice, as far as its next token depends on them."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int,
        prompt: PromptTokens,
        eos_token_ids: tuple[int, ...],
        written: Sequence[int] = (),
        matcher: Matcher | None = None,
    ) -> None:
        """`matcher`: where the choice has come in its grammar; it is this choice's alone from now on."""
        self.params = params
        self.seed = seed
        self.num_written = len(written)
        self.counts = _token_counts(params, prompt, written)
        """Only there if a penalty is in use: then the past changes the logits of this choice alone."""
        self.matcher = matcher
        self.failure: str | None = None
        """Why its grammar cannot be followed any further."""
        self._eos_token_ids = eos_token_ids
        self._ending_ids = _ending_ids(params, eos_token_ids, constrained=matcher is not None)
        self._always_edits = matcher is not None or self.counts is not None or bool(params.logit_bias)
        self._edits_until = params.min_tokens if self._ending_ids else 0

    @property
    def has_edits(self) -> bool:
        """Whether anything changes its logits before its next token is drawn."""
        return self._always_edits or self.num_written < self._edits_until

    @property
    def fresh(self) -> bool:
        """Its siblings, if they are fresh too, have the same edits."""
        return self.num_written == 0

    @property
    def complete(self) -> bool:
        """Its grammar lets nothing follow, and its model has no end-of-sequence to say so."""
        return self.matcher is not None and not self._eos_token_ids and self.matcher.stopped

    def append(self, token_id: int) -> None:
        """Call after each token, the last one too."""
        self.num_written += 1
        if self.counts is not None:
            self.counts.add(token_id)
        if self.matcher is not None and token_id not in self._eos_token_ids:
            try:
                self.matcher.consume(token_id)
            except GrammarError as error:  # matters only if there is to be a next token
                self.fail(error.message)

    def fail(self, why: str) -> None:
        """Nothing more can be drawn."""
        self.failure = self.failure or why

    def forbidden_ids(self) -> tuple[int, ...]:
        """Tokens that must not end the choice now: all that could, before `min_tokens` are written. A grammar wins over
        that where it allows nothing else; so it does over `ignore_eos`, which to a choice with one is a wish to go on.
        """
        if self.num_written < self.params.min_tokens:
            return self._ending_ids
        return self._eos_token_ids if self.matcher is not None and self.params.ignore_eos else ()


class TokenCounts:
    """How often each token was written; a token of the prompt that was not written counts 0.

    The arrays grow by doubling and are handed out as views, so that a step costs no pass over the past.
    """

    def __init__(self, prompt: PromptTokens, written: Sequence[int]) -> None:
        self._prompt_slots = prompt.slots
        self._slots: dict[int, int] = {}  # of tokens that are not in the prompt
        self._size = len(prompt.ids)
        self._ids = np.concatenate([prompt.ids, np.zeros(_ROOM, np.int64)])
        self._counts = np.zeros_like(self._ids)
        for token_id in written:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        slot = self._prompt_slots.get(token_id)
        if slot is None:
            slot = self._slots.setdefault(token_id, self._size)
        if slot == self._size:
            self._append(token_id)
        self._counts[slot] += 1

    def _append(self, token_id: int) -> None:
        if self._size == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[self._size] = token_id
        self._size += 1

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Each token once."""
        return self._ids[: self._size]

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        return self._counts[: self._size]


def _token_counts(params: SamplingParams, prompt: PromptTokens, written: Sequence[int]) -> TokenCounts | None:
    repetition = params.repetition_penalty != 1.0
    if not repetition and params.presence_penalty == 0.0 and params.frequency_penalty == 0.0:
        return None
    return TokenCounts(prompt if repetition else PromptTokens(), written)


def _ending_ids(params: SamplingParams, eos_token_ids: tuple[int, ...], *, constrained: bool) -> tuple[int, ...]:
    if params.min_tokens == 0:
        return ()
    ending = set(params.stop_token_ids)
    if constrained or not params.ignore_eos:
        ending.update(eos_token_ids)
    return tuple(sorted(ending))
