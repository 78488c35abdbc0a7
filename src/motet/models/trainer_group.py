"""A trainer's NCCL group, and the messages between the server and the process that joins it for the server.

    server ── JoinGroup, once ───────────────► process (`engines.native.cuda.receive`)
           ── ReceiveTensors, each update ──►
           ◄── ReceiverAnswer, to each ──────

Each message is a line of JSON, on the process's standard input or output."""

import msgspec

from motet.models.checkpoint import TensorFacts


class TrainerGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The way to meet a trainer, and the form in which its tensors come. The trainer is rank 0."""

    rank: int
    """Rank of this server."""
    world_size: int
    master_address: str = ""
    """Address of the trainer's store; empty if it has none."""
    master_port: int = 0
    unique_id: bytes = b""
    """The group's id, if the trainer has no store."""
    packed: bool
    """True if one broadcast has several tensors."""
    buffer_bytes: int
    """Size limit of a packed broadcast: the tensor that makes it larger is its last one."""
    num_buffers: int
    """Maximum number of broadcasts that are received at the same time."""


class JoinGroup(msgspec.Struct, frozen=True, tag=True):
    """Joins a trainer's group. The first order to the process."""

    group: TrainerGroup
    device: str
    library: str
    """Path of NCCL, or the name under which torch has loaded it."""
    timeout_s: float


class ReceiveTensors(msgspec.Struct, frozen=True, tag=True):
    """Receives the tensors that the trainer broadcasts next."""

    tensors: tuple[TensorFacts, ...]
    path: str
    """The file to write them to."""
    at: int
    """Offset of the first tensor in the file."""


ReceiverOrder = JoinGroup | ReceiveTensors


class ReceiverAnswer(msgspec.Struct, frozen=True):
    """Reports that an order is done, or why it failed."""

    error: str | None = None
