"""Compiles a heavy grammar in a separate process first, under limits of time and memory (`process_limits`).

Compiling cannot be interrupted, and a grammar of a few hundred characters can take hours: for example, llguidance
builds the intersection of all patterns for one string.

1. The server calls `compile_in_process` for a grammar that `limits.is_heavy`.
2. The process builds the vocabulary, then limits its own CPU time and memory, and compiles the grammar.
3. It prints the error of the grammar, if there is one. If it exceeds a limit, it is ended.
4. A grammar without an error is compiled again where it is used, at no more cost than in the process.
"""

import subprocess
import sys
from collections.abc import Sequence
from typing import Final

import msgspec
from tokenizers import Tokenizer as Backend

from motet.errors import GrammarError
from motet.grammar.compiled_grammar import Grammars
from motet.grammar.limits import HEAVY_MB, STACK_BYTES, check_source
from motet.system.machine import process_memory
from motet.system.process_limits import TOO_LONG_CODES, ProcessLimits
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
    check_source(grammar)
    request = TrialRequest(tokenizer.json, vocab_size, tuple(eos_token_ids), grammar)
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
    # The stack of a thread exists for a moment after the thread has ended, in addition to the next thread's stack.
    ProcessLimits((MEMORY_MB << 20) + STACK_BYTES).allow_cpu(CPU_S)
    try:
        grammars.get(request.grammar)
        if (used_mb := process_memory().resident_bytes - before.resident_bytes >> 20) > HEAVY_MB:
            raise GrammarError(f"its compiled form takes {used_mb} MB; at most {HEAVY_MB} MB are allowed")
    except GrammarError as error:
        sys.stdout.write(error.message)


if __name__ == "__main__":
    main()
