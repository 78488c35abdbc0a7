"""What a worker elsewhere may send for a group, and what it may not."""

from collections.abc import Sequence

import pytest

from motet.errors import WorkerFaultError
from motet.ids import RequestId
from motet.routing.groups.response_check import ResponseCheck
from motet.types import (
    ChoiceDelta,
    ChoiceStart,
    Finish,
    FinishReason,
    GenerateRequest,
    GroupDelta,
    PromptReport,
    SamplingParams,
    TokenLogprob,
)

PROMPT = (1, 2, 3)
END = Finish(FinishReason.STOP)


def word(*, max_tokens: int = 4, logprobs: int | None = None, prompt_logprobs: int | None = None) -> ResponseCheck:
    """Choice 0 is new, and choice 1 has written two tokens."""
    request = GenerateRequest(
        request_id=RequestId("g"),
        prompt=PROMPT,
        choices=(ChoiceStart(0, 7), ChoiceStart(1, 8, (5, 6))),
        sampling=SamplingParams(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs),
    )
    return ResponseCheck(request, vocab_size=512)


def delta(*choices: ChoiceDelta, prompt: PromptReport | None = None) -> GroupDelta:
    return GroupDelta(RequestId("g"), choices, prompt)


def likely(token: int, *others: int) -> TokenLogprob:
    return TokenLogprob(token, -1.0, 1, tuple((other, -1.0) for other in others))


LIES: dict[str, tuple[ResponseCheck, Sequence[GroupDelta], str]] = {
    "wrong index": (word(), [delta(ChoiceDelta(7, (5,)))], "choice 7, which is not open"),
    "negative index": (word(), [delta(ChoiceDelta(-1, (5,)))], "choice -1, which is not open"),
    "after the end": (
        word(),
        [delta(ChoiceDelta(0, (5,), None, END)), delta(ChoiceDelta(0, (5,)))],
        "choice 0, which is not open",
    ),
    "too many at once": (word(), [delta(ChoiceDelta(0, (5,) * 5))], "more than max_tokens tokens of choice 0"),
    "too many": (word(), [delta(ChoiceDelta(1, (5,)))] * 3, "more than max_tokens tokens of choice 1"),
    "token outside": (word(), [delta(ChoiceDelta(0, (512,)))], "the token 512; its vocabulary has 512"),
    "negative token": (word(), [delta(ChoiceDelta(0, (-1,)))], "the token -1"),
    "giant token": (word(), [delta(ChoiceDelta(0, (2**63,)))], "the token 9223372036854775808"),
    "unasked": (word(), [delta(ChoiceDelta(0, (5,), (likely(5),)))], "none were requested"),
    "none": (word(logprobs=1), [delta(ChoiceDelta(0, (5,)))], "0 log-probabilities of 1 tokens"),
    "too few": (word(logprobs=1), [delta(ChoiceDelta(0, (5, 6), (likely(5),)))], "1 log-probabilities of 2 tokens"),
    "of no token": (
        word(logprobs=1),
        [delta(ChoiceDelta(0, (5,), (likely(5, 512),)))],
        "token 512; its vocabulary has 512",
    ),
    "cached below 0": (word(), [delta(prompt=PromptReport(-1))], "found -1 tokens"),
    "cached too many": (word(), [delta(prompt=PromptReport(4))], "found 4 tokens of a prompt of 3"),
    "no prompt logprobs": (word(prompt_logprobs=0), [delta(ChoiceDelta(0, (5,)))], "left out"),
    "few prompt logprobs": (word(prompt_logprobs=0), [delta(prompt=PromptReport(0, (None,)))], "left out"),
    "prompt of no token": (
        word(prompt_logprobs=0),
        [delta(prompt=PromptReport(0, (None, likely(2), likely(-3))))],
        "token -3; its vocabulary has",
    ),
}


@pytest.mark.parametrize(("word", "told", "why"), LIES.values(), ids=LIES)
def test_a_delta_that_cannot_be_right_is_noticed(word: ResponseCheck, told: Sequence[GroupDelta], why: str) -> None:
    *honest, lie = told
    for one in honest:
        word.check(one)
    with pytest.raises(WorkerFaultError, match=why):
        word.check(lie)


def test_a_whole_answer_passes() -> None:
    asked = word(logprobs=1, prompt_logprobs=0)
    asked.check(delta(ChoiceDelta(0, (5,), (likely(5, 6),)), prompt=PromptReport(3, (None, likely(2), likely(3)))))
    asked.check(delta(ChoiceDelta(1, (5, 0), (likely(5, 6), likely(0, 1)), END)))
    asked.check(delta(ChoiceDelta(0, (5, 6, 0), (likely(5), likely(6), likely(0)), END)))


def test_an_end_without_a_token_needs_no_log_probabilities() -> None:
    word(logprobs=1).check(delta(ChoiceDelta(0, (), None, END), ChoiceDelta(1, (), (), END)))
