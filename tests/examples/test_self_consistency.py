"""The example of self-consistency: its questions, its figures, and a run against a server with a scripted engine."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from examples.self_consistency.questions import KINDS, MAX_QUESTIONS, SHOTS, make_questions
from examples.self_consistency.report import Answer, Run, difference, load, table, wilson
from examples.self_consistency.run import POLICIES
from motet.types import ChoiceStart, GenerateRequest
from tests.fake_server import FakeServer
from tests.tiny_tokenizer import build_tiny_tokenizer, fake_answer, save_tiny_tokenizer

ROOT = Path(__file__).parents[2]
TOKENIZER = build_tiny_tokenizer()
QUESTIONS = make_questions(len(KINDS), seed=3)
NEVER_AGREES = "greater"


def answered(request: GenerateRequest, start: ChoiceStart) -> list[int]:
    """Returns the tokens of a sample. All samples have the correct answer, except for questions of one kind, whose
    samples have different answers."""
    prompt = TOKENIZER.decode(list(request.prompt))
    (question,) = [one for one in QUESTIONS if prompt.endswith(f"Q: {one.text}\nA:")]
    value = 1000 + start.index if question.kind == NEVER_AGREES else question.answer
    return fake_answer(f"1 + 1 = 2. The answer is {value:4}.")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    with FakeServer(save_tiny_tokenizer(tmp_path_factory.mktemp("model")), answered) as running:
        yield running


def test_equal_seeds_make_equal_questions_of_each_kind_in_turn_and_none_twice() -> None:
    made = make_questions(MAX_QUESTIONS, seed=11)
    assert made == make_questions(MAX_QUESTIONS, seed=11)
    assert made[:96] == make_questions(96, seed=11) != make_questions(96, seed=12)
    assert [question.kind for question in made] == [kind.__name__ for kind in KINDS] * (MAX_QUESTIONS // len(KINDS))
    assert len({question.text for question in made}) == MAX_QUESTIONS
    assert not any(question.text in SHOTS for question in made)
    assert (made[0].text, made[0].answer) == ("What is 9 + 9?", 18)
    with pytest.raises(ValueError, match="at most 360"):
        make_questions(MAX_QUESTIONS + 1, seed=11)


@pytest.mark.long
@pytest.mark.slow
def test_one_command_runs_each_policy_and_one_makes_the_picture(server: FakeServer, tmp_path: Path) -> None:
    """A policy starts as few samples as it needs if all agree, and all samples if none agree."""
    out, picture = tmp_path / "runs.json", tmp_path / "savings.svg"
    flags = ["--url", f"{server.url}/v1", "--questions", str(len(QUESTIONS)), "--seed", "3", "--at-a-time", "2"]
    shown = run("examples.self_consistency.run", *flags, "--out", str(out))
    runs = load(out)
    counts = {run.policy: {answer.kind: answer.started for answer in run.answers} for run in runs}
    others = [kind.__name__ for kind in KINDS if kind.__name__ != NEVER_AGREES]
    started = {name: group.get("start", 40) for name, group in POLICIES.items()}
    assert counts == {name: dict.fromkeys(others, count) | {NEVER_AGREES: 40} for name, count in started.items()}
    assert [run.right for run in runs] == [len(others)] * len(runs)
    tokens = len(fake_answer("1 + 1 = 2. The answer is    7."))
    assert [run.answers[0].tokens for run in runs] == [run.answers[0].started * tokens for run in runs]
    assert shown == table(runs) + "\n" == run("examples.self_consistency.report", str(out), str(picture))
    assert all(name in picture.read_text() for name in POLICIES)


def run(module: str, *arguments: str) -> str:
    command = [sys.executable, "-m", module, *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def run_of(policy: str, right: str, *, tokens: int, seconds: float) -> Run:
    answers = [Answer("total", letter == "+", started=4, finished=4, tokens=tokens) for letter in right]
    return Run(policy, 1, seconds, answers)


def test_intervals_are_wilson_s_and_for_equal_questions_bonett_s_and_price_s() -> None:
    assert wilson(15, 20) == pytest.approx((0.5313, 0.8881), abs=1e-4)
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-4)
    for right, total in ((4, 4), (0, 4), (7, 7)):  # rounding put the share outside, and the plot failed
        low, high = wilson(right, total)
        assert low <= right / total <= high
    full, fewer = (run_of("all", "++--" * 25, tokens=9, seconds=1), run_of("one", "+---" * 25, tokens=9, seconds=1))
    # As if 1 of 102 had been won and 26 lost: the error is sqrt((27 / 102 - (25 / 102)^2) / 102) = 0.04479.
    assert difference(fewer, full) == pytest.approx((-0.25, -0.33289, -0.15731), abs=1e-4)
    # As if 1 of 102 had been won and 1 lost: the error is sqrt(2 / 102 / 102) = 0.01386.
    assert difference(full, full) == pytest.approx((0, -0.02717, 0.02717), abs=1e-4)


def test_a_row_shows_the_savings() -> None:
    full = run_of("all", "++--", tokens=200, seconds=8)
    *_, row = table([full, run_of("ESC", "++--", tokens=50, seconds=6)]).splitlines()
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    assert cells[:2] == ["ESC", "1"]
    assert cells[3:] == ["+0.0 (-46.2 to +46.2) points", "4.0", "50", "75%", "6.0", "25%"]
