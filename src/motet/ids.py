"""Identifiers, each with a type of its own, so that the type checker finds one passed for another."""

import secrets
from typing import NewType

RequestId = NewType("RequestId", str)
"""Id of one group (one prompt and its choices) in log lines, on the wire and in the engine."""

ModelName = NewType("ModelName", str)


def new_request_id(prefix: str) -> RequestId:
    """Returns a new id with 128 random bits: `chatcmpl-4f0c...`, or `resp_4f0c...` for a prefix that ends in `_`."""
    return RequestId(f"{prefix}{'' if prefix.endswith('_') else '-'}{secrets.token_hex(16)}")


def new_engine_id(role: str) -> str:
    """Returns an id for one start of an engine, such as `prefill-4f0c...`, unique across machines."""
    return f"{role}-{secrets.token_hex(16)}"
