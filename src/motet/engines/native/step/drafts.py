"""Draft tokens: guesses of the next output tokens of a choice, verified in the same step.

    output tokens  ... a b c | drafts  d e f        rows of the step:  c d e f
                                                    sampled tokens:    d e x .      new output tokens: d e x

Each draft is one more row of the step. The token after each row is sampled as always, by the seed of the choice and the
token's position. Drafts are accepted up to the first one that differs from the sampled token. They therefore change the
number of steps and nothing else.

Each row makes a step slower, for all choices in it, and its relative cost grows with the number of choices and with
the number of positions that it reads (`docs/log.md`). Drafts are therefore made only in steps with few choices, and
only if their acceptance is likely enough. Acceptance rates are counted for each group and each length of n-gram.

The sources of drafts are the prompt and the answers of the group (`ngrams`), the grammar where it allows only one
token, and, with `--draft-from-history`, earlier answers to the same prompt.
"""

from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from motet.engines.native.step.ngrams import MAX_TOKENS_PER_STEP, NGRAM_SIZES, GroupDrafts, NgramIndex
from motet.engines.native.step.sequence import ChoiceSequence, Group
from motet.engines.native.step.step_plan import Draft, TailChunk

MAX_CHOICES = 4
"""Maximum number of choices in a step with drafts. With more choices, a row costs as much as the token it can save."""
ROW_COST = 0.05
"""Cost of an additional row that reads no positions, relative to a step with one choice."""
POSITIONS_PER_ROW = 4000
"""Number of read positions that doubles the cost of a row."""
MAX_PROMPT_TOKENS = 2**15
"""Maximum number of prompt tokens in the index: the last tokens of a longer prompt."""
MAX_EARLIER_ANSWERS = 64
"""Maximum number of earlier answers to a prompt in the index: the newest ones."""


class History:
    """The newest answers to each prompt, for prompts that are requested again."""

    def __init__(self, max_tokens: int) -> None:
        self._num_free = max_tokens
        """Number of tokens that can still be stored."""
        self._answers: defaultdict[bytes, deque[tuple[int, ...]]] = defaultdict(deque)
        self._order: deque[bytes] = deque()
        """The prompt of each answer, the oldest answer first."""

    def store(self, sequence: ChoiceSequence) -> None:
        """Stores the answer of a choice that has ended. Drops the oldest answers if the new one does not fit."""
        if not sequence.output_tokens:
            return
        digest = _prompt_digest(sequence.group)
        self._answers[digest].append(tuple(sequence.output_tokens))
        self._order.append(digest)
        self._num_free -= len(sequence.output_tokens)
        while self._num_free < 0:
            oldest = self._order.popleft()
            self._num_free += len(self._answers[oldest].popleft())
            if not self._answers[oldest]:
                del self._answers[oldest]

    def answers(self, group: Group) -> list[tuple[int, ...]]:
        """Returns the newest answers to the prompt of a group, the newest last."""
        return [*self._answers.get(_prompt_digest(group), ())][-MAX_EARLIER_ANSWERS:]


def _prompt_digest(group: Group) -> bytes:
    request, adapter = group.request, group.trunk.adapter
    key = f"{'' if adapter is None else adapter.info.name}\0{request.cache_salt}"
    return blake2b(array("q", group.prompt).tobytes() + key.encode(), digest_size=16).digest()


@dataclass(eq=False)
class Drafter:
    """Makes the drafts of a step, and counts how many of them are accepted."""

    max_drafts: int
    """Maximum number of drafts of a choice in a step; 0 turns drafts off."""
    max_model_len: int
    history: History | None = None

    def start_step(self, sequences: Sequence[ChoiceSequence]) -> bool:
        """Updates the indexes for a step of these sequences. Returns False if the step gets no drafts."""
        if not self.max_drafts or len(sequences) > MAX_CHOICES:
            return False
        groups = {sequence.group for sequence in sequences}
        for group in groups:
            self._drafts_of(group).index.catch_up(MAX_TOKENS_PER_STEP // len(groups))
        return True

    def drafts(self, sequence: ChoiceSequence, *, num_choices: int) -> list[Draft]:
        """Returns the drafts of a choice, in a step of `num_choices` choices."""
        group, limit = sequence.group, self.limit(sequence)
        context = len(group.prompt) + len(sequence.output_tokens)
        group_drafts = self._drafts_of(group)
        min_probability = ROW_COST * (1 + context / POSITIONS_PER_ROW) * num_choices
        last = [*group.prompt[-NGRAM_SIZES[0] :], *sequence.output_tokens[-NGRAM_SIZES[0] :]]
        drafts: list[Draft] = []
        state, probability = sequence.sampling, 1.0
        forced = state.forced_tokens()
        while len(drafts) < limit and not (drafts and state.can_end_with(drafts[-1].token_id)):
            source = None
            if forced:
                token_id = forced.pop(0)
            elif (found := group_drafts.index.lookup(last)) is not None:
                source, token_id = found
                probability *= group_drafts.acceptance[source]
                if probability < min_probability:
                    if not drafts:
                        group_drafts.record_skipped(source)
                    break
            else:
                break
            if (next_state := state.after(token_id)) is None:
                break
            state = next_state
            drafts.append(Draft(token_id, state, source))
            last.append(token_id)
            forced = forced or state.forced_tokens()
        return drafts

    def update_rates(self, tails: Iterable[TailChunk], num_accepted: Mapping[ChoiceSequence, int]) -> None:
        """Updates the acceptance rates after a step, by the number of accepted drafts of each sequence."""
        for chunk in tails:
            count = num_accepted[chunk.sequence]
            for index, draft in enumerate(chunk.drafts[: count + 1]):
                if draft.source is not None:
                    self._drafts_of(chunk.sequence.group).record_verified(draft.source, accepted=index < count)

    def limit(self, sequence: ChoiceSequence) -> int:
        """Returns the maximum number of drafts for a choice. The token after the last draft must fit too."""
        num_tokens = len(sequence.output_tokens)
        left = sequence.group.request.sampling.max_tokens - num_tokens - 1
        return min(self.max_drafts, left, self.max_model_len - len(sequence.group.prompt) - num_tokens - 1)

    def _drafts_of(self, group: Group) -> GroupDrafts:
        """Returns the index and the acceptance rates of a group, which live as long as the group."""
        if group.drafts is None:
            earlier = self.history.answers(group) if self.history is not None else []
            answers = [sequence.output_tokens for sequence in group.sequences]
            group.drafts = GroupDrafts(NgramIndex([group.prompt[-MAX_PROMPT_TOKENS:], *earlier, *answers]))
        return group.drafts
