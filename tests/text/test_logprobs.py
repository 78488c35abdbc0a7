"""Log-probabilities in the forms of OpenAI's two APIs, and the echo of a prompt."""

import math
import tracemalloc

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.api.generation.collect import CollectedChoice
from motet.api.generation.json_pieces import encode_arrays, encode_json
from motet.text.choice import ChoiceEvent
from motet.text.logprobs import PromptEcho, chat_logprobs, completion_logprobs, echo
from motet.text.tokenizer import Tokenizer
from motet.types import FinishReason, TokenLogprob
from tests.property_settings import examples
from tests.tiny_tokenizer import EOS_ID, FIRST_BYTE_ID, fake_answer

A, B, C = (FIRST_BYTE_ID + byte for byte in b"abc")
SPLIT = fake_answer("é", eos=False)  # two tokens, each of them half a character
ROCKET = fake_answer("🚀", eos=False)  # four tokens


def shown(token: str, logprob: float, code: int) -> dict[str, object]:
    return {"token": token, "logprob": logprob, "bytes": [code]}


def test_the_chat_form_has_text_and_exact_bytes(tokenizer: Tokenizer) -> None:
    entries = [
        TokenLogprob(A, -0.5, 1, ((A, -0.5), (B, -1.5))),
        TokenLogprob(SPLIT[0], -3.0, 7, ((C, -0.1), (A, -2.0))),
    ]
    assert chat_logprobs(tokenizer, entries, num_top=2) == [
        {**shown("a", -0.5, 97), "top_logprobs": [shown("a", -0.5, 97), shown("b", -1.5, 98)]},
        {**shown("\ufffd", -3.0, 0xC3), "top_logprobs": [shown("c", -0.1, 99), shown("a", -2.0, 97)]},
    ]


def test_the_chat_form_has_the_requested_number_of_top_tokens(tokenizer: Tokenizer) -> None:
    entry = TokenLogprob(A, -0.5, 1, ((A, -0.5), (B, -1.5)))
    assert [e["top_logprobs"] for e in chat_logprobs(tokenizer, [entry], num_top=0)] == [[]]


def test_both_forms_can_name_tokens_by_their_ids(tokenizer: Tokenizer) -> None:
    """Tokens that are parts of a character have the same text, so a client could not distinguish them."""
    entry = TokenLogprob(A, -9.0, 5, ((SPLIT[0], -0.5), (SPLIT[1], -1.5)))
    (element,) = chat_logprobs(tokenizer, [entry], num_top=2, as_ids=True)
    assert (element["token"], element["bytes"]) == (f"token_id:{A}", [97])
    tops = [{"token": f"token_id:{SPLIT[0]}", "logprob": -0.5, "bytes": [0xC3]}]
    assert chat_logprobs(tokenizer, [entry], num_top=1, as_ids=True)[0]["top_logprobs"] == tops
    form = completion_logprobs(tokenizer, [A], logprobs=[entry], offsets=(0,), num_top=2, as_ids=True)
    assert form["tokens"] == [f"token_id:{A}"]
    assert form["top_logprobs"] == [{f"token_id:{SPLIT[0]}": -0.5, f"token_id:{SPLIT[1]}": -1.5, f"token_id:{A}": -9.0}]


def test_the_completions_form_has_one_entry_per_token_in_every_list(tokenizer: Tokenizer) -> None:
    entries = [TokenLogprob(A, -0.5, 1, ((A, -0.5), (B, -1.5))), TokenLogprob(C, -4.0, 9, ((A, -0.5), (B, -1.5)))]
    assert completion_logprobs(tokenizer, [A, C], logprobs=entries, offsets=(10, 11), num_top=2) == {
        "tokens": ["a", "c"],
        "token_logprobs": [-0.5, -4.0],
        "top_logprobs": [{"a": -0.5, "b": -1.5}, {"a": -0.5, "b": -1.5, "c": -4.0}],
        "text_offset": [10, 11],
    }


def test_of_top_tokens_with_the_same_text_the_most_likely_one_is_listed(tokenizer: Tokenizer) -> None:
    entry = TokenLogprob(A, -9.0, 5, ((SPLIT[0], -0.5), (SPLIT[1], -1.5)))
    form = completion_logprobs(tokenizer, [A], logprobs=[entry], offsets=(0,), num_top=2)
    assert form["top_logprobs"] == [{"\ufffd": -0.5, "a": -9.0}]


def test_the_sampled_token_is_the_first_of_the_completions_form(tokenizer: Tokenizer) -> None:
    """It came last if it was not among the most likely ones. vLLM's users read the first key."""
    entries = [TokenLogprob(C, -4.0, 9, ((A, -0.5), (B, -1.5))), TokenLogprob(B, -1.5, 2, ((A, -0.5), (B, -1.5)))]
    form = completion_logprobs(tokenizer, [C, B], logprobs=entries, offsets=(0, 1), num_top=2)
    assert [list(top) for top in form["top_logprobs"] if isinstance(top, dict)] == [["c", "a", "b"], ["b", "a"]]


def test_minus_infinity_becomes_a_number_of_json(tokenizer: Tokenizer) -> None:
    entry = TokenLogprob(A, -math.inf, 9, ((B, -math.inf),))
    assert chat_logprobs(tokenizer, [entry], num_top=1)[0]["logprob"] == -9999.0
    form = completion_logprobs(tokenizer, [A], logprobs=[entry], offsets=(0,), num_top=1)
    assert (form["token_logprobs"], form["top_logprobs"]) == ([-9999.0], [{"b": -9999.0, "a": -9999.0}])


def test_an_echo_has_the_offset_of_each_prompt_token(tokenizer: Tokenizer) -> None:
    repeated = echo(tokenizer, fake_answer("aé hello", eos=False))
    assert (repeated.text, repeated.offsets) == ("aé hello", (0, 1, 1, 2, 3))
    assert echo(tokenizer, [A, SPLIT[0]]).text == "a\ufffd"


def test_an_echo_has_the_special_tokens_of_the_prompt(tokenizer: Tokenizer) -> None:
    """An echo of ids had no special tokens, and the offsets after them were too low, also if the prompt was text."""
    ids, text = [EOS_ID, A, EOS_ID, EOS_ID, B], "<|eos|>a<|eos|><|eos|>b"
    expected = PromptEcho(text, (0, 7, 8, 15, 22))
    assert echo(tokenizer, ids) == echo(tokenizer, ids, text=text) == expected


def test_special_tokens_that_the_tokenizer_adds_have_no_text(fallback_tokenizer: Tokenizer) -> None:
    ids = fallback_tokenizer.encode("a hello</s>a")
    assert [fallback_tokenizer.token_name(token_id) for token_id in ids] == ["<s>", "▁a", "▁hello", "</s>", "▁a"]
    assert echo(fallback_tokenizer, ids, text="a hello</s>a") == PromptEcho("a hello</s>a", (0, 0, 1, 7, 11))
    plain = PromptEcho("a hello</s>a", (0, 1, 7, 11))
    assert echo(fallback_tokenizer, ids[1:], text="a hello</s>a", added=False) == plain
    assert echo(fallback_tokenizer, ids) == PromptEcho("<s> a hello</s> a", (0, 3, 5, 11, 15))


@pytest.mark.parametrize(
    ("ids", "text", "offsets"),
    [
        ([A, SPLIT[0], B, C], "a\ufffdbc", (0, 1, 2, 3)),
        ([A, SPLIT[0], SPLIT[0], B], "a\ufffd\ufffdb", (0, 1, 2, 3)),
        ([SPLIT[0], *SPLIT, B], "\ufffdéb", (0, 1, 1, 2)),
        ([*ROCKET[:3], B], "\ufffdb", (0, 0, 0, 1)),
        ([*ROCKET[:3], *ROCKET, B], "\ufffd🚀b", (0, 0, 0, 1, 1, 1, 1, 2)),
        ([SPLIT[0], EOS_ID, B], "\ufffd<|eos|>b", (0, 1, 8)),
        ([A, SPLIT[0]], "a\ufffd", (0, 1)),
        ([SPLIT[1]] * 3, "\ufffd" * 3, (0, 1, 2)),
    ],
)
def test_bytes_that_are_no_character_have_offsets_of_their_own(
    tokenizer: Tokenizer, ids: list[int], text: str, offsets: tuple[int, ...]
) -> None:
    """A token after an invalid byte had the offset of that byte."""
    assert echo(tokenizer, ids) == PromptEcho(text, offsets)


@pytest.mark.parametrize("name", ["tokenizer", "fallback_tokenizer"])
@examples(100)
@given(data=st.data())
def test_the_text_of_each_token_is_at_its_offset(
    tokenizer: Tokenizer, fallback_tokenizer: Tokenizer, name: str, data: st.DataObject
) -> None:
    used = tokenizer if name == "tokenizer" else fallback_tokenizer
    ids = data.draw(st.lists(st.integers(0, used.vocab_size - 1), max_size=12))
    repeated = echo(used, ids)
    assert list(repeated.offsets) == sorted(repeated.offsets)
    for token_id, offset in zip(ids, repeated.offsets, strict=True):
        token = used.token_text(token_id)
        if name == "tokenizer" and "\ufffd" not in token:
            assert repeated.text.startswith(token, offset)


def test_log_probabilities_of_prompt_and_steps_are_joined(tokenizer: Tokenizer) -> None:
    prompt = [A, B]
    repeated = echo(tokenizer, prompt)
    entries = [None, TokenLogprob(B, -1.0, 1, ((B, -1.0),))]
    form = completion_logprobs(tokenizer, prompt, logprobs=entries, offsets=repeated.offsets, num_top=1)
    first = encode_arrays(len(prompt), lambda part: {name: values[part] for name, values in form.items()})
    choice = CollectedChoice(0)
    for token, offset in ((C, 2), (A, 3)):
        logprobs = (TokenLogprob(token, -2.0, 1),)
        event = ChoiceEvent(0, "", (token,), logprobs, (offset,))
        choice.feed(event, completion_logprobs(tokenizer, [token], logprobs=logprobs, offsets=(offset,), num_top=0))
    nothing = completion_logprobs(tokenizer, [], logprobs=[], offsets=(), num_top=0)  # a step without tokens
    choice.feed(ChoiceEvent(0, "", (), (), (), FinishReason.LENGTH), nothing)
    assert msgspec.json.decode(b"".join(encode_json(choice.logprob_fields(before=first)))) == {
        "tokens": ["a", "b", "c", "a"],
        "token_logprobs": [None, -1.0, -2.0, -2.0],
        "top_logprobs": [None, {"b": -1.0}, {"c": -2.0}, {"a": -2.0}],
        "text_offset": [0, 1, 2, 3],
    }


def test_alternatives_of_an_answer_are_collected_as_the_bytes_of_its_json(tokenizer: Tokenizer) -> None:
    """The bug: 256 choices of 4000 tokens with 20 alternatives each took 8 GB before the first byte was sent."""
    choice = CollectedChoice(0)
    tracemalloc.start()
    try:
        for number in range(300):
            top = tuple((FIRST_BYTE_ID + 97 + place, -1.0 - number / 7 - place) for place in range(20))
            logprobs = (TokenLogprob(A, -0.5 - number / 7, 1, top),)
            fields = {"content": chat_logprobs(tokenizer, logprobs, num_top=20)}
            choice.feed(ChoiceEvent(0, "a", (A,), logprobs, (number,)), fields)
        kept = tracemalloc.get_traced_memory()[0]
        choice.feed(ChoiceEvent(0, "", (), (), (), FinishReason.LENGTH), {"content": []})
        kept_after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    content = b"".join(encode_json(choice.logprob_fields()["content"]))
    assert len(msgspec.json.decode(content)) == 300
    assert kept_after < kept < 1.5 * len(content)
