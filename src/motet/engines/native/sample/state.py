"""The state that the sampler keeps for one choice. It has no random generator, because uniforms are counter-based.

A sequence owns its `ChoiceSampling`, appends each output token to it, and discards it when the choice ends. When a
choice is resumed, its state is built again from its output tokens, and the choice continues with the same state.
"""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from itertools import takewhile

import numpy as np
import numpy.typing as npt
import torch

from motet.errors import GrammarError
from motet.grammar.compiled_grammar import Matcher
from motet.types import SamplingParams

_INITIAL_CAPACITY = 64
"""Number of tokens outside the prompt for which the arrays have space at first."""


class PromptTokens:
    """The distinct tokens of a prompt, computed when a choice first needs them, and shared by a group's choices."""

    def __init__(self, prompt: Sequence[int] = ()) -> None:
        self._prompt = prompt

    @cached_property
    def slots(self) -> dict[int, int]:
        """Index of each token in `ids`."""
        return {token_id: slot for slot, token_id in enumerate(dict.fromkeys(self._prompt))}

    @cached_property
    def ids(self) -> npt.NDArray[np.int64]:
        """The distinct tokens, in the order of their first occurrence."""
        return np.fromiter(self.slots, np.int64, len(self.slots))


class BadWords:
    """The tokens that would complete a bad word, by the output tokens before them. Shared by a group's choices."""

    def __init__(self, words: Sequence[tuple[int, ...]]) -> None:
        self.single = tuple(word[0] for word in words if len(word) == 1)
        """Words of one token, which are never sampled."""
        self._last: dict[tuple[int, ...], list[int]] = {}
        """Last tokens of longer words, by the tokens before them."""
        for word in words:
            if len(word) > 1:
                self._last.setdefault(word[:-1], []).append(word[-1])
        lengths: dict[int, set[int]] = {}
        for before in self._last:
            lengths.setdefault(before[-1], set()).add(len(before))
        self._lengths = {token_id: sorted(some) for token_id, some in lengths.items()}
        """Lengths of the sequences in `_last` by their last token: few have to be compared with an answer."""
        self.num_recent = max(map(len, self._last), default=0)
        """Number of output tokens on which the next token can depend."""

    def after(self, recent: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the tokens that would complete a longer word after these output tokens, the last `num_recent`."""
        lengths = self._lengths.get(recent[-1], ()) if recent else ()
        found = [self._last.get(recent[-length:], ()) for length in lengths if length <= len(recent)]
        return tuple(token_id for last in found for token_id in last)


class TokenBias:
    """Biases of tokens as a row that is added to logits; -inf for tokens that are not allowed. The row is made when a
    choice first needs it, and shared by all choices of a group."""

    def __init__(self, params: SamplingParams) -> None:
        self._bias: Mapping[int, float] = params.logit_bias
        self._allowed = params.allowed_token_ids
        self.bad_words = BadWords(params.bad_word_ids)
        self._row: torch.Tensor | None = None
        self._bits: npt.NDArray[np.int32] | None = None

    def __bool__(self) -> bool:
        return bool(self._bias or self._allowed or self.bad_words.single)

    def row(self, width: int, device: torch.device, *, vocab_size: int) -> torch.Tensor:
        """Returns [width] float32 on the device, the same tensor at each call. Ignores ids >= `vocab_size`."""
        if self._row is None:
            row = torch.full((width,), -torch.inf if self._allowed else -0.0)
            allowed = [token_id for token_id in self._allowed if token_id < vocab_size]
            row[allowed] = -0.0  # x + -0.0 has the bits of x, also for zeros
            known = {token_id: bias for token_id, bias in self._bias.items() if token_id < vocab_size}
            row[list(known)] += torch.tensor(list(known.values()), dtype=torch.float32)
            row[[token_id for token_id in self.bad_words.single if token_id < vocab_size]] = -torch.inf
            self._row = row.to(device)
        return self._row

    def mask_disallowed(self, mask: npt.NDArray[np.int32]) -> None:
        """Removes the tokens that are not in `allowed_token_ids`, and bad words of one token, from a grammar's mask
        [words] int32, in place. Bit t % 32 of word t // 32 is token t."""
        if not self._allowed and not self.bad_words.single:
            return
        if self._bits is None:
            tokens = np.full(mask.size * 32, not self._allowed)
            tokens[[token_id for token_id in self._allowed if token_id < tokens.size]] = True
            tokens[[token_id for token_id in self.bad_words.single if token_id < tokens.size]] = False
            self._bits = np.packbits(tokens, bitorder="little").view(np.int32)
        mask &= self._bits


class ChoiceSampling:
    """Parameters, seed and previous tokens of one choice, as far as its next token depends on them."""

    def __init__(
        self,
        params: SamplingParams,
        *,
        seed: int,
        prompt: PromptTokens,
        eos_token_ids: tuple[int, ...],
        output_tokens: Sequence[int] = (),
        matcher: Matcher | None = None,
        bias: TokenBias | None = None,
    ) -> None:
        """`matcher` is the choice's position in its grammar, and from now on belongs to this object. `bias` is the
        `TokenBias` of `params`, if the choices of a group share it."""
        self.params = params
        self.bias = bias or TokenBias(params)
        self.seed = seed
        self.num_output_tokens = len(output_tokens)
        self._recent = tuple(output_tokens[-num_recent:]) if (num_recent := self.bias.bad_words.num_recent) else ()
        self.counts: TokenCounts | None = None
        """Counts for penalties, with which the previous tokens change the choice's logits; None without penalties."""
        repetition = params.repetition_penalty != 1.0
        if repetition or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            self.counts = TokenCounts(prompt if repetition else PromptTokens(), output_tokens)
        self.matcher = matcher
        self.within_form = False
        """True if the last token is a stop token that does not end the choice, because its grammar allowed no end."""
        self.failure: str | None = None
        """Reason why no further token can be sampled, from its grammar. None if sampling can continue."""
        self._eos_token_ids = eos_token_ids
        ending = {*params.stop_token_ids, *(() if params.ignore_eos and matcher is None else eos_token_ids)}
        if params.allowed_token_ids and ending.issuperset(params.allowed_token_ids):
            ending = set()
        self._ending_ids = tuple(sorted(ending))
        always = matcher is not None or bool(self.bias) or params.edits_logits or bool(params.bad_word_ids)
        self._edits_until = math.inf if always else params.min_tokens if ending else 0
        """Number of output tokens from which on the choice's logits are not modified."""

    @property
    def has_edits(self) -> bool:
        """True if the choice's logits are modified before its next token is sampled."""
        return self.num_output_tokens < self._edits_until

    @property
    def complete(self) -> bool:
        """True if the grammar allows no further token, and the model has no end-of-sequence token."""
        return self.matcher is not None and not self._eos_token_ids and self.matcher.stopped

    @property
    def can_end(self) -> bool:
        """True if the choice has no grammar, or its output tokens are a complete answer."""
        return self.matcher is None or self.matcher.accepting

    def append(self, token_id: int) -> None:
        """Updates the state after an output token. Must be called for every output token, including the last."""
        self.num_output_tokens += 1
        if num_recent := self.bias.bad_words.num_recent:
            self._recent = (*self._recent, token_id)[-num_recent:]
        if self.counts is not None:
            self.counts.add(token_id)
        self.within_form = token_id in self.params.stop_token_ids and not self.can_end
        if self.matcher is not None and token_id not in self._eos_token_ids:
            if token_id in self.params.stop_token_ids and not self.within_form:
                return  # the choice ends
            try:
                self.matcher.consume(token_id)
            except GrammarError as error:  # reported only if another token is sampled
                self.fail(error.message)

    def forced(self) -> list[int]:
        """Returns `forced_tokens`, or nothing if log-probabilities were requested, because these need logits."""
        return [] if self.params.logprobs is not None else self.forced_tokens()

    def forced_tokens(self) -> list[int]:
        """Returns the next tokens if the grammar allows no other tokens, independent of the logits. The list can be
        shorter than the actual sequence of forced tokens."""
        if self.matcher is None or self.failure or self.params.allowed_token_ids or self.params.bad_word_ids:
            return []
        stop_ids = self.params.stop_token_ids
        if self.matcher.stopped:
            return [*self._eos_token_ids] if len(self._eos_token_ids) == 1 and not stop_ids else []
        return [*takewhile(lambda token_id: token_id not in stop_ids, self.matcher.forced())]

    def after(self, token_id: int) -> "ChoiceSampling | None":
        """Returns a copy of the state after one more token, or None if the grammar does not allow this token."""
        state = copy(self)
        state.counts = self.counts and self.counts.copy()
        state.matcher = self.matcher and self.matcher.copy()
        state.append(token_id)
        return None if state.failure else state

    def can_end_with(self, token_id: int) -> bool:
        """True if the token ends the choice, unless `min_tokens` or `ignore_eos` prevent it."""
        return token_id in self._ending_ids or token_id in self._eos_token_ids

    def fail(self, reason: str) -> None:
        """Records the reason why no further token can be sampled. The first reason is kept."""
        self.failure = self.failure or reason

    def forbidden_ids(self) -> tuple[int, ...]:
        """Returns the tokens that must not be sampled now: tokens that would end the choice too early, and tokens that
        would complete a bad word. A grammar or a list that allows only these tokens has precedence."""
        forbidden = self._too_early()
        if self._recent and (completing := self.bias.bad_words.after(self._recent)):
            forbidden = (*forbidden, *completing)
            if self.params.allowed_token_ids and {*forbidden}.issuperset(self.params.allowed_token_ids):
                return self._too_early()
        return forbidden

    def _too_early(self) -> tuple[int, ...]:
        """Returns the tokens that must not end the choice now: before `min_tokens`, all tokens that can end it; before
        the end of its grammar, stop tokens."""
        if self.num_output_tokens < self.params.min_tokens:
            return self._ending_ids
        if self.matcher is None:
            return ()
        stop_ids = () if not self.params.stop_token_ids or self.can_end else self.params.stop_token_ids
        return (*stop_ids, *self._eos_token_ids) if self.params.ignore_eos else stop_ids


class TokenCounts:
    """Counts the occurrences of each token in the output. Tokens that occur only in the prompt have count 0. The arrays
    grow by doubling and are returned as views, so a step needs no pass over all previous tokens."""

    def __init__(self, prompt: PromptTokens, output_tokens: Sequence[int]) -> None:
        self._prompt_slots = prompt.slots
        self._slots: dict[int, int] = {}  # index in `ids` of tokens that are not in the prompt
        self._size = len(prompt.ids)
        self._ids = np.concatenate([prompt.ids, np.zeros(_INITIAL_CAPACITY, np.int64)])
        self._counts = np.zeros_like(self._ids)
        for token_id in output_tokens:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        slot = self._prompt_slots.get(token_id)
        if slot is None:
            slot = self._slots.setdefault(token_id, self._size)
        if slot == self._size:
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[slot] = token_id
            self._size += 1
        self._counts[slot] += 1

    def copy(self) -> "TokenCounts":
        """Returns counts that can be changed independently of these."""
        counts = copy(self)
        counts.unshare()
        return counts

    def unshare(self) -> None:
        """Replaces the arrays, which a shallow copy shares with its original, by copies."""
        self._slots, self._ids, self._counts = self._slots.copy(), self._ids.copy(), self._counts.copy()

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """Distinct tokens of prompt and output."""
        return self._ids[: self._size]

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """Number of occurrences in the output of each of `ids`."""
        return self._counts[: self._size]
