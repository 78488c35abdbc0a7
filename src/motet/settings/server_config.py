"""Every setting of a server, declared once: name, type, default, help, range, and the commands that have it.

A record holds the frozen settings of one part of the server. Each field with a `setting(...)` is a setting: its flag,
environment variable, name in the TOML file, checks, `--help` and row in docs/settings.md are derived from the
declaration by `motet.settings`. Fields without one are set later, for example from the model.

To add a setting, add a field here, or in `engine_config`, `gateway_config` or `ray_config`. Add a rule to
`motet.settings.rules` only if the setting depends on another."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from motet.log import LogFormat
from motet.metrics.declare import MetricPrefix
from motet.session_ids import HEADER_PATTERN
from motet.settings.batch_config import BatchConfig
from motet.settings.declaration import (
    CLIENT_KEY,
    ENGINES,
    EVERY,
    GATEWAY,
    MAX_PORT,
    NOT_BLANK,
    ONE_ADDRESS,
    PORT,
    RAY,
    SENT_KEY,
    SERVE,
    Declaration,
    Mark,
    Panel,
    Value,
    common,
    setting,
    settings_of,
)
from motet.settings.engine_config import EngineConfig, ModelConfig
from motet.settings.gateway_config import GatewayConfig
from motet.settings.named_worker import check_urls
from motet.settings.parsed_values import integers_by_key, json_object, weights_by_key
from motet.settings.ray_config import RayConfig
from motet.settings.tls_config import TlsConfig
from motet.types import MAX_LOGPROBS, LogprobsMode


def limit(default: Value, help: str, **more: Any) -> Value:
    """Declares a setting of the panel `LIMITS`."""
    return setting(default, help, panel=Panel.LIMITS, **more)


class Policy(StrEnum):
    """The rule that chooses among workers with free capacity."""

    KV = "kv"
    """Chooses the lowest cost (`routing.choosing.cost`) of computing the prompt and of the open choices."""
    LEAST_LOADED = "least-loaded"
    """Chooses the fewest open choices, then the fewest blocks; for prefill the fewest queued tokens first."""
    ROUND_ROBIN = "round-robin"
    SESSION = "session"
    """Chooses the session's last worker, if there is one, else the least loaded."""


@dataclass(frozen=True, kw_only=True)
class CellConfig:
    """Prefill/decode disaggregation: the number of engines of each role, where they run, and when prefill pays."""

    prefill: int = common(
        0,
        "Number of prefill engines on this machine.",
        minimum=0,
        differs={RAY: {"help": "Number of prefill replicas; with --autoscale, the maximum."}},
    )
    decode: int = common(
        0,
        "Number of decode engines on this machine.",
        minimum=0,
        differs={RAY: {"help": "Number of decode replicas, where 0 counts as 1; with --autoscale, the maximum."}},
    )
    prefill_urls: tuple[str, ...] = common(
        (),
        "URL of a prefill server for this decode server; repeat the flag, or separate URLs with commas.",
        commands=SERVE,
        unit="URL",
        marks=Mark.COMMAS,
        read=check_urls,
    )
    bypass_tokens: int = setting(
        128,
        "Prompts with fewer uncached tokens than this are computed by the decode worker.",
        commands=EVERY,
        unit="tokens",
        minimum=0,
        zero="never",
    )
    prefill_timeout_s: float = setting(
        120.0, "Time after which decode stops waiting for prefill and computes the prompt.", commands=EVERY, above=0
    )
    prefill_may_come: bool = False
    """True if prefill workers join and leave at run time. Prompts computed without one are then counted."""


@dataclass(frozen=True, kw_only=True)
class RoutingConfig:
    """How groups are assigned to workers, and what happens when a worker is lost."""

    routing_policy: Policy = setting(
        Policy.KV, "Rule that assigns groups to workers; kv weighs cached prefixes, running choices and KV blocks."
    )
    session_expiry_s: float = setting(600.0, "Time for which the worker of an idle session is remembered.", above=0)
    spread_choices: int = setting(
        0, "Groups with more choices than this can be split over several decode workers.", minimum=0, zero="never"
    )
    migration_limit: int = setting(
        3, "Maximum number of times that a group moves because its worker was lost.", minimum=0, zero="never"
    )
    migration_wait_s: float = setting(
        15.0, "Time for which a group waits for a new worker after all were lost.", minimum=0
    )
    queue_timeout_s: float = setting(
        60.0, "Maximum time for which a group waits for capacity before it is refused.", above=0
    )
    engine_restarts: int = setting(
        5,
        "Maximum number of consecutive restarts of an engine that dies; the server then runs without it.",
        differs={
            RAY: {"help": "Maximum number of consecutive restarts of an engine before Serve replaces its replica."}
        },
        commands=ENGINES,
        minimum=0,
        zero="never",
    )


@dataclass(frozen=True, kw_only=True)
class KVEventsConfig:
    """The addresses at which engines publish events about the prompt blocks in their prefix caches."""

    kv_events_port: int | None = setting(
        None,
        "Port of the KV cache events. Each engine takes two ports: events, then replays.",
        unset="no events",
        minimum=0,
        maximum=MAX_PORT - 1,
        zero="any free ports",
    )
    kv_events_host: str = setting(
        "127.0.0.1",
        "Address of this machine at which KV cache events are published.",
        pattern=ONE_ADDRESS,
        must="one address at which others reach this server",
        reason="gateways connect to it",
    )
    kv_events_topic: str = setting("kv-events", "Topic of the KV cache events: the first frame of every message.")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The settings of the HTTP side."""

    served_model_name: str
    host: str = common("127.0.0.1", "Address to listen on.", pattern=NOT_BLANK, must="a host name or an address")
    port: int = common(8000, "Port to listen on.", differs={RAY: {"minimum": 1, "zero": ""}}, **PORT)
    api_keys: tuple[str, ...] = common(
        (),
        "API key of a client; repeatable.",
        unset="none, requests need no key",
        pattern=CLIENT_KEY,
        must="keys of ASCII characters that are not blank",
        marks=Mark.SECRET,
    )
    admin_key: str = common(
        "",
        "Key for /drain, /workers, LoRA adapters and the routes of --rl; API keys are refused there.",
        unset="none; /workers cannot be changed, and API keys do not open /drain",
        pattern=r"[ -~]*",
        must="ASCII characters",
        marks=Mark.SECRET,
    )
    rl: bool = setting(False, "Enable the routes for trainers, which pause the server and update its weights.")
    max_ready_pause_s: float | None = setting(
        None,
        "Time in a pause (--rl) after which /ready returns 503, so that load balancers send nothing.",
        unset="/ready returns 200 in a pause of any length",
        minimum=0,
        zero="at once",
    )
    worker_key: str = setting(
        "",
        "Key shared by Motet servers, which each requires at /engine and sends to others. Set it in the environment.",
        unset="none",
        differs={RAY: {"unset": "the cluster key"}},
        **SENT_KEY,
    )
    insecure: bool = setting(
        False,
        "Start without access control: at a --host other than loopback without --api-key, or with a --role at such a "
        "--side-channel-host without --cluster-key.",
        differs={GATEWAY + RAY: {"help": "Allow a --host other than loopback without --api-key."}},
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "Additional Host header that a server on a loopback address accepts; repeatable.",
        unset="the names of loopback only",
        pattern=NOT_BLANK,
        must="the name of a host, without a port",
    )
    cors_origins: tuple[str, ...] = setting(
        (),
        "Origin whose web pages may call the server (CORS); repeatable.",
        pattern=NOT_BLANK,
        must="an origin such as https://example.com",
    )
    session_headers: tuple[str, ...] = setting(
        (),
        "Additional request header with the id of the client's session, after x-session-id; repeatable.",
        unset="x-session-id, then the headers of Dynamo, Claude Code and Codex",
        pattern=HEADER_PATTERN,
        must="the name of a header without a key",
    )
    root_path: str = setting(
        "",
        "Path at which a proxy mounts the server, such as /llm: accepted in front of every route, and shown in "
        "/openapi.json.",
        unset="none",
        pattern=r"(/[!-.0-~]+)*",
        must="a path that starts with / and does not end with it",
    )
    uds: str | None = setting(
        None,
        "Unix domain socket to listen on, instead of --host and --port.",
        commands=SERVE + GATEWAY,
        unit="path",
    )
    page: bool = setting(True, "Serve a web page at / that sends requests to this server and shows its groups.")
    default_chat_template_kwargs: str = setting(
        "{}",
        "Variables for the chat template, as a JSON object; variables of a request take precedence.",
        panel=Panel.MODEL,
        unit="JSON",
        unset="none",
        read=json_object,
        must='a JSON object, such as {"enable_thinking": false}',
    )
    return_tokens_as_token_ids: bool = setting(
        False, "Show tokens in log-probabilities as token_id:NUMBER, unless a request sets this field."
    )
    enable_force_include_usage: bool = setting(
        False, "Report the usage so far in every chunk of a stream, even without stream_options, as in vLLM."
    )
    max_n: int = limit(256, "Maximum n: the number of choices of one prompt.", minimum=1)
    max_choices: int = limit(1024, "Maximum number of choices of one request: prompts times n.", minimum=1)
    max_logprobs: int = limit(
        20, "Maximum number of alternatives reported for a token.", minimum=0, maximum=MAX_LOGPROBS
    )
    logprobs_mode: LogprobsMode = limit(LogprobsMode.RAW, "Distribution of log-probabilities.")
    unknown_fields: str = setting(
        "refuse",
        "Handling of requests with fields that the server does not know: refuse answers with 400; warn ignores the "
        "fields, and names them in the log and in a header of the response.",
        choices=("refuse", "warn"),
    )
    trust_request_chat_template: bool = setting(
        False,
        "Render chats with the chat_template of a request. A template is a program, which runs in a process with "
        "limits of time and memory.",
    )
    max_tokens_policy: str = limit(
        "refuse",
        "Handling of requests for more output tokens than the model's length allows: refuse answers with 400; cap "
        "reduces the maximum to what fits.",
        choices=("refuse", "cap"),
    )
    max_waiting_groups: int = limit(
        256, "Maximum number of groups that wait for their first token; more are refused with 503.", minimum=1
    )
    key_max_requests: int = limit(
        0,
        "Maximum number of running requests per API key (429 for more) or, without keys, of all clients (503).",
        minimum=0,
        zero="any number",
    )
    key_max_choices: int = limit(
        0,
        "Maximum number of running choices per API key (429 for more) or, without keys, of all clients (503).",
        minimum=0,
        zero="any number",
    )
    key_priority: tuple[str, ...] = limit(
        (),
        "Lowest (most urgent) 'priority' that requests with one API key may have: KEY=NUMBER; repeatable.",
        unset="0 for every key if there are several, else any",
        read=integers_by_key,
        must="KEY=NUMBER, such as secret=-10",
        marks=Mark.SECRET,
    )
    key_share: tuple[str, ...] = limit(
        (),
        "Weight of one API key if clients request more than a worker can do at once: KEY=WEIGHT; repeatable.",
        unset="1 for every key",
        read=weights_by_key,
        must="KEY=WEIGHT with a weight from 0.01 to 100, such as secret=2.5",
        marks=Mark.SECRET,
    )
    cache_salt_per_key: str = limit(
        "auto",
        "Isolate the prefix cache per API key, so that cache hits reveal nothing about other keys' prompts; auto does "
        "so if there are several keys.",
        choices=("auto", "on", "off"),
    )
    max_body_bytes: int = limit(8 * 2**20, "Maximum size of a request body.", unit="bytes", minimum=1)
    max_open_body_bytes: int = limit(
        2**28, "Maximum memory for the bodies of all open requests; more are refused with 503.", unit="bytes", minimum=1
    )
    max_open_answer_bytes: int = limit(
        2**31,
        "Maximum memory for all answers that are not streamed. An answer that alone exceeds it ends with 400. If all "
        "together exceed it, an answer of a client with more than an equal share ends with 503.",
        unit="bytes",
        minimum=1,
    )
    max_connections: int = limit(
        8192,
        "Maximum number of client connections, at most half of the limit on open files.",
        commands=SERVE + GATEWAY,
        minimum=1,
    )
    receive_timeout_s: float = limit(
        60.0, "Maximum time to receive a request's head, and then its body.", commands=SERVE + GATEWAY, above=0
    )
    sse_ping_s: float = setting(
        10.0,
        "Time without a byte after which a stream sends its headers and a comment, so that clients and proxies keep "
        "waiting. An error after the headers is an event of the stream.",
        minimum=0,
        zero="no comments",
    )
    keep_alive_s: int = limit(
        120,
        "Time for which an idle connection stays open. It must be longer than the time for which clients and proxies "
        "reuse connections, so that no request meets a closed one.",
        minimum=1,
    )
    additional_properties: bool = limit(
        False, "Allow properties that a JSON Schema neither names nor forbids, as JSON Schema itself does."
    )
    control_tokens_in_messages: bool = setting(
        False,
        "Read texts of control tokens in messages and tools as control tokens, as vLLM does. Without it, a text such "
        "as <|im_end|> in a message is only text, and cannot start another turn.",
    )
    metric_prefix: MetricPrefix = setting(
        MetricPrefix.MOTET,
        "With vllm, /metrics also exposes vLLM's metrics under vLLM's names, for its dashboards and load balancers.",
    )
    drain_timeout_s: float = setting(
        30.0, "Time for which running answers can finish after a request to stop.", panel=Panel.PROCESS, minimum=0
    )
    log_level: str = common(
        "info", "Minimum level of log lines.", panel=Panel.PROCESS, choices=("debug", "info", "warning", "error")
    )
    log_format: LogFormat = setting(
        LogFormat.TEXT, "Format of log lines: text, or json with one object per line.", panel=Panel.PROCESS
    )
    otlp_endpoint: str | None = setting(
        None,
        "URL of the OpenTelemetry collector that receives traces of requests (OTLP): http://HOST:4318.",
        unset="no traces",
        panel=Panel.PROCESS,
        pattern=r"https?://[^\s/@]+(/\S*)?",
        read=check_urls,
        unit="URL",
        must="a URL such as http://127.0.0.1:4318",
    )

    batches: BatchConfig = field(default=BatchConfig())

    @cached_property
    def template_defaults(self) -> Mapping[str, object]:
        """Variables that the chat template has unless a request sets them."""
        return json_object([self.default_chat_template_kwargs])


RECORDS: Final[Mapping[type, Mapping[str, Declaration]]] = {
    ModelConfig: settings_of(ModelConfig, Panel.MODEL, commands=ENGINES),
    EngineConfig: settings_of(EngineConfig, Panel.ENGINE, commands=ENGINES),
    CellConfig: settings_of(CellConfig, Panel.CELL, commands=ENGINES),
    RoutingConfig: settings_of(RoutingConfig, Panel.ROUTING, commands=EVERY),
    KVEventsConfig: settings_of(KVEventsConfig, Panel.ROUTING, commands=SERVE),
    TlsConfig: settings_of(TlsConfig, Panel.TLS, commands=SERVE + GATEWAY),
    GatewayConfig: settings_of(GatewayConfig, Panel.SERVERS, commands=GATEWAY),
    RayConfig: settings_of(RayConfig, Panel.RAY, commands=RAY),
    BatchConfig: settings_of(BatchConfig, Panel.BATCHES, commands=SERVE + GATEWAY),
    ServerConfig: settings_of(ServerConfig, Panel.HTTP, commands=EVERY),
}
"""Settings of each record; panel and commands apply to settings that do not set their own."""
SETTINGS: Final = {name: declared for settings in RECORDS.values() for name, declared in settings.items()}


def environment() -> Mapping[str, str]:
    """Returns the process's environment. It is read only here and passed on as an argument."""
    return dict(os.environ)  # noqa: TID251  the one place that reads it


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Returns the folder for models: `MOTET_CACHE_DIR`, else `motet` in the user's cache folder."""
    if chosen := environ.get("MOTET_CACHE_DIR"):
        return Path(chosen).expanduser()
    return Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "motet"
