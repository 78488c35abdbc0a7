"""Chunks and bodies of text upstreams are read, whatever form they have."""

import pytest

from motet.engines.upstream.bodies import PieceReader, read_chunk
from motet.errors import EngineDiedError, EngineError, UpstreamRefusalError, WorkerFaultError
from motet.types import Usage

NO_CHUNKS = (
    b"no json",
    b"\xff",
    b"[]",
    b'{"choices": 1}',
    b'{"choices": [1]}',
    b'{"choices": [{"index": "x"}]}',
    b'{"choices": [{"delta": [1]}]}',
    b'{"choices": [{"finish_reason": 3}]}',
    b'{"choices": [{"delta": {"content": "\xff"}}]}',
    b'{"choices": [{"delta": {"content": "\xff"}, "other": [\n1]}]}',
)


def test_line_breaks_between_the_parts_of_a_chunk_are_not_passed_on() -> None:
    """They would end the event in which Motet passes the chunk on, and start another one."""
    step = PieceReader(0, 1, chat=False).chunk(
        b'{"choices": [{"logprobs": {"a":\n\ndata: 1}}]}'.replace(b"data: ", b"\r")
    )
    assert step is not None
    assert bytes(step.pieces[0].fields["logprobs"]) == b'{"a":1}'


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        (b'{"delta": {"role": "assistant", "content": "a"}}', "a"),
        (b'{"message": {"content": "a", "reasoning_content": "b"}}', "a"),
        (b'{"text": "a"}', "a"),
        (b'{"delta": {"content": [{"type": "thinking", "thinking": ["b"]}, {"type": "text", "text": "a"}]}}', "a"),
        (b'{"delta": {}}', ""),
        (b'{"delta": null}', ""),
        (b'{"message": {"content": 5}}', ""),
        (b"{}", ""),
    ],
)
def test_the_text_of_a_piece_is_its_content_without_reasoning(choice: bytes, text: str) -> None:
    step, _ = read_chunk(b'{"choices": [%b]}' % choice)
    assert step.pieces[0].text == text


@pytest.mark.parametrize("data", NO_CHUNKS)
def test_an_invalid_chunk_is_the_servers_error(data: bytes) -> None:
    with pytest.raises(WorkerFaultError, match="cannot read"):
        PieceReader(0, 1, chat=True).chunk(data)


@pytest.mark.parametrize(
    ("data", "kind", "message"),
    [
        (b'{"error": {"message": "too long", "code": 400}}', UpstreamRefusalError, "too long"),
        (b'{"error": {"message": "fell over", "code": 500}}', EngineError, "fell over"),
        (b'{"error": {"message": "busy", "code": 503}}', EngineDiedError, "busy"),
        (b'{"error": {"message": "busy", "type": "overloaded_error", "code": "overloaded"}}', EngineDiedError, "busy"),
        (b'{"error": {"message": "gone", "type": "server_error", "code": "no_worker"}}', EngineDiedError, "gone"),
        (b'{"error": {"message": "hangs", "type": "server_error", "code": "engine_silent"}}', EngineDiedError, "hangs"),
        (b'{"error": "fell over"}', EngineError, "fell over"),
        (b'{"object": "error", "message": "fell over"}', EngineError, "fell over"),
        (b'{"error": 5}', EngineError, "without a message"),
        (b'{"choices": [{"index": 0, "finish_reason": "abort"}]}', EngineError, "abort"),
        (b'{"choices": [{"index": 0, "finish_reason": "network_error"}]}', EngineError, "network_error"),
        (b'{"choices": [{"index": 1, "text": "x"}]}', WorkerFaultError, "with the number 1"),
        (b'{"choices": [{"index": -1, "text": "x"}]}', WorkerFaultError, "with the number -1"),
    ],
)
def test_errors_in_a_stream_are_raised_by_their_kind(data: bytes, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        PieceReader(0, 1, chat=False).chunk(data)


@pytest.mark.parametrize(
    "usage",
    [
        b"null",
        b"{}",
        b"5",
        b'{"prompt_tokens": null, "completion_tokens": 3}',
        b'{"prompt_tokens": -1, "completion_tokens": 3}',
        b'{"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": -1}}',
    ],
)
def test_usage_without_numbers_counts_as_missing(usage: bytes) -> None:
    reader = PieceReader(0, 1, chat=False)
    reader.body(b'{"choices": [{"text": "x", "finish_reason": "stop"}], "usage": %b}' % usage)
    reader.close()
    assert reader.usage is None


def test_no_more_tokens_are_cached_than_the_prompt_has() -> None:
    reader = PieceReader(0, 1, chat=False)
    usage = b'{"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 99}}'
    reader.body(b'{"choices": [{"text": "x", "finish_reason": "stop"}], "usage": %b}' % usage)
    assert reader.usage == Usage(prompt_tokens=9, completion_tokens=3, cached_tokens=9, reasoning_tokens=None)


def test_an_empty_finish_reason_is_none() -> None:
    reader = PieceReader(0, 1, chat=False)
    step = reader.chunk(b'{"choices": [{"text": "x", "finish_reason": ""}], "error": null}')
    assert step is not None
    assert [piece.finish for piece in step.pieces] == [None]
    assert reader.unfinished == [0]


@pytest.mark.parametrize(
    ("sent", "shown"), [(b"null", b'"stop_sequence"'), (b'"###"', b'"###"'), (b"151645", b"151645")]
)
def test_a_stop_reason_that_the_server_sends_is_kept(sent: bytes, shown: bytes) -> None:
    step = PieceReader(0, 1, chat=False).chunk(
        b'{"choices": [{"text": "x", "finish_reason": "stop_sequence", "stop_reason": %b}]}' % sent
    )
    assert step is not None
    assert [(piece.finish, bytes(piece.fields["stop_reason"])) for piece in step.pieces] == [("stop", shown)]
