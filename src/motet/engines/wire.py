"""Our own engine protocol: what a gateway and its workers, and an engine process and its server, say to each other.

    GET  /engine            ─► EngineReport                       how the worker is; asked every second
    POST /engine/generate   GenerateRequest ─► frames             a group, as long as the connection lasts
    POST /engine/prefill    GenerateRequest ─► Ticket
    POST /engine/release    Ticket
    POST /engine/stop       StopChoice
    POST /engine/connect    TransferAddress
    GET  /engine/tokenizer  ─► name of each file -> its bytes

All bodies are msgpack. A frame of a group's answer is

    [ length of the payload, 4 bytes | kind, 1 byte | payload ]     big endian; payload: GroupDelta or CarriedError

The number of the protocol goes with every question (`PROTOCOL_HEADER`) and stands in the report; a server refuses
another one. It is raised by every change that the other side could misread. Fields with a default may be added without:
who does not know them passes over them.

    2   a request may have a grammar: who passed over it would write what it forbids
"""

import struct

import msgspec

from motet.engines.base import WorkerState
from motet.errors import (
    AnswerParserError,
    BodyTooLargeError,
    ConfigError,
    ContextLengthError,
    DirectoryError,
    DrainingError,
    EngineClosedError,
    EngineDiedError,
    EngineError,
    EngineSilentError,
    ForbiddenError,
    GrammarError,
    KVMemoryError,
    MethodNotAllowedError,
    ModelLoadError,
    ModelNotFoundError,
    MotetError,
    NoSingleModelError,
    NotFoundError,
    NoWorkerError,
    OtherServerError,
    OverloadedError,
    PortTakenError,
    RateLimitedError,
    RequestError,
    StartupError,
    UnauthorizedError,
    UnsupportedModelError,
    WorkerLeavingError,
)
from motet.ids import RequestId
from motet.types import EngineInfo, EngineStats, GroupDelta, ModelCard

PROTOCOL = 2
PROTOCOL_HEADER = "x-motet-engine-protocol"
MSGPACK = "application/msgpack"
FRAMES = "application/vnd.motet.engine-frames"

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""What a server needs of a model that others run."""

MAX_FRAME_BYTES = 2**27
"""The largest delta there is tells the log-probabilities of a long prompt: 40 MB for 128 k tokens, 20 of each."""

UNREADABLE: tuple[type[Exception], ...] = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What msgspec raises for bytes that are not what was asked for; text that is no UTF-8 is no DecodeError to it."""

_KNOWN: tuple[type[MotetError], ...] = (
    MotetError,
    RequestError,
    ContextLengthError,
    GrammarError,
    UnauthorizedError,
    ForbiddenError,
    NotFoundError,
    ModelNotFoundError,
    NoSingleModelError,
    MethodNotAllowedError,
    BodyTooLargeError,
    RateLimitedError,
    OverloadedError,
    DrainingError,
    EngineError,
    EngineDiedError,
    EngineSilentError,
    NoWorkerError,
    WorkerLeavingError,
    OtherServerError,
    AnswerParserError,
    EngineClosedError,
    DirectoryError,
    StartupError,
    ConfigError,
    PortTakenError,
    ModelLoadError,
    UnsupportedModelError,
    KVMemoryError,
)
_BY_NAME = {known.__name__: known for known in _KNOWN}


class CarriedError(msgspec.Struct, frozen=True, array_like=True):
    """An error of ours on its way to another process."""

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
        """The same error on the other side; one without a class there is an EngineError."""
        known = _BY_NAME.get(self.kind)
        if known is None:
            return EngineError(f"{self.kind}: {self.message}")
        if issubclass(known, RequestError):
            return known(self.message, param=self.param, code=self.code)
        if issubclass(known, OverloadedError):
            return known(self.message, retry_after_s=self.retry_after_s or 1)
        return known(self.message)


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a worker is at this moment."""

    protocol: int = PROTOCOL
    version: str
    """Of Motet there."""
    engine_id: str
    """New at every start: with another one, all that was known of the worker's cache and leases is void."""
    state: WorkerState
    info: EngineInfo
    stats: EngineStats | None = None
    """None: it did not tell in time, or is dead."""
    block_events: str | None = None
    """Where it tells which blocks its prefix cache has; None: nowhere."""
    block_replay: str | None = None
    """Where what was missed of that can be asked for. Our own servers do not say it: it is the port after."""
    models: tuple[ModelCard, ...] = ()
    """What it serves beside `info.model`, or all it serves if it takes texts; may change from report to report."""


class StopChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Ends one choice of a group early."""

    request_id: RequestId
    index: int


Frame = GroupDelta | CarriedError
"""What one frame holds. After an error nothing follows."""

_HEADER = struct.Struct(">IB")
_DELTA, _ERROR = 0, 1
_encoder = msgspec.msgpack.Encoder()
_decoders: dict[int, msgspec.msgpack.Decoder[GroupDelta] | msgspec.msgpack.Decoder[CarriedError]] = {
    _DELTA: msgspec.msgpack.Decoder(GroupDelta),
    _ERROR: msgspec.msgpack.Decoder(CarriedError),
}


def frame(content: Frame) -> bytes:
    """`content` as it goes over the wire."""
    payload = _encoder.encode(content)
    return _HEADER.pack(len(payload), _DELTA if isinstance(content, GroupDelta) else _ERROR) + payload


class FrameReader:
    """Puts frames together again, however the bytes were cut on their way. Pure.

    Raises EngineError for what is no frame; after that nothing more can be read.
    """

    def __init__(self, *, max_bytes: int = MAX_FRAME_BYTES) -> None:
        self._max_bytes = max_bytes
        self._bytes = bytearray()

    @property
    def in_frame(self) -> bool:
        """Whether a frame has begun that is not complete."""
        return bool(self._bytes)

    def feed(self, data: bytes) -> list[Frame]:
        """The frames that `data` completes, in order."""
        self._bytes += data
        frames: list[Frame] = []
        begin = 0
        with memoryview(self._bytes) as view:
            while (end := self._end_of_frame(begin)) is not None:
                frames.append(_content(view[begin + _HEADER.size : end], kind=view[begin + _HEADER.size - 1]))
                begin = end
        del self._bytes[:begin]
        return frames

    def _end_of_frame(self, begin: int) -> int | None:
        """None: not there yet."""
        if begin + _HEADER.size > len(self._bytes):
            return None
        length, kind = _HEADER.unpack_from(self._bytes, begin)
        if kind not in _decoders or length > self._max_bytes:
            raise EngineError(f"no frame of engine protocol {PROTOCOL}: kind {kind}, {length} bytes")
        end: int = begin + _HEADER.size + length
        return end if end <= len(self._bytes) else None


def _content(payload: memoryview, *, kind: int) -> Frame:
    with payload:
        try:
            return _decoders[kind].decode(payload)
        except UNREADABLE as error:
            raise EngineError(f"a frame of engine protocol {PROTOCOL} cannot be read: {error}") from error
