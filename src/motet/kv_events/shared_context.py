"""One ZeroMQ context for all the workers that are followed: with one each, a follower has two threads for every worker,
and opens eight files in place of three."""

import zmq
import zmq.asyncio


class SharedContext:
    """There from when the first subscription takes it until the last has given it back. Of one event loop."""

    def __init__(self) -> None:
        self._context: zmq.asyncio.Context | None = None
        self._takers = 0

    def take(self) -> zmq.asyncio.Context:
        if self._context is None:
            self._context = zmq.asyncio.Context()
            self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._takers += 1
        return self._context

    def give_back(self) -> None:
        """By a taker that has closed its sockets."""
        self._takers -= 1
        if self._takers == 0 and self._context is not None:
            self._context.term()
            self._context = None
