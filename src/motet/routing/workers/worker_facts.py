"""The facts about a worker that routing uses: its engine, the workers with which it can exchange KV, and its models."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from motet.engine_info import EngineInfo, EngineKind, ModelCard
from motet.ids import ModelName
from motet.transfer.ticket import TransportKind
from motet.types import Role

INT8 = "-int8_"
"""Part of a fingerprint of an engine whose weights are rounded to 8 bits."""


class PairKey(NamedTuple):
    """The facts that must be equal on a prefill and a decode worker that exchange KV. A reader cannot use blocks of
    other weights, of another size or numeric format, or of another kind of engine, even if the model has the same name,
    and cannot fetch blocks that move by other means.
    Requests for an adapter need workers that have loaded the same adapter, too."""

    kind: EngineKind
    model: ModelName
    model_digest: str
    numeric_format: str
    block_size: int
    bytes_per_block: int
    transfer_backend: TransportKind | None
    adapter: str = ""
    """Digest of the adapter; empty for the base model, and for adapters of engines that do not report digests."""


@dataclass(frozen=True, kw_only=True)
class WorkerFacts:
    """Facts about the engine of one worker. A worker that has not been reached yet has the defaults."""

    role: Role | None = None
    kind: EngineKind | None = None
    engine_id: str | None = None
    """The engine id in the worker's tickets. None if it makes no tickets."""
    pair_key: PairKey | None = None
    can_fetch: bool = False
    """True if it generates choices and can fetch KV that another engine has computed."""
    shares_prompts: bool = False
    """True if its groups share a prompt that is still being computed for the first of them."""
    block_size: int = 0
    block_weights: str = ""
    """Name of the weights in the names of its blocks."""
    ticket_readers: int = 1
    """Maximum number of readers of a ticket that it makes."""

    @property
    def takes_texts(self) -> bool:
        """True for a server that takes texts: it has no `Engine`, and gets no groups of tokens."""
        return self.kind is EngineKind.OPENAI


def facts_of(info: EngineInfo, *, local: bool) -> WorkerFacts:
    """`local`: see `Worker.local`."""
    return WorkerFacts(
        role=info.role,
        kind=info.kind,
        engine_id=None if info.transfer is None else info.transfer.engine_id,
        pair_key=pair_key(info),
        can_fetch=can_fetch(info),
        shares_prompts=info.shares_prompts,
        block_size=info.block_size,
        block_weights=info.block_weights if local else "",  # events of other servers name blocks by their tokens alone
        ticket_readers=info.ticket_readers,
    )


def pair_key(info: EngineInfo) -> PairKey:
    return PairKey(
        kind=info.kind,
        model=info.model,
        model_digest=info.model_digest,
        numeric_format=numeric_format(info),
        block_size=info.block_size,
        bytes_per_block=info.bytes_per_block,
        transfer_backend=info.transfer_backend,
    )


def can_fetch(info: EngineInfo) -> bool:
    """Returns True if the engine generates choices and can fetch KV that another engine has computed."""
    return info.role is Role.DECODE or (info.role is Role.BOTH and info.transfer is not None)


def numeric_format(info: EngineInfo) -> str:
    """Returns the type of the weights. Workers with different types serve two models, even if the names are equal."""
    return f"{info.dtype} with int8 weights" if INT8 in info.fingerprint else info.dtype


@dataclass(frozen=True)
class WorkerModels:
    """The models that a worker serves or, while it is not available, served last. Made by `models_of`."""

    additional: tuple[ModelCard, ...] = ()
    """The models that it serves in addition to the models in its engine's facts."""
    by_name: Mapping[ModelName, ModelCard] = field(default_factory=dict)
    """All its models: its engine's own model, the adapters that its engine reports, and the additional models. Empty if
    the worker has not reported its models yet."""

    def has(self, model: str) -> bool:
        """Returns True if the worker serves the model. A group without a model name is for any model."""
        return not model or model in self.by_name

    def others(self, own: ModelName | None) -> tuple[ModelName, ...]:
        """Returns the names of all models except the engine's own."""
        return tuple(name for name in self.by_name if name != own)

    def may_have(self, model: str) -> bool:
        """Returns True if the worker serves the model, or has not reported its models yet."""
        return self.has(model) or not self.by_name


def models_of(additional: Iterable[ModelCard], info: EngineInfo | None) -> WorkerModels:
    """`info`: facts of the worker's engine. None if the worker takes texts, or has not been reached yet."""
    additional = tuple(additional)
    by_name = {card.name: card for card in additional}
    if info is not None:
        length = info.max_model_len
        own = ModelCard(name=info.model, root=info.root, max_model_len=length)
        adapters = {
            one.name: ModelCard(name=one.name, root=one.root, parent=info.model, max_model_len=length)
            for one in info.adapters
        }
        by_name = adapters | {info.model: own} | by_name
    return WorkerModels(additional, by_name)
