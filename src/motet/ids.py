"""Identifiers, each with a type of its own, so that the type checker finds one passed for another."""

import re
import secrets
from typing import NewType

RequestId = NewType("RequestId", str)
"""Id of one group (one prompt and its choices) in log lines, on the wire and in the engine."""

ModelName = NewType("ModelName", str)


_PART_OF_PATH = re.compile(r"[A-Za-z0-9._:~-]{1,128}")


def new_request_id(prefix: str, *, named: str = "") -> RequestId:
    """Returns a new id with 128 random bits: `chatcmpl-4f0c...`, or `resp_4f0c...` for a prefix that ends in `_`.

    `named`: the client's own id of the request. It becomes a part of the new id, `chatcmpl-mine-4f0c...`, if it is
    short and has only characters that a URL's path can have. The new id is unique even if the client repeats its own.
    """
    own = f"{named}-" if _PART_OF_PATH.fullmatch(named) else ""
    return RequestId(f"{prefix}{'' if prefix.endswith('_') else '-'}{own}{secrets.token_hex(16)}")


def new_engine_id(role: str) -> str:
    """Returns an id for one start of an engine, such as `prefill-4f0c...`, unique across machines."""
    return f"{role}-{secrets.token_hex(16)}"
