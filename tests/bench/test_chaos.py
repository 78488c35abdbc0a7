"""The chaos run counts answers that are identical, different, duplicated or lost."""

import json

import pytest

from bench.chaos.__main__ import ChaosReport, described, pauses_of
from bench.chaos.mixed_requests import RepeatedRequest, mixed_requests
from bench.chaos.received_answers import ComparedAnswers, ReceivedAnswer, feed_line


def chunk(index: int, text: str, *, finish: str | None = None, role: bool = False, id: str = "chatcmpl-1") -> str:
    delta = {"content": text} | ({"role": "assistant"} if role else {})
    return "data: " + json.dumps({"id": id, "choices": [{"index": index, "delta": delta, "finish_reason": finish}]})


def answer(*lines: str) -> ReceivedAnswer:
    received = ReceivedAnswer()
    for line in lines:
        feed_line(received, line)
    return received


COMPLETE = (
    chunk(0, "", role=True),
    chunk(1, "", role=True),
    chunk(0, "one"),
    chunk(1, "two"),
    chunk(0, "", finish="stop"),
    chunk(1, "", finish="length"),
    "data: [DONE]",
)
REQUEST = RepeatedRequest("two", "/v1/chat/completions", {"n": 2})


def outcome_of(*lines: str) -> ComparedAnswers:
    outcome = ComparedAnswers()
    outcome.add(REQUEST, answer(*lines), answer(*COMPLETE))
    return outcome


def test_an_answer_without_faults_is_identical() -> None:
    outcome = outcome_of(*COMPLETE)
    assert (outcome.finished, outcome.identical, outcome.duplicates, outcome.lost) == (1, 1, 0, 0)


@pytest.mark.parametrize(
    ("lines", "duplicates", "lost"),
    [
        (tuple(line.replace("one", "won") for line in COMPLETE), 0, 0),
        ((*COMPLETE[:4], chunk(0, "one"), *COMPLETE[4:]), 0, 0),
        ((*COMPLETE[:5], chunk(0, "", finish="stop"), *COMPLETE[5:]), 1, 0),
        ((COMPLETE[0], *COMPLETE), 1, 0),
        ((*COMPLETE, "data: [DONE]"), 1, 0),
        ((*COMPLETE[:5], "data: [DONE]"), 0, 1),
    ],
    ids=["another text", "a chunk twice", "an end twice", "a role twice", "done twice", "a choice that never ends"],
)
def test_wrong_answers_are_counted(lines: tuple[str, ...], duplicates: int, lost: int) -> None:
    outcome = outcome_of(*lines)
    assert (outcome.duplicates, outcome.lost) == (duplicates, lost)
    assert outcome.identical == 0 or duplicates


def test_a_request_with_an_error_event_has_not_finished() -> None:
    outcome = outcome_of(*COMPLETE[:3], 'data: {"error": {"message": "gone"}}', "data: [DONE]")
    assert (outcome.finished, outcome.errors) == (0, ["two: gone"])


def test_only_pauses_of_streams_that_moved_count() -> None:
    moved, other = answer(*COMPLETE), answer(*(line.replace("chatcmpl-1", "chatcmpl-2") for line in COMPLETE))
    moved.chunk_s, other.chunk_s = [0.0, 1.0, 4.0], [0.0, 9.0]
    log = "12:00 WARNING m: a group continues on another worker request_id=r group=chatcmpl-1 cause=died choices=2\n"
    assert pauses_of([moved, other], log) == {"died": [3.0]}
    assert described([3.0]) == "3.00 s, one stream"


def test_a_perfect_run_meets_its_targets_and_one_error_misses_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    outcome = outcome_of(*COMPLETE)
    report = ChaosReport(
        {}, 1.0, outcome, {"decode killed": 8}, {"migrations": 1, "choices_resumed": 2}, {"leases": 0}, {}
    )
    assert all(target.met for target in report.targets)
    outcome.errors.append("two: gone")
    assert [target.what for target in report.targets if not target.met] == ["requests with an error"]
    assert report.print(check=True) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["injected_faults"] == {"decode killed": 8}


def test_the_mix_is_the_same_for_a_seed_and_has_all_kinds() -> None:
    requests = mixed_requests(200, seed=1)
    assert requests == mixed_requests(200, seed=1)
    assert {request.path for request in requests} == {"/v1/chat/completions", "/v1/completions"}
    assert {request.body["stream"] for request in requests} == {True, False}
    assert {request.body["n"] for request in requests} == {1, 2, 4, 8, 16, 32}
