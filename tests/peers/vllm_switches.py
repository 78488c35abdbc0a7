"""Switches with which a fake vLLM server behaves as an older version, has other settings, or fails."""

from dataclasses import dataclass

from tests.peers.vllm_shapes import Json


@dataclass
class Switches:
    """Tests can change the fields at any time."""

    scale_out: bool = False
    """If off, `/inference/v1/generate` is a 403."""
    token_ids: bool = True
    """If off, the server does not know `return_token_ids`."""
    reports_blocks: bool = True
    """If off, the size and number of blocks in its metrics are `None`."""
    event_sources: Json | None = None
    """The answer of `/kv_event_sources`. None simulates an older server, which answers 404."""
    connector: bool = True
    """If off, the server makes no tickets, and ignores the tickets that it gets."""
    tokens_of_text: list[int] | None = None
    """The tokens that `/tokenize` returns for any text. None means that the server does not have the route."""
    defaults: Json | None = None
    """The server's defaults of sampling fields in rendered requests. None means that it does not render requests."""
    refuses_priority: bool = False
    healthy: bool = True
    """If off, the engine is dead."""
    api_key: str | None = None
    ticket_in_list: bool = False
    """If on, `kv_transfer_params` of an answer is a list with one item."""
    pull_fails: bool = False
    pull_hangs: bool = False
    tokens_a_chunk: int = 1
    fail_after: int | None = None
    """Number of tokens per choice after which the engine fails every request."""
    lost: tuple[str, ...] = ()
    """Adapters that the server still lists but no longer has."""
    changes_adapters: bool = True
    """If off, the server has no routes for adapters: it was started without VLLM_ALLOW_RUNTIME_LORA_UPDATING."""
    unreadable: tuple[str, ...] = ()
    """Paths from which no adapter can be loaded."""
    too_busy: int = 0
    """Number of following requests for tokens that are refused with 503."""
