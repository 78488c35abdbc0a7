"""A server in front of fake text upstreams: they have the model `texts`, the server has the model `tiny`."""

from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

import httpx

from motet.api.served import TextModel
from motet.engines.http import server_client
from motet.engines.upstream.text_upstream import TextUpstream
from motet.engines.upstream.upstream_server import UpstreamOptions, UpstreamServer
from motet.routing.text_router import TextRouter
from motet.routing.workers.fleet import Fleet
from motet.settings.server_config import ServerConfig
from motet.tracing.spans import NO_TRACES, Tracer
from tests.api.serving import MODEL, Served, Serving, WatchedEngine
from tests.api.two_models import ListedModels, served_as
from tests.engines.upstream.fake_upstream import report_of
from tests.peers.fake_openai import FakeOpenAI
from tests.peers.openai_script import CHAT, COMPLETIONS, Behaviour

TEXTS = "texts"


@dataclass
class TextGateway:
    """The server, and its upstreams."""

    served: Served
    peers: list[FakeOpenAI]
    fleet: Fleet

    def body(self, **fields: object) -> dict[str, object]:
        """Returns the body of a chat with the text model."""
        return {"model": TEXTS, "messages": [{"role": "user", "content": "hi"}], **fields}

    async def chat(self, **fields: object) -> httpx.Response:
        return await self.served.http.post(CHAT, json=self.body(**fields))

    async def complete(self, **fields: object) -> httpx.Response:
        return await self.served.http.post(COMPLETIONS, json={"model": TEXTS, "prompt": "hi", **fields})


@dataclass
class TextServing:
    """Starts such servers. Afterwards nothing may be left on any of them."""

    serve: Serving
    stack: AsyncExitStack

    async def __call__(
        self,
        *behaviour: Behaviour,
        options: UpstreamOptions | None = None,
        config: ServerConfig | None = None,
        learn: bool = True,
        with_tokens: bool = True,
        tracer: Tracer = NO_TRACES,
    ) -> TextGateway:
        """Starts one text upstream for each of `behaviour`."""
        client = await self.stack.enter_async_context(server_client())
        fleet = Fleet()
        texts = TextRouter(fleet)
        self.stack.callback(fleet.check)
        peers = []
        for number, how in enumerate(behaviour):
            how.models = ({"id": TEXTS, "max_model_len": 99},)
            peer = await self.stack.enter_async_context(FakeOpenAI(how))
            server = UpstreamServer(peer.url, client, options=options)
            upstream = TextUpstream(server, report := await report_of(server))
            self.stack.push_async_callback(upstream.close)
            if learn:
                await upstream.learn_abilities()
                peer.requests.clear()
            fleet.expect(f"texts-{number}", peer.url, takes_texts=True)
            texts.put(f"texts-{number}", upstream.generate)
            fleet.put_text(f"texts-{number}", report.models)
            self.stack.push_async_callback(peer.until_idle)
            self.stack.callback(upstream.check)
            peers.append(peer)
        engine = WatchedEngine()
        token_model = served_as(MODEL, engine, self.serve.tokenizer, root=MODEL)
        text_model = TextModel(name=TEXTS, root=TEXTS, created=1, max_model_len=99, generate=texts.generate)
        models = ListedModels(*([token_model] if with_tokens else []), text_model)
        served = await self.serve.several(models, engine, config=config, tracer=tracer)
        return TextGateway(served, peers, fleet)


def texts_of(answer: dict[str, Any]) -> list[str]:
    return [(choice.get("message") or {"content": choice.get("text")})["content"] for choice in answer["choices"]]


def joined(stream: list[dict[str, Any]]) -> dict[str, Any]:
    """Joins the chunks of a stream to the form of an answer that is not streamed."""
    texts: dict[int, str] = {}
    for chunk in stream:
        for choice in chunk["choices"]:
            text = (choice.get("delta") or {"content": choice.get("text")}).get("content") or ""
            texts[choice["index"]] = texts.get(choice["index"], "") + text
    choices = [{"index": index, "text": texts[index]} for index in sorted(texts)]
    return {**stream[-1], "choices": choices}
