"""The answers that clients read without a fault: one engine generates them, in one piece, and they are kept."""

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
    """Ends its engines with `stack`."""

    folder: Path
    spawn: Spawn
    stack: AsyncExitStack
    _servers: dict[str, RunningCell] = field(default_factory=dict)
    _answers: dict[tuple[str, str, bytes], Answer] = field(default_factory=dict)

    async def start(self, dtype: str) -> None:
        """Must be called before the other cell starts: processes and tasks that appear later belong to that cell."""
        if dtype not in self._servers:
            one = RunningCell(self.folder, cell=CellConfig(), spawn=self.spawn, dtype=dtype)
            self._servers[dtype] = await self.stack.enter_async_context(one)

    async def answer(self, route: str, body: Body, *, dtype: str = "float32") -> Answer:
        """Returns the complete answer. For a stream without `include_usage` it has no usage."""
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
