"""The unfinished choices of a group or of a part, with everything that another worker needs to continue them.

A token depends on logits, seed and position only. So between workers with equal fingerprints a choice that moves gets
the tokens that it would have got without the move."""

import msgspec

from motet.engine_info import EngineInfo, adapter_in, weights_of
from motet.ids import RequestId
from motet.merge import PromptOnce
from motet.types import ChoiceDelta, ChoiceStart, Finish, FinishReason, GenerateRequest, GroupDelta


class UnfinishedChoice:
    """The output tokens of a choice, and the blocks that its worker holds for them."""

    __slots__ = ("block_tokens", "output", "seed", "tail_blocks")

    def __init__(self, seed: int, output: list[int]) -> None:
        self.seed = seed
        self.output = output
        self.tail_blocks = 0
        """KV blocks that the worker is assumed to hold for the choice, in addition to the blocks of the prompt."""
        self.block_tokens = 0
        """Number of output tokens up to which these blocks suffice."""

    def count_blocks(self, block_size: int) -> None:
        """Sets the number of blocks, each of `block_size` tokens. A choice without output tokens holds one block."""
        self.tail_blocks = len(self.output) // block_size + 1
        self.block_tokens = self.tail_blocks * block_size - 1


class Unfinished:
    """The unfinished choices of a part, by index. They become a new group each time that the part moves."""

    def __init__(
        self, request: GenerateRequest, *, reader_id: RequestId | None = None, prompt: PromptOnce | None = None
    ) -> None:
        """`reader_id`: id of the group in the deltas for its reader, if the request is one of its parts. `prompt`:
        shared by all parts of a group."""
        self.request = request
        """The group, or the part of it, as it was before any move."""
        self.reader_id = reader_id or request.request_id
        self.choices = {start.index: UnfinishedChoice(start.seed, [*start.output_tokens]) for start in request.choices}
        self.started = False
        """True once the reader has received a delta."""
        self.prompt = prompt or PromptOnce()
        """Passes on the report on the prompt, which the reader of the group gets once."""
        self.model_digest = request.model_digest
        """Digest of the weights that generate the choices. Empty before the first token, or if the engine has none."""

    def __len__(self) -> int:
        return len(self.choices)

    @property
    def output_tokens(self) -> int:
        return sum(len(choice.output) for choice in self.choices.values())

    def use_weights(self, info: EngineInfo) -> None:
        """Records that the worker has new weights, with which it continues the choices."""
        model = self.request.model
        unloaded = model not in ("", info.model) and adapter_in(info, model) is None
        if self.model_digest and not unloaded:  # an engine continues its groups with an adapter that it has unloaded
            self.model_digest = weights_of(info, model)

    def abort(self) -> GroupDelta | None:
        """Ends all choices early. Returns the delta that reports this to the reader, or None if no choice is left."""
        logprobs = None if self.request.sampling.logprobs is None else ()
        ended = tuple(ChoiceDelta(index, (), logprobs, Finish(FinishReason.ABORT)) for index in self.choices)
        self.choices.clear()
        return GroupDelta(self.reader_id, ended) if ended else None

    def remaining_request(self, placements: int) -> GenerateRequest:
        """Returns a group of the unfinished choices for a worker. `placements`: number of workers that had it before.
        The group gets another id each time, because a lost worker can still know the earlier one. It has no ticket,
        because a part reads a ticket once."""
        request = self.request
        if placements == 0 and len(self.choices) == len(request.choices) and request.ticket is None:
            return request
        sampling = request.sampling
        if self.prompt.reported and sampling.prompt_logprobs is not None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return msgspec.structs.replace(
            request,
            request_id=RequestId(f"{request.request_id}.{placements}") if placements else request.request_id,
            choices=tuple(ChoiceStart(index, one.seed, tuple(one.output)) for index, one in self.choices.items()),
            sampling=sampling,
            ticket=None,
            model_digest=self.model_digest,
        )
