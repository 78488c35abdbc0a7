"""What a played vLLM server may be told to be: older, set up in another way, or failing."""

from dataclasses import dataclass

from tests.peers.vllm_shapes import Json


@dataclass
class Switches:
    """What a test may change at any time."""

    scale_out: bool = False
    """Whether `/inference/v1/generate` is there; 403 otherwise."""
    token_ids: bool = True
    """Off: a server that does not know `return_token_ids`."""
    tells_blocks: bool = True
    """Off: their size and number are `None` in its figures."""
    event_sources: Json | None = None
    """None: an older server, 404."""
    connector: bool = True
    """Off: it makes no tickets, and passes over those it is sent."""
    tokens_of_text: list[int] | None = None
    """What `/tokenize` makes of any text; None: there is no such route."""
    refuses_priority: bool = False
    healthy: bool = True
    """Off: its engine is dead."""
    api_key: str | None = None
    ticket_in_list: bool = False
    """Whether `kv_transfer_params` of an answer are a list of one."""
    pull_fails: bool = False
    pull_hangs: bool = False
    tokens_a_chunk: int = 1
    fail_after: int | None = None
    """Its engine fails every request after so many tokens a choice."""
    lost: tuple[str, ...] = ()
    """Adapters that it has no more, though it still lists them."""
    too_busy: int = 0
    """So many requests for tokens are refused with 503."""
