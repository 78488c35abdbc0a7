"""The comparison with a peer: both servers get the same requests, and each target can be missed."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from bench.client.load import Timing
from bench.compare.__main__ import main, mix, parse
from bench.compare.grid import QUICK, Grid, GridRow, RequestShape, figures_of, targets
from bench.program.report import Bound, Target
from bench.servers.compared_server import FigurePair, TimedSample
from motet.types import ChoiceStart, GenerateRequest
from tests.fake_server import FakeServer
from tests.tiny_tokenizer import fake_answer, save_tiny_tokenizer

pytestmark = pytest.mark.slow

AT_ONCE = ["--settle", "0", "--idle", "0.02"]
SMALL = [*AT_ONCE, "--ns", "1,3", "--prompt-tokens", "40", "--max-tokens", "5", "--repeats", "2"]
PEER = {"last_first_s": 2.0, "total_s": 10.0, "decode_tokens_per_s": 100.0}


class RecordingServer:
    """A server that generates `max_tokens` tokens for each choice, and stores the requests."""

    def __init__(self, folder: Path) -> None:
        self.requests: list[tuple[tuple[int, ...], int]] = []
        self.server = FakeServer(folder, self.answer)

    def answer(self, request: GenerateRequest, _: ChoiceStart) -> list[int]:
        request_key = (request.prompt, len(request.choices))
        if request_key not in self.requests:
            self.requests.append(request_key)
        return fake_answer("and on ", eos=False)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[RecordingServer, RecordingServer]]:
    folder = save_tiny_tokenizer(tmp_path)
    ours, peer = RecordingServer(folder), RecordingServer(folder)
    with ours.server, peer.server:
        yield ours, peer


def urls(pair: tuple[RecordingServer, RecordingServer]) -> list[str]:
    return ["--ours", pair[0].server.url, "--peer", f"{pair[1].server.url}/v1"]


def row(n: int, *, peer: Mapping[str, float] = PEER, **ours: float) -> GridRow:
    return GridRow(RequestShape(1340, 64, n), FigurePair({**PEER, **ours}, peer))


def rows_that_meet() -> list[GridRow]:
    return [
        row(1, decode_tokens_per_s=120.0, last_first_s=1.0),
        row(8, decode_tokens_per_s=140.0),
        row(32, decode_tokens_per_s=140.0, last_first_s=1.0, total_s=6.5),
    ]


def test_both_servers_get_the_same_new_prompts_and_json_comes_out(
    pair: tuple[RecordingServer, RecordingServer], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*urls(pair), *SMALL]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(r["prompt_tokens"], r["max_tokens"], r["n"]) for r in report["rows"]] == [(40, 5, 1), (40, 5, 3)]
    for each in report["rows"]:
        assert each["ours"].keys() == each["peer"].keys() == each["ratios"].keys()
        assert each["ratios"]["total_s"] == each["ours"]["total_s"] / each["peer"]["total_s"]
        assert each["ours"]["peak_mib"] > 0
    assert {"cpu", "motet", "command", "load average"} <= report["conditions"]["machine"].keys()
    assert report["conditions"]["peer"]["version"] == report["conditions"]["machine"]["motet"]
    assert pair[0].requests == pair[1].requests
    prompts = [prompt for prompt, _ in pair[0].requests]
    assert [n for _, n in pair[0].requests] == [3, 1, 1, 3, 3]  # one warm-up, then two of each
    assert len(set(prompts)) == len(prompts)


def test_a_server_that_refuses_has_no_figures_and_the_comparison_continues(
    pair: tuple[RecordingServer, RecordingServer], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*urls(pair), *SMALL, "--ns", "1,300"]) == 0  # more choices than a server allows
    output = capsys.readouterr()
    report = json.loads(output.out.splitlines()[-1])
    assert [bool(r["ours"]) for r in report["rows"]] == [True, False]
    assert report["rows"][1]["ratios"] == {}
    assert "peer failed: EngineError('400" in output.err


def test_targets_that_were_not_measured_fail_the_check(pair: tuple[RecordingServer, RecordingServer]) -> None:
    assert main([*urls(pair), *SMALL, "--check"]) == 1


def test_a_plot_of_the_totals_is_drawn(pair: tuple[RecordingServer, RecordingServer], tmp_path: Path) -> None:
    picture = tmp_path / "out" / "totals.png"
    assert main([*urls(pair), *SMALL, "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_targets_are_met_at_their_limits() -> None:
    assert [target.met for target in targets(rows_that_meet())] == [True] * 6


@pytest.mark.parametrize(
    ("n", "worse"),
    [
        (1, {"decode_tokens_per_s": 119.0}),
        (8, {"decode_tokens_per_s": 139.0}),
        (32, {"decode_tokens_per_s": 139.0}),
        (32, {"total_s": 6.6}),
    ],
)
def test_each_target_can_be_missed_alone(n: int, worse: dict[str, float]) -> None:
    rows = [
        replace(r, pair=FigurePair({**r.pair.ours, **worse}, PEER)) if r.shape.n == n else r for r in rows_that_meet()
    ]
    assert sum(not target.met for target in targets(rows)) == 1


def test_the_last_first_token_has_targets_against_the_peer_and_against_n_1() -> None:
    one, eight, many = rows_that_meet()
    late = replace(many, pair=FigurePair({**many.pair.ours, "last_first_s": 1.05}, PEER))
    assert [target.what for target in targets([one, eight, late]) if not target.met] == [
        "last first token / peer's, n=32"
    ]
    quick = replace(one, pair=FigurePair({**one.pair.ours, "last_first_s": 0.9}, PEER))
    missed = [target.what for target in targets([quick, eight, many]) if not target.met]
    assert missed == ["last first token, n=32 / Motet's at n=1"]


def test_rows_of_other_prompts_and_lengths_have_no_targets() -> None:
    others = [replace(r, shape=replace(r.shape, max_tokens=256)) for r in rows_that_meet()]
    assert [target.value for target in targets(others)] == [None] * 6


def test_a_target_can_bound_a_figure_from_below_or_above() -> None:
    assert Target("x", 1.2, 1.2, Bound.AT_LEAST).met and not Target("x", 1.19, 1.2, Bound.AT_LEAST).met
    assert Target("x", 1.2, 1.2).met and not Target("x", 1.21, 1.2).met
    assert Target("x", None, 1.2).line() == "MISSED x: not measured, at most 1.20"


def test_figures_are_medians_and_the_highest_peak() -> None:
    times = [(1.0, 5.0, 9.0), (2.0, 4.0, 8.0), (3.0, 6.0, 7.0)]
    samples = [TimedSample(Timing(*t, tokens=60), peak) for t, peak in zip(times, (7.0, 9.0, None), strict=True)]
    assert figures_of(samples) == {
        "first_s": 2.0,
        "last_first_s": 5.0,
        "total_s": 8.0,
        "decode_tokens_per_s": 20.0,
        "peak_mib": 9.0,
    }
    assert figures_of([*samples, None]) == {}


def test_there_is_a_ratio_where_both_servers_have_a_figure() -> None:
    figures = FigurePair({"a": 1.0, "b": 2.0, "c": None, "d": 3.0}, {"a": 4.0, "b": 0.0, "c": 1.0})
    assert [figures.ratio(name) for name in "abcde"] == [0.25, None, None, None, None]
    assert [figures.text(name, 1) for name in "ad"] == ["1.0 / 4.0", "3.0 / -"]
    assert [value for _, value, _ in row(8).cells()[:5]] == [1340, 64, 8, "- / -", None]


def test_the_quick_grid_has_the_targets_and_the_full_grid_has_24_shapes() -> None:
    assert Grid((1340,), (64,), (1, 8, 32)) == QUICK
    assert len(list(Grid().shapes())) == 24
    assert mix("1:6,8:0.5") == {1: 6.0, 8: 0.5}


def test_both_servers_must_be_named() -> None:
    for argv in (["--ours", "x"], ["--ours", "x", "--start-ours", "--peer", "y"]):
        with pytest.raises(SystemExit, match="2"):
            parse(argv)
