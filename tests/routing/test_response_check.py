"""Deltas that a worker on another server may send for a group, and deltas that are refused."""

from collections.abc import Sequence

import pytest

from motet.engine import Worker
from motet.errors import WorkerFaultError
from motet.ids import RequestId
from motet.loop_budget import BUDGET
from motet.routing.groups.placement import ResponseCheck
from motet.routing.router import Router
from motet.routing.workers.fleet import Fleet
from motet.settings.server_config import RoutingConfig
from motet.testing.fake_engine import FakeEngine
from motet.types import (
    SCORES_PER_PART,
    ChoiceDelta,
    ChoiceStart,
    Finish,
    FinishReason,
    GenerateRequest,
    GroupDelta,
    PromptReport,
    SamplingParams,
    TokenLogprob,
    choice_starts,
)
from tests.clock import CountedBudget
from tests.routing.scene import Received

PROMPT = (1, 2, 3)
END = Finish(FinishReason.STOP)


def response_check(
    *, max_tokens: int = 4, logprobs: int | None = None, prompt_logprobs: int | None = None, scored_from: int = 0
) -> ResponseCheck:
    """Returns the check of a group whose choice 0 is new and whose choice 1 has two output tokens."""
    request = GenerateRequest(
        request_id=RequestId("g"),
        prompt=PROMPT,
        choices=(ChoiceStart(0, 7), ChoiceStart(1, 8, (5, 6))),
        sampling=SamplingParams(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs),
        scored_from=scored_from,
    )
    return ResponseCheck(request, vocab_size=512)


def delta(*choices: ChoiceDelta, prompt: PromptReport | None = None) -> GroupDelta:
    return GroupDelta(RequestId("g"), choices, prompt)


def check_all(check: ResponseCheck, delta: GroupDelta) -> None:
    check.check(delta)
    for number, part in enumerate((delta.prompt and delta.prompt.parts) or ()):
        check.check_part(number, part)


def logprob(token: int, *others: int) -> TokenLogprob:
    return TokenLogprob(token, -1.0, 1, tuple((other, -1.0) for other in others))


INVALID: dict[str, tuple[ResponseCheck, Sequence[GroupDelta], str]] = {
    "wrong index": (response_check(), [delta(ChoiceDelta(7, (5,)))], "choice 7, which is not open"),
    "negative index": (response_check(), [delta(ChoiceDelta(-1, (5,)))], "choice -1, which is not open"),
    "after the end": (
        response_check(),
        [delta(ChoiceDelta(0, (5,), None, END)), delta(ChoiceDelta(0, (5,)))],
        "choice 0, which is not open",
    ),
    "too many at once": (
        response_check(),
        [delta(ChoiceDelta(0, (5,) * 5))],
        "more than max_tokens tokens of choice 0",
    ),
    "too many": (response_check(), [delta(ChoiceDelta(1, (5,)))] * 3, "more than max_tokens tokens of choice 1"),
    "token outside": (response_check(), [delta(ChoiceDelta(0, (512,)))], "the token 512; its vocabulary has 512"),
    "negative token": (response_check(), [delta(ChoiceDelta(0, (-1,)))], "the token -1"),
    "giant token": (response_check(), [delta(ChoiceDelta(0, (2**63,)))], "the token 9223372036854775808"),
    "unasked": (response_check(), [delta(ChoiceDelta(0, (5,), (logprob(5),)))], "none were requested"),
    "none": (response_check(logprobs=1), [delta(ChoiceDelta(0, (5,)))], "0 log-probabilities of 1 tokens"),
    "too few": (
        response_check(logprobs=1),
        [delta(ChoiceDelta(0, (5, 6), (logprob(5),)))],
        "1 log-probabilities of 2 tokens",
    ),
    "of no token": (
        response_check(logprobs=1),
        [delta(ChoiceDelta(0, (5,), (logprob(5, 512),)))],
        "token 512; its vocabulary has 512",
    ),
    "cached below 0": (response_check(), [delta(prompt=PromptReport(-1))], "found -1 tokens"),
    "cached too many": (response_check(), [delta(prompt=PromptReport(4))], "found 4 tokens of a prompt of 3"),
    "no prompt logprobs": (response_check(prompt_logprobs=0), [delta(ChoiceDelta(0, (5,)))], "left out"),
    "broken prompt logprobs": (
        response_check(prompt_logprobs=0),
        [delta(prompt=PromptReport(0, (b"x",)))],
        "cannot be read",
    ),
    "unasked prompt logprobs": (
        response_check(),
        [delta(prompt=PromptReport.scored(0, (None, logprob(2), logprob(3))))],
        "of the prompt, and none were requested",
    ),
    "too many alternatives": (
        response_check(prompt_logprobs=2),
        [delta(prompt=PromptReport.scored(0, (None, logprob(2, *range(1000)), logprob(3))))],
        "more log-probabilities of the prompt than were requested",
    ),
    "few prompt logprobs": (
        response_check(prompt_logprobs=0),
        [delta(prompt=PromptReport.scored(0, (None,)))],
        "left out",
    ),
    "late prompt logprobs": (
        response_check(prompt_logprobs=0, scored_from=1),
        [delta(prompt=PromptReport.scored(0, (logprob(3),), scored_from=2))],
        "left out",
    ),
    "prompt of no token": (
        response_check(prompt_logprobs=0),
        [delta(prompt=PromptReport.scored(0, (None, logprob(2), logprob(-3))))],
        "token -3; its vocabulary has",
    ),
}


@pytest.mark.parametrize(("response_check", "deltas", "why"), INVALID.values(), ids=INVALID)
def test_an_invalid_delta_is_refused(response_check: ResponseCheck, deltas: Sequence[GroupDelta], why: str) -> None:
    *honest, lie = deltas
    for one in honest:
        check_all(response_check, one)
    with pytest.raises(WorkerFaultError, match=why):
        check_all(response_check, lie)


def test_a_complete_answer_passes() -> None:
    check = response_check(logprobs=1, prompt_logprobs=0)
    scores = (None, logprob(2), logprob(3))
    check_all(check, delta(ChoiceDelta(0, (5,), (logprob(5, 6),)), prompt=PromptReport.scored(3, scores)))
    check.check(delta(ChoiceDelta(1, (5, 0), (logprob(5, 6), logprob(0, 1)), END)))
    check.check(delta(ChoiceDelta(0, (5, 6, 0), (logprob(5), logprob(6), logprob(0)), END)))


def test_an_end_without_a_token_needs_no_log_probabilities() -> None:
    response_check(logprobs=1).check(delta(ChoiceDelta(0, (), None, END), ChoiceDelta(1, (), (), END)))


@pytest.mark.anyio
@pytest.mark.parametrize("length", [1, SCORES_PER_PART, 10 * SCORES_PER_PART + 1])
async def test_the_log_probabilities_of_a_long_prompt_are_checked_in_turns_of_the_event_loop(length: int) -> None:
    """The bug: the check of 8,000 tokens with 20 alternatives each held the event loop for 60 to 75 ms."""
    fleet = Fleet()
    fleet.put(Worker("decode-0", FakeEngine(lambda *_: (5, 0)), "http://127.0.0.1:1", local=False))
    router = Router(fleet, RoutingConfig())
    request = GenerateRequest(
        request_id=RequestId("g"),
        prompt=tuple(range(1, length + 1)),
        choices=choice_starts(1, seed=7),
        sampling=SamplingParams(max_tokens=4, prompt_logprobs=0),
    )
    BUDGET.set(budget := CountedBudget())
    (report,) = (await Received().read(router.generate(request), request)).prompts
    assert report.logprobs is not None and len(report.logprobs) == length
    assert budget.num_pieces == -(-length // SCORES_PER_PART)
