"""The benchmark of the front end: its client counts events, its engine steps for all groups at once."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from bench.frontend.__main__ import main
from bench.frontend.costs import ApiCost, BurstGaps, FrontendReport, FrontendRow, best_of, percentile
from bench.frontend.part_costs import engine_us, group, pipe_us
from bench.frontend.raw_client import LoadCase, RawClients, Received, request_bytes
from bench.frontend.scripted_engine import Pulse, PulsedEngine, ScriptedSteps
from motet.models.smollm2 import Smollm2
from motet.settings.server_config import cache_folder, environment
from motet.types import Finish, FinishReason

HEAD = b"HTTP/1.1 200 OK\r\n"
QUICK = ApiCost(us_per_token=2.0, tokens_per_s=1.0, first_p50_ms=1.0, first_p99_ms=15.0)


def row(n: int, motet: ApiCost, bare_us: float) -> FrontendRow:
    return FrontendRow("chat", n, 64, 128, motet, replace(QUICK, us_per_token=bare_us))


def report(*, ratio: float = 1.5, many_us: float = 3.0, first_ms: float = 15.0, gap_ms: float = 20.0) -> FrontendReport:
    one = row(1, replace(QUICK, us_per_token=2.0 * ratio), 2.0)
    many = row(64, replace(QUICK, us_per_token=many_us), 1.0)
    first = row(1, replace(QUICK, first_p99_ms=first_ms), 2.0)
    return FrontendReport({}, [one, many], [], first, 1.0, BurstGaps.of([gap_ms]))


def test_each_target_can_be_met_and_missed() -> None:
    assert [target.met for target in report().targets] == [True] * 4
    missed = [report(ratio=1.51), report(many_us=3.01), report(first_ms=15.01), report(gap_ms=20.01)]
    assert [[target.met for target in one.targets].index(False) for one in missed] == [0, 1, 2, 3]


def test_percentiles_are_values_that_occurred() -> None:
    values = [float(i) for i in range(1, 101)]
    assert [percentile(values, percent) for percent in (50, 99, 100)] == [50.0, 99.0, 100.0]
    assert percentile([7.0], 99) == 7.0


def test_the_best_of_each_figure_counts() -> None:
    costs = [ApiCost(1, 5, 9, 7), ApiCost(2, 4, 8, 6), ApiCost(3, 6, 7, 5)]
    assert best_of(costs) == ApiCost(1, 6, 7, 5)


@pytest.fixture
def answering() -> Iterator[tuple[str, list[bytes]]]:
    """Yields a server for one connection that answers every request with all pieces of the list, one by one."""
    pieces: list[bytes] = []

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while connection.recv(1 << 16):
                for piece in pieces:
                    connection.sendall(piece)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", pieces
        thread.join()


@pytest.mark.parametrize("cut", range(len(HEAD) + 40, len(HEAD) + 80))
def test_events_are_counted_wherever_reads_cut_them(answering: tuple[str, list[bytes]], cut: int) -> None:
    url, pieces = answering
    answer = (
        HEAD + b"transfer-encoding: chunked\r\n\r\n" + b'data: {"a"}\n\ndata: {}\n\ndata: [DONE]\n\n' + b"0\r\n\r\n"
    )
    pieces += [answer[:cut], answer[cut:]]
    with RawClients(url, 1) as clients:
        received = clients.load(request_bytes("/", {}), requests=2)
    assert received.events == 6
    assert len(received.first_s) == 2


def test_an_answer_of_known_length_ends_with_its_last_byte(answering: tuple[str, list[bytes]]) -> None:
    url, pieces = answering
    pieces += [HEAD + b"content-length: 4\r\n\r\n", b"ab", b"cd"]
    with RawClients(url, 1, nap_s=0.001) as clients:
        received = clients.load(request_bytes("/", {}), requests=3)
    assert (received.events, len(received.first_s)) == (0, 3)
    assert [sorted(reads_s) for reads_s in received.reads_s] == received.reads_s
    assert len(received.reads_s) == 3


def test_a_refused_request_raises(answering: tuple[str, list[bytes]]) -> None:
    url, pieces = answering
    pieces.append(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")
    with RawClients(url, 1) as clients, pytest.raises(ConnectionError, match="503"):
        clients.load(request_bytes("/", {}), requests=1)


def test_a_missing_token_is_noticed() -> None:
    case = LoadCase("chat", n=2, clients=3, max_tokens=5, requests=1)
    case.check(Received(events=3 * (2 + 2 * 5 + 1)))
    with pytest.raises(AssertionError, match="38 events came, not 39"):
        case.check(Received(events=38))


def test_scripted_choices_start_in_different_places_and_end_together() -> None:
    steps = [*ScriptedSteps(range(10), (0, 1), max_tokens=3, listed=None)]
    assert [[delta.token_ids for delta in step] for step in steps] == [[(0,), (7,)], [(1,), (8,)], [(2,), (9,)]]
    assert [[delta.finish for delta in step] for step in steps] == [
        [None, None],
        [None, None],
        [Finish(FinishReason.LENGTH)] * 2,
    ]


@pytest.mark.anyio
async def test_groups_take_their_steps_together() -> None:
    engine, steps = PulsedEngine((5, 6), Pulse()), list[int]()

    async def read(number: int) -> None:
        stream = engine.generate(group(number, 1))
        for _ in range(3):
            await anext(stream)
            steps.append(number)
        await stream.aclose()

    await asyncio.gather(read(0), read(1))
    assert steps == [0, 1] * 3
    engine.check()


@pytest.mark.anyio
async def test_pulses_rest_after_a_burst() -> None:
    pulse, loop = Pulse(burst=3, rest_s=0.02), asyncio.get_running_loop()
    came_s = []
    for _ in range(4):
        await pulse.next(None)
        came_s.append(loop.time())
    assert came_s[3] - came_s[2] >= 0.019  # the loop's clock is coarser than its timers


def test_the_pipe_and_the_engine_have_plausible_costs() -> None:
    assert pipe_us(1, 64) > 0
    assert engine_us(4, 1) < 100


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.real
def test_a_run_prints_json_on_the_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    if not Smollm2(cache_folder(environment())).folder.is_dir():
        pytest.skip("the default model is not here: motet models pull")
    assert main(["--ns", "1,8", "--clients", "2", "--repeats", "1", "--tokens", "2000"]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(r["route"], r["n"], r["clients"]) for r in found["streamed"]] == [
        (route, n, 2) for route in ("chat", "completions") for n in (1, 8)
    ]
    assert found["burst"]["number"] >= 50
    assert {"cpu", "motet", "command"} <= found["machine"].keys()
