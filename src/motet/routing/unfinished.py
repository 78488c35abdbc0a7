"""What of a group is still to be written: the books that a move to another worker is made from. Pure."""

import msgspec

from motet.ids import RequestId
from motet.types import ChoiceStart, GenerateRequest, GroupDelta


class Unfinished:
    """Fed with all that the group's reader is given."""

    def __init__(self, request: GenerateRequest) -> None:
        self._request = request
        self._seeds = {start.index: start.seed for start in request.choices}
        self._written = {start.index: list(start.written) for start in request.choices}
        """Of choices that have not finished."""
        self.begun = False
        """Whether the reader has been given anything."""
        self.prompt_told = False
        """Whether the report on the prompt was among it."""

    def __bool__(self) -> bool:
        return bool(self._written)

    @property
    def choices(self) -> int:
        return len(self._written)

    @property
    def tokens(self) -> int:
        """Written so far by the choices that go on."""
        return sum(map(len, self._written.values()))

    def take(self, delta: GroupDelta) -> None:
        written = self._written
        for choice in delta.choices:
            if choice.finish is not None:
                written.pop(choice.index, None)
            elif choice.index in written:
                written[choice.index].extend(choice.token_ids)
        self.begun = True
        if delta.prompt is not None:
            self.prompt_told = True

    def drop(self, index: int) -> None:
        """A choice that was stopped."""
        self._written.pop(index, None)

    def rest(self, life: int) -> GenerateRequest:
        """A group of what is left, to be written elsewhere.

        Its name is another one for each life: the worker that was lost may still know the old one. It has no ticket: a
        ticket is read once.
        """
        sampling = self._request.sampling
        if self.prompt_told and sampling.prompt_logprobs is not None:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        return msgspec.structs.replace(
            self._request,
            request_id=RequestId(f"{self._request.request_id}.{life}"),
            choices=tuple(
                ChoiceStart(index, self._seeds[index], tuple(written)) for index, written in self._written.items()
            ),
            sampling=sampling,
            ticket=None,
            straight=False,
        )
