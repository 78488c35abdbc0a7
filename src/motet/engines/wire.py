"""The engine protocol between a gateway and its workers, both Motet servers. The pipe of an engine process uses parts
of it.

    GET  /engine            ─► EngineReport                       the worker's state; requested every second
    POST /engine/generate   GenerateRequest ─► frames             a group, as long as the connection lasts
    POST /engine/prefill    GenerateRequest ─► Ticket
    POST /engine/release    Ticket
    POST /engine/stop       StopChoice                            one choice of a group, or a prefill
    POST /engine/order      WorkerOrder ─► OrderAnswer            weights, pauses, connections (`engine_orders`)
    POST /engine/checkpoint?file=I                                a safetensors file, for the next PrepareWeights
    GET  /engine/tokenizer  ─► name of each file -> its bytes

All bodies are msgpack, except the body with `TENSORS`. A frame of a group's answer is

    [ length of the payload, 4 bytes | kind, 1 byte | payload ]     big endian; payload: GroupDelta or CarriedError

The number of the protocol is in every request (`PROTOCOL_HEADER`) and in the report; a server refuses another number.
Every change that the other side could misread increments the number. Fields with a default can be added without a new
number: the other side ignores fields that it does not know.

    2   a request can have a grammar: a worker that ignored it would generate tokens that the grammar forbids
    3   a request can have `allowed_token_ids`, `logprob_token_ids` and `logprobs_mode`: a worker that ignored them
        would generate other tokens, or report other log-probabilities
    4   all orders are sent to /engine/order; /engine/connect and the routes below /engine/weights were removed
    5   a request can have `prompt_logprob_token_ids`, and `logprob_token_ids` next to `logprobs`: a worker would report
        other log-probabilities
    6   a request can have `bad_words`, `bad_word_ids` and `extra_args`: a worker that ignored them would generate
        other tokens
    7   a request can be for an adapter that the worker has loaded, and `LoadAdapter` and `UnloadAdapter` are orders
"""

import math
import struct
from collections.abc import Iterator
from dataclasses import fields

import msgspec

from motet import errors
from motet.engine import WorkerState
from motet.engine_info import EngineInfo, EngineKind, ModelCard
from motet.errors import (
    EngineDiedError,
    EngineError,
    EngineSilentError,
    MotetError,
    OverloadedError,
    RequestError,
    UpstreamRefusalError,
    WorkerFaultError,
)
from motet.ids import RequestId
from motet.metrics.stats import EngineStats
from motet.sampling_defaults import faulty_default
from motet.types import GroupDelta

PROTOCOL = 7
PROTOCOL_HEADER = "x-motet-engine-protocol"
WORKER_KEY_CODE = "worker_key_required"
"""The error code of a Motet server that requires another worker key."""
CERTIFICATE_REQUIRED = "client_certificate_required"
"""The error code of a server that requires a client certificate for all routes except health routes."""
MSGPACK = "application/msgpack"
FRAMES = "application/vnd.motet.engine-frames"
TENSORS = "application/octet-stream"
"""The content type of a safetensors file."""
INVALID_WEIGHTS = "invalid_weights"
"""The code of an error about weights that cannot be used. The API adds the field of the request to the message."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""The files of a model that a server needs if other servers run the model."""

MAX_FRAME_BYTES = 2**27
"""Maximum size of a frame. The largest delta has 20 log-probabilities for each of 128 k prompt tokens: 40 MB."""
MAX_STEP_BYTES = 2**24
"""Maximum size of a frame without log-probabilities of a prompt. A step of 1024 choices has 0.3 MB with 20
log-probabilities for each, and 15 MB with 1000."""
MAX_MESSAGE_CHARS = 2000
"""Maximum length of an error message from another process. Longer messages are cut."""

MAX_MODELS = 4096
MAX_TEXT_CHARS = 1000
MAX_NUMBERS = 1024
"""Maximum length of a list in a report, such as its end-of-sequence tokens, and of a dictionary."""
MAX_FIGURE = 2**63
MAX_LENGTH = 2**31
SIZES = {
    "max_model_len": (2, MAX_LENGTH),
    "vocab_size": (1, 2**31),
    "block_size": (1, 2**16),
    "num_blocks": (1, 2**40),
    "bytes_per_block": (0, 2**40),
    "max_num_seqs": (1, 2**20),
    "num_weights": (0, 2**50),
    "ticket_readers": (1, 2**20),
    "max_adapters": (0, MAX_MODELS),
    "max_adapter_rank": (0, 2**20),
}
"""Minimum and maximum of each number with which routing calculates."""

UNREADABLE: tuple[type[Exception], ...] = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors of msgspec for bytes of another type. For text that is not UTF-8 it raises UnicodeDecodeError."""

_BY_NAME: dict[str, type[MotetError]] = {
    name: found
    for name, found in vars(errors).items()
    if isinstance(found, type) and issubclass(found, MotetError) and found is not UpstreamRefusalError
}
"""The error classes that the receiver can make from a `CarriedError`, by name."""


class CarriedError(msgspec.Struct, frozen=True, array_like=True):
    """A MotetError that is sent to another process."""

    kind: str
    message: str
    param: str | None = None
    code: str | None = None
    retry_after_s: int | None = None

    @classmethod
    def of(cls, error: MotetError) -> "CarriedError":
        param = error.param if isinstance(error, RequestError) else None
        return cls(type(error).__name__, error.message, param, error.code, error.retry_after_s)

    def error(self) -> MotetError:
        """Returns the same error, on the side of the receiver. An error of an unknown class becomes an EngineError."""
        known, message = _BY_NAME.get(self.kind), self.message[:MAX_MESSAGE_CHARS]
        if known is None:
            return EngineError(f"{self.kind[:MAX_TEXT_CHARS]}: {message}")
        if issubclass(known, RequestError):
            return known(message, param=self.param, code=self.code)
        if issubclass(known, OverloadedError):
            return known(message, retry_after_s=self.retry_after_s or 1)
        return known(message)


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a worker at the time of the report."""

    protocol: int = PROTOCOL
    version: str
    """Version of Motet on the worker."""
    engine_id: str
    """Identifies one start of the engine. A new id means that the worker's cache and leases are gone."""
    state: WorkerState
    info: EngineInfo
    stats: EngineStats | None = None
    """Figures of the engine; None if it did not answer in time, or is dead."""
    block_events: str | None = None
    """Address at which the worker publishes the blocks of its prefix cache; None if it publishes none."""
    block_replay: str | None = None
    """Address at which missed events can be requested. Motet servers omit it: it is the next port."""
    models: tuple[ModelCard, ...] = ()
    """The models other than `info.model`, or all models if the worker takes texts. Can change from report to report."""

    def stats_of(self, name: str) -> EngineStats:
        """Returns the figures of server `name`. Raises EngineDiedError or EngineSilentError if there are none."""
        if self.stats is not None:
            return self.stats
        if self.state is WorkerState.DEAD:
            raise EngineDiedError(f"{name} has lost its engine")
        raise EngineSilentError(f"the engine of {name} sends no heartbeats")


def checked(report: EngineReport, name: str, *, texts: bool = False) -> EngineReport:
    """Returns the report of server `name`. Raises WorkerFaultError if it cannot be true, or has more entries than any
    server needs. `texts`: True for a text upstream, which has no sizes."""
    if fault := next(_faults(report, texts=texts), None):
        raise WorkerFaultError(f"{name} reports {fault}")
    return report


def _faults(report: EngineReport, *, texts: bool) -> Iterator[str]:
    info = report.info
    if (info.kind is EngineKind.OPENAI) is not texts:
        yield f"the kind {info.kind}, which is not the kind of this worker"
    for name, (minimum, maximum) in {} if texts else SIZES.items():
        if not minimum <= (size := getattr(info, name)) <= maximum:
            yield f"{name} {size}; {minimum} to {maximum} is allowed"
    yield from _model_faults(report)
    yield from _generation_faults(info)
    if odd := next((text for text in _texts(report) if len(text) > MAX_TEXT_CHARS or not text.isprintable()), None):
        yield f"{odd[:40]!r}; a text has at most {MAX_TEXT_CHARS} printable characters"
    for figure in fields(EngineStats) if report.stats is not None else ():
        if not _is_figure(getattr(report.stats, figure.name)):
            yield f"a figure {figure.name} that no server can count"


def _model_faults(report: EngineReport) -> Iterator[str]:
    models, adapters = report.models, report.info.adapters
    if (number := len(models) + len(adapters)) > MAX_MODELS:
        yield f"{number} models; at most {MAX_MODELS} are allowed"
    if not all(card.name and 1 <= card.max_model_len <= MAX_LENGTH for card in models):
        yield "a model without a name, or without a possible max_model_len"
    if not all(adapter.name and adapter.digest for adapter in adapters):
        yield "an adapter without a name, or without a digest"


def _generation_faults(info: EngineInfo) -> Iterator[str]:
    ends, defaults = info.eos_token_ids, info.default_sampling_params or {}
    if len(ends) > MAX_NUMBERS or not all(0 <= token < info.vocab_size for token in ends):
        yield "end-of-sequence tokens that are not in its vocabulary"
    if (faulty := faulty_default(defaults)) is not None:
        yield f"a default of the sampling field {faulty[:40]!r} that no request could have"


def _texts(report: EngineReport) -> Iterator[str]:
    """Yields the texts of a report that are not empty."""
    info = report.info
    texts = (
        report.version,
        report.engine_id,
        report.block_events,
        report.block_replay,
        info.model,
        info.root,
        info.dtype,
    )
    yield from filter(None, (*texts, info.device, info.fingerprint, info.model_digest))
    yield from filter(None, (info.kernels, info.kernels_note, info.kv_cache_reason))
    if info.transfer is not None:
        yield from (info.transfer.engine_id, info.transfer.host)
    for card in report.models:
        yield from filter(None, (card.name, card.root, card.parent))
    for adapter in info.adapters:
        yield from filter(None, (adapter.name, adapter.root, adapter.digest, adapter.version))


def _is_figure(value: object) -> bool:
    """Returns True for a number that a counter can have, or a bounded collection of such numbers."""
    match value:
        case None:
            return True
        case int():
            return 0 <= value < MAX_FIGURE
        case float():
            return math.isfinite(value) and value >= 0
        case dict():
            known = all(len(name) <= MAX_TEXT_CHARS and name.isprintable() for name in value)
            return known and len(value) <= MAX_NUMBERS and all(map(_is_figure, value.values()))
        case tuple():
            return len(value) <= MAX_NUMBERS and all(map(_is_figure, value))
    return False


class StopChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Ends one choice of a group early, or a prefill whose ticket is not needed any more."""

    request_id: RequestId
    index: int


Frame = GroupDelta | CarriedError

_HEADER = struct.Struct(">IB")
_DELTA, _ERROR = 0, 1
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[int, msgspec.msgpack.Decoder[GroupDelta] | msgspec.msgpack.Decoder[CarriedError]] = {
    _DELTA: msgspec.msgpack.Decoder(GroupDelta),
    _ERROR: msgspec.msgpack.Decoder(CarriedError),
}


def frame(content: Frame) -> bytes:
    payload = _encoder.encode(content)
    return _HEADER.pack(len(payload), _DELTA if isinstance(content, GroupDelta) else _ERROR) + payload


class FrameReader:
    """Joins received bytes to frames, wherever the bytes are divided. Pure.

    Raises WorkerFaultError for bytes that are not a frame. After that, it must not be used any more."""

    def __init__(self, *, max_bytes: int = MAX_FRAME_BYTES) -> None:
        """`max_bytes`: maximum size of a payload."""
        self._bytes = bytearray()
        self._max_bytes = max_bytes

    def feed(self, data: bytes) -> list[Frame]:
        """Returns the frames that `data` completes, in order."""
        self._bytes += data
        frames: list[Frame] = []
        begin = 0
        with memoryview(self._bytes) as view:
            while (payload := begin + _HEADER.size) <= len(view):
                length, kind = _HEADER.unpack_from(view, begin)
                if kind not in _decoders or length > self._max_bytes:
                    raise WorkerFaultError(f"not a frame of engine protocol {PROTOCOL}: kind {kind}, {length} bytes")
                if payload + length > len(view):
                    break
                begin = payload + length
                frames.append(_content(view[payload:begin], kind=kind))
        del self._bytes[:begin]
        return frames


def _content(payload: memoryview, *, kind: int) -> Frame:
    with payload:
        try:
            return _decoders[kind].decode(payload)
        except UNREADABLE as error:
            raise WorkerFaultError(f"a frame of engine protocol {PROTOCOL} cannot be read: {error}") from error
