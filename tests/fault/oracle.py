"""Answers without faults, to compare others with: one engine generates them, unstreamed, and they are cached."""

from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from motet.engines.native.spawn import Spawn
from motet.settings.server_config import CellConfig
from tests.fault.answers import Answer, Body, fetch_answer
from tests.fault.running_cell import RunningCell

ONLY_STREAMED = ("stream", "stream_options")


@dataclass
class Undisturbed:
    """Servers of one engine, started when needed, one for each dtype. They end with `stack`."""

    folder: Path
    spawn: Spawn
    stack: AsyncExitStack
    _servers: dict[str, RunningCell] = field(default_factory=dict)
    _answers: dict[tuple[str, str, bytes], Answer] = field(default_factory=dict)

    async def start(self, dtype: str) -> None:
        """Starts the server of a dtype. Must be called before a `RunningCell` starts, which counts later processes and
        tasks as its own."""
        if dtype not in self._servers:
            server = RunningCell(self.folder, cell=CellConfig(), spawn=self.spawn, dtype=dtype)
            self._servers[dtype] = await self.stack.enter_async_context(server)

    async def answer(self, route: str, body: Body, *, dtype: str = "float32") -> Answer:
        """Returns the complete answer. It has no usage if the body is a stream without `include_usage`."""
        fields = {name: value for name, value in body.items() if name not in ONLY_STREAMED}
        key = dtype, route, msgspec.json.encode(fields)
        if key not in self._answers:
            await self.start(dtype)
            answer = await fetch_answer(self._servers[dtype].http, route, fields)
            assert all(choice.text or choice.token_ids for choice in answer.choices.values()), "nothing to compare"
            self._answers[key] = answer
        answer = self._answers[key]
        return (
            answer
            if not body.get("stream") or "stream_options" in body
            else Answer(answer.choices, groups=answer.groups)
        )
