"""Switches that make a played vLLM server older, set it up in another way, or make it fail."""

from dataclasses import dataclass

from tests.peers.vllm_shapes import Json


@dataclass
class Switches:
    """Tests may change these at any time."""

    scale_out: bool = False
    """If off, `/inference/v1/generate` is a 403."""
    token_ids: bool = True
    """If off, the server does not know `return_token_ids`."""
    tells_blocks: bool = True
    """If off, the size and number of blocks in its figures are `None`."""
    event_sources: Json | None = None
    """None stands for an older server, which answers 404."""
    connector: bool = True
    """If off, the server makes no tickets and ignores those that it gets."""
    tokens_of_text: list[int] | None = None
    """The tokens that `/tokenize` makes of any text. None means that there is no such route."""
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
    """Number of tokens a choice after which the engine fails every request."""
    lost: tuple[str, ...] = ()
    """Adapters that it has no more, though it still lists them."""
    too_busy: int = 0
    """Number of requests for tokens that are still to be refused with 503."""
