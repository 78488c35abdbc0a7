"""Compiles a heavy grammar in a process of its own first, under limits of time and memory that the system enforces.

Compiling cannot be interrupted, and a few hundred characters may make it take hours: llguidance builds what all
patterns of one text have in common, for instance. `limits.is_heavy` tells which grammars are tried here; whoever
compiles one afterwards needs no more than the process did.
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
"""Seconds of a processor that compiling may take."""
MEMORY_MB: Final = 512
"""Memory that compiling may take."""
PATIENCE_S: Final = 60.0
"""After so many seconds the process is killed, though a busy machine may have given it less than `CPU_S`."""
COMMAND: Final = (sys.executable, "-m", "motet.grammar.trial")
TOO_LONG: Final = f"compiling it takes more than {CPU_S} s"


class TrialRequest(msgspec.Struct):
    """What the process reads."""

    tokenizer: str
    """In the form of `tokenizer.json`."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    grammar: Grammar


def try_apart(grammar: Grammar, tokenizer: Tokenizer, *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
    """Compiles a grammar in a process that ends with it. Blocks; starting takes most of a second. Raises `GrammarError`
    if the grammar is wrong, or takes too much."""
    order = TrialRequest(tokenizer.backend.to_str(), vocab_size, tuple(eos_token_ids), grammar)
    told = msgspec.msgpack.encode(order)
    try:
        done = subprocess.run(COMMAND, input=told, stdout=subprocess.PIPE, timeout=PATIENCE_S, check=False)
    except subprocess.TimeoutExpired:
        raise GrammarError(TOO_LONG) from None
    if done.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        raise GrammarError(TOO_LONG)
    if done.returncode != 0:
        raise GrammarError(f"compiling it takes more than {MEMORY_MB} MB")
    if error := done.stdout.decode():
        raise GrammarError(error)


def main() -> None:
    """Reads an `TrialRequest`, and writes the error of the grammar, if there is one."""
    order = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=TrialRequest)
    tokenizer = Tokenizer(Backend.from_str(order.tokenizer), named_tokens={}, chat_template=None)
    grammars = Grammars(lambda: tokenizer, vocab_size=order.vocab_size, eos_token_ids=order.eos_token_ids)
    grammars.get(Grammar(GrammarKind.REGEX, "a"))  # builds the vocabulary
    address_mb, before_mb = memory_mb()
    used_s = math.ceil(time.process_time())
    # A thread's stack is there for a moment after its end, beside that of the next one.
    most = (address_mb + MEMORY_MB << 20) + STACK_BYTES
    for limit, values in (
        (resource.RLIMIT_CORE, (0, 0)),
        (resource.RLIMIT_CPU, (used_s + CPU_S, used_s + CPU_S + 1)),
        (resource.RLIMIT_AS, (most, most)),
    ):
        resource.setrlimit(limit, values)
    try:
        grammars.get(order.grammar)
        if (kept_mb := memory_mb()[1] - before_mb) > HEAVY_MB:
            raise GrammarError(f"compiled, it takes {kept_mb} MB, and {HEAVY_MB} are allowed")
    except GrammarError as error:
        sys.stdout.write(error.message)


def memory_mb() -> tuple[int, int]:
    """Returns the size of this process's address space, and what of it is in memory."""
    pages = Path("/proc/self/statm").read_text().split()
    address, resident = (int(number) * resource.getpagesize() >> 20 for number in pages[:2])
    return address, resident


if __name__ == "__main__":
    main()
