"""Items of an output while they are written: each tells the events of its begin, of its pieces, and of its end."""

from collections.abc import Sequence

from motet.api.responses_events import (
    ArgumentsDelta,
    ArgumentsDone,
    Event,
    ItemAdded,
    ItemDone,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    TextDelta,
    TextDone,
)
from motet.api.responses_shape import (
    FunctionCallItem,
    MessageItem,
    OutputText,
    ReasoningItem,
    ReasoningText,
    Status,
)
from motet.text.logprobs import ChatLogprob


class OpenMessage:
    def __init__(self, index: int, name: str) -> None:
        """`index`: of the item in the output; `name`: what makes its id its own."""
        self._index = index
        self._id = f"msg_{name}"
        self._texts: list[str] = []
        self._logprobs: list[ChatLogprob] = []

    def item(self, status: Status) -> MessageItem:
        return MessageItem(id=self._id, status=status, content=(self._part,))

    def begin(self) -> list[Event]:
        return [
            ItemAdded(output_index=self._index, item=MessageItem(id=self._id, status=Status.IN_PROGRESS)),
            PartAdded(item_id=self._id, output_index=self._index, part=OutputText("")),
        ]

    def add(self, text: str, logprobs: Sequence[ChatLogprob]) -> list[Event]:
        self._texts.append(text)
        self._logprobs.extend(logprobs)
        return [TextDelta(item_id=self._id, output_index=self._index, delta=text, logprobs=tuple(logprobs))]

    def end(self, status: Status) -> list[Event]:
        part = self._part
        return [
            TextDone(item_id=self._id, output_index=self._index, text=part.text, logprobs=part.logprobs),
            PartDone(item_id=self._id, output_index=self._index, part=part),
            ItemDone(output_index=self._index, item=self.item(status)),
        ]

    @property
    def _part(self) -> OutputText:
        return OutputText("".join(self._texts), logprobs=tuple(self._logprobs))


class OpenReasoning:
    def __init__(self, index: int, name: str) -> None:
        """As `OpenMessage`."""
        self._index = index
        self._id = f"rs_{name}"
        self._texts: list[str] = []

    def item(self, status: Status) -> ReasoningItem:
        return ReasoningItem(id=self._id, status=status, content=(self._part,))

    def begin(self) -> list[Event]:
        return [
            ItemAdded(output_index=self._index, item=ReasoningItem(id=self._id, status=Status.IN_PROGRESS)),
            PartAdded(item_id=self._id, output_index=self._index, part=ReasoningText("")),
        ]

    def add(self, text: str) -> list[Event]:
        self._texts.append(text)
        return [ReasoningDelta(item_id=self._id, output_index=self._index, delta=text)]

    def end(self, status: Status) -> list[Event]:
        part = self._part
        return [
            ReasoningDone(item_id=self._id, output_index=self._index, text=part.text),
            PartDone(item_id=self._id, output_index=self._index, part=part),
            ItemDone(output_index=self._index, item=self.item(status)),
        ]

    @property
    def _part(self) -> ReasoningText:
        return ReasoningText("".join(self._texts))


class OpenCall:
    def __init__(self, index: int, name: str, *, call_id: str, function: str) -> None:
        """As `OpenMessage`."""
        self._index = index
        self._id = f"fc_{name}"
        self._call_id = call_id
        self._function = function
        self._texts: list[str] = []

    def item(self, status: Status) -> FunctionCallItem:
        return FunctionCallItem(
            id=self._id, status=status, call_id=self._call_id, name=self._function, arguments="".join(self._texts)
        )

    def begin(self) -> list[Event]:
        return [ItemAdded(output_index=self._index, item=self.item(Status.IN_PROGRESS))]

    def add(self, text: str) -> list[Event]:
        self._texts.append(text)
        return [ArgumentsDelta(item_id=self._id, output_index=self._index, delta=text)]

    def end(self, status: Status) -> list[Event]:
        item = self.item(status)
        return [
            ArgumentsDone(item_id=self._id, output_index=self._index, arguments=item.arguments),
            ItemDone(output_index=self._index, item=item),
        ]


OpenItem = OpenMessage | OpenReasoning | OpenCall
