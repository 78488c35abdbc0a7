"""Compiles a heavy grammar in a separate process first, under limits of time and memory that the operating system
enforces. If it has no such limits (macOS, Windows, a container without /proc), a thread of the process enforces them.

Compiling cannot be interrupted, and a grammar of a few hundred characters can take hours: for example, llguidance
builds the intersection of all patterns for one string.

1. The server calls `compile_in_process` for a grammar that `limits.is_heavy`.
2. The process builds the vocabulary, then limits its own CPU time and memory, and compiles the grammar.
3. It prints the error of the grammar, if there is one. If it exceeds a limit, the operating system or the thread ends
   it. The thread checks 20 times a second, so until then the process can take more memory than it is allowed.
4. A grammar without an error is compiled again where it is used, at no more cost than in the process.
"""

import importlib
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from tokenizers import Tokenizer as Backend

from motet.errors import GrammarError
from motet.grammar.compiled_grammar import Grammars
from motet.grammar.limits import HEAVY_MB, STACK_BYTES
from motet.machine import process_memory
from motet.text.tokenizer import Tokenizer
from motet.types import Grammar, GrammarKind

CPU_S: Final = 5
"""Maximum CPU time for compiling, in seconds."""
MEMORY_MB: Final = 512
"""Maximum memory for compiling."""
TIMEOUT_S: Final = 60.0
"""Time in seconds after which the process is killed, even if it had less than `CPU_S` of CPU time on a busy machine."""
COMMAND: Final = (sys.executable, "-m", "motet.grammar.trial")
TOO_LONG: Final = f"compiling it takes more than {CPU_S} s"
TOO_LONG_CODE: Final = 75
"""Exit code of a process that has exceeded `CPU_S`."""
TOO_LONG_CODES: Final = (
    TOO_LONG_CODE,
    *(-getattr(signal, name) for name in ("SIGXCPU", "SIGKILL") if hasattr(signal, name)),
)
TOO_LARGE_CODE: Final = 76
"""Exit code of a process that has exceeded `MEMORY_MB`, if the thread found it."""
CHECK_S: Final = 0.05
"""Time in seconds between two checks of the thread."""

resource: Any
"""The module with the system's limits. None on Windows."""
try:
    resource = importlib.import_module("resource")
except ImportError:
    resource = None


class TrialRequest(msgspec.Struct):
    """The input of the process."""

    tokenizer: str
    """Content of a `tokenizer.json` file."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    grammar: Grammar


def compile_in_process(
    grammar: Grammar, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]
) -> None:
    """Compiles a grammar in a new process, and discards the result. Blocks; the start of the process takes most of a
    second. Raises `GrammarError` if the grammar is invalid, or exceeds a limit."""
    request = TrialRequest(tokenizer.backend.to_str(), vocab_size, tuple(eos_token_ids), grammar)
    content = msgspec.msgpack.encode(request)
    try:
        done = subprocess.run(COMMAND, input=content, stdout=subprocess.PIPE, timeout=TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise GrammarError(TOO_LONG) from None
    if done.returncode in TOO_LONG_CODES:
        raise GrammarError(TOO_LONG)
    if done.returncode != 0:
        raise GrammarError(f"compiling it takes more than {MEMORY_MB} MB")
    if error := done.stdout.decode():
        raise GrammarError(error)


def main() -> None:
    """Reads a `TrialRequest` from standard input, and prints the error of the grammar, if there is one."""
    request = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=TrialRequest)
    tokenizer = Tokenizer(Backend.from_str(request.tokenizer))
    grammars = Grammars(lambda: tokenizer, vocab_size=request.vocab_size, eos_token_ids=request.eos_token_ids)
    grammars.get(Grammar(GrammarKind.REGEX, "a"))  # builds the vocabulary
    before = process_memory()
    max_cpu_s = math.ceil(time.process_time()) + CPU_S
    if before.address_bytes and has_limits():
        # The stack of a thread exists for a moment after the thread has ended, in addition to the next thread's stack.
        max_bytes = before.address_bytes + (MEMORY_MB << 20) + STACK_BYTES
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (max_cpu_s, max_cpu_s + 1))
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    else:
        limits = max_cpu_s, before.resident_bytes + (MEMORY_MB << 20)
        threading.Thread(target=end_at, args=limits, daemon=True).start()
    try:
        grammars.get(request.grammar)
        if (used_mb := process_memory().resident_bytes - before.resident_bytes >> 20) > HEAVY_MB:
            raise GrammarError(f"its compiled form takes {used_mb} MB; at most {HEAVY_MB} MB are allowed")
    except GrammarError as error:
        sys.stdout.write(error.message)


def has_limits() -> bool:
    """Returns True if the system enforces limits of CPU time and memory. On macOS, RLIMIT_AS is another name for
    RLIMIT_RSS, which macOS ignores."""
    return resource is not None and resource.RLIMIT_AS != resource.RLIMIT_RSS


def end_at(max_cpu_s: float, max_resident_bytes: int) -> None:
    """Ends this process when it exceeds a limit. Compiling does not hold the GIL, so it does not stop this thread."""
    while time.process_time() <= max_cpu_s:
        if process_memory().resident_bytes > max_resident_bytes:
            os._exit(TOO_LARGE_CODE)
        time.sleep(CHECK_S)
    os._exit(TOO_LONG_CODE)


if __name__ == "__main__":
    main()
