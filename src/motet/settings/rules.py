"""Which values and combinations are possible, one line a rule, and the defaults that give way to what was set."""

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from motet.errors import ConfigError
from motet.log import LogFormat
from motet.settings.gateway_rules import GATEWAY_RULES
from motet.settings.named_worker import is_http_url
from motet.settings.ray_rules import RAY_RULES
from motet.settings.record import DEFAULT, Setting, Settings, flag_of
from motet.settings.rule import Proposal, Rule
from motet.types import Role

DEVICE = re.compile(r"auto|cpu|cuda|cuda:\d+")
KERNELS = ("auto", "compiled", "torch")
QUANTIZATIONS = ("none", "int8")
POLICIES = ("kv", "least-loaded", "round-robin", "session")
DTYPES = ("auto", "bfloat16", "float16", "float32")
LOG_LEVELS = ("debug", "info", "warning", "error")
MAX_BLOCK_SIZE = 256
MAX_PORT = 65535
LEAST_LEASE_S = 3
LEAST_HEARTBEAT_TIMEOUT_S = 1
EVERY_ADDRESS = ("", "0.0.0.0", "::", "*")


RULES = (
    Rule(("model",), "must be a folder or the name of a model", lambda p: bool(p.model.model.strip())),
    Rule(("served_model_name",), "must be not empty", lambda p: p.model.served_model_name != ""),
    Rule(("device",), "must be auto, cpu, cuda or cuda:K", lambda p: DEVICE.fullmatch(p.engine.device) is not None),
    Rule(("kernels",), f"must be one of {', '.join(KERNELS)}", lambda p: p.engine.kernels in KERNELS),
    Rule(
        ("quantization",),
        f"must be one of {', '.join(QUANTIZATIONS)}",
        lambda p: p.engine.quantization in QUANTIZATIONS,
    ),
    Rule(
        ("quantization", "kernels"),
        "int8 weights are for the compiled kernels: --kernels auto or compiled",
        lambda p: p.engine.quantization == "none" or p.engine.kernels != "torch",
    ),
    Rule(("dtype",), f"must be one of {', '.join(DTYPES)}", lambda p: p.engine.dtype in DTYPES),
    Rule(
        ("max_model_len",), "must be at least 2: a prompt and an answer", lambda p: (p.engine.max_model_len or 2) >= 2
    ),
    Rule(("kv_cache_gb",), "must be above 0", lambda p: 0 < p.engine.kv_cache_gb < math.inf),
    Rule(
        ("gpu_memory_utilization",),
        "must be above 0 and at most 1",
        lambda p: p.engine.gpu_memory_utilization is None or 0 < p.engine.gpu_memory_utilization <= 1,
    ),
    Rule(
        ("gpu_memory_utilization", "device"),
        "there is no GPU to fill: give --kv-cache-gb",
        lambda p: p.engine.gpu_memory_utilization is None or p.engine.device != "cpu",
    ),
    Rule(
        ("gpu_memory_utilization", "prefill"),
        "the engines of a cell would each take what is free: give --kv-cache-gb",
        lambda p: p.engine.gpu_memory_utilization is None or p.cell.prefill == 0 or p.ray.gpus_per_worker >= 1,
    ),
    Rule(
        ("block_size",),
        f"must be a power of two, at most {MAX_BLOCK_SIZE}",
        lambda p: 0 < p.engine.block_size <= MAX_BLOCK_SIZE and p.engine.block_size.bit_count() == 1,
    ),
    Rule(("max_num_seqs",), "must be at least 1", lambda p: p.engine.max_num_seqs >= 1),
    Rule(
        ("max_num_batched_tokens", "max_num_seqs"),
        "a step must hold a token of every running choice: max_num_batched_tokens at least max_num_seqs",
        lambda p: p.engine.max_num_batched_tokens >= p.engine.max_num_seqs,
    ),
    Rule(
        ("cache_answers", "prefix_cache"),
        "answers are cached in the prefix cache, which is off",
        lambda p: p.engine.prefix_cache or not p.engine.cache_answers,
    ),
    Rule(("num_threads",), "must be at least 1", lambda p: p.engine.num_threads is None or p.engine.num_threads >= 1),
    Rule(("prefill",), "must be 0 or more", lambda p: p.cell.prefill >= 0),
    Rule(("decode",), "must be 0 or more", lambda p: p.cell.decode >= 0),
    Rule(
        ("prefill", "decode"),
        "prefill engines need decode engines: --decode at least 1",
        lambda p: p.cell.prefill == 0 or p.cell.decode > 0,
    ),
    Rule(
        ("role", "prefill"),
        "a cell has engines of both roles: give --prefill and --decode, or --role for a server of its own",
        lambda p: p.engine.role is Role.BOTH or (p.cell.prefill == 0 and p.cell.decode == 0),
    ),
    Rule(
        ("prefill_urls", "prefill"),
        "a cell has prefill engines of its own: prefill servers are asked by a server with --role decode",
        lambda p: not p.cell.prefill_urls or p.cell.prefill == 0,
    ),
    Rule(
        ("prefill_urls", "role"),
        "only a server with --role decode asks prefill servers",
        lambda p: not p.cell.prefill_urls or p.engine.role is Role.DECODE,
    ),
    Rule(
        ("prefill_urls",),
        "must be URLs such as http://host:8000",
        lambda p: all(map(is_http_url, p.cell.prefill_urls)),
    ),
    Rule(
        ("prefill_urls",),
        "no server may be named twice",
        lambda p: len({url.rstrip("/") for url in p.cell.prefill_urls}) == len(p.cell.prefill_urls),
    ),
    Rule(("bypass_tokens",), "must be 0 (never) or more", lambda p: p.cell.bypass_tokens >= 0),
    Rule(("prefill_timeout_s",), "must be above 0", lambda p: 0 < p.cell.prefill_timeout_s < math.inf),
    Rule(
        ("side_channel_host",),
        "must be one address at which other workers reach this one: it is written into tickets",
        lambda p: p.engine.side_channel_host.strip() not in EVERY_ADDRESS,
    ),
    Rule(
        ("side_channel_port",),
        f"must be 0 (any free port) to {MAX_PORT}",
        lambda p: 0 <= (p.engine.side_channel_port or 0) <= MAX_PORT,
    ),
    Rule(
        ("side_channel_port", "prefill"),
        "every engine of a cell needs a side channel of its own and takes a free port: leave it out",
        lambda p: not p.engine.side_channel_port or p.cell.prefill == 0,
    ),
    Rule(
        ("lease_s",),
        f"must be at least {LEAST_LEASE_S}: a reader gives a sign of life every second",
        lambda p: LEAST_LEASE_S <= p.engine.lease_s < math.inf,
    ),
    Rule(("pull_timeout_s",), "must be above 0", lambda p: 0 < p.engine.pull_timeout_s < math.inf),
    Rule(
        ("heartbeat_timeout_s",),
        f"must be at least {LEAST_HEARTBEAT_TIMEOUT_S}: on a busy machine signs of life come late",
        lambda p: LEAST_HEARTBEAT_TIMEOUT_S <= p.engine.heartbeat_timeout_s < math.inf,
    ),
    Rule(("step_timeout_s",), "must be above 0", lambda p: 0 < p.engine.step_timeout_s < math.inf),
    Rule(
        ("routing_policy",),
        f"must be one of {', '.join(POLICIES)}",
        lambda p: p.routing.routing_policy in POLICIES,
    ),
    Rule(("session_expiry_s",), "must be above 0", lambda p: 0 < p.routing.session_expiry_s < math.inf),
    Rule(("spread_choices",), "must be 0 (never) or more", lambda p: p.routing.spread_choices >= 0),
    Rule(("migration_limit",), "must be 0 (never) or more", lambda p: p.routing.migration_limit >= 0),
    Rule(("migration_wait_s",), "must be 0 or more", lambda p: 0 <= p.routing.migration_wait_s < math.inf),
    Rule(("queue_timeout_s",), "must be above 0", lambda p: 0 < p.routing.queue_timeout_s < math.inf),
    Rule(("engine_restarts",), "must be 0 (never) or more", lambda p: p.routing.engine_restarts >= 0),
    Rule(
        ("kv_events_port",),
        f"must be 0 (any free ports) to {MAX_PORT}, with room for two ports an engine",
        lambda p: 0 <= (p.kv_events.kv_events_port or 0) <= MAX_PORT + 1 - 2 * max(1, p.cell.prefill + p.cell.decode),
    ),
    Rule(
        ("kv_events_port", "prefix_cache"),
        "there is nothing to tell of: the prefix cache is off",
        lambda p: p.kv_events.kv_events_port is None or p.engine.prefix_cache,
    ),
    Rule(
        ("kv_events_host",),
        "must be one address at which others reach this server: a gateway is told to follow it there",
        lambda p: p.kv_events.kv_events_host.strip() not in EVERY_ADDRESS,
    ),
    *GATEWAY_RULES,
    *RAY_RULES,
    Rule(("host",), "must be a host name or an address", lambda p: bool(p.server.host.strip())),
    Rule(("port",), f"must be 0 (any free port) to {MAX_PORT}", lambda p: 0 <= p.server.port <= MAX_PORT),
    Rule(("api_keys",), "no key may be empty", lambda p: all(key.strip() for key in p.server.api_keys)),
    Rule(
        ("admin_key", "api_keys"),
        "must be a key of its own, neither blank nor an API key: clients could do what operators do",
        lambda p: (
            p.server.admin_key == "" or p.server.admin_key.strip() not in ("", *map(str.strip, p.server.api_keys))
        ),
    ),
    Rule(("max_n",), "must be at least 1", lambda p: p.server.max_n >= 1),
    Rule(
        ("max_n", "max_num_seqs"),
        "the choices of a group are admitted together: max_n at most max_num_seqs",
        lambda p: p.server.max_n <= p.engine.max_num_seqs,
    ),
    Rule(
        ("max_choices", "max_n"),
        "a request may have as many choices as one group: max_choices at least max_n",
        lambda p: p.server.max_choices >= p.server.max_n,
    ),
    Rule(("max_waiting_groups",), "must be at least 1", lambda p: p.server.max_waiting_groups >= 1),
    Rule(("key_max_requests",), "must be 0 (any number) or more", lambda p: p.server.key_max_requests >= 0),
    Rule(("key_max_choices",), "must be 0 (any number) or more", lambda p: p.server.key_max_choices >= 0),
    Rule(("max_body_bytes",), "must be at least 1", lambda p: p.server.max_body_bytes >= 1),
    Rule(("log_level",), f"must be one of {', '.join(LOG_LEVELS)}", lambda p: p.server.log_level in LOG_LEVELS),
    Rule(("log_format",), f"must be one of {', '.join(LogFormat)}", lambda p: p.server.log_format in tuple(LogFormat)),
    Rule(("drain_timeout_s",), "must be 0 or more", lambda p: 0 <= p.server.drain_timeout_s < math.inf),
)


def fit_defaults(rows: Mapping[str, Setting]) -> dict[str, Setting]:
    """Lets defaults give way to what was set: `--max-num-seqs 64` alone is no contradiction to a `max_n` of 128."""
    fitted = dict(rows)
    for name, other, bound in (
        ("max_n", "max_num_seqs", min),
        ("max_num_batched_tokens", "max_num_seqs", max),
        ("max_choices", "max_n", max),
    ):
        if not {name, other} <= fitted.keys():
            continue
        value, limit = fitted[name].value, fitted[other].value
        if fitted[name].is_default and isinstance(value, int) and isinstance(limit, int) and limit >= 1:
            fit = bound(value, limit)
            if fit != value:
                fitted[name] = replace(fitted[name], value=fit, source=f"{DEFAULT}, from {other}")
    return fitted


def check_rules(settings: Settings) -> None:
    proposal = Proposal(
        settings.model,
        settings.engine(model_path=Path(), model_name=""),
        settings.cell,
        settings.routing,
        settings.kv_events,
        settings.gateway,
        settings.ray,
        settings.server(served_model_name=""),
    )
    for rule in RULES:
        if rule.of(settings) and not rule.holds(proposal):
            blamed = " with ".join(blame(settings.rows[name]) for name in rule.names)
            raise ConfigError(f"{blamed}: {rule.says}")


def blame(setting: Setting) -> str:
    """`--port 99999`, or `port 99999 (motet.toml)` where a flag is not to blame."""
    flag = flag_of(setting.name)
    if setting.source == flag:
        return f"{flag} {setting.shown}"
    return f"{setting.name} {setting.shown} ({setting.source})"
