"""`motet serve` as real processes: it answers, and whatever ends it leaves nothing behind."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from openai import OpenAI

from motet.config import environment
from motet.deploy.child import ChildServer
from motet.errors import StartupError
from tests.e2e.processes import wait_until_gone

pytestmark = pytest.mark.slow

ARGUMENTS = ("--served-model-name", "tiny", "--kv-cache-gb", "0.05", "--threads", "1", "--dtype", "float32")
GONE_TIMEOUT_S = 20.0


def start(model: Path, tmp_path: Path, *more: str) -> ChildServer:
    """A server whose temporary files are all in `tmp_path`."""
    return ChildServer([str(model), *ARGUMENTS, *more], environ={**environment(), "TMPDIR": str(tmp_path)})


def engine_pid(server: ChildServer) -> int:
    pid = httpx.get(f"{server.url}/status").json()["workers"][0]["pid"]
    assert isinstance(pid, int)
    return pid


def events_of_long_answer(server: ChildServer, *then_signal: tuple[int, signal.Signals]) -> list[str]:
    """The stream of an answer with no end of its own; once it has begun, signals are sent to processes."""
    body = {"prompt": "the hand", "n": 3, "seed": 1, "max_tokens": 400, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()
        events = [next(lines)]
        for pid, number in then_signal:
            os.kill(pid, number)
        events.extend(lines)
    return [event for event in events if event]


def texts_of(events: list[str]) -> list[str]:
    """Of the three choices."""
    texts = [""] * 3
    for event in events[:-1]:
        for choice in json.loads(event.removeprefix("data: "))["choices"]:
            texts[choice["index"]] += choice["text"]
    return texts


@pytest.fixture
def server(model: Path, tmp_path: Path) -> Iterator[ChildServer]:
    with start(model, tmp_path) as running:
        yield running


def test_the_official_client_gets_n_answers(server: ChildServer) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}], n=4, max_tokens=8, seed=3
        )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert answer.usage is not None
    assert answer.usage.prompt_tokens < 100


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_lets_the_answer_finish_and_leaves_nothing(
    model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    with start(model, tmp_path) as server:
        engine = engine_pid(server)
        events = events_of_long_answer(server, (server.pid, number))
        assert events[-1] == "data: [DONE]"
        assert sum('"finish_reason":"length"' in event for event in events) == 3
        assert server.wait() == 0
        wait_until_gone(engine, GONE_TIMEOUT_S)
        assert list(tmp_path.glob("motet-*")) == []


def test_a_second_signal_cuts_the_answer_short_without_a_traceback(server: ChildServer, tmp_path: Path) -> None:
    events = events_of_long_answer(server, (server.pid, signal.SIGTERM), (server.pid, signal.SIGINT))
    assert '"error"' in events[-2]
    assert events[-1] == "data: [DONE]"
    assert server.wait() == 0
    assert "Traceback" not in server.log
    assert list(tmp_path.glob("motet-*")) == []


def test_an_engine_that_dies_is_started_again_and_the_answer_goes_on(server: ChildServer, tmp_path: Path) -> None:
    undisturbed = texts_of(events_of_long_answer(server))
    killed = engine_pid(server)
    assert texts_of(events_of_long_answer(server, (killed, signal.SIGKILL))) == undisturbed
    assert engine_pid(server) != killed
    assert httpx.get(f"{server.url}/ready").status_code == 200
    os.kill(server.pid, signal.SIGTERM)
    assert server.wait() == 0
    assert list(tmp_path.glob("motet-*")) == []


def test_without_restarts_the_death_of_the_engine_is_that_of_the_server(model: Path, tmp_path: Path) -> None:
    with start(model, tmp_path, "--engine-restarts", "0") as server:
        events = events_of_long_answer(server, (engine_pid(server), signal.SIGKILL))
        assert '"engine_died"' in events[-2]
        assert events[-1] == "data: [DONE]"
        assert httpx.get(f"{server.url}/health").status_code == 503
        assert server.wait() == 70
        assert list(tmp_path.glob("motet-*")) == []


def test_a_killed_server_takes_its_engine_along(server: ChildServer) -> None:
    engine = engine_pid(server)
    os.kill(server.pid, signal.SIGKILL)
    wait_until_gone(engine, GONE_TIMEOUT_S)


def test_a_killed_program_takes_the_server_it_started_along(model: Path, tmp_path: Path) -> None:
    program = (
        "import sys; from motet.deploy.child import ChildServer\n"
        "with ChildServer(sys.argv[1:]) as server: print(server.pid, flush=True); input()"
    )
    command = [sys.executable, "-c", program, str(model), *ARGUMENTS]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**environment(), "TMPDIR": str(tmp_path)}
    ) as starter:
        assert starter.stdout is not None
        server_pid = int(starter.stdout.readline())
        starter.kill()
    wait_until_gone(server_pid, GONE_TIMEOUT_S)
    assert list(tmp_path.glob("motet-*")) == []


def test_memory_too_small_for_one_sequence_is_said_with_its_own_code(model: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(StartupError, match="exit code 5") as caught,
        start(model, tmp_path, "--kv-cache-gb", "0.000001"),
    ):
        pass
    assert "Traceback" not in caught.value.message
    assert list(tmp_path.glob("motet-*")) == []


def test_an_unknown_architecture_is_said_with_its_own_code(model: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = (other / "config.json").read_text()
    (other / "config.json").write_text(
        config.replace('"llama"', '"mamba"').replace("LlamaForCausalLM", "MambaForCausalLM")
    )
    with pytest.raises(StartupError, match="exit code 4") as caught, start(other, tmp_path):
        pass
    assert "Traceback" not in caught.value.message
