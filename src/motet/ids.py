"""Identities, each a type of its own so that one is never passed for another."""

from typing import NewType
from uuid import uuid4

RequestId = NewType("RequestId", str)
"""Names one group (one prompt and its choices) everywhere: in log lines, on the wire and in the engine."""

ModelName = NewType("ModelName", str)


def new_request_id(prefix: str) -> RequestId:
    """A fresh id such as `chatcmpl-4f0c...`, 128 random bits. Behind a prefix that ends in `_` stands no `-`."""
    return RequestId(f"{prefix}{'' if prefix.endswith('_') else '-'}{uuid4().hex}")


def new_engine_id(role: str) -> str:
    """Names one start of an engine, such as `prefill-4f0c...`: no two are equal, on any machine."""
    return f"{role}-{uuid4().hex}"
