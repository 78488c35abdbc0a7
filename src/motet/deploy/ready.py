"""The line by which a server says that it serves: for people, and for the programs that started it."""

import re
from collections.abc import Mapping, Sequence

from motet.engines.base import Worker, WorkerReport, WorkerState
from motet.types import Role

GIB = 2**30
READY = re.compile(r"^Motet(?: gateway| on Ray)? is ready: .* at (?P<url>http://\S+) ")


def ready_line(url: str, workers: Sequence[Worker]) -> str:
    """`workers`: those of this server that run here, at least one."""
    info = workers[-1].engine.info
    tokens, gib = info.num_blocks * info.block_size, info.num_blocks * info.bytes_per_block / GIB
    blocks = f"{info.num_blocks:,} KV blocks of {info.block_size} tokens: {tokens:,} tokens, {gib:.2f} GiB"
    return f"Motet is ready: {info.model} at {url} ({roles_of(workers)}{blocks})"


def gateway_ready_line(url: str, models: Sequence[str], workers: Sequence[WorkerReport]) -> str:
    """`workers`: those that are known; those that are ready are named."""
    ready = [worker.id for worker in workers if worker.state is WorkerState.READY]
    there = f"{len(ready)} worker{'s' * (len(ready) != 1)}: {', '.join(ready)}"
    return f"Motet gateway is ready: {', '.join(models)} at {url} ({there})"


def ray_ready_line(model: str, url: str, replicas: Mapping[str, int]) -> str:
    """`replicas`: of each deployment."""
    there = ", ".join(f"{number} {name}" for name, number in replicas.items())
    return f"Motet on Ray is ready: {model} at {url} ({there})"


def roles_of(workers: Sequence[Worker]) -> str:
    """`2 prefill and 1 decode engines, each with `; nothing for an engine that does it all."""
    roles = [worker.engine.info.role for worker in workers]
    match roles:
        case [Role.BOTH]:
            return ""
        case [role]:
            return f"{role} server, "
    counted = " and ".join(f"{roles.count(role)} {role}" for role in (Role.PREFILL, Role.DECODE))
    return f"{counted} engines, each with "


def url_in(line: str) -> str | None:
    """The URL of a ready line; None if it is another line."""
    found = READY.match(line)
    return found["url"] if found else None
