"""The frames of Motet's engine protocol are read the same however bytes are cut, and errors keep all their fields."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from motet import errors
from motet.engine import WorkerState
from motet.engine_info import EngineKind, ModelCard
from motet.engines.wire import (
    MAX_FRAME_BYTES,
    MAX_MESSAGE_CHARS,
    MAX_MODELS,
    PROTOCOL,
    CarriedError,
    EngineReport,
    Frame,
    FrameReader,
    checked,
    frame,
)
from motet.errors import EngineError, MotetError, OverloadedError, RequestError, UpstreamRefusalError, WorkerFaultError
from motet.ids import ModelName, RequestId
from motet.metrics.stats import EngineStats
from motet.testing.fake_engine import fake_info
from motet.types import ChoiceDelta, Finish, FinishReason, GroupDelta, PromptReport, TokenLogprob

tokens = st.integers(0, 2**32 - 1)
logprobs = st.builds(
    TokenLogprob,
    tokens,
    st.floats(max_value=0, allow_nan=False),
    st.integers(1, 10**6),
    st.lists(st.tuples(tokens, st.floats(allow_nan=False)), max_size=3).map(tuple),
)
choices = st.builds(
    ChoiceDelta,
    st.integers(0, 127),
    st.lists(tokens, max_size=3).map(tuple),
    st.none() | st.lists(logprobs, max_size=2).map(tuple),
    st.none() | st.builds(Finish, st.sampled_from(FinishReason), st.none() | tokens),
)
prompts = st.builds(PromptReport.scored, st.integers(0, 10**5), st.none() | st.lists(st.none() | logprobs, max_size=3))
deltas = st.builds(GroupDelta, st.text().map(RequestId), st.lists(choices, max_size=4).map(tuple), st.none() | prompts)
carried = st.builds(
    CarriedError, st.text(), st.text(), st.none() | st.text(), st.none() | st.text(), st.none() | tokens
)
frames = st.lists(deltas | carried, max_size=6)


@pytest.mark.slow
@given(frames, st.data())
def test_frames_come_out_as_they_went_in_however_the_bytes_are_cut(content: list[Frame], data: st.DataObject) -> None:
    complete = b"".join(map(frame, content))
    some = st.lists(st.integers(0, len(complete)), max_size=12)
    cuts = sorted(data.draw(some | st.just([*range(len(complete))])))
    reader, out = FrameReader(), list[Frame]()
    for begin, end in zip([0, *cuts], [*cuts, len(complete)], strict=True):
        out += reader.feed(complete[begin:end])
    assert out == content


@given(st.binary())
def test_noise_waits_for_more_or_raises_motets_error_and_no_other(noise: bytes) -> None:
    reader = FrameReader()
    try:
        for content in reader.feed(noise):
            assert isinstance(content, GroupDelta | CarriedError)
    except EngineError as error:
        assert f"engine protocol {PROTOCOL}" in error.message


@pytest.mark.parametrize("payload", [b"", b"\xc1", b"\x90", b"\x80", b"\x93\xa1\xff\x90\xc0", b"\x91" * 100_000])
@pytest.mark.parametrize("kind", [0, 1])
def test_an_invalid_payload_is_an_error(payload: bytes, kind: int) -> None:
    with pytest.raises(EngineError, match="cannot be read"):
        FrameReader().feed(len(payload).to_bytes(4, "big") + bytes([kind]) + payload)


def test_a_length_beyond_the_limit_is_refused_before_the_payload_arrives() -> None:
    head = (MAX_FRAME_BYTES + 1).to_bytes(4, "big") + b"\0"
    with pytest.raises(EngineError, match=f"{MAX_FRAME_BYTES + 1} bytes"):
        FrameReader().feed(head)


def all_errors(kind: type[MotetError] = MotetError) -> list[type[MotetError]]:
    """Returns all error classes of `errors.py`."""
    children = [child for child in kind.__subclasses__() if child.__module__ == errors.__name__]
    return [kind, *(found for child in children for found in all_errors(child))]


@pytest.mark.parametrize("kind", [kind for kind in all_errors() if kind is not UpstreamRefusalError])
def test_every_error_arrives_with_its_class_and_all_its_fields(kind: type[MotetError]) -> None:
    """Only the error of a text upstream never goes over this wire."""
    if issubclass(kind, RequestError):
        error: MotetError = kind("what and why", param="field", code="some_code")
    elif issubclass(kind, OverloadedError):
        error = kind("what and why", retry_after_s=17)
    else:
        error = kind("what and why")
    wire = msgspec.msgpack.encode(CarriedError.of(error))
    arrived = msgspec.msgpack.decode(wire, type=CarriedError).error()
    assert type(arrived) is kind
    assert (vars(arrived), arrived.code, arrived.retry_after_s) == (vars(error), error.code, error.retry_after_s)


def test_an_error_without_a_class_here_is_an_engine_error_that_names_it() -> None:
    arrived = CarriedError("FutureError", "it was").error()
    assert type(arrived) is EngineError
    assert arrived.message == "FutureError: it was"


def test_fields_that_a_newer_version_adds_are_ignored() -> None:
    delta = ["g", [[0, [5], None, None, "added"]], None, "", "", "added"]
    payload = msgspec.msgpack.encode(delta)
    read = FrameReader().feed(len(payload).to_bytes(4, "big") + b"\0" + payload)
    assert read == [GroupDelta(RequestId("g"), (ChoiceDelta(0, (5,)),))]


def test_fields_that_an_older_version_does_not_send_have_their_defaults() -> None:
    wire = msgspec.msgpack.encode(["RequestError", "no", "n"])
    assert msgspec.msgpack.decode(wire, type=CarriedError) == CarriedError("RequestError", "no", "n")


def report(**facts: Any) -> EngineReport:
    honest = EngineReport(version="0", engine_id="e", state=WorkerState.READY, info=fake_info(), stats=EngineStats())
    return msgspec.structs.replace(honest, **facts)


def sized(**sizes: Any) -> EngineReport:
    return report(info=msgspec.structs.replace(fake_info(), **sizes))


def serving(*names: str, max_model_len: int = 100) -> EngineReport:
    return report(models=tuple([ModelCard(name=ModelName(name), max_model_len=max_model_len) for name in names]))


UNTRUE: dict[str, tuple[EngineReport, str]] = {
    "block_size 0": (sized(block_size=0), "block_size 0; 1 to 65536 is allowed"),
    "block_size negative": (sized(block_size=-16), "block_size -16"),
    "max_num_seqs 0": (sized(max_num_seqs=0), "max_num_seqs 0"),
    "max_model_len 0": (sized(max_model_len=0), "max_model_len 0"),
    "max_model_len absurd": (sized(max_model_len=2**62), f"max_model_len {2**62}"),
    "num_blocks 0": (sized(num_blocks=0), "num_blocks 0"),
    "vocab_size 0": (sized(vocab_size=0, eos_token_ids=()), "vocab_size 0"),
    "default": (sized(default_sampling_params={"top_p": 2}), "a default of the sampling field 'top_p' that no"),
    "end outside": (sized(eos_token_ids=(512,)), "end-of-sequence tokens that are not in its vocabulary"),
    "kind": (sized(kind=EngineKind.OPENAI), "the kind openai"),
    "a line end in its name": (sized(model="a\nb"), "printable characters"),
    "an endless name": (sized(model="a" * 10**5), "printable characters"),
    "many models": (serving(*map(str, range(MAX_MODELS + 1))), f"{MAX_MODELS + 1} models"),
    "a nameless model": (serving(""), "a model without a name"),
    "a model without length": (serving("a", max_model_len=0), "possible max_model_len"),
    "negative figures": (report(stats=EngineStats(choices_running=-5)), "a figure choices_running"),
    "not a number": (report(stats=EngineStats(transfer_seconds_sum=float("nan"))), "a figure transfer_seconds_sum"),
    "endless labels": (report(stats=EngineStats(transfer_failures=dict.fromkeys(map(str, range(9999)), 1))), "figure"),
}


@pytest.mark.parametrize(("untrue", "why"), UNTRUE.values(), ids=UNTRUE)
def test_a_report_that_cannot_be_true_is_not_used(untrue: EngineReport, why: str) -> None:
    with pytest.raises(WorkerFaultError, match=why) as caught:
        checked(untrue, "the worker w")
    assert caught.value.message.startswith("the worker w reports ")


def test_an_honest_report_is_used() -> None:
    honest = serving("a", "b/c d")
    assert checked(honest, "w") is honest


def test_an_error_of_another_process_is_cut() -> None:
    assert CarriedError("EngineError", "x" * 10**6).error().message == "x" * MAX_MESSAGE_CHARS
