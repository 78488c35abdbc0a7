"""Rules about several settings: forbidden combinations, and defaults that depend on other settings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from motet.errors import ConfigError
from motet.settings.declaration import MAX_PORT
from motet.settings.named_adapter import named_adapters
from motet.settings.parsed_values import integers_by_key, weights_by_key
from motet.settings.record import DEFAULT, Setting, Settings
from motet.transfer.ticket import is_loopback
from motet.types import Role


@dataclass(frozen=True)
class Rule:
    """A rule about two or more settings, for commands that have all of them."""

    names: tuple[str, ...]
    """Settings in the order in which the error names them, without the ones that have no value."""
    message: str
    """Text of the error after the names."""
    holds: Callable[[Settings], bool]


def first_ports_are_apart(settings: Settings) -> bool:
    """Returns True if no replica of one role has the port of a replica of the other role."""
    ray, cell = settings.ray, settings.cell
    lower, upper = sorted(((ray.prefill_port, cell.prefill), (ray.decode_port, cell.decode)))
    return 0 in (ray.prefill_port, ray.decode_port) or upper[0] - lower[0] >= lower[1]


def admin_key_is_distinct(settings: Settings) -> bool:
    """Returns True if the admin key is not set, or is neither blank nor one of the API keys."""
    server = settings.server()
    return server.admin_key == "" or server.admin_key.strip() not in ("", *map(str.strip, server.api_keys))


def workers_need_a_key(settings: Settings) -> bool:
    """Returns True if only workers with a cluster key are trusted, or the side channel is local. A cell and Ray
    generate a cluster key; a server with one role must be given one."""
    engine = settings.engine()
    known = engine.role is Role.BOTH or is_loopback(engine.side_channel_host)
    return known or bool(engine.cluster_key) or settings.server().insecure


def worker_key_is_distinct(settings: Settings) -> bool:
    """Returns True if the worker key is neither an API key nor the admin key."""
    server = settings.server()
    return server.worker_key not in map(str.strip, filter(None, (*server.api_keys, server.admin_key)))


RULES = (
    Rule(
        ("key_priority", "api_keys"),
        "a priority needs its API key: --key-priority KEY=NUMBER with --api-key KEY",
        lambda s: integers_by_key(s.server().key_priority).keys() <= set(s.server().api_keys),
    ),
    Rule(
        ("key_share", "api_keys"),
        "a share needs its API key: --key-share KEY=WEIGHT with --api-key KEY",
        lambda s: weights_by_key(s.server().key_share).keys() <= set(s.server().api_keys),
    ),
    Rule(
        ("host", "api_keys"),
        "anyone who reaches that address could use the server: give --api-key (better in MOTET_API_KEYS), or "
        "--insecure",
        lambda s: bool(s.server().api_keys) or s.server().insecure or is_loopback(s.server().host),
    ),
    Rule(
        ("ssl_keyfile", "ssl_certfile"),
        "a private key needs its certificate: --ssl-certfile",
        lambda s: s.tls.ssl_keyfile is None or s.tls.ssl_certfile is not None,
    ),
    Rule(
        ("ssl_ca_certs", "ssl_certfile"),
        "clients show certificates only to a server with TLS: give --ssl-certfile",
        lambda s: s.tls.ssl_ca_certs is None or s.tls.ssl_certfile is not None,
    ),
    Rule(
        ("worker_key_file", "worker_cert_file"),
        "a private key needs its certificate: --worker-cert-file",
        lambda s: s.tls.worker_key_file is None or s.tls.worker_cert_file is not None,
    ),
    Rule(
        ("side_channel_host", "cluster_key"),
        "anyone who reaches that address would be trusted as a worker: give --cluster-key (better in "
        "MOTET_CLUSTER_KEY), or --insecure",
        workers_need_a_key,
    ),
    Rule(
        ("quantization", "kernels"),
        "int8 weights need the compiled kernels: --kernels auto or compiled",
        lambda s: s.engine().quantization == "none" or s.engine().kernels != "torch",
    ),
    Rule(
        ("gpu_memory_utilization", "device"),
        "a CPU has no GPU memory: give --kv-cache-gb",
        lambda s: s.engine().gpu_memory_utilization is None or s.engine().device != "cpu",
    ),
    Rule(
        ("gpu_memory_utilization", "prefill"),
        "each engine of a cell would take all free memory: give --kv-cache-gb",
        lambda s: s.engine().gpu_memory_utilization is None or s.cell.prefill == 0 or s.ray.gpus_per_worker == 1,
    ),
    Rule(
        ("max_num_batched_tokens", "max_num_seqs"),
        "a step must hold a token of every running choice: max_num_batched_tokens at least max_num_seqs",
        lambda s: s.engine().max_num_batched_tokens >= s.engine().max_num_seqs,
    ),
    Rule(
        ("cache_answers", "prefix_cache"),
        "the prefix cache, which would hold the answers, is off",
        lambda s: s.engine().prefix_cache or not s.engine().cache_answers,
    ),
    Rule(
        ("adapters", "max_adapters"),
        "--max-adapters must be at least the number of adapters",
        lambda s: len(s.engine().adapters) <= s.engine().max_adapters,
    ),
    Rule(
        ("adapters", "served_model_name", "model"),
        "an adapter needs another name than its base model",
        lambda s: all(
            adapter.name != (s.model.served_model_name or s.model.model)
            for adapter in named_adapters(s.engine().adapters)
        ),
    ),
    Rule(
        ("prefill", "decode"),
        "prefill engines need decode engines: --decode at least 1",
        lambda s: s.cell.prefill == 0 or s.cell.decode > 0,
    ),
    Rule(
        ("role", "prefill"),
        "a cell has engines of both roles: give --prefill and --decode, or --role for a separate server",
        lambda s: s.engine().role is Role.BOTH or (s.cell.prefill == 0 and s.cell.decode == 0),
    ),
    Rule(
        ("prefill_urls", "prefill"),
        "a cell has its own prefill engines: prefill servers are for a server with --role decode",
        lambda s: not s.cell.prefill_urls or s.cell.prefill == 0,
    ),
    Rule(
        ("prefill_urls", "role"),
        "only a server with --role decode uses prefill servers",
        lambda s: not s.cell.prefill_urls or s.engine().role is Role.DECODE,
    ),
    Rule(
        ("side_channel_port", "prefill"),
        "every engine of a cell needs its own side channel and takes a free port: omit it",
        lambda s: not s.engine().side_channel_port or s.cell.prefill == 0,
    ),
    Rule(
        ("kv_events_port", "prefill", "decode"),
        f"each engine takes two ports, the last of them at most {MAX_PORT}",
        lambda s: (s.kv_events.kv_events_port or 0) + 2 * max(1, s.cell.prefill + s.cell.decode) <= MAX_PORT + 1,
    ),
    Rule(
        ("kv_events_port", "prefix_cache"),
        "without the prefix cache there are no KV cache events",
        lambda s: s.kv_events.kv_events_port is None or s.engine().prefix_cache,
    ),
    Rule(
        ("workers", "workers_file"),
        "a gateway needs workers: --worker URL (repeatable) or --workers-file FILE",
        lambda s: bool(s.gateway.workers or s.gateway.workers_file),
    ),
    Rule(
        ("min_prefill", "prefill"),
        "--prefill is the maximum: at least --min-prefill",
        lambda s: s.ray.min_prefill <= s.cell.prefill,
    ),
    Rule(
        ("min_decode", "decode"),
        "--decode is the maximum: at least --min-decode",
        lambda s: s.ray.min_decode <= max(1, s.cell.decode),
    ),
    Rule(
        ("prefill_port", "decode_port"),
        "each replica's port is its role's first port plus its rank: the two must be further apart",
        first_ports_are_apart,
    ),
    Rule(
        ("prefill_port", "prefill"),
        f"each replica's port is the first port plus its rank: the last one must be at most {MAX_PORT}",
        lambda s: s.ray.prefill_port == 0 or s.ray.prefill_port + max(1, s.cell.prefill) <= MAX_PORT + 1,
    ),
    Rule(
        ("decode_port", "decode"),
        f"each replica's port is the first port plus its rank: the last one must be at most {MAX_PORT}",
        lambda s: s.ray.decode_port == 0 or s.ray.decode_port + max(1, s.cell.decode) <= MAX_PORT + 1,
    ),
    Rule(
        ("port", "ingress"), "clients must know Serve's port: it cannot be any free one", lambda s: s.server().port != 0
    ),
    Rule(
        ("admin_key", "api_keys"),
        "must be neither blank nor an API key: clients would have the rights of operators",
        admin_key_is_distinct,
    ),
    Rule(
        ("worker_key", "api_keys", "admin_key"),
        "must be neither an API key nor the admin key: clients would have the rights of workers",
        worker_key_is_distinct,
    ),
    Rule(
        ("max_n", "max_num_seqs"),
        "the choices of a group are admitted together: max_n at most max_num_seqs",
        lambda s: s.server().max_n <= s.engine().max_num_seqs,
    ),
    Rule(
        ("max_choices", "max_n"),
        "a request must be able to hold one full group: max_choices at least max_n",
        lambda s: s.server().max_choices >= s.server().max_n,
    ),
)

FITTED: tuple[tuple[str, str, Callable[[int, int], int]], ...] = (
    ("max_n", "max_num_seqs", min),
    ("max_num_batched_tokens", "max_num_seqs", max),
    ("max_choices", "max_n", max),
)
"""Settings whose default depends on another setting: (setting, other setting, function of the two values)."""


def check_rules(settings: Settings) -> None:
    """Raises ConfigError for the first value that its declaration refuses, or the first forbidden combination."""
    for row in settings.rows.values():
        if refusal := row.declared.refusal(row.value):
            raise ConfigError(f"{row.as_given}: {refusal}")
    for rule in RULES:
        if settings.rows.keys() >= set(rule.names) and not rule.holds(settings):
            rows = (settings.rows[name] for name in rule.names)
            given = " with ".join(row.as_given for row in rows if not row.is_unset)
            raise ConfigError(f"{given}: {rule.message}" if given else rule.message)


def fit_defaults(rows: Mapping[str, Setting]) -> dict[str, Setting]:
    """Adapts defaults to values that were set: `--max-num-seqs 64` alone lowers the default of `max_n` from 256."""
    fitted = dict(rows)
    for name, other, bound in FITTED:
        if not {name, other} <= fitted.keys():
            continue
        value, limit = fitted[name].value, fitted[other].value
        if not (fitted[name].is_default and isinstance(value, int) and isinstance(limit, int) and limit >= 1):
            continue
        if (fit := bound(value, limit)) != value:
            fitted[name] = replace(fitted[name], value=fit, source=f"{DEFAULT}, from {other}")
    return fitted
