"""The answers of vLLM 0.32 in the bytes that it sends, however they are cut: streams, log-probabilities, refusals."""

from itertools import pairwise
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet.engines.refusals import Refusal
from motet.engines.vllm.vllm_wire import LOWEST, ScoredAnswer, VLLMPiece, VLLMReader, VLLMUsage, refused
from motet.errors import (
    ContextLengthError,
    EngineDiedError,
    EngineError,
    ModelNotFoundError,
    MotetError,
    OtherServerError,
    OverloadedError,
    RequestError,
    WorkerFaultError,
    WorkerLeavingError,
)
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
    VLLMPiece(1, (28,)),
    VLLMPiece(0, (29, 30), None, Finish(STOP, 30)),
    VLLMPiece(1, (31,), None, Finish(LENGTH)),
    VLLMUsage(),
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
    VLLMPiece(0, (7,), (TokenLogprob(7, -2.5, 9, BEST),)),
    VLLMPiece(0, (4,), (TokenLogprob(4, -1.0, 2, BEST),), Finish(STOP)),
    VLLMUsage(1),
]


def reader(sampling: SamplingParams = PLAIN) -> VLLMReader:
    return VLLMReader(sampling, server="the server")


def read(*parts: bytes, sampling: SamplingParams = PLAIN) -> list[object]:
    complete = reader(sampling)
    pieces: list[object] = [piece for part in parts for piece in complete.feed(part)]
    complete.close()
    return pieces


def event(choice: bytes) -> bytes:
    return b"data: " + HEAD + b"{" + choice + b"}]}\n\n"


def error_of(data: bytes, sampling: SamplingParams = PLAIN) -> MotetError:
    with pytest.raises(MotetError) as caught:
        reader(sampling=sampling).feed(data)
    return caught.value


def test_a_stream_of_completions_is_read_as_pieces_and_usage() -> None:
    assert read(COMPLETIONS) == PIECES


def test_a_stream_of_generate_is_read_with_ranks_and_the_top_tokens() -> None:
    assert read(GENERATE, sampling=LISTED) == GENERATED


@pytest.mark.parametrize("lines", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
@given(cuts=st.lists(st.integers(0, 2000), max_size=40))
def test_a_stream_is_read_the_same_wherever_it_is_cut(lines: bytes, cuts: list[int]) -> None:
    for stream, sampling, pieces in ((COMPLETIONS, PLAIN, PIECES), (GENERATE, LISTED, GENERATED)):
        data = stream.replace(b"\n", lines)
        ends = [0, *sorted(cuts), len(data)]
        parts = [data[begin:end] for begin, end in pairwise(ends)]
        assert read(*parts, sampling=sampling) == pieces


def test_a_stream_has_ended_at_done_and_not_before() -> None:
    stream = reader()
    stream.feed(COMPLETIONS.removesuffix(b"\n"))
    with pytest.raises(EngineDiedError, match="the server broke off in the middle of its answer"):
        stream.close()
    stream.feed(b"\n")
    stream.close()


def test_several_choices_can_come_in_one_event() -> None:
    choices = b'"index":0,"token_ids":[5]},{"index":1,"token_ids":[],"finish_reason":"length"'
    assert reader().feed(event(choices)) == [VLLMPiece(0, (5,)), VLLMPiece(1, (), None, Finish(LENGTH))]


def test_a_stop_token_that_was_not_requested_is_an_end_of_sequence() -> None:
    """vLLM reports a model's other ends of sequence as stop tokens."""
    (piece,) = reader().feed(event(b'"index":0,"token_ids":[99],"finish_reason":"stop","stop_reason":99'))
    assert piece == VLLMPiece(0, (99,), None, Finish(STOP, None))


def test_the_rank_of_a_completions_token_is_counted_among_the_listed_ones() -> None:
    choice = (
        b'"index":0,"token_ids":[7,4],"logprobs":{"text_offset":[0,2],"token_logprobs":[-2.5,-1.0],"tokens":'
        b'["token_id:7","token_id:4"],"top_logprobs":[{"token_id:7":-2.5,"token_id:3":-0.5,"token_id:4":-1.0},'
        b'{"token_id:4":-1.0,"token_id:3":-0.5}]}'
    )
    assert reader(sampling=LISTED).feed(event(choice)) == [
        VLLMPiece(0, (7, 4), (TokenLogprob(7, -2.5, 3, BEST), TokenLogprob(4, -1.0, 2, BEST)))
    ]


NAMED = SamplingParams(max_tokens=9, logprobs=0, logprob_token_ids=(8, 5))
NAMED_TOLD = TokenLogprob(5, -0.5, 1, ((5, -0.5), (8, -3.0)))


@pytest.mark.parametrize(
    "lists",
    [
        b'{"token_logprobs": [-0.5], "top_logprobs": [{"token_id:5": -0.5, "token_id:8": -3.0}]}',
        b'{"content": [{"token_id": 5, "logprob": -0.5, "rank": 1, "top_logprobs": ['
        b'{"token_id": 5, "logprob": -0.5}, {"token_id": 8, "logprob": -3.0}]}]}',
    ],
    ids=["completions", "generate"],
)
def test_named_tokens_are_read_after_the_sampled_one(lists: bytes) -> None:
    choice = b'"index": 0, "token_ids": [5], "logprobs": %b' % lists
    assert reader(NAMED).feed(event(choice)) == [VLLMPiece(0, (5,), (NAMED_TOLD,))]
    without = choice.replace(b"8", b"9")
    assert isinstance(error_of(event(without), sampling=NAMED), WorkerFaultError)


def test_a_piece_without_tokens_has_no_log_probabilities() -> None:
    end = b'"index":0,"token_ids":[],"logprobs":null,"finish_reason":"length"'
    assert reader(sampling=LISTED).feed(event(end)) == [VLLMPiece(0, (), (), Finish(LENGTH))]


@pytest.mark.parametrize("lists", [b"null", b'{"token_logprobs":[],"top_logprobs":[]}'])
def test_missing_log_probabilities_are_an_error(lists: bytes) -> None:
    error = error_of(event(b'"index":0,"token_ids":[5],"logprobs":' + lists), LISTED)
    assert (type(error), error.message) == (WorkerFaultError, "the server sent 0 log-probabilities of 1 tokens")


def test_log_probabilities_of_texts_are_an_error() -> None:
    lists = b'{"token_logprobs":[-0.5],"top_logprobs":[{" the":-0.5}]}'
    error = error_of(event(b'"index":0,"token_ids":[5],"logprobs":' + lists), LISTED)
    assert type(error) is WorkerFaultError
    assert "' the'" in error.message


@pytest.mark.parametrize(
    ("fault", "kind", "message"),
    [
        (
            b'{"message":"EngineCore encountered an issue.","type":"InternalServerError","param":null,"code":500}',
            EngineError,
            "the server ended its answer with an error: EngineCore encountered an issue.",
        ),
        (
            b'{"message":"Request failed; please retry","type":"InternalServerError","param":null,"code":503}',
            WorkerLeavingError,
            "the server ended its answer with an error: Request failed; please retry",
        ),
        (
            b'{"message":"bad","type":"BadRequestError","param":"top_k","code":400}',
            RequestError,
            "The engine refused the request: bad",
        ),
    ],
    ids=["500", "503", "400"],
)
def test_an_error_in_mid_stream_has_motets_class_and_vllms_message(
    fault: bytes, kind: type[MotetError], message: str
) -> None:
    error = error_of(b'data: {"error":' + fault + b"}\n\n")
    assert (type(error), error.message) == (kind, message)


@pytest.mark.parametrize("reason", ["repetition", "parse_error"])
def test_vllm_s_own_finish_reasons_become_stop_and_are_kept(reason: Literal["repetition", "parse_error"]) -> None:
    (piece,) = reader().feed(event(b'"index":0,"token_ids":[5],"finish_reason":"%b"' % reason.encode()))
    assert piece == VLLMPiece(0, (5,), None, Finish(FinishReason.STOP, worker_reason=reason))


@pytest.mark.parametrize(
    ("reason", "kind"), [(b"abort", WorkerLeavingError), (b"error", EngineError), (b"tool_calls", EngineError)]
)
def test_an_unusual_finish_reason_is_an_error_that_quotes_it(reason: bytes, kind: type[MotetError]) -> None:
    error = error_of(event(b'"index":0,"token_ids":[],"finish_reason":"' + reason + b'"'))
    assert type(error) is kind
    assert f"finish_reason {reason.decode()!r}" in error.message


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"data: <html>\n\n", "<html>"),
        (b'data: {"object":"x"}\n\n', "it has no choices"),
        (b'data: {"choices":[{"index":"a"}]}\n\n', "that cannot be read"),
        (b'data: {"choices":[{"index":0,"token_ids":["\xff"]}]}\n\n', "that cannot be read"),
        (event(b'"index":0,"text":"hello"'), "sends no token ids"),
    ],
    ids=["no JSON", "other JSON", "wrong type", "no UTF-8", "no token ids"],
)
def test_an_event_that_cannot_be_read_is_an_error(data: bytes, message: str) -> None:
    error = error_of(data)
    assert type(error) is WorkerFaultError
    assert message in error.message


LISTS = (
    b'[null,{"6":{"logprob":-3.0,"rank":12,"decoded_token":"x"},"2":{"logprob":-0.1,"rank":1,"decoded_token":"a"},'
    b'"3":{"logprob":-0.7,"rank":2,"decoded_token":"b"}},{"3":{"logprob":-0.7,"rank":2,"decoded_token":"b"},'
    b'"2":{"logprob":null,"rank":1,"decoded_token":"a"}}]'
)
USAGE = b'"usage":{"prompt_tokens_details":{"cached_tokens":4}}}'
TOLD = (None, TokenLogprob(6, -3.0, 12, ((2, -0.1), (3, -0.7))), TokenLogprob(3, -0.7, 2, ((2, LOWEST), (3, -0.7))))


@pytest.mark.parametrize(
    "body",
    [
        b'{"choices":[{"index":0,"token_ids":[9],"finish_reason":"length","prompt_logprobs":' + LISTS + b"}]," + USAGE,
        b'{"choices":[{"index":0,"token_ids":[9],"finish_reason":"length"}],"prompt_logprobs":' + LISTS + b"," + USAGE,
    ],
    ids=["completions", "generate"],
)
def test_the_log_probabilities_of_a_prompt_are_read_with_the_best_first(body: bytes) -> None:
    answer = ScoredAnswer.read(body)
    assert (*answer.scores((5, 6, 3), k=2),) == TOLD
    pieces = VLLMReader(SamplingParams(max_tokens=1)).complete(answer)
    assert pieces == [VLLMUsage(4), VLLMPiece(0, (9,), None, Finish(FinishReason.LENGTH))]


def test_without_top_tokens_only_the_prompts_own_tokens_are_read() -> None:
    body = b'{"choices":[{"index":0,"prompt_logprobs":[null,{"6":{"logprob":-3.0,"rank":12}}]}]}'
    assert [*ScoredAnswer.read(body).scores((5, 6), k=0)] == [None, TokenLogprob(6, -3.0, 12, ())]


def test_only_the_entries_that_are_read_are_decoded() -> None:
    """The bug: all entries of a prompt of 8,000 tokens were decoded at once, which held the event loop for 80 ms."""
    body = b'{"choices":[{"index":0,"prompt_logprobs":[null,{"6":{"logprob":-3.0}},7]}]}'
    entries = ScoredAnswer.read(body).scores((5, 6, 3), k=0)
    assert (next(entries), next(entries)) == (None, TokenLogprob(6, -3.0, 1, ()))
    with pytest.raises(WorkerFaultError, match="cannot be read"):
        next(entries)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b'{"choices":[{"index":0}]}', "of 0 of 2 prompt tokens"),
        (b'{"choices":[{"index":0,"prompt_logprobs":[null]}]}', "of 1 of 2 prompt tokens"),
        (b'{"choices":[{"index":0,"prompt_logprobs":[null,{"8":{"logprob":-1.0}}]}]}', "of prompt token 6"),
        (b"no", "cannot be read"),
    ],
)
def test_log_probabilities_that_do_not_fit_the_prompt_are_an_error(body: bytes, message: str) -> None:
    with pytest.raises(EngineError, match=message):
        [*ScoredAnswer.read(body).scores((5, 6), k=1)]


def refusal_of(status: int, body: str = "", *, retry_after_s: int | None = None) -> MotetError:
    return refused(Refusal(status, "Phrase", body.encode(), retry_after_s), "the server")


def body(message: str, kind: str = "BadRequestError", *, param: str | None = None, code: int = 400) -> str:
    quoted = "null" if param is None else f'"{param}"'
    return f'{{"error":{{"message":"{message}","type":"{kind}","param":{quoted},"code":{code}}}}}'


@pytest.mark.parametrize(
    ("quoted", "message"),
    [
        ("<!DOCTYPE HTML>\n<html>\n<head><title>Error</title></head>", "the server answered 418: Phrase"),
        ("one line\n  and\r\nanother", "the server answered 418: one line and another"),
        ("x" * 2000, "the server answered 418: " + "x" * 300),
    ],
)
def test_a_body_without_an_error_is_quoted_in_one_short_line(quoted: str, message: str) -> None:
    assert refusal_of(418, quoted).message == message


@pytest.mark.parametrize(("theirs", "ours"), [("top_p", "top_p"), ("body.prompt", "prompt"), (None, None)])
def test_a_refused_request_is_the_clients_error(theirs: str | None, ours: str | None) -> None:
    error = refusal_of(400, body("no", param=theirs))
    assert isinstance(error, RequestError)
    assert (type(error), error.message, error.param) == (RequestError, "The engine refused the request: no", ours)


def test_a_prompt_that_is_too_long_has_its_own_error() -> None:
    error = refusal_of(400, body("maximum context length is 10", param="input_tokens"))
    assert (type(error), error.code) == (ContextLengthError, "context_length_exceeded")


@pytest.mark.parametrize(
    ("status", "text", "kind"),
    [
        (404, body("The model `x` does not exist.", "NotFoundError", code=404), ModelNotFoundError),
        (404, body("Not Found", "Not Found", code=404), OtherServerError),
        (404, '{"detail":"Not Found"}', OtherServerError),
        (405, "", OtherServerError),
        (501, body("no completions", "NotImplementedError", code=501), OtherServerError),
        (401, '{"error":"Unauthorized"}', EngineError),
        (403, body("no", "Forbidden", code=403), EngineError),
        (409, body("no", "Conflict", code=409), EngineError),
        (429, "", OverloadedError),
        (503, body("busy", "Service Unavailable", code=503), OverloadedError),
        (503, '{"error":"The model is currently scaling."}', OverloadedError),
        (503, "", EngineDiedError),
        (502, "<html>", EngineDiedError),
        (500, body("broke", "InternalServerError", code=500), EngineError),
        (302, "", EngineError),
        (400, "<html>", EngineError),
    ],
)
def test_each_refusal_becomes_one_of_motets_errors(status: int, text: str, kind: type[MotetError]) -> None:
    assert type(refusal_of(status, text)) is kind


def test_the_message_of_a_refusal_names_the_server_and_what_to_do() -> None:
    assert refusal_of(401, '{"error":"Unauthorized"}').message == (
        "the server answered 401: Unauthorized. Give the gateway a key that this server accepts."
    )
    assert refusal_of(502).message == "the server answered 502: Phrase"


def test_a_busy_server_says_when_to_come_again() -> None:
    assert refusal_of(503, body("busy"), retry_after_s=7).retry_after_s == 7
