"""Kills the engine that generates an answer, while the answer is streamed, to show what the client sees: a pause.

The client reads the stream through `EngineKill.read`, which kills the engine with SIGKILL when a part of the expected
text has been received. The server continues the answers on another engine."""

import os
import signal
import time
from collections.abc import Callable, Sequence

import httpx
import msgspec

from motet.cli.conversation import Conversation, StreamedChoice
from motet.errors import EngineError

PART = 0.3
"""Part of the expected text after which the engine is killed."""


def kill_process(pid: int) -> None:
    """Ends a process without giving it a chance to clean up."""
    os.kill(pid, getattr(signal, "SIGKILL", signal.SIGTERM))  # Windows has only SIGTERM, which does the same


class _EngineStatus(msgspec.Struct):
    id: str
    role: str
    pid: int | None = None
    choices_running: int = 0


class _ServerStatus(msgspec.Struct):
    workers: list[_EngineStatus]


class EngineKill:
    """A kill during one request. `expected`: the answers to the same request without a kill."""

    def __init__(
        self,
        expected: Sequence[StreamedChoice],
        *,
        client: httpx.Client,
        kill: Callable[[int], None] = kill_process,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.worker = ""
        """Id of the killed engine; empty before the kill, and if the answers end before it."""
        self.pid = 0
        self.pause_s = 0.0
        """Longest time in seconds without a chunk since the kill."""
        self._expected = expected
        self._client = client
        self._kill = kill
        self._clock = clock
        self._last_s = 0.0

    def read(self, conversation: Conversation) -> None:
        """Called after each chunk of the stream."""
        now_s = self._clock()
        if self.worker:
            self.pause_s = max(self.pause_s, now_s - self._last_s)
            self._last_s = now_s
        elif _num_chars(conversation.answers) >= PART * _num_chars(self._expected):
            self._kill_busiest()
            self._last_s = self._clock()

    def _kill_busiest(self) -> None:
        response = self._client.get("/status")
        if response.status_code != httpx.codes.OK:
            raise EngineError(f"/status answered {response.status_code}")
        workers = msgspec.json.decode(response.content, type=_ServerStatus).workers
        busiest = max(workers, key=lambda worker: worker.choices_running, default=None)
        if busiest is not None and busiest.choices_running and busiest.pid:
            self._kill(busiest.pid)
            self.worker, self.pid = busiest.id, busiest.pid

    def figures(self, answers: Sequence[StreamedChoice]) -> dict[str, object]:
        return {"worker": self.worker, "pause_ms": round(self.pause_s * 1000), "identical": self.num_identical(answers)}

    def sentence(self, answers: Sequence[StreamedChoice]) -> str:
        """Returns what the kill changed."""
        if not self.worker:
            return "The answers had ended before an engine could be killed."
        same = f"{self.num_identical(answers)} of {len(answers)} answers are the same, to the last character"
        pause = f"a pause of {self.pause_s * 1000:.0f} ms"
        return f"{self.worker} (process {self.pid}) was killed in mid-stream: {pause}, and {same}."

    def num_identical(self, answers: Sequence[StreamedChoice]) -> int:
        """Returns the number of answers that are the same as without a kill, to the last character."""
        pairs = zip(answers, self._expected, strict=True)
        return sum((a.text, a.finish_reason) == (b.text, b.finish_reason) for a, b in pairs)


def _num_chars(answers: Sequence[StreamedChoice]) -> int:
    return sum(len(answer.text) + len(answer.reasoning) for answer in answers)
