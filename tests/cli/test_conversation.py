"""A conversation reads a stream as a client does: each answer separately, with its times."""

import json
from collections.abc import Iterator

import httpx
import pytest

from bench.client.load import last_first_s
from motet.cli.conversation import (
    ChatQuestion,
    Conversation,
    CountedUsage,
    check_server,
    default_temperature,
    stream_answers,
)
from motet.errors import EngineError, MotetError


def line(event: dict[str, object]) -> str:
    return "data: " + json.dumps(event)


def chat_chunk(index: int, content: str | None, finish: str | None = None) -> str:
    return line({"choices": [{"index": index, "delta": {"content": content}, "finish_reason": finish}], "usage": None})


def conversation(n: int) -> Conversation:
    """Returns a conversation whose clock is read at the start and at every line: line k arrives at k seconds."""
    ticks = iter(range(100))
    return Conversation(n, clock=lambda: next(ticks))


def test_answers_are_separated_and_timed() -> None:
    talk = conversation(2)
    for text in (
        line({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}),  # 1 s
        line({"choices": [{"index": 1, "delta": {"role": "assistant", "content": ""}}]}),  # 2 s
        chat_chunk(0, "on"),  # 3 s
        "",
        ": comment",
        chat_chunk(1, "two"),  # 4 s
        chat_chunk(0, "e"),  # 5 s
        chat_chunk(0, None, "stop"),  # 6 s
        chat_chunk(1, None, "length"),  # 7 s
        line({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8}}),  # 8 s
        "data: [DONE]",  # 9 s
    ):
        talk.feed(text)
    assert [(a.text, a.finish_reason, a.first_s) for a in talk.answers] == [("one", "stop", 3), ("two", "length", 4)]
    assert (talk.first_s, last_first_s(talk), talk.total_s) == (3, 4, 9)
    assert talk.usage == CountedUsage(3, 5)
    assert talk.done


def test_reasoning_is_not_part_of_the_answer_but_counts_as_first_text() -> None:
    talk = conversation(1)
    for delta in ({"reasoning_content": "Hm", "reasoning": "Hm"}, {"reasoning_content": "."}, {"content": "Yes."}):
        talk.feed(line({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}))
    (answer,) = talk.answers
    assert (answer.reasoning, answer.text, answer.first_s) == ("Hm.", "Yes.", 1)


def test_completions_are_read_in_the_same_way() -> None:
    talk = conversation(1)
    talk.feed(line({"choices": [{"index": 0, "text": "a", "finish_reason": None}]}))
    talk.feed(line({"choices": [{"index": 0, "text": "b", "finish_reason": "length"}]}))
    assert talk.answers[0].text == "ab"


def test_an_answer_without_text_counts_from_its_end() -> None:
    talk = conversation(1)
    talk.feed(chat_chunk(0, None, "stop"))
    assert talk.first_s == 1


def test_there_is_no_last_first_token_while_an_answer_is_silent() -> None:
    talk = conversation(2)
    assert (talk.first_s, last_first_s(talk)) == (None, None)
    talk.feed(chat_chunk(1, "x"))
    assert (talk.first_s, last_first_s(talk)) == (1, None)
    talk.feed(chat_chunk(0, "y"))
    assert (talk.first_s, last_first_s(talk)) == (1, 2)
    assert not talk.done


def test_an_error_in_the_stream_is_raised() -> None:
    with pytest.raises(EngineError, match="the engine died"):
        conversation(1).feed(line({"error": {"message": "the engine died", "type": "server_error"}}))


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        ("{not JSON", "cannot be read"),
        ('{"choices": 5}', "cannot be read"),
        ('{"choices": [{"index": 0, "delta": {"content": "\\ud800"}}]}', "cannot be read"),
        ('{"choices": ' + "[" * 10**5 + "]" * 10**5 + "}", "cannot be read"),
        ('{"choices": [{"index": 2}]}', "sent choice 2, and 2 choices were requested"),
        ('{"choices": [{"index": -1}]}', "sent choice -1"),
        ('{"error": {"message": "' + "x" * 10**6 + '"}}', r"x\.\.\. \(1000000 characters\)"),
    ],
    ids=["syntax", "type", "surrogate", "deep", "index", "negative", "long"],
)
def test_an_invalid_chunk_is_a_short_error(data: str, reason: str) -> None:
    with pytest.raises(EngineError, match=reason) as raised:
        conversation(2).feed(f"data: {data}")
    assert len(raised.value.message) < 3000


def endless(piece: bytes) -> Iterator[bytes]:
    """Yields pieces until a test has read 64 MiB."""
    for _ in range(2**26 // len(piece)):
        yield piece
    raise AssertionError("the client reads without a limit")


def answering(status: int, content: Iterator[bytes]) -> httpx.Client:
    server = httpx.MockTransport(lambda _: httpx.Response(status, content=content))
    return httpx.Client(base_url="http://server", transport=server)


def test_no_server_can_fill_the_memory_of_its_client() -> None:
    question = ChatQuestion([], n=1, max_tokens=9, temperature=1.0)
    piece = b"x" * 2**20
    with answering(200, endless(piece)) as client, pytest.raises(EngineError, match="a line of more than"):
        stream_answers(question, Conversation(1), client=client)
    with answering(500, endless(piece)) as client, pytest.raises(MotetError, match=r"^the server answered 500$"):
        stream_answers(question, Conversation(1), client=client)
    with answering(200, endless(piece)) as client:
        check_server(client)
    with answering(200, endless(piece)) as client:
        assert default_temperature(client, None) == 0.4


CARDS = {"data": [{"id": "a", "default_sampling_params": {"temperature": 0.6, "top_k": 20}}, {"id": "b"}]}


@pytest.mark.parametrize(
    ("content", "model", "temperature"),
    [
        (json.dumps(CARDS).encode(), None, 0.6),
        (json.dumps(CARDS).encode(), "a", 0.6),
        (json.dumps(CARDS).encode(), "b", 0.4),
        (json.dumps(CARDS).encode(), "c", 0.4),
        (b'{"error": "no key"}', None, 0.4),
        (b"\xff", None, 0.4),
    ],
)
def test_the_temperature_is_the_models_default(content: bytes, model: str | None, temperature: float) -> None:
    with answering(200, iter([content])) as client:
        assert default_temperature(client, model) == temperature


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=repr)
def test_a_text_can_contain_unicode_line_separators(end: str) -> None:
    text = "a\u0085b\u2028c\u2029\u00e9"
    chunk = json.dumps({"choices": [{"index": 0, "delta": {"content": text}}]}, ensure_ascii=False)
    body = f"data: {chunk}{end}{end}data: [DONE]{end}{end}".encode()
    pieces = (body[at : at + 1] for at in range(len(body)))
    server = httpx.MockTransport(lambda _: httpx.Response(200, content=pieces))
    talk = Conversation(1)
    with httpx.Client(base_url="http://server", transport=server) as client:
        stream_answers(ChatQuestion([], n=1, max_tokens=9, temperature=1.0), talk, client=client)
    assert talk.answers[0].text == text
