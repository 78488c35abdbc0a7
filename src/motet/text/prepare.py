"""Turns a client's texts and limits into prompt tokens and limits that the engine accepts."""

from collections.abc import Container, Sequence
from functools import lru_cache

from motet.engine_info import EngineInfo
from motet.errors import ContextLengthError, RequestError, TokenNeed
from motet.text.template import ChatTemplate
from motet.text.tokenizer import Tokenizer

request_template = lru_cache(maxsize=4)(ChatTemplate.of_request)
"""Requests with the same template share its process."""


class PromptPreparer:
    """Makes and checks prompts for one model. Thread-safe: encoding a long prompt takes milliseconds, without the
    GIL."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, *, info: EngineInfo) -> None:
        self.template = template
        self._tokenizer = tokenizer
        self._info = info

    def with_template(self, source: str) -> "PromptPreparer":
        """Returns a preparer with the template of a request. Can take long. Raises `RequestError`."""
        return PromptPreparer(self._tokenizer, request_template(source, self._tokenizer), info=self._info)

    def text_prompt(
        self,
        text: str,
        add_special_tokens: bool = True,
        *,
        param: str = "prompt",
        as_text: Container[int] | None = None,
    ) -> list[int]:
        """Tokenises a text. `as_text`: as in `Tokenizer.encode`. Raises `RequestError` for a text that is not valid
        Unicode, and `ContextLengthError` for a text that certainly has too many tokens, because tokenising takes 200
        bytes of memory per character."""
        try:
            text.encode()
        except UnicodeEncodeError as exc:
            why = f"{param} is not valid Unicode: {exc.reason} at {exc.start}"
            raise RequestError(why, param=param, code="invalid_value") from exc
        if (minimum := self._tokenizer.min_num_tokens(len(text))) > self._info.max_model_len:
            reason = f"your {_part(param)} resulted in at least {minimum} tokens"
            raise self._too_long(reason, _part(param), param=param, prompt=minimum)
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens, as_text=as_text)

    def check_prompt(self, ids: Sequence[int], *, param: str) -> None:
        """Raises `RequestError` for a prompt without tokens, or with ids that the model does not have."""
        if not ids:
            why = f"{param} is empty; at least one token is needed"
            raise RequestError(why, param=param, code="invalid_value")
        for token_id in (min(ids), max(ids)):
            if not 0 <= token_id < self._info.vocab_size:
                raise RequestError(
                    f"{param} contains token id {token_id}; this model's ids are 0 to {self._info.vocab_size - 1}",
                    param=param,
                    code="invalid_value",
                )

    def check_length(self, ids: Sequence[int], *, param: str) -> None:
        """Raises `ContextLengthError` if there are more tokens than the model supports."""
        if len(ids) > self._info.max_model_len:
            raise self._too_long(f"you sent {len(ids)} tokens", param, param=param, prompt=len(ids))

    def max_tokens(
        self,
        prompt_len: int,
        requested: int | None,
        *,
        default: int | None,
        param: str,
        scored: bool = False,
        caps: bool = False,
    ) -> int:
        """Returns the maximum number of output tokens of a choice: `requested`, else `default`, else all that fit.
        Raises `ContextLengthError` if the prompt leaves no capacity, or less than `requested`. `param`: field of the
        prompt. `scored`: True if the request is for the log-probabilities of the prompt and no output. `caps`: True to
        return all tokens that fit if they are fewer than `requested`."""
        part, capacity = _part(param), self._info.max_model_len - prompt_len
        if scored and capacity <= 0:
            longest = f"a prompt for an answer of 0 tokens can have {self._info.max_model_len - 1}"
            reason = f"your {part} resulted in {prompt_len} tokens, and {longest}"
            raise self._too_long(reason, part, param=param, prompt=prompt_len)
        if requested is None:
            if capacity <= 0:
                reason = f"your {part} resulted in {prompt_len} tokens"
                raise self._too_long(reason, part, param=param, prompt=prompt_len)
            return capacity if default is None else min(default, capacity)
        if requested > capacity and not (caps and capacity > 0):
            parts = f"{prompt_len} in the {part}, {requested} in the completion"
            reason = f"you requested {prompt_len + requested} tokens ({parts})"
            raise self._too_long(reason, f"{part} or completion", param=param, prompt=prompt_len, answer=requested)
        return min(requested, capacity)

    def _too_long(
        self, reason: str, to_shorten: str, *, param: str, prompt: int, answer: int = 0
    ) -> ContextLengthError:
        maximum = self._info.max_model_len
        return ContextLengthError(
            f"This model's maximum context length is {maximum} tokens. However, {reason}. Please reduce the length of "
            f"the {to_shorten}.",
            param=param,
            need=TokenNeed(prompt, answer, maximum),
        )


def _part(param: str) -> str:
    """Returns the name of the prompt in OpenAI's error messages."""
    return "messages" if param == "messages" else "prompt"
