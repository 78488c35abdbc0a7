"""The routes of a trainer that broadcasts tensors over NCCL, as in vLLM.

    /init_weight_transfer_engine {"init_info": ...}   the server joins the trainer's group, as one rank
    /start_weight_update                              opens an upload (`control.checkpoint_upload`)
    /update_weights {"update_info": ...}              names the next tensors; returns when they have been received
    /finish_weight_update                             gives the engines all received tensors
    /shutdown_weight_transfer_engine                  the server leaves the group

Between start and finish, broadcast tensors are treated like tensors in request bodies. An announcement is checked
before any tensor is received. If the trainer then fails, the upload is discarded, and the server leaves the group."""

import base64
import binascii
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from motet.api.http.failure import invalid_value
from motet.api.http.schema import Schema
from motet.api.service import Service
from motet.api.tensor_bodies import TensorMemory
from motet.control.nccl_receiver import NcclReceiver
from motet.errors import BodyTooLargeError, EngineError
from motet.models.checkpoint import TensorFacts, safetensors_header
from motet.models.memory_file import MemoryFile
from motet.models.trainer_group import TrainerGroup

UNIQUE_ID_BYTES = 128
DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
"""The name in safetensors files of each dtype, by its name in torch."""
MAX_RANKS = 2**16
MAX_BUFFERS = 16
PACKED_BYTES, PACKED_BUFFERS = 2**30, 2
"""Defaults of vLLM's trainers."""


class InitInfo(Schema):
    """How to connect to the trainer. Empty for a trainer that sends its tensors over HTTP."""

    backend: str | None = None
    master_address: Annotated[str | None, Field(min_length=1, max_length=255)] = None
    master_port: Annotated[int | None, Field(ge=1, le=65535)] = None
    nccl_unique_id_b64: Annotated[str | None, Field(min_length=1)] = None
    """Instead of the address: 128 bytes of ncclGetUniqueId, in base64."""
    rank_offset: Annotated[int | None, Field(ge=1, le=MAX_RANKS)] = None
    """Rank of this server."""
    world_size: Annotated[int | None, Field(ge=2, le=MAX_RANKS)] = None
    packed: bool = False
    packed_buffer_size_bytes: Annotated[int, Field(ge=1, le=2**40)] = PACKED_BYTES
    packed_num_buffers: Annotated[int, Field(ge=1, le=MAX_BUFFERS)] = PACKED_BUFFERS

    @property
    def over_nccl(self) -> bool:
        rendezvous = (self.master_address, self.master_port, self.nccl_unique_id_b64)
        return self.backend == "nccl" or any(field is not None for field in rendezvous)


class UpdateInfo(Schema):
    """Announces the next tensors."""

    names: Annotated[list[str], Field(min_length=1)]
    dtype_names: list[str] | None = None
    """Not needed if the tensors are sent in a body, which has their dtypes and shapes."""
    shapes: list[list[int]] | None = None


async def join_group(service: Service, info: InitInfo) -> None:
    """Leaves the previous group, and joins the group of a trainer that sends over NCCL, or raises RequestError."""
    await leave_group(service)
    if not info.over_nccl and info.backend in (None, "http"):
        return
    receiver = service.receiver
    if not info.over_nccl or receiver is None or receiver.device is None:
        http = "this server receives tensors over HTTP (POST /update_weights), as motet.weights.push sends them"
        nccl = "only servers with an engine on a GPU (--device cuda) receive tensors over NCCL"
        raise invalid_value("init_info", f"{http}; {nccl}")
    try:
        await receiver.join(group_of(info))
    except EngineError as error:
        raise invalid_value("init_info", error.message) from error


async def leave_group(service: Service) -> None:
    if service.receiver is not None:
        await service.receiver.close()


def group_of(info: InitInfo) -> TrainerGroup:
    """Returns the group that a trainer describes. Raises RequestError, which names the field."""
    by_id = info.nccl_unique_id_b64 is not None
    if by_id and (info.master_address is not None or info.master_port is not None):
        why = "it replaces master_address and master_port; give one of both"
        raise invalid_value("init_info.nccl_unique_id_b64", why)
    for name in ("rank_offset", "world_size", *(() if by_id else ("master_address", "master_port"))):
        if getattr(info, name) is None:
            raise invalid_value(f"init_info.{name}", "a trainer that sends over NCCL must give it")
    assert info.rank_offset is not None and info.world_size is not None
    if info.rank_offset >= info.world_size:
        raise invalid_value("init_info.rank_offset", f"it must be below world_size, which is {info.world_size}")
    return TrainerGroup(
        rank=info.rank_offset,
        world_size=info.world_size,
        master_address=info.master_address or "",
        master_port=info.master_port or 0,
        unique_id=_unique_id(info.nccl_unique_id_b64),
        packed=info.packed,
        buffer_bytes=info.packed_buffer_size_bytes,
        num_buffers=info.packed_num_buffers,
    )


def _unique_id(given: str | None) -> bytes:
    if given is None:
        return b""
    try:
        unique_id = base64.b64decode(given, validate=True)
    except (binascii.Error, ValueError) as error:
        raise invalid_value("init_info.nccl_unique_id_b64", f"it is not standard base64: {error}") from error
    if len(unique_id) != UNIQUE_ID_BYTES:
        why = f"it has {len(unique_id)} bytes, and an id of NCCL {UNIQUE_ID_BYTES}"
        raise invalid_value("init_info.nccl_unique_id_b64", why)
    return unique_id


async def take_announced(service: Service, info: UpdateInfo) -> None:
    """Waits until these tensors have been received: over NCCL if the server is in a trainer's group, else in bodies.
    Raises RequestError if they do not arrive or cannot be used."""
    receiver, control = service.receiver, service.opened(service.control)
    upload = control.opened_upload()
    if receiver is None or not receiver.joined:
        await upload.wait_for(info.names)
        return
    upload.check_new(info.names)
    tensors = announced(info)
    try:
        file = await _received(receiver, tensors, memory=service.tensor_memory)
    except EngineError as error:
        upload.drop()  # otherwise a trainer that finishes the update would apply only some of its weights
        if control.upload is upload:
            control.upload = None
        raise invalid_value("update_info", f"{error.message}; the update is discarded") from error
    upload.add(file, frozenset(info.names))


async def _received(receiver: NcclReceiver, tensors: Sequence[TensorFacts], *, memory: TensorMemory) -> MemoryFile:
    """Returns a sealed file with the tensors that the trainer sends next. Raises EngineError if the trainer fails."""
    header = safetensors_header(tensors)
    num_bytes = len(header) + sum(tensor.num_bytes for tensor in tensors)
    try:
        file = await memory.create(num_bytes)
    except BodyTooLargeError as error:
        raise invalid_value("update_info", error.message.rstrip(".")) from error
    try:
        file.write(header, 0)
        await receiver.receive(tensors, file.path, at=len(header))
        file.seal()
    except BaseException:
        file.close()
        raise
    return file


def announced(info: UpdateInfo) -> list[TensorFacts]:
    """Returns the tensors that an announcement names. Raises RequestError, which names the field."""
    dtypes, shapes = info.dtype_names or [], info.shapes or []
    for field, values in (("dtype_names", dtypes), ("shapes", shapes)):
        if len(values) != len(info.names):
            why = f"it has {len(values)} entries, and names has {len(info.names)}"
            raise invalid_value(f"update_info.{field}", why)
    tensors = []
    for name, dtype, shape in zip(info.names, dtypes, shapes, strict=True):
        if dtype not in DTYPES:
            why = f"tensor {name} has the dtype {dtype}; {', '.join(DTYPES)} can be used"
            raise invalid_value("update_info.dtype_names", why)
        if any(size < 1 for size in shape):
            raise invalid_value("update_info.shapes", f"tensor {name} has the shape {shape}: each size is 1 or more")
        tensors.append(TensorFacts(name, DTYPES[dtype], tuple(shape)))
    return tensors
