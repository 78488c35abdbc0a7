"""One request to a server and what comes back, as pieces of the group's choices."""

from collections import deque

from motet.engines.sse import DONE, EventSplitter
from motet.engines.upstream.ask import Ask
from motet.engines.upstream.base import TextStep, TextUsage
from motet.engines.upstream.client import Ids, Reply, UpstreamServer
from motet.errors import EngineDiedError, EngineError, UpstreamRefusalError

NOT_ELSEWHERE = "What a text upstream has begun cannot go on elsewhere."


class Answer:
    """Read to its end or closed early, which ends it there; owned by one task."""

    def __init__(self, server: UpstreamServer, ask: Ask) -> None:
        self.ask = ask
        self.begun = False
        """Whether anything has come; before that, it may be asked for once more."""
        self._server = server
        self._merge = ask.merge()
        self._reply: Reply | None = None
        self._events = EventSplitter()
        self._steps: deque[TextStep] = deque()
        self._done = False

    @property
    def usage(self) -> TextUsage | None:
        """Known at the end, if it is told."""
        return self._merge.usage

    async def read(self) -> TextStep | None:
        """None at the end. Raises MotetError, with the server and the choice named in it."""
        try:
            return await self._read()
        except UpstreamRefusalError:
            raise  # in its own words
        except EngineDiedError as error:
            after = f". {NOT_ELSEWHERE}" if self.begun else ""
            raise type(error)(f"{self._named(error)}{after}") from error
        except EngineError as error:
            raise EngineError(self._named(error)) from error

    def close(self) -> None:
        if self._reply is not None:
            self._reply.close()

    def _named(self, error: EngineError) -> str:
        said = error.message if self._server.name in error.message else f"{self._server.name}: {error.message}"
        return f"{self.ask.name.capitalize()} of the request failed: {said}"

    async def _read(self) -> TextStep | None:
        if self._reply is None:
            request = self.ask.request
            ids = Ids(trace=request.trace, session_id=request.session_id, authorization=request.authorization)
            self._reply = await self._server.post(request.route, self.ask.body(), ids)
            if request.stream and not self._reply.is_stream:
                raise EngineError("it was asked for a stream, and answered something else")
        return await (self._next(self._reply) if self.ask.request.stream else self._whole(self._reply))

    async def _whole(self, reply: Reply) -> TextStep | None:
        if self.begun:
            return None
        step = self._merge.body(await reply.whole())
        self._merge.close()
        self.begun = True
        return step

    async def _next(self, reply: Reply) -> TextStep | None:
        while not self._steps and not self._done:
            try:
                data = await reply.read()
            except EngineDiedError:
                if self._merge.unfinished:
                    raise
                data = b""  # cut off after all had been said
            self._feed(data)
        if self._steps:
            self.begun = True
            return self._steps.popleft()
        self._merge.close()
        await reply.end()
        return None

    def _feed(self, data: bytes) -> None:
        """Nothing: the stream has ended."""
        self._done = not data
        for event in self._events.feed(data):
            if self._done or event == DONE:
                self._done = True
            elif (step := self._merge.chunk(event)) is not None:
                self._steps.append(step)
