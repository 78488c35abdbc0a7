"""The rules about what a gateway is told of its workers."""

import math
from collections.abc import Callable, Sequence

from motet.errors import ConfigError
from motet.settings.named_worker import by_url, named_workers, roles_by_url
from motet.settings.rule import Rule
from motet.types import Role

LEAST_WORKER_TIMEOUT_S = 2


def are_workers(texts: Sequence[str]) -> bool:
    try:
        urls = [worker.url for worker in named_workers(texts)]
    except ConfigError:
        return False
    return len(set(urls)) == len(urls)


def reads(read: Callable[[Sequence[str]], object], texts: Sequence[str]) -> bool:
    """Whether they are what `read` reads."""
    try:
        read(texts)
    except ConfigError:
        return False
    return True


GATEWAY_RULES = (
    Rule(
        ("workers", "workers_file"),
        "a gateway needs workers: --worker URL, several times, or --workers-file FILE",
        lambda p: bool(p.gateway.workers or p.gateway.workers_file),
    ),
    Rule(
        ("workers",),
        "must be URLs such as http://host:8000, each with a role or a kind behind it or none, and none twice",
        lambda p: are_workers(p.gateway.workers),
    ),
    Rule(
        ("role_of",),
        f"must be URL=ROLE, such as http://host:8000=prefill, with one of {', '.join(Role)}",
        lambda p: reads(roles_by_url, p.gateway.role_of),
    ),
    Rule(("key_of",), "must be URL=KEY, such as http://host:8000=secret", lambda p: reads(by_url, p.gateway.key_of)),
    Rule(
        ("tokenizer_of",),
        "must be MODEL=FOLDER or MODEL=ORG/NAME",
        lambda p: all(name and folder for name, _, folder in (text.partition("=") for text in p.gateway.tokenizer_of)),
    ),
    Rule(("leader_timeout_s",), "must be above 0", lambda p: 0 < p.gateway.leader_timeout_s < math.inf),
    Rule(("upstream_timeout_s",), "must be above 0", lambda p: 0 < p.gateway.upstream_timeout_s < math.inf),
    Rule(
        ("worker_timeout_s",),
        f"must be at least {LEAST_WORKER_TIMEOUT_S}: workers are asked every second",
        lambda p: LEAST_WORKER_TIMEOUT_S <= p.gateway.worker_timeout_s < math.inf,
    ),
    Rule(("start_timeout_s",), "must be above 0", lambda p: 0 < p.gateway.start_timeout_s < math.inf),
)
