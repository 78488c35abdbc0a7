"""Settings, each declared once: name, type, default, meaning, range, and the commands that have it.

A record holds the frozen settings of one part of the server. Each field with a `setting(...)` is a setting. The command
line, the TOML file, the environment, the checks, `--help` and docs/settings.md are all derived from its declaration by
`motet.settings`. Fields without one are set later, for example from the model.

To add a setting, add a field here, in `motet.settings.gateway_config` or in `motet.settings.ray_config`. Add a function
to `motet.settings.rules` only if the setting depends on another.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from motet.log import LogFormat
from motet.metrics.declare import MetricPrefix
from motet.settings.declaration import (
    ASKED_KEY,
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
    Panel,
    setting,
    settings_of,
)
from motet.settings.gateway_config import GatewayConfig
from motet.settings.named_worker import check_urls, numbers_by_key
from motet.settings.ray_config import RayConfig
from motet.types import MAX_LOGPROBS, LogprobsMode, Policy, Role

MAX_THREADS: Final = 1024


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model, and files that replace its own."""

    model: str = setting(
        "smollm2",
        "The model: a local folder, a name on the hub (org/name) or smollm2.",
        flag="MODEL",
        pattern=NOT_BLANK,
        must="a folder or the name of a model",
    )
    served_model_name: str | None = setting(
        None,
        "Name by which clients ask for the model; for a gateway, for the first of its models.",
        commands=EVERY,
        unset="the model as it was named",
        pattern=NOT_BLANK,
        must="not empty",
    )
    revision: str | None = setting(None, "Branch, tag or commit of the model on the hub.", unset="the main branch")
    tokenizer: str | None = setting(
        None,
        "Folder or hub name of a tokenizer to use instead; a gateway uses it for models whose workers hand out none.",
        commands=EVERY,
        unset="the model's own",
    )
    chat_template: str | None = setting(
        None, "File with a Jinja chat template to use instead.", commands=EVERY, unset="the model's own"
    )
    tool_parser: str = setting(
        "auto",
        "How the model writes tool calls: the name of a format, none, or auto, which knows it by the chat template.",
        commands=EVERY,
    )
    reasoning_parser: str = setting(
        "auto",
        "How the model marks its reasoning: the name of a format, none, or auto, which knows it by the chat template.",
        commands=EVERY,
    )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All settings of an engine process, which gets them as one message."""

    model_path: str
    """A local folder in Hugging Face's layout (`motet.models` finds or makes it)."""
    model_name: str
    tokenizer_path: str = ""
    """The folder of the tokenizer, which grammars need; empty: `model_path`."""
    device: str = setting(
        "auto",
        "Where the model runs: cpu, cuda, cuda:K, or auto, which takes the first GPU, or the CPU if there is none.",
        pattern=r"auto|cpu|cuda|cuda:\d+",
        must="auto, cpu, cuda or cuda:K",
    )
    dtype: str = setting(
        "auto",
        "Number format of weights and KV cache; auto takes the model's own. On a CPU float16 lacks compiled kernels.",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    max_model_len: int | None = setting(
        None,
        "Greatest length of a prompt and its answer together.",
        unit="tokens",
        unset="the model's own",
        least=2,
        because="a prompt and an answer",
    )
    kv_cache_gb: float = setting(2.0, "Memory for the KV blocks of one engine.", unit="GiB", above=0)
    gpu_memory_utilization: float | None = setting(
        None,
        "Part of a GPU's memory that the engine may fill, weights included; in place of --kv-cache-gb.",
        above=0,
        most=1,
    )
    block_size: int = setting(16, "Tokens whose KV one block holds.", unit="tokens", choices=(8, 16, 32, 64, 128))
    max_num_seqs: int = setting(256, "Number of choices that one engine runs at once; also the largest group.", least=1)
    max_num_batched_tokens: int = setting(
        512, "Number of tokens in one step: those of the running choices, the rest for prompts.", unit="tokens", least=1
    )
    kernels: str = setting(
        "auto",
        "Kernels on the CPU: compiled (C++; bfloat16 on AVX-512 or AVX2), torch, or auto, the first that works.",
        choices=("auto", "compiled", "torch"),
    )
    quantization: str = setting(
        "none",
        "int8 rounds the weights to 8 bits with one scale a column; for the compiled kernels.",
        choices=("none", "int8"),
    )
    prefix_cache: bool = setting(True, "Reuse the KV of earlier prompts that begin alike.")
    keep_gb: float | None = setting(
        None,
        "Most memory for prompts that one engine keeps for more choices of them (keep_s).",
        unit="GiB",
        unset="as much as there is: they give way to all groups",
        least=0,
        zero="none is kept",
    )
    cache_answers: bool = setting(
        False,
        "Keep answers in the prefix cache too. Saves prefill in conversations, but an answer may then depend on "
        "what the server did before.",
    )
    draft_tokens: int = setting(
        8, "Most draft tokens of a choice in a step, guessed from its prompt and siblings; on a CPU.", least=0, most=64
    )
    draft_from_history: int = setting(
        0, "Tokens of earlier answers that an engine keeps as drafts for equal prompts.", least=0, zero="none"
    )
    num_threads: int | None = setting(
        None,
        "Number of CPU threads of one engine.",
        flag="--threads",
        unset="all cores, shared evenly by the engines of a cell; on Ray, --cpus-per-worker",
        least=1,
        most=MAX_THREADS,
        because="threads beyond the machine's cores only wait for each other",
    )
    enforce_eager: bool = setting(False, "Run a GPU without CUDA graphs: launch every operator by itself.")
    role: Role = setting(
        Role.BOTH,
        "What this server does: prefill hands over the KV of prompts, decode fetches it, both keeps its own.",
        panel=Panel.CELL,
        commands=SERVE,
    )
    side_channel_host: str = setting(
        "127.0.0.1",
        "Address at which other workers reach this one. Unless it is set, Ray's replicas take their node's address.",
        panel=Panel.CELL,
        pattern=ONE_ADDRESS,
        must="one address at which other workers reach this one",
        because="it is written into tickets",
        of_this_machine=True,
    )
    side_channel_port: int | None = setting(
        None,
        "Port at which other workers reach this one.",
        panel=Panel.CELL,
        commands=SERVE,
        unset="20000 for a prefill server, 22000 for a decode server, a free one in a cell",
        **PORT,
    )
    cluster_key: str = setting(
        "",
        "Workers with another key are refused. Better set in the environment: other users see the command line.",
        panel=Panel.CELL,
        unset="none; cells and Ray draw their own",
        pattern=r"(?!\s+$)[\s\S]*",
        must="not blank",
        secret=True,
    )
    lease_s: float = setting(
        60.0,
        "Time for which prefilled KV is kept without a sign of life from its reader.",
        panel=Panel.CELL,
        least=3,
        because="a reader gives a sign of life every second",
    )
    pull_timeout_s: float = setting(
        10.0, "Time after which a prompt whose KV has not come is computed instead.", panel=Panel.CELL, above=0
    )
    heartbeat_timeout_s: float = setting(
        10.0,
        "Time without a sign of life after which an engine process is killed.",
        panel=Panel.PROCESS,
        least=1,
        because="on a busy machine signs of life come late",
    )
    step_timeout_s: float = setting(
        300.0, "Time in one step after which an engine process is killed.", panel=Panel.PROCESS, above=0
    )


@dataclass(frozen=True, kw_only=True)
class CellConfig:
    """Prefill and decode apart: the number of engines of each, where they run, and when prefill pays."""

    prefill: int = setting(
        0,
        "Number of prefill engines on this machine; on Ray, of prefill replicas (with --autoscale, the most).",
        least=0,
    )
    decode: int = setting(
        0,
        "Number of decode engines on this machine; on Ray, of decode replicas (with --autoscale, the most), "
        "where 0 counts as 1.",
        least=0,
    )
    prefill_urls: tuple[str, ...] = setting(
        (),
        "URL of a prefill server that a decode server asks; several times, or URL,URL.",
        commands=SERVE,
        commas=True,
        read=check_urls,
    )
    bypass_tokens: int = setting(
        128,
        "A prompt with fewer tokens to compute than this is computed where it is decoded.",
        commands=EVERY,
        unit="tokens",
        least=0,
        zero="never",
    )
    prefill_timeout_s: float = setting(
        120.0,
        "Time after which a decode worker computes a prompt itself for which it has no KV yet.",
        commands=EVERY,
        above=0,
    )
    prefill_may_come: bool = False
    """True if prefill workers come and go: prompts that an absent one would have computed are counted."""


@dataclass(frozen=True, kw_only=True)
class RoutingConfig:
    """How groups are given to workers, and what happens when a worker is lost."""

    routing_policy: Policy = setting(
        Policy.KV, "Which worker gets a group: kv weighs cached prefixes, running choices and KV blocks."
    )
    session_expiry_s: float = setting(600.0, "Time for which the worker of a session is remembered.", above=0)
    spread_choices: int = setting(
        0, "A group of more choices than this may be split over several decode workers.", least=0, zero="never"
    )
    migration_limit: int = setting(
        3, "Number of times that a group may move because its worker was lost.", least=0, zero="never"
    )
    migration_wait_s: float = setting(15.0, "Time that a group waits for a new worker when all are lost.", least=0)
    queue_timeout_s: float = setting(60.0, "Time that a group waits for room before it is refused.", above=0)
    engine_restarts: int = setting(
        5,
        "Number of times in a row that an engine that dies is started again; then the server does without it.",
        commands=ENGINES,
        least=0,
        zero="never",
    )


@dataclass(frozen=True, kw_only=True)
class KVEventsConfig:
    """The addresses of events about the prompt blocks in each engine's prefix cache."""

    kv_events_port: int | None = setting(
        None,
        "Port of the events that tell which blocks are cached. Each engine takes two ports: events, then replays.",
        unset="no events",
        least=0,
        most=MAX_PORT - 1,
        zero="any free ports",
    )
    kv_events_host: str = setting(
        "127.0.0.1",
        "Address of this machine at which the events are found.",
        pattern=ONE_ADDRESS,
        must="one address at which others reach this server",
        because="a gateway is told to follow it there",
    )
    kv_events_topic: str = setting("kv-events", "First frame of every event message.")


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """The settings of the HTTP side."""

    served_model_name: str
    host: str = setting("127.0.0.1", "Address to listen on.", pattern=NOT_BLANK, must="a host name or an address")
    port: int = setting(8000, "Port to listen on; not 0 on Ray.", **PORT)
    api_keys: tuple[str, ...] = setting(
        (),
        "API key that opens the server to a client; several times.",
        unset="none, every client may ask",
        pattern=ASKED_KEY,
        must="keys of ASCII characters that are not blank",
        secret=True,
    )
    admin_key: str = setting(
        "",
        "Key that opens /drain, /workers and the routes of --rl in place of the API keys.",
        unset="none, and /workers cannot be changed",
        pattern=r"[ -~]*",
        must="ASCII characters",
        secret=True,
    )
    rl: bool = setting(False, "Open the routes that give the server new weights. API keys do not open them.")
    worker_key: str = setting(
        "",
        "Key that servers of ours share: it alone opens /engine, and is sent to the workers and prefill servers that "
        "are asked there. Better set in the environment.",
        unset="none; on Ray, the cluster key",
        **SENT_KEY,
    )
    insecure: bool = setting(
        False,
        "Start although strangers may reach this server: at a --host other than loopback without --api-key, or at a "
        "--side-channel-host without --cluster-key.",
    )
    allowed_hosts: tuple[str, ...] = setting(
        (),
        "One more name in the Host header to which a server on a loopback address answers; several times.",
        unset="the names of loopback only",
        pattern=NOT_BLANK,
        must="the name of a host, without a port",
    )
    cors_origins: tuple[str, ...] = setting((), "Origin whose web pages may call the server; several times.")
    page: bool = setting(True, "Show a page at / that asks this server and shows how groups are written.")
    max_n: int = setting(256, "Greatest n: the number of choices of one prompt.", panel=Panel.LIMITS, least=1)
    max_choices: int = setting(1024, "Most choices of one request: prompts times n.", panel=Panel.LIMITS, least=1)
    max_logprobs: int = setting(20, "Most alternatives to a token.", panel=Panel.LIMITS, least=0, most=MAX_LOGPROBS)
    logprobs_mode: LogprobsMode = setting(LogprobsMode.RAW, "Distribution of log-probabilities.", panel=Panel.LIMITS)
    max_waiting_groups: int = setting(
        256,
        "Number of groups that may wait for their first token; one more is answered 503.",
        panel=Panel.LIMITS,
        least=1,
    )
    key_max_requests: int = setting(
        0,
        "Requests that one API key may have running; one more is answered 429. Without keys: all clients, and 503.",
        panel=Panel.LIMITS,
        least=0,
        zero="any number",
    )
    key_max_choices: int = setting(
        0,
        "Choices that one API key may have running; more are answered 429. Without keys: all clients, and 503.",
        panel=Panel.LIMITS,
        least=0,
        zero="any number",
    )
    key_priority: tuple[str, ...] = setting(
        (),
        "Lowest 'priority', which goes first, that the requests of one API key may have: KEY=NUMBER; several times.",
        panel=Panel.LIMITS,
        unset="0 for every key if there are several, else any",
        read=numbers_by_key,
        must="KEY=NUMBER, such as secret=-10",
        secret=True,
    )
    cache_salt_per_key: str = setting(
        "auto",
        "Keep the cached prompts of each API key apart, so that none tells another's; auto: if there are several keys.",
        panel=Panel.LIMITS,
        choices=("auto", "on", "off"),
    )
    max_body_bytes: int = setting(
        8 * 2**20, "Greatest size of a request's body.", panel=Panel.LIMITS, unit="bytes", least=1
    )
    max_open_body_bytes: int = setting(
        2**28, "Memory for bodies under way; one more is answered 503.", panel=Panel.LIMITS, unit="bytes", least=1
    )
    max_connections: int = setting(
        8192,
        "Connections of clients; half of the open files at most.",
        commands=SERVE + GATEWAY,
        panel=Panel.LIMITS,
        least=1,
    )
    receive_timeout_s: float = setting(
        60.0,
        "Time for a request's head, then for its body, to come.",
        commands=SERVE + GATEWAY,
        panel=Panel.LIMITS,
        above=0,
    )
    additional_properties: bool = setting(
        False,
        "Let objects in schemas have properties that the schema does not name, unless it forbids them: the letter of "
        "JSON Schema.",
        panel=Panel.LIMITS,
    )
    metric_prefix: MetricPrefix = setting(
        MetricPrefix.MOTET,
        "With vllm, /metrics has what vLLM counts too also under vLLM's names, for its dashboards and load balancers.",
    )
    drain_timeout_s: float = setting(
        30.0, "Time that a stopping server or replica gives its running answers.", panel=Panel.PROCESS, least=0
    )
    log_level: str = setting(
        "info",
        "Lowest level of the lines that are logged.",
        panel=Panel.PROCESS,
        choices=("debug", "info", "warning", "error"),
    )
    log_format: LogFormat = setting(
        LogFormat.TEXT, "Form of log lines: text for people, json for machines.", panel=Panel.PROCESS
    )
    otlp_endpoint: str | None = setting(
        None,
        "URL of an OpenTelemetry collector that gets traces of requests, over OTLP: http://HOST:4318.",
        unset="no traces",
        panel=Panel.PROCESS,
        pattern=r"https?://[^\s/@]+(/\S*)?",
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
"""The settings of each record; panel and commands apply to settings that do not set their own."""
SETTINGS: Final = {name: declared for settings in RECORDS.values() for name, declared in settings.items()}


def environment() -> Mapping[str, str]:
    """Returns the process's environment. It is read only here, and passed on as an argument."""
    return dict(os.environ)  # noqa: TID251  the one place that reads it


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Returns the folder for models: `MOTET_CACHE_DIR`, else `motet` in the user's cache folder."""
    if chosen := environ.get("MOTET_CACHE_DIR"):
        return Path(chosen).expanduser()
    return Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "motet"
