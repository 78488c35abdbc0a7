"""Renders a chat template in a process of its own, under limits of time and memory (`process_limits`).

1. The first prompt that needs the process starts it. The process receives the source of the template, then the
   variables of one prompt at a time, in marshal's format, which has every value that JSON can contain.
2. For each prompt, it sends the text, or the template's error.
3. If it exceeds a limit, it is killed, and the next prompt starts another process.

The process ends at the end of its standard input, at the latest when the server ends. A server that shuts down kills
it, so that no rendering delays the shutdown (`end_renderings`)."""

import contextlib
import functools
import marshal
import os
import signal
import struct
import subprocess
import sys
import threading
import weakref
from typing import IO, Any, Final

from motet.errors import EngineClosedError, EngineError, RequestError
from motet.system.machine import described_end
from motet.system.process_limits import TOO_LARGE_CODE, TOO_LONG_CODES, ProcessLimits
from motet.text.rendering.jinja import TEMPLATE_ERRORS, Arguments, compiled

CPU_S: Final = 5
"""Maximum CPU time of one rendering, in seconds."""
MEMORY_MB: Final = 512
"""Maximum memory for rendering."""
TIMEOUT_S: Final = 30.0
"""Time in seconds after which the process is killed, even if it had less than `CPU_S` of CPU time on a busy machine."""
MAX_TEXT_BYTES: Final = 32 * 2**20
"""Maximum size of a rendered text: four times the size of the largest body."""
COMMAND: Final = (sys.executable, "-m", "motet.text.rendering.render_process")
HEADER: Final = struct.Struct("<cI")
"""Header of each message: its kind, and the number of bytes that follow."""
KILLED_CODE: Final = -getattr(signal, "SIGKILL", 1)
"""Return code of a process that was killed, as after `TIMEOUT_S`."""
SOURCE, VARIABLES, TEXT, ERROR = b"s", b"v", b"t", b"e"


started: dict["subprocess.Popen[bytes]", int] = {}
"""The processes that have not been ended, each with the id of the process that started it."""


class RenderError(Exception):
    """An error of the template, with the message of the exception."""


class RenderProcess:
    """The process of one template. Thread-safe; renders one prompt at a time."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._pid = 0
        """Id of the process that started `_process`: a fork of the server must not use it."""

    def render(self, variables: bytes) -> str:
        """Returns the text. Blocks. `variables`: in marshal's format (`marshalled`). Raises RenderError for an error of
        the template, RequestError if it exceeds a limit, EngineClosedError if the server shuts down, and EngineError if
        the process cannot run."""
        with self._lock:
            process = self._running() or self._start()
            timer = threading.Timer(TIMEOUT_S, process.kill)
            timer.start()
            try:
                send(process.stdin, variables, kind=VARIABLES)
                kind, content = receive(process.stdout)
            except (OSError, EOFError):
                closed = process not in started
                end(process, self._pid)
                raise (
                    EngineClosedError("The server is shutting down.") if closed else _error_of(process.returncode)
                ) from None
            finally:
                timer.cancel()
        text = content.decode("utf-8", "surrogatepass")
        if kind == ERROR:
            raise RenderError(text)
        return text

    def _running(self) -> "subprocess.Popen[bytes] | None":
        process = self._process
        return process if process is not None and self._pid == os.getpid() and process.poll() is None else None

    def _start(self) -> "subprocess.Popen[bytes]":
        """Starts the process, in a session of its own: a terminal sends Ctrl-C to every process of its session."""
        try:
            process = subprocess.Popen(
                COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=os.name == "posix"
            )
        except OSError as error:
            raise EngineError(f"The process that renders chat templates cannot be started: {error}") from error
        self._process, self._pid = process, os.getpid()
        started[process] = self._pid
        weakref.finalize(self, end, process, self._pid)
        try:
            send(process.stdin, self._source.encode("utf-8", "surrogatepass"), kind=SOURCE)
        except OSError:
            end(process, self._pid)
            raise _error_of(process.returncode) from None
        return process


render_process = functools.lru_cache(maxsize=32)(RenderProcess)
"""Models with the same template share its process."""


def end(process: "subprocess.Popen[bytes]", started_by: int) -> None:
    """Kills the process, unless this is a fork of the process that started it."""
    if os.getpid() != started_by:
        return
    started.pop(process, None)
    process.kill()
    process.wait()
    for stream in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # it can hold bytes that the process has not read
            stream.close()  # type: ignore[union-attr]


def end_renderings() -> None:
    """Kills all processes. Requests that wait for one end with EngineClosedError."""
    for process, started_by in list(started.items()):
        if started_by == os.getpid():
            del started[process]
            process.kill()


def _error_of(code: int) -> RequestError | EngineError:
    if code == KILLED_CODE:
        what = f"{TIMEOUT_S:g} s"
    elif code in TOO_LONG_CODES:
        what = f"{CPU_S} s of CPU time"
    elif code == TOO_LARGE_CODE:
        what = f"{MEMORY_MB} MB of memory"
    else:
        return EngineError(f"The process that renders chat templates ended: {described_end(code)}.")
    return RequestError(f"the chat template takes more than {what} for these messages", param="messages")


def send(stream: IO[bytes] | None, content: bytes, *, kind: bytes) -> None:
    assert stream is not None
    stream.write(HEADER.pack(kind, len(content)))
    stream.write(content)
    stream.flush()


def receive(stream: IO[bytes] | None) -> tuple[bytes, bytes]:
    """Returns the kind and the content of the next message. Raises EOFError at the end of the stream."""
    assert stream is not None
    if len(header := stream.read(HEADER.size)) < HEADER.size:
        raise EOFError
    kind, size = HEADER.unpack(header)
    if len(content := stream.read(size)) < size:
        raise EOFError
    return kind, content


def marshalled(variables: dict[str, Any]) -> bytes:
    """Returns variables in marshal's format. It does not have `Arguments`, which become plain dicts."""
    messages = variables["messages"]
    if any("tool_calls" in message for message in messages):
        variables = {**variables, "messages": [_with_calls(message, dict) for message in messages]}
    return marshal.dumps(variables)


def _with_calls(message: dict[str, Any], kind: type[dict[str, object]]) -> dict[str, Any]:
    """Returns the message with the arguments of its calls converted to `kind`."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    functions = [call["function"] for call in calls]
    with_arguments = [{**function, "arguments": kind(function["arguments"])} for function in functions]
    return {
        **message,
        "tool_calls": [{**call, "function": one} for call, one in zip(calls, with_arguments, strict=True)],
    }


def main() -> None:
    """Renders the prompts that arrive on standard input."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # service managers send it to all processes of a server
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    limits = ProcessLimits(MEMORY_MB << 20)
    try:
        _, source = receive(requests)
        limits.allow_cpu(CPU_S)
        template: Any = None
        while True:
            _, content = receive(requests)
            limits.allow_cpu(CPU_S)
            kind, text = TEXT, ""
            try:
                template = template or compiled(source.decode("utf-8", "surrogatepass"))
                variables = marshal.loads(content)
                variables["messages"] = [_with_calls(message, Arguments) for message in variables["messages"]]
                text = template.render(variables)
            except TEMPLATE_ERRORS as error:
                kind, text = ERROR, str(error)
            if len(encoded := text.encode("utf-8", "surrogatepass")) > MAX_TEXT_BYTES:
                kind, encoded = ERROR, f"it generates more than {MAX_TEXT_BYTES >> 20} MiB of text".encode()
            send(answers, encoded, kind=kind)
    except EOFError:
        return
    except MemoryError:
        os._exit(TOO_LARGE_CODE)


if __name__ == "__main__":
    main()
