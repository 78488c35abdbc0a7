"""`motet batch` as a command: on a running server, on a server of its own, and killed again and again."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from bench.servers.ports import free_port
from motet.batch.run import BatchProgress
from motet.cli.batch.target import MAX_FRUITLESS_STARTS, OwnServer
from motet.deploy.child import ChildServer
from motet.errors import BatchStoppedError
from motet.settings.server_config import environment
from tests.batch.batch_scene import request
from tests.cli.test_servers import fails, motet
from tests.fake_server import MODEL, FakeServer
from tests.forked import ForkingProcess
from tests.models.model_folders import write_model
from tests.patience import PATIENCE_S
from tests.tiny_engine import TINY
from tests.tiny_tokenizer import fake_answer, save_tiny_tokenizer

KEY = "the key"
COMPLETIONS = "/v1/completions"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FakeServer]:
    folder = save_tiny_tokenizer(tmp_path_factory.mktemp("model"))
    with FakeServer(folder, lambda request, start: fake_answer(f"answer {start.seed}"), api_key=KEY) as running:
        yield running


def completion(custom_id: str, prompt: str = "Hi", **body: object) -> bytes:
    return request(custom_id, url=COMPLETIONS, body={"model": MODEL, "prompt": prompt, **body})


def lines_of(path: Path) -> list[dict[str, dict[str, object]]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def texts_of(path: Path) -> dict[object, object]:
    """The choices of each line. Fails if an id has two lines."""
    lines = lines_of(path)
    texts = {str(line["custom_id"]): line["response"]["body"]["choices"] for line in lines}  # type: ignore[index]
    assert len(texts) == len(lines)
    return {custom_id: [choice["text"] for choice in choices] for custom_id, choices in texts.items()}


def test_a_batch_on_a_running_server_has_its_answers_and_refusals(server: FakeServer, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    wrong = [completion("few", n=0), completion("other", model="gone"), b"{}\n", completion("a")]
    source.write_bytes(b"".join([completion("a", n=2, seed=5), completion("b", seed=1), *wrong]))
    arguments = ("batch", str(source), "-o", str(output), "--url", f"{server.url}/v1", "--api-key", KEY)
    result = motet(*arguments)
    assert result.exit_code == 1, result.output
    assert "6 lines: 2 completed, 4 failed" in result.stderr
    headers, body = {"authorization": f"Bearer {KEY}"}, {"prompt": "Hi", "n": 2, "seed": 5}
    direct = httpx.post(f"{server.url}{COMPLETIONS}", json=body, headers=headers).json()
    assert texts_of(output)["a"] == [choice["text"] for choice in direct["choices"]]
    assert all(str(line["response"]["request_id"]).startswith("req-") for line in lines_of(output))
    failed = lines_of(tmp_path / "out.errors.jsonl")
    assert {str(line["custom_id"]): line["response"] and line["response"]["status_code"] for line in failed} == {
        "few": 400, "other": 404, "None": None, "a": None
    }  # fmt: skip
    again = motet(*arguments, MOTET_API_KEYS=KEY)
    assert "out.jsonl has 2 of 6 results: continuing" in again.stderr
    assert len(lines_of(output)) == 2


def test_a_batch_that_is_complete_ends_at_once_with_0(server: FakeServer, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_bytes(completion("a"))
    arguments = ("batch", str(source), "-o", str(output), "--url", server.url)
    assert motet(*arguments, MOTET_API_KEYS=KEY).exit_code == 0
    assert motet(*arguments[:-1], "http://127.0.0.1:1").exit_code == 0
    assert not (tmp_path / "out.errors.jsonl").exists()


def test_wrong_commands_start_nothing(server: FakeServer, tmp_path: Path) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    files = ("batch", str(source), "-o", str(output))
    fails(motet(*files), 2, "in.jsonl cannot be read")
    source.write_bytes(completion("a"))
    fails(motet(*files, "org/name", "--url", server.url), 2, "--url", "--model")
    fails(motet(*files, "--url", "http://host:none"), 2, "--url", "is not a URL")
    fails(motet(*files, "--max-num-seqs", "0"), 2, "--max-num-seqs 0")
    fails(motet(*files, "--api-key", "x"), 2, "--api-key")
    fails(motet(*files, "./gone"), 3, "./gone")
    fails(motet(*files, "--url", server.url, "--api-key", "wrong"), 1, "refuses the API key")
    fails(motet(*files, "--url", "http://127.0.0.1:1", "--server-timeout", "0"), 1, "has not answered")
    assert output.read_bytes() == b""


def write_batch(source: Path, *, count: int) -> None:
    prompts = ["the hand", "the sand", "an ant and a tent"]
    bodies = ({"prompt": prompts[i % 3], "n": 1 + i % 3, "seed": i, "max_tokens": 40} for i in range(count))
    source.write_bytes(b"".join(request(f"{i}", url=COMPLETIONS, body=body) for i, body in enumerate(bodies)))


def start(forking: ForkingProcess, source: Path, output: Path, *target: str) -> "subprocess.Popen[str]":
    """Starts the command. Its server runs with one thread, and ends with it."""
    command = [sys.executable, "-m", "motet", "batch", str(source), "-o", str(output), *target]
    streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return forking.popen(command, **streams, env=environment(), text=True, start_new_session=True)


def num_results(output: Path) -> int:
    return output.read_bytes().count(b"\n") if output.exists() else 0


def wait_for_results(output: Path, count: int, process: "subprocess.Popen[str]") -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while num_results(output) < count and process.poll() is None:
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@pytest.mark.slow
def test_a_batch_that_is_killed_again_and_again_equals_an_undisturbed_one(
    folder: Path, tmp_path: Path, forking: ForkingProcess
) -> None:
    """Each run is killed with SIGKILL after a random number of results, in the last one the server is."""
    source, output, expected = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "expected.jsonl"
    write_batch(source, count=120)
    target = (str(folder), *TINY)
    undisturbed = start(forking, source, expected, *target)
    assert undisturbed.communicate(timeout=PATIENCE_S) and undisturbed.returncode == 0
    chance = random.Random(1)
    for number in range(1, 5):
        process = start(forking, source, output, *target)
        wait_for_results(output, 20 * number + chance.randrange(10), process)
        process.kill()
        process.communicate(timeout=PATIENCE_S)
    assert num_results(output) < 120
    last = start(forking, source, output, *target)
    assert last.communicate(timeout=PATIENCE_S) and last.returncode == 0
    assert texts_of(output) == texts_of(expected)
    assert len(texts_of(output)) == 120


@pytest.mark.slow
def test_a_batch_survives_the_loss_of_its_engine_and_of_its_server(
    folder: Path, tmp_path: Path, forking: ForkingProcess
) -> None:
    """A server at a URL loses its engine, then it is killed and started again at the same port."""
    source, output, expected = tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "expected.jsonl"
    write_batch(source, count=90)
    arguments, port = (str(folder), *TINY), free_port()
    with ExitStack() as stack:
        server = stack.enter_context(forking.server(arguments, port=port))
        process = start(forking, source, expected, "--url", server.url)
        assert process.communicate(timeout=PATIENCE_S) and process.returncode == 0
        process = start(forking, source, output, "--url", server.url)
        wait_for_results(output, 10, process)
        (worker,) = httpx.get(f"{server.url}/status").json()["workers"]
        os.kill(worker["pid"], signal.SIGKILL)
        wait_for_results(output, num_results(output) + 15, process)
        os.kill(server.pid, signal.SIGKILL)
        server.wait()
        stack.enter_context(forking.server(arguments, port=port))
        assert process.communicate(timeout=PATIENCE_S) and process.returncode == 0
    assert texts_of(output) == texts_of(expected)


@pytest.mark.slow
def test_ctrl_c_ends_a_batch_with_130_and_whole_lines(folder: Path, tmp_path: Path, forking: ForkingProcess) -> None:
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write_batch(source, count=200)
    process = start(forking, source, output, str(folder), *TINY)
    wait_for_results(output, 10, process)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 130
    assert 10 <= len(texts_of(output)) < 200


class FakeChild(ChildServer):
    """A server that has ended with this exit code; None while it runs."""

    code: int | None = None

    def __init__(self, number: int) -> None:
        self.url = f"http://server-{number}"

    def __enter__(self) -> "FakeChild":
        return self

    def __exit__(self, *error: object) -> None:
        """Does nothing."""

    @property
    def exit_code(self) -> int | None:
        return self.code

    @property
    def log(self) -> str:
        return "the last line"


@pytest.mark.anyio
async def test_a_server_that_ends_is_started_again_while_there_are_results(tmp_path: Path) -> None:
    children: list[FakeChild] = []

    def start_child(arguments: object, **settings: object) -> FakeChild:
        children.append(FakeChild(len(children)))
        return children[-1]

    server = OwnServer({"model": str(write_model(tmp_path))}, None, start_timeout_s=1.0, start=start_child)
    progress = BatchProgress(100)
    with ExitStack() as stack:
        server.start(progress, stack)
        await server.revive()
        assert server.url == "http://server-0"
        for number in range(1, 10):
            progress.num_completed += 1
            children[-1].code = -signal.SIGKILL
            await server.revive()
            assert server.url == f"http://server-{number}"
        with pytest.raises(BatchStoppedError, match="without a result:\nthe last line"):
            for _ in range(MAX_FRUITLESS_STARTS + 1):
                children[-1].code = 1
                await server.revive()
        assert len(children) == 10 + MAX_FRUITLESS_STARTS
