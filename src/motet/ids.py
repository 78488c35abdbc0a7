"""Identifiers, each with a type of its own, so that the type checker finds one passed for another."""

import secrets
from typing import NewType

RequestId = NewType("RequestId", str)
"""Id of one group (one prompt and its choices) in log lines, on the wire and in the engine."""

ModelName = NewType("ModelName", str)


def new_request_id(prefix: str) -> RequestId:
    """Returns a new id such as `chatcmpl-4f0c...` with 128 random bits. A prefix that ends in `_`, such as `resp_`, is
    not followed by `-`, as in OpenAI's ids."""
    return RequestId(f"{prefix}{'' if prefix.endswith('_') else '-'}{secrets.token_hex(16)}")


def new_engine_id(role: str) -> str:
    """Returns an id for one start of an engine, such as `prefill-4f0c...`, unique across machines."""
    return f"{role}-{secrets.token_hex(16)}"
