"""The messages between Motet servers are listed next to the number of their protocol, so that both change together.

`wire_fields.txt` has the number, and every field of the messages by its name on the wire. After a change run

    python -m tests.engines.test_wire_fields

which refuses a change that the other side could misread, unless `PROTOCOL` in `motet/engines/wire.py` is raised, with a
line of history: a sampling field, which a worker must not ignore; a required field; another name, type or order.
Statistics (`EngineStats`) are not listed: the other side can ignore new ones.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec import inspect as info

from motet.engine_orders import OrderAnswer, WorkerOrder
from motet.engines.wire import PROTOCOL, PROTOCOL_HEADER, CarriedError, EngineReport, StopChoice
from motet.transfer.ticket import Ticket
from motet.types import GenerateRequest, GroupDelta, SamplingParams

LIST = Path(__file__).with_name("wire_fields.txt")
MESSAGES = (
    *(GenerateRequest, Ticket, StopChoice, WorkerOrder),
    *(GroupDelta, CarriedError, EngineReport, OrderAnswer),
)
"""Messages of a gateway to a worker, and the worker's answers."""


def test_the_listed_fields_and_protocol_are_those_of_the_messages() -> None:
    raise_it = [f"raise PROTOCOL in motet/engines/wire.py: {why}" for why in misread(LIST.read_text(), listed())]
    advice = "; ".join([*raise_it, "run python -m tests.engines.test_wire_fields"])
    assert LIST.read_text() == listed(), advice


def test_the_page_of_the_protocol_has_its_number() -> None:
    page = LIST.parents[2] / "docs" / "status.md"
    assert f"`{PROTOCOL_HEADER}: {PROTOCOL}`" in page.read_text()


BEFORE = """protocol 7

Finish (array)
    reason: FinishReason

FinishReason: stop, length

SamplingParams (map)
    max_tokens: int
    top_p: float, optional

Ticket (map)
    host: str
"""


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (
            "    top_p: float, optional",
            "    top_p: float, optional\n    novelty: float, optional",
            "SamplingParams.novelty is a",
        ),
        ("    top_p: float, optional\n", "", "SamplingParams.top_p was changed or removed"),
        ("max_tokens: int", "max_tokens: float", "SamplingParams.max_tokens was changed or removed"),
        ("    host: str", "    host: str\n    port: int", "Ticket.port is required"),
        (
            "    reason: FinishReason",
            "    token: int, optional\n    reason: FinishReason",
            "Finish.reason has another place",
        ),
        ("stop, length", "stop, length, abort", "FinishReason has other values"),
        ("Ticket (map)", "Ticket (array)", "Ticket has another form"),
        ("    host: str", "    host: str\n    port: int, optional", None),
        ("    reason: FinishReason", "    reason: FinishReason\n    token: int, optional", None),
        ("protocol 7", "protocol 8", None),
    ],
    ids=str,
)
def test_a_change_that_the_other_side_could_misread_needs_another_protocol(old: str, new: str, why: str | None) -> None:
    after = BEFORE.replace(old, new)
    assert after != BEFORE
    reasons = list(misread(BEFORE, after))
    assert (len(reasons) == 1 and reasons[0].startswith(why)) if why else not reasons
    assert not list(misread(BEFORE, after.replace("protocol 7", "protocol 8")))


def misread(before: str, after: str) -> Iterator[str]:
    """Yields the changes between two lists with the same protocol that the other side could misread."""
    old, new = _parts(before), _parts(after)
    if before.split("\n")[0] != after.split("\n")[0]:
        return
    for name in old.keys() & new.keys():
        (form, *fields), (new_form, *new_fields) = old[name], new[name]
        if form != new_form:
            yield f"{name} has other values" if ": " in form.partition("(")[0] else f"{name} has another form"
        for field in fields:
            if field not in new_fields:
                yield f"{_field(name, field)} was changed or removed"
            elif "(array" in form and fields.index(field) != new_fields.index(field):
                yield f"{_field(name, field)} has another place"
        known = {_field(name, field) for field in fields}
        for field in new_fields:
            if _field(name, field) not in known and not field.endswith(", optional"):
                yield f"{_field(name, field)} is required"
            elif _field(name, field) not in known and name == SamplingParams.__name__:
                yield f"{_field(name, field)} is a sampling field, which workers with this protocol ignore"


def _parts(text: str) -> dict[str, list[str]]:
    parts = (part.split("\n") for part in text.strip().split("\n\n")[1:])
    return {re.split("[ :]", part[0])[0]: part for part in parts}


def _field(name: str, line: str) -> str:
    return f"{name}.{line.strip().partition(':')[0]}"


def listed() -> str:
    """Returns the protocol and the parts of its messages, in the order of their names."""
    parts: dict[str, list[str]] = {}
    for kind in info.multi_type_info(MESSAGES):
        _collect(kind, parts)
    return "\n".join([f"protocol {PROTOCOL}", *("\n".join(["", *parts[name]]) for name in sorted(parts))]) + "\n"


def _collect(kind: info.Type, parts: dict[str, list[str]]) -> None:
    match kind:
        case info.StructType():
            if kind.cls.__name__ in parts:
                return
            fields = [
                f"    {field.encode_name}: {_name(field.type)}{'' if field.required else ', optional'}"
                for field in kind.fields
            ]
            tag = "" if kind.tag is None else f", {kind.tag_field}: {kind.tag}"
            form = "array" if kind.array_like else "map"
            parts[kind.cls.__name__] = [f"{kind.cls.__name__} ({form}{tag})", *fields]
        case info.EnumType():
            parts[kind.cls.__name__] = [f"{kind.cls.__name__}: {', '.join(str(value.value) for value in kind.cls)}"]
    for inner in _inner(kind):
        _collect(inner, parts)


def _inner(kind: info.Type) -> Iterator[info.Type]:
    match kind:
        case info.StructType():
            yield from (field.type for field in kind.fields)
        case info.UnionType():
            yield from kind.types
        case info.TupleType():
            yield from kind.item_types
        case info.VarTupleType() | info.ListType():
            yield kind.item_type
        case info.DictType():
            yield from (kind.key_type, kind.value_type)


def _name(kind: info.Type) -> str:
    if isinstance(kind, info.StructType | info.EnumType):
        return kind.cls.__name__
    name = type(kind).__name__.removesuffix("Type").lower().replace("vartuple", "array")
    inner = [_name(one) for one in _inner(kind)]
    return f"{name}[{', '.join(inner)}]" if inner else name


if __name__ == "__main__":
    if reasons := list(misread(LIST.read_text(), listed())):
        sys.exit("raise PROTOCOL in motet/engines/wire.py first:\n  " + "\n  ".join(reasons))
    LIST.write_text(listed())
