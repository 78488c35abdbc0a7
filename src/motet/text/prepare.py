"""Turns texts and limits of a client into prompt tokens and limits that the engine accepts."""

from collections.abc import Sequence

from motet.errors import ContextLengthError, RequestError, TokenNeed
from motet.text.template import ChatTemplate
from motet.text.tokenizer import Tokenizer
from motet.types import EngineInfo


class PromptPreparer:
    """Encoding a long prompt takes milliseconds and releases the GIL, so it may run in a thread."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, *, info: EngineInfo) -> None:
        self.template = template
        self._tokenizer = tokenizer
        self._info = info

    def text_prompt(self, text: str, add_special_tokens: bool = True, *, param: str = "prompt") -> list[int]:
        """Raises `RequestError` for a text that is not valid Unicode, `ContextLengthError` for one that is too long."""
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            raise RequestError(f"{param} is not valid Unicode: {exc.reason} at {exc.start}", param=param) from exc
        least = self._tokenizer.least_tokens(len(text))
        if least > self._info.max_model_len:  # tokenising takes 200 bytes of memory a character
            said = f"your {_part(param)} resulted in at least {least} tokens"
            raise self._too_long(said, _part(param), param=param, prompt=least)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens)

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

    def check_length(self, ids: Sequence[int], *, param: str) -> None:
        """Raises `ContextLengthError` for more tokens than the model can have."""
        if len(ids) > self._info.max_model_len:
            raise self._too_long(f"you sent {len(ids)} tokens", param, param=param, prompt=len(ids))

    def max_tokens(self, prompt_len: int, asked: int | None, *, default: int | None, param: str) -> int:
        """Returns how many tokens a choice may have: `asked`, else `default`, else all that fit. `param`: the prompt.

        Raises `ContextLengthError` if the prompt leaves no room, or less than was asked for.
        """
        part, room = _part(param), self._info.max_model_len - prompt_len
        if asked is None:
            if room <= 0:
                said = f"your {part} resulted in {prompt_len} tokens"
                raise self._too_long(said, part, param=param, prompt=prompt_len)
            return room if default is None else min(default, room)
        if asked > room:
            parts = f"{prompt_len} in the {part}, {asked} in the completion"
            said = f"you requested {prompt_len + asked} tokens ({parts})"
            raise self._too_long(said, f"{part} or completion", param=param, prompt=prompt_len, answer=asked)
        return asked

    def _too_long(self, said: str, shorter: str, *, param: str, prompt: int, answer: int = 0) -> ContextLengthError:
        most = self._info.max_model_len
        return ContextLengthError(
            f"This model's maximum context length is {most} tokens. However, {said}. Please reduce the length of the "
            f"{shorter}.",
            param=param,
            need=TokenNeed(prompt, answer, most),
        )


def _part(param: str) -> str:
    """Names the prompt as OpenAI's error messages do."""
    return "messages" if param == "messages" else "prompt"
