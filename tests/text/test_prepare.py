"""Prompts and limits are prepared for the engine."""

import pytest
import tokenizers

from motet.api.http.caller import Caller
from motet.api.openai.chat_plan import chat_prompt
from motet.api.openai.chat_schema import ChatPrompt
from motet.api.openai.models import TokenizeBody
from motet.errors import ContextLengthError, RequestError
from motet.settings.server_config import ServerConfig
from motet.testing.fake_engine import fake_info
from motet.text.prepare import PromptPreparer
from motet.text.template import ChatTemplate
from motet.text.tokenizer import Tokenizer
from tests.tiny_tokenizer import CHAT_TEMPLATE

CONFIG = ServerConfig(served_model_name="tiny")
CALLER = Caller("trace", session_id="", client="client")


@pytest.fixture
def preparer(tokenizer: Tokenizer) -> PromptPreparer:
    return PromptPreparer(tokenizer, ChatTemplate(CHAT_TEMPLATE), info=fake_info(vocab_size=300, max_model_len=100))


@pytest.mark.anyio
async def test_the_tokenizer_adds_no_special_tokens_to_a_chat_prompt(fallback_tokenizer: Tokenizer) -> None:
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", named_tokens={"bos_token": "<s>"})
    chat = ChatPrompt.model_validate({"messages": [{"role": "user", "content": "a"}]})
    ids = await chat_prompt(
        PromptPreparer(fallback_tokenizer, template, info=fake_info()), chat, config=CONFIG, caller=CALLER
    )
    assert fallback_tokenizer.decode(ids, skip_special_tokens=False).count("<s>") == 1


@pytest.mark.anyio
async def test_a_client_can_request_special_tokens_for_a_chat_prompt(fallback_tokenizer: Tokenizer) -> None:
    preparer = PromptPreparer(fallback_tokenizer, ChatTemplate("{{ messages[0].content }}"), info=fake_info())
    fields = {"messages": [{"role": "user", "content": "hello"}]}
    plain, added, omitted = [
        await chat_prompt(preparer, TokenizeBody.model_validate(fields | more), config=CONFIG, caller=CALLER)
        for more in ({}, {"add_special_tokens": True}, {"add_special_tokens": False})
    ]
    assert added == [1, *plain]
    assert omitted == plain


def test_a_text_prompt_gets_special_tokens_unless_the_request_disables_them(fallback_tokenizer: Tokenizer) -> None:
    preparer = PromptPreparer(fallback_tokenizer, ChatTemplate(None), info=fake_info())
    assert preparer.text_prompt("a")[0] == 1
    assert preparer.text_prompt("a", add_special_tokens=False) == preparer.text_prompt("a")[1:]


def test_text_that_is_not_unicode_is_refused(preparer: PromptPreparer) -> None:
    with pytest.raises(RequestError, match="not valid Unicode") as raised:
        preparer.text_prompt("a\ud800")
    assert raised.value.param == "prompt"


def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenised(
    preparer: PromptPreparer, tokenizer: Tokenizer
) -> None:
    longest = max(len(tokenizer.token_text(token_id)) for token_id in range(tokenizer.vocab_size))
    fits = next(i for i in range(tokenizer.vocab_size) if len(tokenizer.token_text(i)) == longest)
    text = tokenizer.token_text(fits) * 100
    assert preparer.text_prompt(text) == [fits] * 100
    with pytest.raises(ContextLengthError) as raised:
        preparer.text_prompt(text + "a")
    assert raised.value.message == (
        "This model's maximum context length is 100 tokens. However, your prompt resulted in at least 101 tokens. "
        "Please reduce the length of the prompt."
    )


def test_a_text_is_always_tokenised_if_tokens_can_have_any_length() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    preparer = PromptPreparer(Tokenizer(backend), ChatTemplate(None), info=fake_info(max_model_len=100))
    assert preparer.text_prompt("x" * 1000) == [0]


def test_prompt_ids_must_be_in_the_vocabulary(preparer: PromptPreparer) -> None:
    preparer.check_prompt([0, 299], param="prompt")
    for ids, wrong in [([5, 300], 300), ([-1, 5], -1)]:
        with pytest.raises(RequestError, match=f"token id {wrong}; this model's ids are 0 to 299") as raised:
            preparer.check_prompt(ids, param="prompt")
        assert raised.value.param == "prompt"
    with pytest.raises(RequestError, match="prompt is empty"):
        preparer.check_prompt([], param="prompt")


@pytest.mark.parametrize(
    ("prompt_len", "requested", "default", "expected"),
    [(60, 40, None, 40), (60, None, None, 40), (60, None, 16, 16), (90, None, 16, 10), (100, 0, 16, 0)],
)
def test_max_tokens_is_the_requested_number_or_all_that_fit(
    preparer: PromptPreparer, prompt_len: int, requested: int | None, default: int | None, expected: int
) -> None:
    assert preparer.max_tokens(prompt_len, requested, default=default, param="prompt") == expected


NO_CAPACITY = "However, your prompt resulted in 100 tokens. Please reduce the length of the prompt."
TOO_MUCH = (
    "However, you requested 101 tokens (60 in the messages, 41 in the completion). Please reduce the length of the "
    "messages or completion."
)


@pytest.mark.parametrize(
    ("prompt_len", "requested", "default", "param", "message"),
    [
        (60, 41, None, "messages", TOO_MUCH),
        (100, None, None, "prompt", NO_CAPACITY),
        (100, None, 16, "prompt", NO_CAPACITY),
    ],
)
def test_more_tokens_than_fit_are_refused_with_openai_s_message(
    preparer: PromptPreparer, prompt_len: int, requested: int | None, default: int | None, param: str, message: str
) -> None:
    with pytest.raises(ContextLengthError) as raised:
        preparer.max_tokens(prompt_len, requested, default=default, param=param)
    assert raised.value.message == f"This model's maximum context length is 100 tokens. {message}"
    assert (raised.value.code, raised.value.param) == ("context_length_exceeded", param)
