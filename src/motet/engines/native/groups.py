"""Makes of a request what the engine runs: a group, its sequences, and where each begins in the group's grammar."""

from collections.abc import Mapping

from motet.block_names import BlockName, block_names
from motet.engines.native.matchers import matchers_of
from motet.engines.native.sample.state import ChoiceSampling, PromptTokens
from motet.engines.native.sequence import Group, Sequence
from motet.grammar.compiled import Grammars, Matcher
from motet.types import ChoiceStart, EngineInfo, GenerateRequest


class GroupMaker:
    """Of one engine."""

    def __init__(self, info: EngineInfo, *, prefix_cache: bool, grammars: Grammars | None) -> None:
        self._eos_token_ids = tuple(token_id for token_id in info.eos_token_ids if token_id < info.vocab_size)
        """Those that can be drawn."""
        self._block_size = info.block_size
        self._prefix_cache = prefix_cache
        self._grammars = grammars

    def to_write(self, request: GenerateRequest, arrival: int, matchers: Mapping[int, Matcher] | None) -> Group:
        """A group whose choices are written here. Raises RequestError for a grammar that cannot be used."""
        if matchers is None:
            matchers = matchers_of(self._grammars, request)
        group = Group(request, arrival, self._names(request))
        prompt = PromptTokens(request.prompt)
        sequences = []
        for starts in _shared_starts(request):
            sampling = ChoiceSampling(
                request.sampling,
                seed=starts[0].seed,
                prompt=prompt,
                eos_token_ids=self._eos_token_ids,
                written=starts[0].written,
                matcher=matchers.get(starts[0].index),
            )
            sequences.append(Sequence(group, [start.index for start in starts], sampling, list(starts[0].written)))
        group.sequences = sorted(sequences, key=lambda sequence: sequence.rank)
        group.answered_by = {index: sequence for sequence in sequences for index in sequence.indices}
        return group

    def to_hand_over(self, request: GenerateRequest, arrival: int, readers: int) -> Group:
        """A group whose prompt is prefilled for others, who draw all of its tokens."""
        return Group(request, arrival, self._names(request), readers)

    def _names(self, request: GenerateRequest) -> list[BlockName]:
        return block_names(request.prompt, self._block_size, request.cache_salt) if self._prefix_cache else []


def _shared_starts(request: GenerateRequest) -> list[list[ChoiceStart]]:
    """Choices that must come out equal, side by side: in a greedy group those that have written the same."""
    if not request.sampling.greedy:
        return [[start] for start in request.choices]
    by_written: dict[tuple[int, ...], list[ChoiceStart]] = {}
    for start in request.choices:
        by_written.setdefault(start.written, []).append(start)
    return list(by_written.values())
