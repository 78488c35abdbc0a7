"""The line by which a server says that it serves: for people, and for the programs that started it."""

import re

from motet.types import EngineInfo

GIB = 2**30
READY = re.compile(r"^Motet is ready: .* at (?P<url>http://\S+) ")


def ready_line(url: str, info: EngineInfo) -> str:
    tokens, gib = info.num_blocks * info.block_size, info.num_blocks * info.bytes_per_block / GIB
    return (
        f"Motet is ready: {info.model} at {url} "
        f"({info.num_blocks:,} KV blocks of {info.block_size} tokens: {tokens:,} tokens, {gib:.2f} GiB)"
    )


def url_in(line: str) -> str | None:
    """The URL of a ready line; None if it is another line."""
    found = READY.match(line)
    return found["url"] if found else None
