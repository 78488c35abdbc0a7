"""The engine process at the end of its pipes, with real sockets and a tiny model, and all ways in which it can end."""

import asyncio
import importlib
import io
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import msgspec
import psutil
import pytest
import zmq

from motet.engines.native.client import NativeEngine
from motet.engines.native.protocol import Close, Launch, Pipes, StartFailed
from motet.engines.native.spawn import Spawn, engine_environ, spawn
from motet.engines.wire import CarriedError
from motet.errors import (
    ContextLengthError,
    EngineClosedError,
    EngineDiedError,
    KVMemoryError,
    ModelLoadError,
    RequestError,
    StartupError,
    UnsupportedModelError,
)
from motet.ids import RequestId
from motet.settings.engine_config import EngineConfig
from motet.system.machine import torch_environ
from motet.text.choice import ChoiceEvent
from motet.text.text_group import GroupStep, TextGroup
from motet.types import FinishReason, GenerateRequest, GroupDelta
from tests.e2e.processes import wait_until_gone
from tests.engines.native.drive import group, make_core, prompt_of, run
from tests.engines.native.grammars import tiny_tokenizer
from tests.forked import ForkingProcess, ModuleProcess
from tests.patience import PATIENCE_S
from tests.text.feeding import ids_of, stopping
from tests.tiny_engine import engine_config

Tiny = Callable[[str], Path]
pytestmark = [pytest.mark.anyio, pytest.mark.slow]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    """All tests share one event loop, so that several can use one engine."""
    return "asyncio"


@asynccontextmanager
async def engine(folder: Path, spawn: Spawn, **changes: object) -> AsyncIterator[NativeEngine]:
    """Starts an engine, closes it in any case, and checks that nothing of it is left."""
    before = pipe_folders()
    started = await NativeEngine.start(engine_config(folder, **changes), spawn=spawn)
    try:
        yield started
    finally:
        await started.close()
    assert started.info.pid is not None and not psutil.pid_exists(started.info.pid)
    assert pipe_folders() <= before


@pytest.fixture(scope="module")
async def shared(tiny: Tiny, forking: ForkingProcess) -> AsyncIterator[NativeEngine]:
    async with engine(tiny("llama"), forking.spawn) as started:
        yield started


@pytest.fixture
async def native(shared: NativeEngine) -> AsyncIterator[NativeEngine]:
    """The engine that tests share if they do not end it; each must leave it idle."""
    yield shared
    assert await idle(shared)


def pipe_folders(pid: int | None = None) -> set[Path]:
    """Returns the temporary folders that engines of a process (by default this one) have until they are connected."""
    return set(Path(tempfile.gettempdir()).glob(f"motet-{pid or os.getpid()}-*"))


async def tokens_of(native: NativeEngine, request: GenerateRequest) -> dict[int, list[int]]:
    """Returns all tokens of a group."""
    tokens: dict[int, list[int]] = {start.index: [] for start in request.choices}
    async for delta in native.generate(request):
        add(tokens, delta)
    return tokens


def add(tokens: dict[int, list[int]], delta: GroupDelta) -> None:
    for choice in delta.choices:
        tokens[choice.index] += choice.token_ids


async def idle(native: NativeEngine) -> bool:
    """Returns True if no blocks are held. The engine runs its own checks."""
    stats = await native.stats(check=True)
    return stats.blocks_used == stats.groups_running == stats.groups_waiting == stats.choices_waiting == 0


async def test_arguments_for_vllm_workers_are_refused(native: NativeEngine) -> None:
    with pytest.raises(RequestError, match="vLLM workers") as refused:
        await tokens_of(native, group("g", prompt_of(30), extra_args='{"a":1}'))
    assert refused.value.param == "extra_args"


async def test_groups_through_the_process_equal_the_core_and_run_side_by_side(native: NativeEngine, tiny: Tiny) -> None:
    requests = [group(f"g{i}", prompt_of(30 + i, i), n=i + 1, seed=i, max_tokens=25) for i in range(4)]
    expected = run(make_core(tiny("llama")), requests)
    found = await asyncio.gather(*(tokens_of(native, request) for request in requests))
    assert [expected[request.request_id].tokens for request in requests] == list(found)
    assert await idle(native)
    assert native.info.fingerprint.endswith("-same")


async def test_a_closed_stream_frees_its_group_at_once(native: NativeEngine) -> None:
    never_read = native.generate(group("never read", prompt_of(20), n=2, max_tokens=400))
    stream = native.generate(group("left", prompt_of(50, 1), n=4, max_tokens=400))
    await anext(stream)
    await stream.aclose()
    await stream.aclose()
    await never_read.aclose()
    assert await idle(native)
    with pytest.raises(StopAsyncIteration):
        await anext(stream)


async def test_a_stopped_choice_ends_and_its_siblings_continue(native: NativeEngine, tiny: Tiny) -> None:
    request = group("g", prompt_of(20), n=3, seed=4, max_tokens=490)
    expected = run(make_core(tiny("llama")), [request])["g"].tokens
    stream, tokens = native.generate(request), {0: list[int](), 1: [], 2: []}
    add(tokens, await anext(stream))
    await native.stop_choice(RequestId("g"), 1)
    async for delta in stream:
        add(tokens, delta)
    assert (tokens[0], tokens[2]) == (expected[0], expected[2])
    assert tokens[1] == expected[1][: len(tokens[1])] and len(tokens[1]) < 490
    assert await idle(native)


async def test_a_stop_string_ends_a_text_inside_a_step_of_several_tokens(
    native: NativeEngine, tiny: Tiny, forking: ForkingProcess
) -> None:
    """With few letters an answer repeats itself, so draft tokens are accepted."""
    request = group("g", prompt_of(20), seed=4, max_tokens=90, temperature=0.3, allowed_token_ids=ids_of("abc"))
    before = (await native.stats()).accepted_tokens
    steps = [delta.choices[0].token_ids async for delta in native.generate(request)]
    assert (await native.stats()).accepted_tokens > before
    tokens = [token for step in steps for token in step]
    number = next(number for number, step in enumerate(steps) if len(step) > 2)
    end = sum(map(len, steps[:number])) + 2
    text = tiny_tokenizer().decode(tokens[:end])
    stop = newest_string(text)
    async with engine(tiny("llama"), forking.spawn, draft_tokens=0) as plain:
        expected = await answer_of(plain, request, stop)
    assert await answer_of(native, request, stop) == expected
    assert expected == (text.removesuffix(stop), tokens[:end], FinishReason.STOP, stop)


def newest_string(text: str) -> str:
    """Returns the shortest string at the end of a text that occurs nowhere else in it."""
    begins = (begin for begin in range(len(text) - 1, -1, -1) if text.find(text[begin:]) == begin)
    return text[next(begins) :]


async def answer_of(
    native: NativeEngine, request: GenerateRequest, stop: str
) -> tuple[str, list[int], FinishReason | None, str | int | None]:
    """Returns the text, the tokens and the end of a choice that a stop string ends."""
    events: list[ChoiceEvent] = []

    def take(steps: Sequence[GroupStep]) -> None:
        events.extend(event for step in steps for event in step.events)

    await TextGroup(native, request, tokenizer=tiny_tokenizer(), rules=stopping(stop)).run(take)
    tokens = [token for event in events for token in event.token_ids]
    return "".join(event.text for event in events), tokens, events[-1].finish, events[-1].stop_reason


async def test_a_group_that_cannot_run_is_refused_and_the_next_one_runs(native: NativeEngine) -> None:
    with pytest.raises(ContextLengthError) as refused:
        await tokens_of(native, group("long", prompt_of(600)))
    assert refused.value.param == "prompt"
    assert len((await tokens_of(native, group("fine", prompt_of(9), max_tokens=5)))[0]) == 5


async def test_a_killed_engine_ends_every_group_with_engine_died(tiny: Tiny, forking: ForkingProcess) -> None:
    """The bug: groups that arrived after it was closed got `engine_closed`, and no other worker continues such
    groups."""
    async with engine(tiny("llama"), forking.spawn) as native:
        streams = [native.generate(group(f"g{i}", prompt_of(20, i), n=3, max_tokens=450)) for i in range(3)]
        for stream in streams:
            await anext(stream)
        native.kill()
        for stream in streams:
            with pytest.raises(EngineDiedError, match="was ended by SIGKILL"):
                async for _ in stream:
                    pass
        await asyncio.wait_for(native.died.wait(), PATIENCE_S)
        with pytest.raises(EngineDiedError):
            await native.stats()
        for name in ("late", "after close"):
            with pytest.raises(EngineDiedError):
                await anext(native.generate(group(name, prompt_of(5))))
            await native.close()
        native.kill()  # does nothing then


async def test_closing_ends_open_groups_with_engine_closed(tiny: Tiny, forking: ForkingProcess) -> None:
    async with engine(tiny("llama"), forking.spawn) as native:
        stream = native.generate(group("g", prompt_of(20), max_tokens=450))
        await anext(stream)
        await native.close()
        with pytest.raises(EngineClosedError):
            async for _ in stream:
                pass
        assert not native.died.is_set()


async def test_an_engine_whose_close_is_cancelled_is_killed(tiny: Tiny, forking: ForkingProcess) -> None:
    """The bug: it kept running, and closing it again did nothing."""
    async with engine(tiny("llama"), forking.spawn) as native:
        assert native.info.pid is not None
        os.kill(native.info.pid, signal.SIGSTOP)
        closing = asyncio.create_task(native.close(timeout_s=PATIENCE_S))
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert not psutil.pid_exists(native.info.pid)


async def test_an_engine_whose_start_is_cancelled_before_it_reads_anything_is_ended(tiny: Tiny) -> None:
    """The bug: the start waited while the process imported, as its launch was too long for the pipe, and then the
    process had no owner."""
    long = "x" * 2**20
    before = psutil.Process().children()
    starting = asyncio.create_task(NativeEngine.start(engine_config(tiny("llama"), model_name=long)))
    while not (started := [child for child in psutil.Process().children() if child not in before]):  # noqa: ASYNC110
        await asyncio.sleep(0)
    for _ in range(10):  # the process exists: the rest of its start is to send the launch
        await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert not any(child.is_running() for child in started)


async def test_an_engine_whose_pipes_cannot_be_made_leaves_nothing(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug: a folder for temporary files with a long name raised ZeroMQ's own error, and a folder was left there."""
    (deep := tmp_path / ("x" * 100)).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with pytest.raises(StartupError, match="the pipes to an engine process cannot be made"):
        await NativeEngine.start(engine_config(tiny("llama")))
    assert list(deep.iterdir()) == []


async def test_an_engine_ignores_signals_that_the_terminal_sends_to_all_processes(native: NativeEngine) -> None:
    stream = native.generate(group("g", prompt_of(20), max_tokens=100))
    await anext(stream)
    os.kill(native.info.pid or 0, signal.SIGINT)
    os.kill(native.info.pid or 0, signal.SIGTERM)
    assert sum([len(delta.choices) async for delta in stream]) == 99


@asynccontextmanager
async def parent_of(config: EngineConfig, forking: ForkingProcess) -> AsyncIterator[tuple[ModuleProcess, int]]:
    """Starts a parent, which is killed at the end, and yields it with the pid of its engine."""
    parent = await forking.start_module("tests.engines.native.parent")
    assert parent.stdin is not None and parent.stdout is not None
    try:
        parent.stdin.write(msgspec.json.encode(config) + b"\n")
        yield parent, int(await parent.stdout.readline())
    finally:
        parent.kill()
        await parent.wait()
        parent.stdin.close()


async def test_an_engine_dies_with_its_parent_and_leaves_no_file(tiny: Tiny, forking: ForkingProcess) -> None:
    async with parent_of(engine_config(tiny("llama")), forking) as (parent, child):
        assert psutil.pid_exists(child)
        assert not pipe_folders(parent.pid)  # while both live: killing them at the same time leaves none
    await asyncio.to_thread(wait_until_gone, child, PATIENCE_S)


def test_an_engine_whose_parent_dies_before_it_is_connected_leaves_no_file(tiny: Tiny, tmp_path: Path) -> None:
    """The parent has started the engine, but does not listen at the pipes."""
    pipes = tmp_path / "pipes"
    pipes.mkdir()
    launch = msgspec.json.encode(Launch(engine_config(tiny("llama")), str(pipes))) + b"\n"
    ended = subprocess.run([sys.executable, "-m", "motet.engines.native"], input=launch, stderr=subprocess.PIPE)
    assert (ended.returncode, ended.stderr) == (0, b"")
    assert not pipes.exists()


async def test_an_engine_that_cannot_start_reports_why_and_leaves_nothing(
    tiny: Tiny, forking: ForkingProcess, tmp_path: Path
) -> None:
    """Tests one reason of each class. `test_build` tests the others without a process."""
    before = pipe_folders()
    other = tmp_path / "other"
    other.mkdir()
    config = (tiny("llama") / "config.json").read_text()
    (other / "config.json").write_text(config.replace("LlamaForCausalLM", "NovelForCausalLM"))
    for folder, changes, error, words in (
        (tmp_path / "missing", {}, ModelLoadError, "missing"),
        (other, {}, UnsupportedModelError, "NovelForCausalLM, which is not a decoder"),
        (tiny("llama"), {"kv_cache_gb": 0.0001}, KVMemoryError, "--kv-cache-gb"),
    ):
        with pytest.raises(error, match=words):
            await NativeEngine.start(engine_config(folder, **changes), spawn=forking.spawn)
    assert pipe_folders() <= before


class EndsBeforeItsEvent(asyncio.subprocess.Process):
    """A process whose end is known before its last event arrives."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    @property
    def returncode(self) -> int:
        return ModelLoadError.exit_code

    async def wait(self) -> int:
        unable = StartFailed(CarriedError.of(ModelLoadError("no such model")))
        with zmq.Context() as context, context.socket(zmq.PUSH) as events:
            events.connect(self._launch.address("events"))
            events.send(msgspec.msgpack.encode(unable))
        return self.returncode


@pytest.fixture
def no_file_pipes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes ZeroMQ report that it has no pipes in the file system, as on Windows."""
    has = zmq.has
    monkeypatch.setattr(zmq, "has", lambda capability: capability != "ipc" and has(capability))


@pytest.mark.usefixtures("no_file_pipes")
async def test_an_engine_can_be_reached_over_the_loopback_address(
    native: NativeEngine, tiny: Tiny, forking: ForkingProcess
) -> None:
    request = group("g", prompt_of(30), n=3, max_tokens=20)
    async with engine(tiny("llama"), forking.spawn) as over_tcp:
        assert await tokens_of(over_tcp, request) == await tokens_of(native, request)
        assert await idle(over_tcp)


@pytest.mark.usefixtures("no_file_pipes")
def test_only_a_process_with_the_key_of_the_launch_gets_commands(tmp_path: Path) -> None:
    pipes = Pipes(Launch(EngineConfig(model_path="", model_name=""), str(tmp_path / "pipes")))
    launch = pipes.launch
    assert launch.loopback is not None
    other = zmq.curve_keypair()[0].decode()
    without_key = msgspec.structs.replace(launch, loopback=msgspec.structs.replace(launch.loopback, key=other))
    with zmq.Context() as context, context.socket(zmq.PULL) as stranger, context.socket(zmq.PULL) as engine:
        for end in (stranger, engine):
            end.setsockopt(zmq.LINGER, 0)
        without_key.connect(stranger, "commands")
        launch.connect(engine, "commands")
        engine_gets = 0
        while engine_gets < 20:
            pipes.send(Close())
            engine_gets += engine.poll(100) and bool(engine.recv())
        assert not stranger.poll(0), "a connected stranger would get half of the commands"
    pipes.close()


async def test_an_event_that_arrives_after_the_end_of_its_process_is_read(tiny: Tiny) -> None:
    """The bug: on a busy machine the server ended with another exit code, and did not report why."""

    async def spawn(launch: Launch) -> EndsBeforeItsEvent:
        return EndsBeforeItsEvent(launch)

    with pytest.raises(ModelLoadError, match="no such model"):
        await NativeEngine.start(engine_config(tiny("llama")), spawn=spawn)


def test_the_users_variables_replace_those_of_an_engines_environment() -> None:
    assert engine_environ({"HOME": "/x"}) == {"HOME": "/x", "GOMP_SPINCOUNT": "1000", "MALLOC_ARENA_MAX": "1"}
    own = {"GOMP_SPINCOUNT": "7", "MALLOC_ARENA_MAX": "4"}
    assert engine_environ(own) == own
    assert "GOMP_SPINCOUNT" not in engine_environ({"OMP_WAIT_POLICY": "ACTIVE"})


async def test_an_engine_s_torch_uses_no_folder_that_another_user_can_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug: no engine started if another user had made a file `torchinductor_USER` among the temporary files."""
    environs: list[dict[str, str]] = []

    async def record(*_: object, env: dict[str, str], **__: object) -> SimpleNamespace:
        environs.append(env)
        return SimpleNamespace(stdin=io.BytesIO())

    monkeypatch.setattr(asyncio, "create_subprocess_exec", record)
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    await spawn(Launch(engine_config(tmp_path), str(tmp_path)))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", environs[0]["TORCHINDUCTOR_CACHE_DIR"])
    torch_folders = importlib.import_module("torch._inductor.runtime.cache_dir_utils")
    assert torch_folders.cache_dir() == str(tmp_path)
    assert torch_environ({"TORCHINDUCTOR_CACHE_DIR": "/x"}, tmp_path) == {"TORCHINDUCTOR_CACHE_DIR": "/x"}


@pytest.mark.slow
def test_an_engine_whose_parent_is_killed_during_its_imports_ends_at_once(tmp_path: Path) -> None:
    """The bug: it imported torch to the end first. Ray kills such engines, and the folder of their pipes was left."""
    (folder := tmp_path / "pipes").mkdir()
    launch = msgspec.json.encode(Launch(engine_config(tmp_path), str(folder)))
    command = [sys.executable, "-X", "importtime", "-m", "motet.engines.native"]
    ended = subprocess.run(command, input=launch + b"\n", capture_output=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode == 0
    assert not folder.exists()
    assert b"motet.engines.native.process" not in ended.stderr  # a module is listed when it has been imported
