"""Parts of the front end's cost, measured alone in this process: the scripted engine, and the pipe of the real engine.

In the pipe, encoded events of a step go through ZeroMQ, are decoded, and wake the readers of their streams, as in
`motet.engines.native.client`. The figures include the sending end of the socket.
"""

import asyncio
import tempfile
import time
from pathlib import Path

import msgspec
import uvloop
import zmq

from bench.frontend.scripted_engine import Pulse, PulsedEngine
from motet.engines.native.client import PipeStream
from motet.engines.native.protocol import Launch, Pipes, StepReport
from motet.ids import RequestId
from motet.settings.engine_config import EngineConfig
from motet.types import ChoiceDelta, GenerateRequest, GroupDelta, SamplingParams, choice_starts

TOKENS = (500, 260, 28, 1032, 30)
STEPS = 500


def engine_us(groups: int, n: int) -> float:
    """Returns the scripted engine's CPU microseconds per token, without the pulse, which the bare server has too."""
    return uvloop.run(_engine_us(groups, n))


def pipe_us(groups: int, n: int) -> float:
    """Returns the CPU microseconds per token from the pipe to the reader of a stream."""
    with tempfile.TemporaryDirectory(prefix="motet-bench-") as folder:
        return uvloop.run(_pipe_us(Path(folder), groups, n))


def group(number: int, n: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=RequestId(f"chatcmpl-{number:032}"),
        prompt=(1, 2, 3),
        choices=choice_starts(n, 0),
        sampling=SamplingParams(max_tokens=STEPS),
    )


async def _engine_us(groups: int, n: int) -> float:
    engine = PulsedEngine(TOKENS, Pulse())

    async def read(number: int) -> None:
        async for _ in engine.generate(group(number, n)):
            pass

    async def wait() -> None:
        for _ in range(STEPS):
            await engine.pulse.next(None)

    [*engine.steps(tuple(range(n)), STEPS, None)]  # computed before the measurement
    spent = []
    for numbers in (range(groups), range(0)):
        began_s = time.process_time()
        await asyncio.gather(*map(read, numbers), *(wait() for _ in range(groups - len(numbers))))
        spent.append(time.process_time() - began_s)
    return (spent[0] - spent[1]) / (groups * n * STEPS) * 1e6


async def _pipe_us(folder: Path, groups: int, n: int) -> float:
    launch = Launch(EngineConfig(model_path="", model_name=""), str(folder / "pipes"))
    (folder / "pipes").mkdir()
    pipes = Pipes(launch)
    streams = {
        (request := group(number, n)).request_id: PipeStream(request, lambda _: None) for number in range(groups)
    }
    choices = tuple(ChoiceDelta(index, (TOKENS[index % len(TOKENS)],)) for index in range(n))
    raw = msgspec.msgpack.encode(StepReport([GroupDelta(request_id, choices) for request_id in streams]))
    with zmq.Context() as context, context.socket(zmq.PUSH) as sender:
        sender.connect(launch.address("events"))
        readers = [asyncio.create_task(_read(stream)) for stream in streams.values()]
        began_s = time.process_time()
        for _ in range(STEPS):
            sender.send(raw)
            event = await pipes.receive()
            assert isinstance(event, StepReport)
            for delta in event.deltas:
                streams[delta.request_id].feed(delta)
        await asyncio.gather(*readers)
        spent_s = time.process_time() - began_s
    pipes.close()
    return spent_s / (groups * n * STEPS) * 1e6


async def _read(stream: PipeStream) -> None:
    for _ in range(STEPS):
        await anext(stream)
