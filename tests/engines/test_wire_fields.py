"""The messages between Motet servers are listed next to the number of their protocol, so that both change together.

`wire_fields.txt` has the number, and every field of the messages by its name on the wire. After a change run

    python -m tests.engines.test_wire_fields

and raise `PROTOCOL` in `motet/engines/wire.py`, with a line of history, if the other side could misread the change:
a field that it must not ignore, another name or type, another order in an array. Statistics (`EngineStats`) are not
listed: the other side can ignore new ones.
"""

from collections.abc import Iterator
from pathlib import Path

from msgspec import inspect as info

from motet.engine_orders import OrderAnswer, WorkerOrder
from motet.engines.wire import PROTOCOL, CarriedError, EngineReport, StopChoice
from motet.transfer.ticket import Ticket
from motet.types import GenerateRequest, GroupDelta

LIST = Path(__file__).with_name("wire_fields.txt")
MESSAGES = (
    *(GenerateRequest, Ticket, StopChoice, WorkerOrder),
    *(GroupDelta, CarriedError, EngineReport, OrderAnswer),
)
"""Messages of a gateway to a worker, and the worker's answers."""


def test_the_listed_fields_and_protocol_are_those_of_the_messages() -> None:
    assert LIST.read_text() == listed(), "see the docstring of this file"


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
    LIST.write_text(listed())
