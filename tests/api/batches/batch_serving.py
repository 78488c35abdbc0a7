"""Servers with files and batches, in a folder that several servers can use one after the other."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from openai import AsyncOpenAI
from openai.types import Batch

from motet.api.batches.runner import batch_runner
from motet.api.batches.store import BatchStore, batch_store
from motet.settings.batch_config import BatchConfig
from motet.settings.server_config import ServerConfig
from tests.api.serving import MODEL, Served, Serving, WatchedEngine
from tests.clock import Clock

CHAT: Final = "/v1/chat/completions"


def line(custom_id: str, content: str = "hi", **more: object) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": content}], **more}
    return {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body}


def file_of(*lines: object) -> bytes:
    return b"".join((item if isinstance(item, bytes) else json.dumps(item).encode()) + b"\n" for item in lines)


def results_in(content: bytes) -> dict[str, dict[str, Any]]:
    """Returns the results by their ids. No id may have two."""
    lines = [json.loads(text) for text in content.splitlines()]
    found = {item["custom_id"]: item for item in lines}
    assert len(found) == len(lines)
    return found


@dataclass
class BatchServed:
    """A server, its store, and its client."""

    served: Served
    store: BatchStore

    @property
    def openai(self) -> AsyncOpenAI:
        return self.served.openai

    def as_key(self, key: str) -> AsyncOpenAI:
        return self.openai.with_options(api_key=key)

    async def upload(self, *lines: object, client: AsyncOpenAI | None = None) -> str:
        file = ("lines.jsonl", file_of(*lines))
        return (await (client or self.openai).files.create(file=file, purpose="batch")).id

    async def create(self, *lines: object, client: AsyncOpenAI | None = None, endpoint: Any = CHAT) -> Batch:
        input_id = await self.upload(*lines, client=client)
        batches = (client or self.openai).batches
        return await batches.create(input_file_id=input_id, endpoint=endpoint, completion_window="24h")

    async def ended(self, batch: Batch, *, client: AsyncOpenAI | None = None) -> Batch:
        """Waits until the batch has ended, and returns it."""
        if (running := self.store.open.get(batch.id)) is not None:
            await running.ended.wait()
        return await (client or self.openai).batches.retrieve(batch.id)

    async def results(self, file_id: str | None, *, client: AsyncOpenAI | None = None) -> dict[str, dict[str, Any]]:
        assert file_id is not None
        return results_in((await (client or self.openai).files.content(file_id)).content)


@dataclass
class BatchServing:
    """Starts servers that use one folder."""

    serve: Serving
    folder: Path
    clock: Clock = field(default_factory=lambda: Clock(1_700_000_000.0))

    @asynccontextmanager
    async def __call__(
        self, *, engine: WatchedEngine | None = None, api_keys: Sequence[str] = (), **settings: Any
    ) -> AsyncIterator[BatchServed]:
        """`settings` are fields of `BatchConfig`, or of `ServerConfig`."""
        limits = {name: settings.pop(name) for name in [*settings] if name.startswith("batch_")}
        batches = BatchConfig(batch_dir=str(self.folder), **limits)
        config = ServerConfig(served_model_name=MODEL, api_keys=tuple(api_keys), batches=batches, **settings)
        async with AsyncExitStack() as stack:
            served = await Serving(self.serve.tokenizer, stack)(engine=engine, config=config)
            store = await stack.enter_async_context(batch_store(batches, clock=self.clock))
            assert store is not None
            served.service.batches = store
            await stack.enter_async_context(batch_runner(served.service, served.app, retry_s=0.01))
            yield BatchServed(served, store)
            store.usage.check()
