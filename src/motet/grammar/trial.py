"""Compiles a heavy grammar in a separate process first, under limits of time and memory that the operating system
enforces.

Compiling cannot be interrupted, and a grammar of a few hundred characters can take hours: for example, llguidance
builds the intersection of all patterns for one string.

1. The server calls `compile_in_process` for a grammar that `limits.is_heavy`.
2. The process builds the vocabulary, then limits its own CPU time and memory, and compiles the grammar.
3. It prints the error of the grammar, if there is one. If it exceeds a limit, the operating system ends it.
4. A grammar without an error is compiled again where it is used, at no more cost than in the process.
"""

import math
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from tokenizers import Tokenizer as Backend

from motet.errors import GrammarError
from motet.grammar.compiled_grammar import Grammars
from motet.grammar.limits import HEAVY_MB, STACK_BYTES
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
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
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
    address_mb, before_mb = memory_mb()
    used_s = math.ceil(time.process_time())
    # The stack of a thread exists for a moment after the thread has ended, in addition to the next thread's stack.
    max_bytes = (address_mb + MEMORY_MB << 20) + STACK_BYTES
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (used_s + CPU_S, used_s + CPU_S + 1))
    resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))
    try:
        grammars.get(request.grammar)
        if (used_mb := memory_mb()[1] - before_mb) > HEAVY_MB:
            raise GrammarError(f"its compiled form takes {used_mb} MB; at most {HEAVY_MB} MB are allowed")
    except GrammarError as error:
        sys.stdout.write(error.message)


def memory_mb() -> tuple[int, int]:
    """Returns the size of this process's address space and of its resident memory, in MB."""
    pages = Path("/proc/self/statm").read_text().split()
    address, resident = (int(number) * resource.getpagesize() >> 20 for number in pages[:2])
    return address, resident


if __name__ == "__main__":
    main()
