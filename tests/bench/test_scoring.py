"""The benchmark of scores: its windows cover a text, each server is read in its own form, and targets can be missed."""

import asyncio
import json
import math
from collections.abc import Sequence

import httpx
import pytest

from bench.scoring.__main__ import SMALL, main
from bench.scoring.cases import CASES, ScoringRound, windows
from bench.scoring.requests import (
    Decisions,
    Dialect,
    EchoedPrompts,
    ReadScores,
    ScoringClient,
    ScoringRequest,
    TextWindow,
)
from bench.scoring.results import agreement, rows_of, targets
from bench.servers.compared_server import ComparedServer, RequestStyle

OPTIONS = {7: -3.0, 8: -0.5}
"""Log-probabilities of the tokens for yes and no after each prompt."""
YES = math.exp(-3.0) / (math.exp(-3.0) + math.exp(-0.5))


@pytest.mark.parametrize(("length", "window", "stride"), [(10, 4, 2), (11, 4, 3), (4, 4, 4), (3, 4, 1)])
def test_each_token_but_the_first_is_scored_in_one_window(length: int, window: int, stride: int) -> None:
    text = [*range(length)]
    found = windows(text, window, stride)
    assert [token for one in found for token in one.tokens[one.first :]] == text[1:]
    assert {len(one.tokens) for one in found} == {min(window, length)}


def answer(request: httpx.Request) -> httpx.Response:
    """Answers like each server. In completions, every token has the log-probability of its number."""
    body = json.loads(request.content)
    if request.url.path == "/v1/decisions":
        read = {"probability": YES} | {"prompt_token_ids": [1, 2], "answer_token_ids": [[7], [8]]}
        return httpx.Response(200, json={"answers": [read] * len(body["questions"])})
    if request.url.path == "/completion":
        assert body["logit_bias"] == [[option, 1000.0] for option in OPTIONS]
        return httpx.Response(200, json={"tokens": [max(OPTIONS, key=OPTIONS.__getitem__)]})
    if "logprob_token_ids" in body:
        tops = {f"token_id:{option}": OPTIONS[option] for option in body["logprob_token_ids"]}
        return httpx.Response(200, json={"choices": [{"logprobs": {"token_logprobs": [-1.0], "top_logprobs": [tops]}}]})
    if "prompt_logprobs" in body:
        tokens = body["prompt"]
        entries = [None, *({str(token): {"logprob": float(-token), "rank": 1}} for token in tokens[1:])]
        return httpx.Response(
            200, json={"choices": [{"prompt_logprobs": entries[body.get("prompt_logprobs_from", 0) :]}]}
        )
    choices = [{"logprobs": {"token_logprobs": [None, *(float(-t) for t in tokens[1:])]}} for tokens in body["prompt"]]
    return httpx.Response(200, json={"choices": choices})


@pytest.mark.anyio
@pytest.mark.parametrize("dialect", Dialect)
@pytest.mark.parametrize(
    ("request_", "logprobs", "best"),
    [
        (EchoedPrompts([[1, 2, 9], [1, 2, 4]], first=2), [[-9.0], [-4.0]], 1),
        (TextWindow([5, 6, 7, 8], first=2), [[-7.0, -8.0]], None),
        (Decisions("a text", ["is it?"]), [[math.log(YES)]], None),
    ],
    ids=["echo", "window", "decision"],
)
async def test_every_server_is_read_in_its_own_form(
    dialect: Dialect, request_: ScoringRequest, logprobs: Sequence[Sequence[float]], best: int | None
) -> None:
    async with httpx.AsyncClient(base_url="http://server", transport=httpx.MockTransport(answer)) as client:
        server = ComparedServer("server", client, "model", "1", None, RequestStyle())
        await request_.prepare(ScoringClient(server, Dialect.MOTET, asyncio.Semaphore(1)))
        read = await request_.send(ScoringClient(server, dialect, asyncio.Semaphore(1)))
    reported = [] if dialect is Dialect.LLAMA and isinstance(request_, Decisions) else logprobs
    assert read.best == best
    for row, expected in zip(read.logprobs, reported, strict=True):
        assert row == pytest.approx(expected)


def scored(prompts_per_s: float, *logprobs: float) -> ScoringRound:
    scores = [[logprob] for logprob in logprobs]
    return ScoringRound(10, 10 / prompts_per_s, [ReadScores(scores, logprobs.index(max(logprobs)))], 100)


def test_agreement_is_the_largest_difference_and_the_share_of_the_same_best_options() -> None:
    found = agreement(scored(1.0, -1.0, -2.0), scored(1.0, -1.5, -1.25))
    assert (found.difference, found.same_best) == (0.75, 0.0)


@pytest.mark.parametrize(("speed", "logprob", "met"), [(10.0, -1.0005, True), (9.9, -1.002, False)])
def test_targets_are_met_at_their_limits_and_missed_beyond(speed: float, logprob: float, met: bool) -> None:
    rows = [
        *rows_of({("motet", "few-shot"): [scored(speed, -1.0)], ("vllm", "few-shot"): [scored(1.0, -1.0)]}, "bfloat16"),
        *rows_of({("motet", "few-shot"): [scored(1.0, -1.0)], ("vllm", "few-shot"): [scored(9.0, logprob)]}, "float32"),
    ]
    assert [target.met for target in targets(rows)] == [met, met, True]


def test_rounds_of_a_server_that_failed_once_are_not_compared() -> None:
    rows = rows_of(
        {("motet", "few-shot"): [scored(1.0, -1.0)] * 2, ("vllm", "few-shot"): [scored(1.0, -1.0)]}, "float32"
    )
    assert [row.agreement.difference for row in rows] == [0.0, None]


@pytest.mark.slow
def test_a_run_scores_every_case_on_every_server(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", url, "--before", url, "--small", "--settle", "0"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["case"], row["server"]) for row in report["rows"]] == [
        (case, server) for case in sorted(CASES) for server in ("motet", "before")
    ]
    assert {row["agreement"]["difference"] for row in report["rows"]} == {0.0}
    assert [row["prompts"] for row in report["rows"]][::2] == [
        SMALL.decisions, SMALL.questions * SMALL.options, SMALL.questions * SMALL.options, 6,
    ]  # fmt: skip


def test_an_unknown_case_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--cases", "few-shots"])
    assert "unknown: few-shots" in capsys.readouterr().err
