"""The benchmark of requests that share a prompt: its cases share what they claim, and its targets can be missed."""

import json
from pathlib import Path

import httpx
import pytest

from bench.client.fresh_prompts import FreshPrompts
from bench.client.load import TimedLoad
from bench.servers.computed_tokens import computed_in
from bench.shared.__main__ import main, rows_of, targets
from bench.shared.cases import CASES, CaseLengths, RoundResult, make_case
from motet.types import ChoiceStart, GenerateRequest
from tests.bench.conftest import talkative
from tests.fake_server import FakeServer
from tests.tiny_tokenizer import save_tiny_tokenizer

LENGTHS = CaseLengths(ns=(3,), prompt_tokens=40, question_tokens=10, max_tokens=4, turns=3, forks=2)
SMALL = ["--prompt-tokens", "40", "--question-tokens", "10", "--max-tokens", "4", "--turns", "2", "--forks", "2"]
SHARED = {"group": (1, 40), "separate": (3, 40), "few-shot": (3, 30), "different": (3, 0)}
"""Number of requests, and number of leading tokens that all of their prompts share."""


def result(last_first_s: float, total_s: float) -> RoundResult:
    return RoundResult(total_s, 900, last_first_s)


def common(prompts: list[tuple[int, ...]]) -> int:
    """Returns the number of leading tokens that all prompts share."""
    return next((i for i, tokens in enumerate(zip(*prompts, strict=True)) if len(set(tokens)) > 1), len(prompts[0]))


@pytest.mark.slow
@pytest.mark.anyio
@pytest.mark.parametrize("case", CASES)
async def test_the_prompts_of_a_case_share_the_tokens_that_it_claims(case: str, tmp_path: Path) -> None:
    requests: list[GenerateRequest] = []

    def script(request: GenerateRequest, start: ChoiceStart) -> list[int]:
        requests.append(request)
        return talkative(request, start)

    with FakeServer(save_tiny_tokenizer(tmp_path), script) as server:
        async with httpx.AsyncClient(base_url=server.url) as client:
            load = TimedLoad(client, LENGTHS.max_tokens, count_blocks=False)
            fresh = FreshPrompts(range(20, 60), seed=1)
            n = LENGTHS.forks if case == "conversation" else 3
            result = await make_case(case, n, fresh, LENGTHS)(load)
    prompts = [request.prompt for request in {request.request_id: request for request in requests}.values()]
    if case == "conversation":
        assert [len(prompt) for prompt in prompts] == [10, 10, 24, 24, 38, 38]  # messages of 10 tokens, answers of 4
        assert all(
            later[: len(earlier)] == earlier for earlier, later in zip(prompts[::2], prompts[2::2], strict=False)
        )
        assert (result.tokens, result.last_first_s) == (3 * 2 * 4, None)
    else:
        assert {len(prompt) for prompt in prompts} == {40}
        assert (len(prompts), common(prompts)) == SHARED[case]
        assert result.tokens == 3 * 4


@pytest.mark.slow
def test_a_run_compares_every_case_on_every_server_with_a_group_of_as_many(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run = ["--url", url, "--before", url, "--ns", "3", "--repeats", "1", "--settle", "0", *SMALL]
    assert main(run) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    cases = [("conversation", 2), ("different", 3), ("few-shot", 3), ("group", 3), ("separate", 3)]
    rows = report["rows"]
    assert [(r["case"], r["n"], r["server"]) for r in rows] == [(*c, s) for c in cases for s in ("motet", "before")]
    assert [r["share"] for r in rows if r["case"] == "group"] == [1.0, 1.0]
    assert [r["share"] for r in rows if r["case"] == "conversation"] == [None, None]


def test_an_unknown_case_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--cases", "few-shots"])
    assert "unknown: few-shots" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("separate", "few_shot", "met"),
    [
        (result(1.2, 10.0), 12.8, [True, True, True, True]),
        (result(1.3, 10.1), 13.0, [False, False, False, False]),
    ],
)
def test_each_target_is_met_at_its_limit_and_missed_beyond(
    separate: RoundResult, few_shot: float, met: list[bool]
) -> None:
    rows = rows_of(
        {
            ("motet", "group", 32): [result(1.0, 9.0)],
            ("motet", "separate", 32): [separate],
            ("motet", "few-shot", 32): [result(2.0, few_shot)],
            ("vllm", "few-shot", 32): [result(9.0, 19.25)],
        }
    )
    assert [target.met for target in targets(rows)] == met


def test_a_failed_round_omits_its_row_and_unmeasured_figures_have_no_target() -> None:
    rows = rows_of({("motet", "few-shot", 4): [result(2.0, 9.0)], ("vllm", "few-shot", 4): [result(9.0, 9.0), None]})
    assert [(row.server, row.share) for row in rows] == [("motet", None)]
    assert [(target.limit, target.met) for target in targets(rows)] == [(0.7, False)]


@pytest.mark.parametrize(
    ("exposition", "computed"),
    [
        ('motet:prefill_tokens_total{worker="a"} 7\nmotet:prefill_tokens_total{worker="b"} 5\n', 12),
        (
            'vllm:prompt_tokens_by_source_total{source="local_compute"} 9\n'
            'vllm:prompt_tokens_by_source_total{source="local_cache_hit"} 4\n',
            9,
        ),
        ("llamacpp:prompt_tokens_total 3\n", 3),
        ("another_total 3\n", None),
    ],
)
def test_computed_prompt_tokens_are_read_from_each_servers_metrics(exposition: str, computed: int | None) -> None:
    assert computed_in(exposition) == computed
