"""Streams of vLLM 0.32, in the bytes it writes, however they are cut."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.engines.sse import MAX_EVENT_BYTES
from motet.engines.vllm.ask import Dialect
from motet.engines.vllm.wire import Piece, Reader, Usage
from motet.errors import EngineError, MotetError, RequestError, WorkerLeavingError
from motet.types import Finish, FinishReason, SamplingParams, TokenLogprob

PLAIN = SamplingParams(max_tokens=9, stop_token_ids=(30,))
LISTED = SamplingParams(max_tokens=9, logprobs=2)
HEAD = b'{"id":"cmpl-1","object":"text_completion","created":1795305094,"model":"m","choices":['

COMPLETIONS = (
    b"data: " + HEAD + b'{"index":1,"text":" a","logprobs":null,"finish_reason":null,"stop_reason":null,'
    b'"prompt_token_ids":[5,6],"token_ids":[28]}]}\n\n'
    b": keep-alive\n\n"
    b"data: " + HEAD + b'{"index":0,"text":"","logprobs":null,"finish_reason":null,"stop_reason":null,'
    b'"prompt_token_ids":[5,6],"token_ids":[]}]}\n\n'
    b"data: " + HEAD + b'{"index":0,"text":" b c","logprobs":null,"finish_reason":"stop","stop_reason":30,'
    b'"prompt_token_ids":null,"token_ids":[29,30]}]}\n\n'
    b"data: " + HEAD + b'{"index":1,"text":"","logprobs":null,"finish_reason":"length","stop_reason":null,'
    b'"prompt_token_ids":null,"token_ids":[31]}]}\n\n'
    b"data: " + HEAD + b'],"usage":{"prompt_tokens":2,"total_tokens":6,"completion_tokens":4}}\n\n'
    b"data: [DONE]\n\n"
)
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
PIECES = [
    Piece(1, (28,)),
    Piece(0, (29, 30), None, Finish(STOP, 30)),
    Piece(1, (31,), None, Finish(LENGTH)),
    Usage(2, None),
]

GENERATE = (
    b'data: {"request_id":"generate-tokens-1","usage":null,"output_mode":"tokens","choices":[{"index":0,'
    b'"finish_reason":null,"stop_reason":null,"token_ids":[7],"routed_experts":null,"sampling_mask":null,'
    b'"weight_versions":null,"logprobs":{"content":[{"token_id":7,"logprob":-2.5,"rank":9,"top_logprobs":['
    b'{"token_id":7,"logprob":-2.5,"rank":9},{"token_id":3,"logprob":-0.5,"rank":1},'
    b'{"token_id":4,"logprob":-1.0,"rank":2}]}]}}]}\n\n'
    b'data: {"request_id":"generate-tokens-1","usage":null,"output_mode":"tokens","choices":[{"index":0,'
    b'"finish_reason":"stop","stop_reason":null,"token_ids":[4],"routed_experts":null,"sampling_mask":null,'
    b'"weight_versions":null,"logprobs":{"content":[{"token_id":4,"logprob":-1.0,"rank":2,"top_logprobs":['
    b'{"token_id":4,"logprob":-1.0,"rank":2},{"token_id":3,"logprob":-0.5,"rank":1},'
    b'{"token_id":9,"logprob":-4.0,"rank":3}]}]}}]}\n\n'
    b'data: {"request_id":"generate-tokens-1","usage":{"prompt_tokens":2,"total_tokens":4,"completion_tokens":2,'
    b'"prompt_tokens_details":{"cached_tokens":1}},"output_mode":"tokens","choices":[]}\n\n'
    b"data: [DONE]\n\n"
)
BEST = ((3, -0.5), (4, -1.0))
GENERATED = [
    Piece(0, (7,), (TokenLogprob(7, -2.5, 9, BEST),)),
    Piece(0, (4,), (TokenLogprob(4, -1.0, 2, BEST),), Finish(STOP)),
    Usage(2, 1),
]


def reader(dialect: Dialect = Dialect.COMPLETIONS, sampling: SamplingParams = PLAIN) -> Reader:
    return Reader(dialect, sampling, server="the server")


def read(*parts: bytes, dialect: Dialect = Dialect.COMPLETIONS, sampling: SamplingParams = PLAIN) -> list[object]:
    whole = reader(dialect, sampling)
    pieces: list[object] = [piece for part in parts for piece in whole.feed(part)]
    assert whole.done
    return pieces


def event(choice: bytes) -> bytes:
    return b"data: " + HEAD + b"{" + choice + b"}]}\n\n"


def error_of(data: bytes, sampling: SamplingParams = PLAIN) -> MotetError:
    with pytest.raises(MotetError) as caught:
        reader(sampling=sampling).feed(data)
    return caught.value


def test_a_stream_of_completions_is_read_as_pieces_and_usage() -> None:
    assert read(COMPLETIONS) == PIECES


def test_a_stream_of_generate_is_read_with_ranks_and_the_best_of_each_token() -> None:
    assert read(GENERATE, dialect=Dialect.GENERATE, sampling=LISTED) == GENERATED


@pytest.mark.parametrize("lines", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
@given(cuts=st.lists(st.integers(0, 2000), max_size=40))
def test_wherever_a_stream_is_cut_it_holds_the_same(lines: bytes, cuts: list[int]) -> None:
    streams = [(COMPLETIONS, Dialect.COMPLETIONS, PLAIN, PIECES), (GENERATE, Dialect.GENERATE, LISTED, GENERATED)]
    for stream, dialect, sampling, pieces in streams:
        data = stream.replace(b"\n", lines)
        ends = [0, *sorted(cuts), len(data)]
        parts = [data[begin:end] for begin, end in pairwise(ends)]
        assert read(*parts, dialect=dialect, sampling=sampling) == pieces


def test_every_byte_may_come_by_itself() -> None:
    assert read(*(COMPLETIONS[i : i + 1] for i in range(len(COMPLETIONS)))) == PIECES


def test_it_is_done_at_the_servers_word_and_not_before() -> None:
    stream = reader()
    stream.feed(COMPLETIONS.removesuffix(b"\n"))
    assert not stream.done
    stream.feed(b"\n")
    assert stream.done


def test_the_data_of_an_event_may_have_several_lines_and_other_fields_beside_it() -> None:
    assert read(b'event: x\nid: 1\ndata:{"choices": [{"index": 0,\ndata: "token_ids": [5]}]}\n\ndata:[DONE]\n\n') == [
        Piece(0, (5,))
    ]


def test_several_choices_may_come_in_one_event() -> None:
    choices = b'"index":0,"token_ids":[5]},{"index":1,"token_ids":[],"finish_reason":"length"'
    assert reader().feed(event(choices)) == [Piece(0, (5,)), Piece(1, (), None, Finish(LENGTH))]


def test_a_stop_token_that_was_not_asked_for_is_an_end_of_sequence() -> None:
    """vLLM tells the further ends of sequence of a model as stop tokens."""
    (piece,) = reader().feed(event(b'"index":0,"token_ids":[99],"finish_reason":"stop","stop_reason":99'))
    assert piece == Piece(0, (99,), None, Finish(STOP, None))


def test_the_rank_of_a_completion_is_counted_from_what_is_listed() -> None:
    choice = (
        b'"index":0,"token_ids":[7,4],"logprobs":{"text_offset":[0,2],"token_logprobs":[-2.5,-1.0],"tokens":'
        b'["token_id:7","token_id:4"],"top_logprobs":[{"token_id:7":-2.5,"token_id:3":-0.5,"token_id:4":-1.0},'
        b'{"token_id:4":-1.0,"token_id:3":-0.5}]}'
    )
    assert reader(sampling=LISTED).feed(event(choice)) == [
        Piece(0, (7, 4), (TokenLogprob(7, -2.5, 3, BEST), TokenLogprob(4, -1.0, 2, BEST)))
    ]


def test_a_piece_without_tokens_has_no_log_probabilities() -> None:
    end = b'"index":0,"token_ids":[],"logprobs":null,"finish_reason":"length"'
    assert reader(sampling=LISTED).feed(event(end)) == [Piece(0, (), (), Finish(LENGTH))]


@pytest.mark.parametrize("lists", [b"null", b'{"token_logprobs":[],"top_logprobs":[]}'])
def test_log_probabilities_that_are_missing_are_an_error(lists: bytes) -> None:
    error = error_of(event(b'"index":0,"token_ids":[5],"logprobs":' + lists), LISTED)
    assert (type(error), error.message) == (EngineError, "the server sent 0 log-probabilities of 1 tokens")


def test_log_probabilities_of_texts_are_an_error() -> None:
    lists = b'{"token_logprobs":[-0.5],"top_logprobs":[{" the":-0.5}]}'
    error = error_of(event(b'"index":0,"token_ids":[5],"logprobs":' + lists), LISTED)
    assert type(error) is EngineError
    assert "' the'" in error.message


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (
            b'{"message":"EngineCore encountered an issue.","type":"InternalServerError","param":null,"code":500}',
            EngineError,
            "the server gave up in mid-answer: EngineCore encountered an issue.",
        ),
        (
            b'{"message":"Request failed; please retry","type":"InternalServerError","param":null,"code":503}',
            WorkerLeavingError,
            "the server gave up in mid-answer: Request failed; please retry",
        ),
        (
            b'{"message":"bad","type":"BadRequestError","param":"top_k","code":400}',
            RequestError,
            "The engine refused the request: bad",
        ),
    ],
    ids=["500", "503", "400"],
)
def test_an_error_in_mid_stream_is_ours_in_its_words(fault: bytes, kind: type[MotetError], message: str) -> None:
    error = error_of(b'data: {"error":' + fault + b"}\n\n")
    assert (type(error), error.message) == (kind, message)


@pytest.mark.parametrize(
    ("reason", "kind"), [(b"abort", WorkerLeavingError), (b"error", EngineError), (b"repetition", EngineError)]
)
def test_an_end_that_is_no_end_of_a_choice_is_an_error_that_quotes_it(reason: bytes, kind: type[MotetError]) -> None:
    error = error_of(event(b'"index":0,"token_ids":[],"finish_reason":"' + reason + b'"'))
    assert type(error) is kind
    assert f"finish_reason {reason.decode()!r}" in error.message


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"data: <html>\n\n", "<html>"),
        (b'data: {"object":"x"}\n\n', "it has no choices"),
        (b'data: {"choices":[{"index":"a"}]}\n\n', "what cannot be read"),
        (b'data: {"choices":[{"index":0,"token_ids":["\xff"]}]}\n\n', "what cannot be read"),
        (event(b'"index":0,"text":"hello"'), "sends no token ids"),
    ],
    ids=["no JSON", "other JSON", "wrong type", "no UTF-8", "no token ids"],
)
def test_nonsense_is_said_to_be_nonsense(data: bytes, message: str) -> None:
    error = error_of(data)
    assert type(error) is EngineError
    assert message in error.message


def test_a_line_without_an_end_is_given_up() -> None:
    stream = reader()
    with pytest.raises(EngineError, match="has more than"):
        for _ in range(3):
            stream.feed(b"x" * (MAX_EVENT_BYTES // 2))
