"""What a client wrote, as prompt tokens and limits that the engine takes."""

from collections.abc import Mapping, Sequence

from motet.errors import ContextLengthError, RequestError
from motet.text.messages import Message
from motet.text.template import ChatTemplate
from motet.text.tokenizer import Tokenizer
from motet.types import EngineInfo


class Preparer:
    """Pure; encoding a long prompt takes milliseconds and releases the GIL, so it may run in a thread."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, info: EngineInfo) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._info = info

    def template_knows(self, variable: str) -> bool:
        return self._template.knows(variable)

    def chat_prompt(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        tools: Sequence[Mapping[str, object]] | None = None,
        template_kwargs: Mapping[str, object] | None = None,
    ) -> list[int]:
        """The template writes the special tokens, so none are added."""
        text = self._template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
            tools=tools,
            template_kwargs=template_kwargs,
        )
        return self._encode(text, add_special_tokens=False, param="messages")

    def text_prompt(self, text: str, add_special_tokens: bool = True, *, param: str = "prompt") -> list[int]:
        return self._encode(text, add_special_tokens=add_special_tokens, param=param)

    def check_prompt(self, ids: Sequence[int], *, param: str) -> None:
        """Raises `RequestError` for a prompt without tokens, or with ids the model does not know."""
        if not ids:
            raise RequestError(f"{param} is empty; at least one token is needed", param=param)
        for token_id in (min(ids), max(ids)):
            if not 0 <= token_id < self._info.vocab_size:
                raise RequestError(
                    f"{param} holds token id {token_id}; this model's ids are 0 to {self._info.vocab_size - 1}",
                    param=param,
                )

    def max_tokens(self, prompt_len: int, asked: int | None, *, default: int | None, param: str) -> int:
        """How many tokens a choice may have. Not asked: `default`, None for all that fits.

        Raises `ContextLengthError` if the prompt leaves no room, or less than was asked for. `param` names the prompt.
        """
        limit, part = self._info.max_model_len, _part(param)
        if asked is None and prompt_len >= limit:
            raise self._too_long(str(prompt_len), param)
        if asked is not None and prompt_len + asked > limit:
            raise ContextLengthError(
                f"This model's maximum context length is {limit} tokens. However, you requested {prompt_len + asked} "
                f"tokens ({prompt_len} in the {part}, {asked} in the completion). Please reduce the length of the "
                f"{part} or completion.",
                param=param,
            )
        room = limit - prompt_len
        if asked is not None:
            return asked
        return room if default is None else min(default, room)

    def _encode(self, text: str, *, add_special_tokens: bool, param: str) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            raise RequestError(f"{param} is not valid Unicode: {exc.reason} at {exc.start}", param=param) from exc
        least = self._tokenizer.least_tokens(len(text))
        if least > self._info.max_model_len:  # tokenising takes 200 bytes of memory a character: not for nothing
            raise self._too_long(f"at least {least}", param)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def _too_long(self, prompt_len: str, param: str) -> ContextLengthError:
        part = _part(param)
        return ContextLengthError(
            f"This model's maximum context length is {self._info.max_model_len} tokens. However, your {part} resulted "
            f"in {prompt_len} tokens. Please reduce the length of the {part}.",
            param=param,
        )


def _part(param: str) -> str:
    """The prompt as OpenAI's messages call it."""
    return "messages" if param == "messages" else "prompt"
