"""Identities, each a type of its own so that one is never passed for another."""

import secrets
from typing import NewType

RequestId = NewType("RequestId", str)
"""Names one group (one prompt and its choices) everywhere: in log lines, on the wire and in the engine."""

ModelName = NewType("ModelName", str)


def new_request_id(prefix: str) -> RequestId:
    """Returns a new id such as `chatcmpl-4f0c...` with 128 random bits. A prefix such as `resp_` gets no `-` behind it,
    as in OpenAI's ids."""
    return RequestId(f"{prefix}{'' if prefix.endswith('_') else '-'}{secrets.token_hex(16)}")


def new_engine_id(role: str) -> str:
    """Names one start of an engine, such as `prefill-4f0c...`: no two are equal, on any machine."""
    return f"{role}-{secrets.token_hex(16)}"
