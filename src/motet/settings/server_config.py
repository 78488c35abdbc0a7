"""Every setting of a server, declared once: name, type, default, help, range, and the commands that have it.

A record holds the frozen settings of one part of the server. Each field with a `setting(...)` is a setting: its flag,
environment variable, name in the TOML file, checks, `--help` and row in docs/settings.md are derived from the
declaration by `motet.settings`. Fields without one are set later, for example from the model.

To add a setting, add a field here, in `motet.settings.gateway_config` or in `motet.settings.ray_config`. Add a rule to
`motet.settings.rules` only if the setting depends on another."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from motet.log import LogFormat
from motet.metrics.declare import MetricPrefix
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
from motet.settings.gateway_config import GatewayConfig
from motet.settings.named_worker import check_urls, numbers_by_key
from motet.settings.ray_config import RayConfig
from motet.types import MAX_LOGPROBS, LogprobsMode, Policy, Role

MAX_THREADS: Final = 1024


def limit(default: Value, help: str, **more: Any) -> Value:
    """Declares a setting of the panel `LIMITS`."""
    return setting(default, help, panel=Panel.LIMITS, **more)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model, and files that replace the model's own."""

    model: str = setting(
        "smollm2",
        "Model to serve: a local folder, a Hugging Face model (org/name) or smollm2.",
        pattern=NOT_BLANK,
        must="a folder or the name of a model",
    )
    served_model_name: str | None = common(
        None,
        "Name of the model in requests.",
        commands=EVERY,
        unset="MODEL as given",
        differs={GATEWAY: {"help": "Name of its first model in requests.", "unset": "the name that workers report"}},
        pattern=NOT_BLANK,
        must="not empty",
    )
    revision: str | None = setting(
        None, "Branch, tag or commit of the model on the Hugging Face Hub.", unset="the main branch"
    )
    tokenizer: str | None = setting(
        None,
        "Folder or Hub name of another tokenizer.",
        commands=EVERY,
        unset="the model's tokenizer",
        differs={GATEWAY: {"help": "Tokenizer of models without --tokenizer-of.", "unset": "the workers' tokenizer"}},
    )
    chat_template: str | None = common(
        None,
        "File with another chat template (Jinja).",
        unit="file",
        commands=EVERY,
        unset="the model's chat template",
    )
    tool_parser: str = common(
        "auto", "Format of tool calls: a name, none, or auto, which detects it from the chat template.", commands=EVERY
    )
    reasoning_parser: str = common(
        "auto", "Format of reasoning: a name, none, or auto, which detects it from the chat template.", commands=EVERY
    )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All settings of an engine process, which receives them as one message."""

    model_path: str
    """Local folder in Hugging Face's layout, found or made by `motet.models`."""
    model_name: str
    tokenizer_path: str = ""
    """Folder of the tokenizer, which grammars need; empty for `model_path`."""
    available_bytes: int | None = None
    """Available memory when the server started. None means that the engine reads it when it starts."""
    num_engines: int = 1
    """Number of engines that share the machine's memory."""
    log_format: str = LogFormat.TEXT
    log_level: str = "info"
    device: str = common(
        "auto",
        "Device of the model: cpu, cuda, cuda:K, or auto, which takes the first GPU, or the CPU if there is none.",
        pattern=r"auto|cpu|cuda|cuda:\d+",
        must="auto, cpu, cuda or cuda:K",
    )
    dtype: str = common(
        "auto",
        "Data type of weights and KV cache; auto takes the checkpoint's. On a CPU float16 has no compiled kernels.",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    max_model_len: int | None = common(
        None,
        "Maximum length of a prompt and its output together.",
        unit="tokens",
        unset="the model's maximum",
        minimum=2,
        reason="it holds a prompt and an output",
    )
    kv_cache_gb: float | None = common(
        None,
        "Memory for the KV cache of one engine.",
        unit="GiB",
        unset="2 GiB; on a CPU with little memory, less, so that weights and caches of all engines fit",
        above=0,
    )
    gpu_memory_utilization: float | None = setting(
        None, "Fraction of a GPU's memory for the engine, weights included; replaces --kv-cache-gb.", above=0, maximum=1
    )
    block_size: int = setting(16, "Number of tokens in a KV block.", unit="tokens", choices=(8, 16, 32, 64, 128))
    max_num_seqs: int = common(
        256, "Maximum number of choices that one engine runs at once, and maximum size of a group.", minimum=1
    )
    max_num_batched_tokens: int = setting(
        512, "Maximum tokens of a step: one for each running choice, the rest for prompts.", unit="tokens", minimum=1
    )
    kernels: str = setting(
        "auto",
        "Kernels on the CPU: compiled (C++; bfloat16 and float32), torch, or auto, the first that works.",
        choices=("auto", "compiled", "torch"),
    )
    quantization: str = common(
        "none",
        "Weight quantization; int8 uses 8 bits with one scale per column and needs the compiled kernels.",
        choices=("none", "int8"),
    )
    prefix_cache: bool = setting(True, "Reuse the KV of earlier prompts with the same prefix.")
    keep_gb: float | None = setting(
        None,
        "Maximum memory for prompts that one engine keeps for more choices (keep_s).",
        unit="GiB",
        unset="the entire cache; running groups evict kept prompts",
        minimum=0,
        zero="none is kept",
    )
    cache_answers: bool = setting(
        False,
        "Also keep the KV of output tokens in the prefix cache. Saves prefill in conversations, but makes an answer "
        "depend on earlier requests.",
    )
    draft_tokens: int = setting(
        8,
        "Maximum number of draft tokens of a choice in a step, predicted from its prompt and siblings; CPU only.",
        minimum=0,
        maximum=64,
    )
    draft_from_history: int = setting(
        0, "Number of earlier output tokens that an engine keeps as drafts for equal prompts.", minimum=0, zero="none"
    )
    num_threads: int | None = setting(
        None,
        "Number of CPU threads of one engine.",
        flag="--threads",
        unset="all cores, divided evenly among the engines of a cell",
        differs={RAY: {"unset": "--cpus-per-worker"}},
        minimum=1,
        maximum=MAX_THREADS,
        reason="more threads than cores only wait for each other",
    )
    enforce_eager: bool = setting(False, "Disable CUDA graphs and launch every operator separately.")
    role: Role = common(
        Role.BOTH,
        "Role of this server: prefill provides the KV of prompts, decode fetches it, both does everything itself.",
        panel=Panel.CELL,
        commands=SERVE,
    )
    side_channel_host: str = setting(
        "127.0.0.1",
        "Address at which other workers reach this one.",
        panel=Panel.CELL,
        differs={RAY: {"default": None, "unset": "the address of the replica's node"}},
        pattern=ONE_ADDRESS,
        must="one address at which other workers reach this one",
        reason="tickets contain it",
        marks=Mark.THIS_MACHINE,
    )
    side_channel_port: int | None = setting(
        None,
        "Port at which other workers reach this one.",
        panel=Panel.CELL,
        commands=SERVE,
        unset="20000 for a prefill server, 22000 for a decode server, any free port in a cell",
        **PORT,
    )
    kv_transfer_backend: str = setting(
        "auto",
        "What moves KV between workers: nixl, shared-memory (all on one machine), or auto, the first that works.",
        panel=Panel.CELL,
        choices=("auto", "nixl", "shared-memory"),
    )
    cluster_key: str = setting(
        "",
        "Shared secret of the workers; others are refused. Set it in the environment: the command line is public.",
        panel=Panel.CELL,
        unset="none; a cell generates one",
        differs={RAY: {"unset": "a random key"}},
        pattern=r"(?!\s+$)[\s\S]*",
        must="not blank",
        marks=Mark.SECRET,
    )
    lease_s: float = setting(
        60.0,
        "Time for which prefilled KV is kept without a heartbeat from its reader.",
        panel=Panel.CELL,
        minimum=3,
        reason="a reader sends a heartbeat every second",
    )
    pull_timeout_s: float = setting(
        10.0, "Time after which decode stops waiting for a prompt's KV and computes it.", panel=Panel.CELL, above=0
    )
    heartbeat_timeout_s: float = setting(
        10.0,
        "Time without a heartbeat after which an engine process is killed.",
        panel=Panel.PROCESS,
        minimum=1,
        reason="heartbeats are late on a busy machine",
    )
    step_timeout_s: float = setting(
        300.0, "Maximum time of one step, after which an engine process is killed.", panel=Panel.PROCESS, above=0
    )


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
        "Key for /drain, /workers and the routes of --rl; API keys are refused there.",
        unset="none, and /workers cannot be changed",
        pattern=r"[ -~]*",
        must="ASCII characters",
        marks=Mark.SECRET,
    )
    rl: bool = setting(False, "Enable the routes for trainers, which pause the server and update its weights.")
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
    page: bool = setting(True, "Serve a web page at / that sends requests to this server and shows its groups.")
    max_n: int = limit(256, "Maximum n: the number of choices of one prompt.", minimum=1)
    max_choices: int = limit(1024, "Maximum number of choices of one request: prompts times n.", minimum=1)
    max_logprobs: int = limit(
        20, "Maximum number of alternatives reported for a token.", minimum=0, maximum=MAX_LOGPROBS
    )
    logprobs_mode: LogprobsMode = limit(LogprobsMode.RAW, "Distribution of log-probabilities.")
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
        read=numbers_by_key,
        must="KEY=NUMBER, such as secret=-10",
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
    max_connections: int = limit(
        8192,
        "Maximum number of client connections, at most half of the limit on open files.",
        commands=SERVE + GATEWAY,
        minimum=1,
    )
    receive_timeout_s: float = limit(
        60.0, "Maximum time to receive a request's head, and then its body.", commands=SERVE + GATEWAY, above=0
    )
    additional_properties: bool = limit(
        False, "Allow properties that a JSON Schema neither names nor forbids, as JSON Schema itself does."
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


RECORDS: Final[Mapping[type, Mapping[str, Declaration]]] = {
    ModelConfig: settings_of(ModelConfig, Panel.MODEL, commands=ENGINES),
    EngineConfig: settings_of(EngineConfig, Panel.ENGINE, commands=ENGINES),
    CellConfig: settings_of(CellConfig, Panel.CELL, commands=ENGINES),
    RoutingConfig: settings_of(RoutingConfig, Panel.ROUTING, commands=EVERY),
    KVEventsConfig: settings_of(KVEventsConfig, Panel.ROUTING, commands=SERVE),
    GatewayConfig: settings_of(GatewayConfig, Panel.SERVERS, commands=GATEWAY),
    RayConfig: settings_of(RayConfig, Panel.RAY, commands=RAY),
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
