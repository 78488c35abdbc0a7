"""The scores of a prompt are sent as encoded parts, and a part is decoded when it is read."""

import msgspec
import pytest

from motet.types import SCORES_PER_PART, GroupDelta, PromptReport, PromptScores, Score, TokenLogprob, score_parts
from tests.engines.native.drive import group

LENGTHS = [0, 1, SCORES_PER_PART - 1, SCORES_PER_PART, SCORES_PER_PART + 1, 3 * SCORES_PER_PART]


def scores(length: int) -> list[Score]:
    return [TokenLogprob(place, -place / 7, 1, ((place, -0.5),)) if place else None for place in range(length)]


@pytest.mark.parametrize("length", LENGTHS)
def test_the_scores_of_a_report_can_be_read_like_a_list_also_after_they_were_sent(length: int) -> None:
    expected = scores(length)
    sent = msgspec.msgpack.encode(GroupDelta(group("g", [5]).request_id, (), PromptReport.scored(3, expected)))
    report = msgspec.msgpack.decode(sent, type=GroupDelta).prompt
    assert report is not None and report.logprobs is not None and report.cached_tokens == 3
    found = report.logprobs
    assert (len(found), [*found], list(found[:])) == (length, expected, expected)
    for first in (0, 1, SCORES_PER_PART - 1, SCORES_PER_PART, length):
        since = found.since(first)
        assert (len(since), [*since], list(since[1:40])) == (
            length - min(first, length),
            expected[first:],
            expected[first:][1:40],
        )
    for first in (0, 1, SCORES_PER_PART - 1, SCORES_PER_PART, 50):
        for stop in (0, 1, SCORES_PER_PART, SCORES_PER_PART + 1, 50, 1000):
            assert [*found[first:stop]] == expected[first:stop]
    if length:
        assert (found[0], found[length - 1], found[-1]) == (expected[0], expected[-1], expected[-1])
    for outside in (length, -length - 1):
        with pytest.raises(IndexError):
            found[outside]


def test_only_the_parts_that_are_read_are_decoded() -> None:
    """The bug: a message with the scores of 8,000 tokens was decoded at once, which held the event loop for 40 ms and
    more."""
    parts = PromptReport.scored(0, scores(2 * SCORES_PER_PART)).parts
    assert parts is not None
    broken = msgspec.msgpack.encode(PromptReport(0, (parts[0], b"\xc1", parts[1])))
    found = msgspec.msgpack.decode(broken, type=PromptReport).logprobs
    assert found is not None
    assert [*found[:SCORES_PER_PART]] == scores(SCORES_PER_PART)
    assert (len(found), found[-1]) == (3 * SCORES_PER_PART, scores(2 * SCORES_PER_PART)[-1])
    with pytest.raises(msgspec.MsgspecError):
        found[SCORES_PER_PART]


def test_the_number_of_scores_is_known_without_decoding_one() -> None:
    """The bug: the sizes of 200 prompts with 20 alternatives each were computed from decoded scores, for 30 ms."""
    (part,) = score_parts([msgspec.msgpack.encode(score) for score in scores(5)])
    assert len(PromptScores([part, part[:3]])) == SCORES_PER_PART + 5
    assert len(PromptScores([msgspec.msgpack.encode(scores(5))])) == 5  # of a worker that encodes arrays otherwise


def test_a_report_without_scores_has_none() -> None:
    assert PromptReport.scored(1, None).logprobs is None
