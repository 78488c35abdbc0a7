"""Which part of a JSON Schema llguidance cannot compile: its errors do not say, so parts are tried by themselves.

From the top down: while a part fails and one of the schemas in it fails alone, that one is to blame. References keep
their meaning, as the whole schema goes along under a name that nothing reads.
"""

import time
from collections.abc import Callable, Mapping
from typing import Final

from motet.grammar.schema import Path, Place, inner_schemas

MAX_TRIES: Final = 100
MAX_SECONDS: Final = 1.0
WHOLE: Final = "x-whole-schema"

Fault = Callable[[Mapping[str, object]], str | None]
"""What is wrong with a schema, in llguidance's words; None: it compiles."""


def find_blamed(
    root: Mapping[str, object], why: str, fault: Fault, *, clock: Callable[[], float] = time.monotonic
) -> tuple[Path, str]:
    """The deepest part that fails by itself, and why; `root` failed because of `why`. Ends after `MAX_TRIES` parts or
    `MAX_SECONDS`, with the deepest one found so far."""
    whole = _moved(root)
    deadline = clock() + MAX_SECONDS
    place, tries = Place((), root), MAX_TRIES
    while True:
        deeper: tuple[Place, str] | None = None
        for inner in inner_schemas(place.schema):
            if not isinstance(inner.schema, dict):
                continue
            if tries == 0 or clock() > deadline:
                return place.path, why
            tries -= 1
            moved = _moved(inner.schema)
            said = fault({**moved, WHOLE: whole} if isinstance(moved, dict) else {})
            if said is not None and (deeper is None or said == why):
                deeper = Place((*place.path, *inner.path), inner.schema), said
            if said == why:
                break
        if deeper is None:
            return place.path, why
        place, why = deeper


def _moved(value: object) -> object:
    """The same schema, with every reference into the whole of it."""
    if isinstance(value, dict):
        return {key: _moved_ref(inner) if key == "$ref" else _moved(inner) for key, inner in value.items()}
    return [_moved(inner) for inner in value] if isinstance(value, list) else value


def _moved_ref(ref: object) -> object:
    if not isinstance(ref, str):
        return _moved(ref)  # a property of that name
    return f"#/{WHOLE}" if ref in ("#", "#/") else f"#/{WHOLE}/{ref[2:]}"
