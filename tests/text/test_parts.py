"""Parts that follow each other are joined, so that a step of several tokens is one delta."""

from motet.text.parts import Content, Part, Reasoning, ToolCallArguments, ToolCallBegin, merged


def test_only_consecutive_pieces_of_one_text_are_joined() -> None:
    first, second = ToolCallBegin(0, "a", "f"), ToolCallBegin(1, "b", "g")
    pieces: list[Part] = [Reasoning("x"), Reasoning("y"), Content("c"), Content("d"), first]
    pieces += [ToolCallArguments(0, "{"), ToolCallArguments(0, "}"), second, ToolCallArguments(1, "{}"), Content("e")]
    assert merged(pieces) == (
        Reasoning("xy"),
        Content("cd"),
        first,
        ToolCallArguments(0, "{}"),
        second,
        ToolCallArguments(1, "{}"),
        Content("e"),
    )
    assert merged([ToolCallArguments(0, "a"), ToolCallArguments(1, "b")]) == (
        ToolCallArguments(0, "a"),
        ToolCallArguments(1, "b"),
    )
