"""How a text upstream is, in the shape in which keepers hear of every worker: it lists its models, or it does not.

It tells of no engine: there is no identity of a start, and no figures. What routing asks of an engine and such a server
does not say has the value that stands in nobody's way.
"""

import msgspec

from motet.engines.base import WorkerState
from motet.engines.upstream.base import UNKNOWN_LENGTH
from motet.engines.upstream.client import UpstreamServer
from motet.engines.wire import EngineReport
from motet.errors import EngineError, OtherServerError, UpstreamRefusalError
from motet.ids import ModelName
from motet.types import UNKNOWN_VOCABULARY, EngineInfo, EngineKind, ModelCard, Role

MODELS = "/v1/models"


class _Card(msgspec.Struct, frozen=True):
    """OpenAI's, and what vLLM, SGLang, LMDeploy and llama.cpp add to it."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class _List(msgspec.Struct, frozen=True):
    data: list[_Card]


async def report_of(server: UpstreamServer) -> EngineReport:
    """Asks it. Raises OtherServerError if it lists no models, EngineSilentError and EngineDiedError if it is not there,
    another EngineError if there is no understanding."""
    try:
        body = await server.get(MODELS, timeout_s=server.options.timeouts.report_s)
    except UpstreamRefusalError as error:
        raise OtherServerError(f"{server.name} refused {MODELS} with {error.status}: {error.message}") from error
    try:
        listed = server.decode(body, _List).data
    except EngineError as error:
        raise OtherServerError(error.message) from error
    cards = _served(listed, server)
    if not cards:
        raise EngineError(f"{server.name} serves none of the models that are wanted of it: it lists {_names(listed)}")
    return EngineReport(
        version="", engine_id=f"texts at {server.url}", state=WorkerState.READY, info=_info(cards[0]), models=cards
    )


def _served(listed: list[_Card], server: UpstreamServer) -> tuple[ModelCard, ...]:
    """By the names of clients. Adapters come after what they adapt, so that the first is a model of its own."""
    by_id = {card.id: card for card in listed}
    names = server.options.names or {card.id: card.id for card in listed}
    ours = {theirs: name for name, theirs in names.items()}
    cards = [
        ModelCard(
            name=ModelName(name),
            root=by_id[theirs].root or theirs,
            parent=ModelName(ours[parent]) if (parent := by_id[theirs].parent) in ours and parent is not None else None,
            max_model_len=by_id[theirs].max_model_len or UNKNOWN_LENGTH,
        )
        for name, theirs in names.items()
        if theirs in by_id
    ]
    return tuple(sorted(cards, key=lambda card: card.parent is not None))


def _info(card: ModelCard) -> EngineInfo:
    return EngineInfo(
        model=card.name,
        max_model_len=card.max_model_len,
        vocab_size=UNKNOWN_VOCABULARY,
        block_size=1,
        num_blocks=0,
        bytes_per_block=0,
        max_num_seqs=0,
        role=Role.BOTH,
        eos_token_ids=(),
        dtype="",
        device="",
        fingerprint="",
        kind=EngineKind.OPENAI,
    )


def _names(listed: list[_Card]) -> str:
    return ", ".join(card.id for card in listed[:10]) or "none"
