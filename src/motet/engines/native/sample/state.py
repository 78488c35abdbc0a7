"""The state that the sampler keeps for one choice. It has no random generator: draws are counter-based.

A sequence owns its `ChoiceSampling`, appends each token it writes, and drops it when the choice ends. A resumed choice
builds it again from the tokens written so far and goes on as if it had never stopped.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from motet.errors import GrammarError
from motet.grammar.compiled_grammar import Matcher
from motet.types import SamplingParams

_ROOM = 64
"""The arrays have room for this many tokens outside the prompt at first."""


class PromptTokens:
    """The different tokens of a prompt, found when a choice first needs them, and shared by all choices of a group."""

    def __init__(self, prompt: Sequence[int] = ()) -> None:
        self._prompt = prompt

    @cached_property
    def slots(self) -> dict[int, int]:
        """The place of each token in `ids`."""
        return {token_id: slot for slot, token_id in enumerate(dict.fromkeys(self._prompt))}

    @cached_property
    def ids(self) -> npt.NDArray[np.int64]:
        return np.fromiter(self.slots, np.int64, len(self.slots))


class TokenBias:
    """The biases of tokens, -inf for those that are not allowed, as a row that is added to logits: made when a choice
    first needs it, and shared by all choices of a group."""

    def __init__(self, params: SamplingParams) -> None:
        self._bias: Mapping[int, float] = params.logit_bias
        self._allowed = params.allowed_token_ids
        self._row: torch.Tensor | None = None
        self._bits: npt.NDArray[np.int32] | None = None

    def __bool__(self) -> bool:
        return bool(self._bias or self._allowed)

    def row(self, width: int, device: torch.device, *, vocab_size: int) -> torch.Tensor:
        """Returns [width] float32 on the device, the same at each call. Ids from `vocab_size` are passed over."""
        if self._row is None:
            row = torch.full((width,), -torch.inf if self._allowed else -0.0)
            row[[token_id for token_id in self._allowed if token_id < vocab_size]] = -0.0  # leaves every bit, also of 0
            known = {token_id: bias for token_id, bias in self._bias.items() if token_id < vocab_size}
            row[list(known)] += torch.tensor(list(known.values()), dtype=torch.float32)
            self._row = row.to(device)
        return self._row

    def narrow(self, mask: npt.NDArray[np.int32]) -> None:
        """Takes the tokens that are not allowed out of a grammar's mask [words], whose bit t % 32 of word t // 32 is
        token t."""
        if not self._allowed:
            return
        if self._bits is None:
            tokens = np.zeros(mask.size * 32, np.bool_)
            tokens[[token_id for token_id in self._allowed if token_id < tokens.size]] = True
            self._bits = np.packbits(tokens, bitorder="little").view(np.int32)
        mask &= self._bits


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
        bias: TokenBias | None = None,
    ) -> None:
        """`matcher`: the choice's position in its grammar; only this choice uses it from now on. `bias`: that of
        `params`, if the choices of a group share it."""
        self.params = params
        self.bias = bias or TokenBias(params)
        self.seed = seed
        self.num_written = len(written)
        self.counts: TokenCounts | None = None
        """None unless a penalty is in use; then its past changes the logits of this choice alone."""
        repetition = params.repetition_penalty != 1.0
        if repetition or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0:
            self.counts = TokenCounts(prompt if repetition else PromptTokens(), written)
        self.matcher = matcher
        self.failure: str | None = None
        """Why its grammar cannot be followed any further."""
        self._eos_token_ids = eos_token_ids
        ending = {*params.stop_token_ids, *(() if params.ignore_eos and matcher is None else eos_token_ids)}
        if params.allowed_token_ids and ending.issuperset(params.allowed_token_ids):
            ending = set()
        self._ending_ids = tuple(sorted(ending))
        self._always_edits = matcher is not None or bool(self.bias) or params.edits_logits
        self._edits_until = params.min_tokens if ending else 0

    @property
    def has_edits(self) -> bool:
        """True if anything changes its logits before its next token is drawn."""
        return self._always_edits or self.num_written < self._edits_until

    @property
    def complete(self) -> bool:
        """True if its grammar allows nothing more, and its model has no end-of-sequence token."""
        return self.matcher is not None and not self._eos_token_ids and self.matcher.stopped

    def append(self, token_id: int) -> None:
        """Must be called after each token, also after the last one."""
        self.num_written += 1
        if self.counts is not None:
            self.counts.add(token_id)
        if self.matcher is not None and token_id not in self._eos_token_ids:
            try:
                self.matcher.consume(token_id)
            except GrammarError as error:  # matters only if a next token is drawn
                self.fail(error.message)

    def forced(self) -> list[int]:
        """Returns tokens that come next whatever the logits are, since its grammar allows no others; maybe not all such
        tokens. Where log-probabilities are wanted there are none, because these need logits."""
        return [] if self.params.logprobs is not None else self.only_ones()

    def only_ones(self) -> list[int]:
        """Returns tokens that come next because its grammar allows no others; maybe not all such tokens."""
        if self.matcher is None or self.failure or self.params.allowed_token_ids:
            return []
        if self.matcher.stopped:
            return [*self._eos_token_ids] if len(self._eos_token_ids) == 1 else []
        return self.matcher.forced()

    def ahead(self, token_id: int) -> "ChoiceSampling | None":
        """Returns the state after one more token, and stays as it is; None if the grammar does not allow it."""
        state = copy(self)
        state.counts = self.counts and self.counts.copy()
        state.matcher = self.matcher and self.matcher.copy()
        state.append(token_id)
        return None if state.failure else state

    def may_end_with(self, token_id: int) -> bool:
        """True for tokens that end a choice, where nothing forbids them to."""
        return token_id in self._ending_ids or token_id in self._eos_token_ids

    def fail(self, why: str) -> None:
        """Notes why no token can be drawn any more."""
        self.failure = self.failure or why

    def forbidden_ids(self) -> tuple[int, ...]:
        """Returns the tokens that must not end the choice now: before `min_tokens`, all that could. If a grammar allows
        nothing else, it wins over `min_tokens`, and also over `ignore_eos`.
        """
        if self.num_written < self.params.min_tokens:
            return self._ending_ids
        return self._eos_token_ids if self.matcher is not None and self.params.ignore_eos else ()


class TokenCounts:
    """Counts how often each token was written; a token of the prompt that was not written counts 0.

    The arrays grow by doubling and are handed out as views, so that a step costs no pass over the past.
    """

    def __init__(self, prompt: PromptTokens, written: Sequence[int]) -> None:
        self._prompt_slots = prompt.slots
        self._slots: dict[int, int] = {}  # slots of tokens that are not in the prompt
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
            if slot == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[slot] = token_id
            self._size += 1
        self._counts[slot] += 1

    def copy(self) -> "TokenCounts":
        counts = copy(self)
        counts.part()
        return counts

    def part(self) -> None:
        """Shares nothing any more that changes."""
        self._slots, self._ids, self._counts = self._slots.copy(), self._ids.copy(), self._counts.copy()

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """The tokens, each once."""
        return self._ids[: self._size]

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        return self._counts[: self._size]
