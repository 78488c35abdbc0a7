"""The adapters of an engine without a model: their digests come from the bytes of their files, and the tokens of an
answer depend on the digest."""

import hashlib
from pathlib import Path

import msgspec

from motet.engine_info import AdapterInfo, EngineInfo, adapter_in, kv_weights
from motet.engine_orders import ADAPTER_EXISTS, INVALID_ADAPTER, TOO_MANY_ADAPTERS, AdapterOrder, LoadAdapter
from motet.errors import ModelGoneError, ModelNotFoundError, RequestError
from motet.models.adapter_file import CONFIG_FILE, WEIGHTS_FILE
from motet.models.checkpoint import CheckpointKind

RANK = 8


def make_adapter(folder: Path, content: str = "") -> Path:
    """Writes a folder that a fake engine can load as an adapter. Different contents give different digests."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text("{}")
    (folder / WEIGHTS_FILE).write_text(content)
    return folder


def with_adapters(info: EngineInfo, order: AdapterOrder) -> EngineInfo:
    """Returns the facts about an engine after it has carried out the order. Raises RequestError."""
    known, others = adapter_in(info, order.name), tuple(one for one in info.adapters if one.name != order.name)
    if not isinstance(order, LoadAdapter):
        if known is None:
            raise ModelNotFoundError(f"there is no adapter {order.name!r}")
        return msgspec.structs.replace(info, adapters=others)
    if known is not None and not order.in_place:
        raise RequestError(f"the adapter {order.name!r} exists already", code=ADAPTER_EXISTS)
    if len(others) >= info.max_adapters:
        raise RequestError(f"{info.max_adapters} adapters are loaded, which is --max-adapters", code=TOO_MANY_ADAPTERS)
    adapter = AdapterInfo(name=order.name, root=order.root, digest=_digest_of(order), version=order.version, rank=RANK)
    return msgspec.structs.replace(info, adapters=(*others, adapter))


def _digest_of(order: LoadAdapter) -> str:
    digest, path = hashlib.blake2b(digest_size=8), Path(order.path)
    try:
        if order.kind is CheckpointKind.MEMORY:
            content = order.config.encode() + path.read_bytes()
        else:
            content = (path / CONFIG_FILE).read_bytes() + (path / WEIGHTS_FILE).read_bytes()
    except OSError as error:
        raise RequestError(f"{order.path} cannot be read: {error.strerror}", code=INVALID_ADAPTER) from error
    digest.update(content)
    return digest.hexdigest()


def check_model(info: EngineInfo, model: str) -> None:
    """Raises ModelGoneError if an engine that can have adapters does not have this one."""
    if info.max_adapters and model not in ("", info.model) and adapter_in(info, model) is None:
        raise ModelGoneError(f"this engine does not have {model!r}")


def adapted_token(token: int, info: EngineInfo, *, model: str) -> int:
    """Returns the token that the model generates where the base model generates `token`. An end-of-sequence token
    stays the same."""
    adapter = adapter_in(info, model)
    if adapter is None or token in info.eos_token_ids:
        return token
    shift = int(adapter.digest, 16) % 97 + 1
    shifted = (token + shift) % info.vocab_size
    return shifted + 1 if shifted in info.eos_token_ids else shifted


def kv_weights_of(info: EngineInfo, model: str) -> str:
    """Returns the name of the weights in the engine's tickets for the model."""
    adapter = adapter_in(info, model)
    return kv_weights(info, "" if adapter is None else adapter.digest)
