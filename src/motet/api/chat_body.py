"""A chat answered in one piece."""

from collections.abc import Callable, Sequence

import msgspec

from motet.api.collect import WholeChoice, WholeGroup
from motet.api.open_groups import Step
from motet.api.plan import Plan
from motet.api.usage_shape import UsageShape, usage_shape
from motet.text.logprobs import ChatLogprob, chat_logprobs
from motet.text.tokenizer import Tokenizer
from motet.text.usage import Usage
from motet.transfer.ticket import Ticket
from motet.types import FinishReason


class ChatMessage(msgspec.Struct, frozen=True):
    role: str
    content: str
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
    token_ids: list[int] | msgspec.UnsetType = msgspec.UNSET


class ChatCompletion(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    system_fingerprint: str
    choices: list[ChatChoice]
    usage: UsageShape
    kv_transfer_params: Ticket | None
    prompt_token_ids: tuple[int, ...] | msgspec.UnsetType = msgspec.UNSET


class ChatBody:
    streams = False

    def __init__(self, plan: Plan, tokenizer: Tokenizer, *, num_top: int | None, token_ids: bool) -> None:
        """`num_top`: alternatives beside each token, None without log-probabilities."""
        self._plan = plan
        self._group = WholeGroup(plan.group_size)
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._token_ids = token_ids

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
            usage=usage_shape(usage),
            kv_transfer_params=self._group.ticket,
            prompt_token_ids=self._plan.groups[0].prompt if self._token_ids else msgspec.UNSET,
        )
        return msgspec.json.encode(completion)

    def _choice(self, choice: WholeChoice) -> ChatChoice:
        logprobs = None
        if self._num_top is not None:
            logprobs = ChatLogprobs(chat_logprobs(self._tokenizer, choice.logprobs, num_top=self._num_top))
        return ChatChoice(
            index=choice.index,
            message=ChatMessage("assistant", choice.text),
            logprobs=logprobs,
            finish_reason=choice.finish,
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if self._token_ids else msgspec.UNSET,
        )
