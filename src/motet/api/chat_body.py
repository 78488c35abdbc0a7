"""A chat answered in one piece."""

from collections.abc import Callable, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from motet.api.chat_extras import ChatExtras
from motet.api.collect import WholeCall, WholeChoice, WholeGroup
from motet.api.open_groups import Step
from motet.api.plan import Plan
from motet.api.usage_shape import UsageShape, chat_usage_shape
from motet.text.logprobs import ChatLogprob, chat_logprobs
from motet.text.tokenizer import Tokenizer
from motet.text.usage import Usage
from motet.transfer.ticket import Ticket
from motet.types import FinishReason


class FunctionCall(msgspec.Struct, frozen=True):
    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: str = "function"
    function: FunctionCall


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    role: str = "assistant"
    content: str | None
    """null beside calls and nothing else."""
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    """The same: clients read one or the other."""
    tool_calls: list[ToolCall] | UnsetType = UNSET
    refusal: str | None = None


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChatLogprob]
    refusal: str | None = None


class ChatChoice(msgspec.Struct, frozen=True, kw_only=True):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageShape
    kv_transfer_params: Ticket | None
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class ChatBody:
    streams = False

    def __init__(self, plan: Plan, tokenizer: Tokenizer, extras: ChatExtras) -> None:
        self._plan = plan
        self._group = WholeGroup(plan.group_size)
        self._tokenizer = tokenizer
        self._extras = extras

    def feed(self, steps: Sequence[Step], usage: Callable[[], Usage]) -> bytes:
        for step in steps:
            self._group.feed(step)
        return b""

    def close(self, usage: Usage) -> bytes:
        head = self._plan.head
        completion = ChatCompletion(
            id=head.id,
            created=head.created,
            model=head.model,
            system_fingerprint=head.fingerprint,
            choices=[self._choice(choice) for choice in self._group.choices],
            usage=chat_usage_shape(usage),
            kv_transfer_params=self._group.ticket,
            prompt_token_ids=self._plan.groups[0].prompt if self._extras.token_ids else UNSET,
        )
        return msgspec.json.encode(completion)

    def _choice(self, choice: WholeChoice) -> ChatChoice:
        logprobs = None
        if (num_top := self._extras.num_top) is not None:
            logprobs = ChatLogprobs(chat_logprobs(self._tokenizer, choice.logprobs, num_top=num_top))
        return ChatChoice(
            index=choice.index,
            message=self._message(choice),
            logprobs=logprobs,
            finish_reason=choice.finish,
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if self._extras.token_ids else UNSET,
        )

    def _message(self, choice: WholeChoice) -> ChatMessage:
        parts = choice.parts
        if parts is None:
            return ChatMessage(content=choice.text)
        thought = parts.reasoning if self._extras.reasoning else ""
        return ChatMessage(
            content=parts.content or (None if parts.calls else ""),
            reasoning_content=thought or UNSET,
            reasoning=thought or UNSET,
            tool_calls=[_tool_call(call) for call in parts.calls] or UNSET,
        )


def _tool_call(call: WholeCall) -> ToolCall:
    return ToolCall(id=call.id, function=FunctionCall(call.name, "".join(call.arguments)))
