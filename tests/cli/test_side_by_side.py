"""How answers are laid out, on a terminal and without one."""

import io

import pytest
from rich.console import Console

from motet.cli.conversation import Answer, Conversation
from motet.cli.side_by_side import OnChange, layout, show


def drawn(answers: list[Answer], *, width: int, height: int | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    with console.capture() as capture:
        console.print(layout(answers, width=width, height=height))
    return capture.get().splitlines()


def test_answers_stand_side_by_side_when_they_fit() -> None:
    lines = drawn([Answer("one"), Answer("two"), Answer("three")], width=120)
    assert any("one" in line and "two" in line and "three" in line for line in lines)


def test_answers_stand_below_each_other_when_they_do_not_fit() -> None:
    lines = drawn([Answer("one"), Answer("two")], width=40)
    assert not any("one" in line and "two" in line for line in lines)
    assert any("two" in line for line in lines)


@pytest.mark.parametrize("n", [1, 2, 4, 5, 8])
def test_while_they_are_written_all_fit_the_screen(n: int) -> None:
    answers = [Answer("word " * 400 + f"last{i}") for i in range(n)]
    lines = drawn(answers, width=80, height=24)
    assert len(lines) <= 24
    assert all(len(line) <= 80 for line in lines)
    assert all(any(f"last{i}" in line for line in lines) for i in range(n))


def test_square_brackets_of_an_answer_are_no_markup() -> None:
    assert any("[bold]x[/bold]" in line for line in drawn([Answer("[bold]x[/bold]")], width=80))


def test_a_thought_is_shown_until_something_is_said() -> None:
    assert any("Hm." in line for line in drawn([Answer(thought="Hm.")], width=80))
    said = drawn([Answer("Yes.", thought="Hm.")], width=80)
    assert any("Yes." in line for line in said)
    assert not any("Hm." in line for line in said)


def two_answers(on_change: OnChange) -> Conversation:
    talk = Conversation(2)
    on_change(talk)
    talk.answers[0].text, talk.answers[0].finish_reason = "first [x]", "stop"
    talk.answers[1].text, talk.answers[1].finish_reason = "second", "length"
    on_change(talk)
    return talk


def test_without_a_terminal_finished_answers_are_printed_one_after_the_other() -> None:
    out = io.StringIO()
    show(Console(file=out), two_answers)
    assert out.getvalue() == "--- choice 0 (stop)\nfirst [x]\n--- choice 1 (length)\nsecond\n"


def test_on_a_terminal_the_finished_answers_stay() -> None:
    out = io.StringIO()
    show(Console(file=out, force_terminal=True, color_system=None, width=80, height=24), two_answers)
    _, left = out.getvalue().rsplit("\x1b[?25h", 1)  # the cursor is back: nothing is drawn over from here on
    assert "first [x]" in left
    assert "second" in left
