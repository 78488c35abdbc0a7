"""Our own engine protocol between a gateway and its workers; the pipe of an engine process uses parts of it.

    GET  /engine            ─► EngineReport                       how the worker is; asked every second
    POST /engine/generate   GenerateRequest ─► frames             a group, as long as the connection lasts
    POST /engine/prefill    GenerateRequest ─► Ticket
    POST /engine/release    Ticket
    POST /engine/stop       StopChoice                            one choice of a group, or a whole prefill
    POST /engine/connect    TransferAddress
    GET  /engine/tokenizer  ─► name of each file -> its bytes

All bodies are msgpack. A frame of a group's answer is

    [ length of the payload, 4 bytes | kind, 1 byte | payload ]     big endian; payload: GroupDelta or CarriedError

The number of the protocol goes with every request (`PROTOCOL_HEADER`) and is in the report; a server refuses another
one. It is raised by every change that the other side could misread. Fields with a default may be added without a new
number: the other side ignores fields that it does not know.

    2   a request may have a grammar: a worker that ignored it would write what it forbids
"""

import struct

import msgspec

from motet import errors
from motet.engines.base import WorkerState
from motet.errors import (
    EngineDiedError,
    EngineError,
    EngineSilentError,
    MotetError,
    OverloadedError,
    RequestError,
    UpstreamRefusalError,
)
from motet.ids import RequestId
from motet.types import EngineInfo, EngineStats, GroupDelta, ModelCard

PROTOCOL = 2
PROTOCOL_HEADER = "x-motet-engine-protocol"
WORKER_KEY_CODE = "worker_key_required"
"""The error code of a server of ours that wants another worker key."""
MSGPACK = "application/msgpack"
FRAMES = "application/vnd.motet.engine-frames"

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
"""The files that a server needs of a model that others run."""

MAX_FRAME_BYTES = 2**27
"""The largest delta has the log-probabilities of a long prompt: 40 MB for 128 k tokens with 20 each."""

UNREADABLE: tuple[type[Exception], ...] = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""The errors of msgspec for bytes of another type; for text that is no UTF-8 it raises UnicodeDecodeError."""

_BY_NAME: dict[str, type[MotetError]] = {
    name: found
    for name, found in vars(errors).items()
    if isinstance(found, type) and issubclass(found, MotetError) and found is not UpstreamRefusalError
}
"""The error classes that the other side can make again from a `CarriedError`."""


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
        """Makes the same error on the other side; a class that is not in the list becomes an EngineError."""
        known = _BY_NAME.get(self.kind)
        if known is None:
            return EngineError(f"{self.kind}: {self.message}")
        if issubclass(known, RequestError):
            return known(self.message, param=self.param, code=self.code)
        if issubclass(known, OverloadedError):
            return known(self.message, retry_after_s=self.retry_after_s or 1)
        return known(self.message)


class EngineReport(msgspec.Struct, frozen=True, kw_only=True):
    """The state of a worker at this moment."""

    protocol: int = PROTOCOL
    version: str
    """Version of Motet on the worker."""
    engine_id: str
    """New at every start: if it changes, the worker's cache and leases are gone."""
    state: WorkerState
    info: EngineInfo
    stats: EngineStats | None = None
    """None if the engine did not answer in time, or is dead."""
    block_events: str | None = None
    """The address where it publishes the blocks of its prefix cache; None if it does not."""
    block_replay: str | None = None
    """The address where missed events can be requested. Our own servers leave it out: it is the next port."""
    models: tuple[ModelCard, ...] = ()
    """The models beside `info.model`, or all models if it takes texts; may change from report to report."""

    def told_stats(self, name: str) -> EngineStats:
        """Returns the figures of the engine of server `name`. Raises EngineDiedError or EngineSilentError without."""
        if self.stats is not None:
            return self.stats
        if self.state is WorkerState.DEAD:
            raise EngineDiedError(f"{name} has lost its engine")
        raise EngineSilentError(f"the engine of {name} gives no sign of life")


class StopChoice(msgspec.Struct, frozen=True, kw_only=True):
    """Ends one choice of a group early, or a prefill whose ticket nobody wants any more."""

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
    """Puts frames together again, however the bytes were cut on their way. Pure.

    Raises EngineError for bytes that are no frame; after that nothing more can be read.
    """

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> list[Frame]:
        """Returns the frames that `data` completes, in order."""
        self._bytes += data
        frames: list[Frame] = []
        begin = 0
        with memoryview(self._bytes) as view:
            while (begun := begin + _HEADER.size) <= len(view):
                length, kind = _HEADER.unpack_from(view, begin)
                if kind not in _decoders or length > MAX_FRAME_BYTES:
                    raise EngineError(f"no frame of engine protocol {PROTOCOL}: kind {kind}, {length} bytes")
                if begun + length > len(view):
                    break
                begin = begun + length
                frames.append(_content(view[begun:begin], kind=kind))
        del self._bytes[:begin]
        return frames


def _content(payload: memoryview, *, kind: int) -> Frame:
    with payload:
        try:
            return _decoders[kind].decode(payload)
        except UNREADABLE as error:
            raise EngineError(f"a frame of engine protocol {PROTOCOL} cannot be read: {error}") from error
