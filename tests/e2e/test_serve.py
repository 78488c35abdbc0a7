"""`motet serve` as real processes: it answers, and leaves nothing behind, however it ends."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from motet.deploy.child import ChildServer
from motet.errors import StartupError
from motet.settings.server_config import environment
from motet.types import SamplingParams
from tests.e2e.long_answer import ENDLESS, events_of_long_answer, texts_of
from tests.e2e.processes import wait_until_gone
from tests.forked import ForkingProcess
from tests.hosts.servers import eventually
from tests.patience import PATIENCE_S
from tests.tiny_engine import TINY

pytestmark = pytest.mark.slow


def start(forking: ForkingProcess, folder: Path, tmp_path: Path) -> ChildServer:
    """Makes a server whose temporary files are all in `tmp_path`."""
    return forking.server([str(folder), *TINY], environ={**environment(), "TMPDIR": str(tmp_path)})


def pid_of_engine(server: ChildServer, *, other_than: int | None = None) -> int:
    """Returns the pid of the server's engine, once the engine with pid `other_than` has been replaced."""

    def pid() -> object:
        return httpx.get(f"{server.url}/status", timeout=PATIENCE_S).json()["workers"][0]["pid"]

    found = eventually(pid, lambda pid: pid not in (None, other_than))
    assert isinstance(found, int)
    return found


@pytest.fixture
def server(forking: ForkingProcess, folder: Path, tmp_path: Path) -> Iterator[ChildServer]:
    with start(forking, folder, tmp_path) as running:
        yield running


def test_a_second_signal_cuts_the_answer_short_without_a_traceback(
    forking: ForkingProcess, long_folder: Path, tmp_path: Path
) -> None:
    with start(forking, long_folder, tmp_path) as server:
        signals = (server.pid, signal.SIGTERM), (server.pid, signal.SIGINT)
        events = events_of_long_answer(server, *signals, max_tokens=ENDLESS)
        assert '"error"' in events[-2]
        assert events[-1] == "data: [DONE]"
        assert server.wait() == 0
        assert "Traceback" not in server.log
        assert list(tmp_path.glob("motet-*")) == []


def test_an_answer_survives_its_engine_and_finishes_after_a_terminal_signal(
    server: ChildServer, tmp_path: Path
) -> None:
    undisturbed = texts_of(events_of_long_answer(server))
    killed = pid_of_engine(server)
    assert texts_of(events_of_long_answer(server, (killed, signal.SIGKILL))) == undisturbed
    again = pid_of_engine(server, other_than=killed)
    assert eventually(lambda: httpx.get(f"{server.url}/ready", timeout=PATIENCE_S), lambda ready: ready.is_success)
    events = events_of_long_answer(server, (server.pid, signal.SIGINT))
    assert events[-1] == "data: [DONE]"
    assert sum('"finish_reason":"length"' in event for event in events) == 3
    assert texts_of(events) == undisturbed
    assert server.wait() == 0
    wait_until_gone(again, PATIENCE_S)
    assert list(tmp_path.glob("motet-*")) == []


def test_a_server_ends_when_the_program_that_started_it_is_killed(
    forking: ForkingProcess, folder: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.e2e.starter", str(folder), *TINY]
    environ = {**environment(), "TMPDIR": str(tmp_path)}
    with forking.popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ) as starter:
        assert starter.stdout is not None
        server_pid = int(starter.stdout.readline())
        starter.kill()
    wait_until_gone(server_pid, PATIENCE_S)
    assert list(tmp_path.glob("motet-*")) == []


def test_an_unknown_architecture_has_its_own_exit_code(forking: ForkingProcess, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    for file in folder.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    config = (other / "config.json").read_text()
    (other / "config.json").write_text(
        config.replace('"llama"', '"mamba"').replace("LlamaForCausalLM", "MambaForCausalLM")
    )
    with pytest.raises(StartupError, match="exit code 4") as caught, start(forking, other, tmp_path):
        pass
    assert "Traceback" not in caught.value.message


def test_a_request_that_omits_fields_gets_the_tokens_of_one_that_has_the_defaults(
    forking: ForkingProcess, folder: Path, tmp_path: Path
) -> None:
    defaults = {"temperature": 1.5, "top_p": 0.9, "top_k": 20, "min_p": 0.2, "repetition_penalty": 1.3}
    flags = ["--override-generation-config", json.dumps({**defaults, "max_new_tokens": 30})]
    with forking.server([str(folder), *TINY, *flags]) as server:

        def tokens(**fields: object) -> list[list[int]]:
            body = {"messages": [{"role": "user", "content": "hello"}], "n": 4, "seed": 3, "ignore_eos": True}
            answer = httpx.post(
                f"{server.url}/v1/chat/completions",
                json={**body, "return_token_ids": True, **fields},
                timeout=PATIENCE_S,
            ).json()
            return [choice["token_ids"] for choice in answer["choices"]]

        assert tokens() == tokens(**defaults, max_tokens=30)
        assert {len(choice) for choice in tokens()} == {30}
        for name in defaults:
            neutral = getattr(SamplingParams(max_tokens=1), name)
            assert tokens(**{name: neutral}) != tokens(), name
