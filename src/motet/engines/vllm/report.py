"""How a vLLM server is, in the shape in which our own workers report. Pure.

What vLLM does not tell is said to be unknown: its vocabulary, its end-of-sequence tokens, how many choices it runs at
once. Where it does not tell its blocks either, they are taken to be enough: it queues what has no place itself. Its
block events are followed where there is one publisher: of several data-parallel ranks nobody could tell which has a
prefix, since vLLM itself chooses the rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

from motet.engines.base import WorkerState
from motet.engines.vllm.scrape import Scrape, stats_of
from motet.engines.wire import UNREADABLE, EngineReport
from motet.errors import OtherServerError
from motet.ids import ModelName
from motet.transfer.ticket import TransferAddress
from motet.types import UNKNOWN_VOCABULARY, EngineInfo, EngineKind, ModelCard, Role

MAX_NUM_SEQS = 1024
"""The most that vLLM runs at once unless told otherwise. A server with fewer queues the others itself, so that too high
a figure costs less than one that holds back what could run."""
BLOCK_SIZE = 16
"""vLLM's default on a GPU, for a server that does not tell its own."""
TICKET_READERS = 1

ANY_HOST = ("*", "0.0.0.0", "::", "[::]")
"""What a publisher listens at, and nobody can connect to."""


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """Of a model, in `GET /v1/models`."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: tuple[Card, ...]


class _Version(msgspec.Struct):
    version: str


class EventSource(msgspec.Struct, frozen=True, kw_only=True):
    """Of one rank, in `GET /kv_event_sources`."""

    endpoint: str
    replay_endpoint: str | None = None


@dataclass(frozen=True, kw_only=True)
class Start:
    """What stays as it is from one start of a server to the next."""

    engine_id: str
    version: str
    events: EventSource | None
    """None: it publishes none, or from several places."""


def cards_in(body: bytes) -> tuple[Card, ...]:
    """The first is a model of the server's own, not an adapter. Raises OtherServerError."""
    try:
        cards = msgspec.json.decode(body, type=_Cards).data
    except UNREADABLE as error:
        raise OtherServerError(f"its list of models cannot be read: {error}") from error
    ordered = sorted(cards, key=lambda card: card.parent is not None)
    if not ordered or ordered[0].parent is not None or ordered[0].max_model_len is None:
        raise OtherServerError("it lists no model with its max_model_len")
    return tuple(ordered)


def version_in(body: bytes) -> str:
    """Raises OtherServerError."""
    try:
        return msgspec.json.decode(body, type=_Version).version
    except UNREADABLE as error:
        raise OtherServerError(f"its version cannot be read: {error}") from error


def event_source_in(body: bytes) -> EventSource | None:
    """Raises OtherServerError."""
    try:
        by_rank = msgspec.json.decode(body, type=dict[str, EventSource])
    except UNREADABLE as error:
        raise OtherServerError(f"its kv_event_sources cannot be read: {error}") from error
    return next(iter(by_rank.values())) if len(by_rank) == 1 else None


def report_of(url: str, start: Start, scrape: Scrape, cards: Sequence[Card], *, role: Role | None) -> EngineReport:
    """Of a server that is healthy."""
    address = urlsplit(url)
    host = address.hostname or ""
    port = address.port or (443 if address.scheme == "https" else 80)
    own, *others = cards
    max_model_len = own.max_model_len or 0
    block_size = scrape.block_size or BLOCK_SIZE
    source = start.events if scrape.ranks == 1 else None
    return EngineReport(
        version=start.version,
        engine_id=start.engine_id,
        state=WorkerState.READY,
        info=EngineInfo(
            model=ModelName(own.id),
            max_model_len=max_model_len,
            vocab_size=UNKNOWN_VOCABULARY,
            block_size=block_size,
            num_blocks=scrape.num_blocks or MAX_NUM_SEQS * -(-max_model_len // block_size),
            bytes_per_block=0,
            max_num_seqs=MAX_NUM_SEQS,
            role=role or Role.BOTH,
            eos_token_ids=(),
            dtype=scrape.cache_dtype,
            device="remote",
            fingerprint=f"vllm-{start.version}-{own.id}",
            transfer=TransferAddress(start.engine_id, host, port) if role or scrape.connector else None,
            kind=EngineKind.VLLM,
            ticket_readers=TICKET_READERS,
        ),
        stats=stats_of(scrape),
        block_events=reachable(source.endpoint, host) if source else None,
        block_replay=reachable(source.replay_endpoint, host) if source and source.replay_endpoint else None,
        models=tuple(_model_card(card, max_model_len) for card in others),
    )


def reachable(endpoint: str, host: str) -> str:
    """The address to connect to, of one that may be bound to every address of the server at `host`."""
    scheme, separator, rest = endpoint.partition("://")
    bound, colon, port = rest.rpartition(":")
    if scheme != "tcp" or bound not in ANY_HOST:
        return endpoint
    return f"{scheme}{separator}{f'[{host}]' if ':' in host else host}{colon}{port}"


def _model_card(card: Card, max_model_len: int) -> ModelCard:
    """An adapter's own card does not tell the length."""
    return ModelCard(
        name=ModelName(card.id),
        root=card.root or "",
        parent=ModelName(card.parent) if card.parent else None,
        max_model_len=card.max_model_len or max_model_len,
    )
