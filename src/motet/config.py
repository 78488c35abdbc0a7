"""Settings: their names, defaults and meaning. Resolved once (default < file < environment < flag), then frozen."""

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from motet.types import Ingress, Role

ENVIRONMENT_PREFIX = "MOTET_"


def environment() -> Mapping[str, str]:
    """The process's environment, read here and nowhere else; passed on as an argument."""
    return dict(os.environ)  # noqa: TID251  the one place that reads it


def cache_folder(environ: Mapping[str, str]) -> Path:
    """Where models are kept: `MOTET_CACHE_DIR`, else `motet` in the user's cache folder."""
    if chosen := environ.get("MOTET_CACHE_DIR"):
        return Path(chosen).expanduser()
    return Path(environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "motet"


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Which model, and what of it is replaced."""

    model: str = "smollm2"
    """A local folder, a hub name (`org/name`) or the default model."""
    served_model_name: str | None = None
    """The name clients use; None: as `model` was written."""
    revision: str | None = None
    """Branch, tag or commit on the hub."""
    tokenizer: str | None = None
    """A folder or hub name whose tokenizer takes the place of the model's own."""
    chat_template: str | None = None
    """A file with a Jinja template that takes the place of the model's own."""
    tool_parser: str = "auto"
    """How tool calls are written: a format's name, `auto` for what the chat template is known by, or `none`."""
    reasoning_parser: str = "auto"
    """How thoughts are marked: the same."""


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All an engine process needs to know; goes to it as one message."""

    model_path: str
    """A local folder in Hugging Face's layout (`motet.models` finds or makes it)."""
    model_name: str
    tokenizer_path: str = ""
    """The folder of the tokenizer; empty: `model_path`. Read when a group has a grammar."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:K`."""
    dtype: str = "auto"
    """`auto` (the model's own), `bfloat16`, `float16` or `float32`."""
    max_model_len: int | None = None
    """None: the model's own length."""
    kv_cache_gb: float = 2.0
    """Memory for KV blocks, in 2^30 bytes."""
    gpu_memory_utilization: float | None = None
    """In place of it: which part of a GPU's memory the engine may fill, the weights included."""
    block_size: int = 16
    max_num_seqs: int = 256
    """Choices that run at once; also the largest group."""
    max_num_batched_tokens: int = 512
    """Tokens of one step: choices being written first, the rest for prompts."""
    kernels: str = "auto"
    """`compiled` (C++, for bfloat16 on processors with AVX-512 or AVX2), `torch`, or `auto`: the first that can."""
    quantization: str = "none"
    """`int8`: weights are rounded to 8 bits, a scale a column, where the compiled kernels run."""
    prefix_cache: bool = True
    cache_answers: bool = False
    """Let answers into the prefix cache too: saves prefill in conversations, at the price of sameness."""
    num_threads: int | None = None
    """Threads of one engine on the CPU; None: all cores, shared evenly by the engines of a cell."""
    enforce_eager: bool = False
    """On a GPU, launch every operator by itself: no CUDA graphs."""
    role: Role = Role.BOTH
    """`both` keeps its KV to itself; `prefill` and `decode` hand it over and fetch it."""
    side_channel_host: str = "127.0.0.1"
    """The address at which other workers reach this one; bound, and written into tickets."""
    side_channel_port: int | None = None
    """None: 20000 for a prefill server, 22000 for a decode server, a free one in a cell. 0: a free one."""
    cluster_key: str = ""
    """Workers talk to each other only if theirs are equal."""
    lease_s: float = 60.0
    """How long a prefilled prompt is kept without a sign of life from who wants it."""
    pull_timeout_s: float = 10.0
    """After this a prompt whose KV has not come is computed instead."""
    heartbeat_timeout_s: float = 10.0
    """An engine process that gives no sign of life for so long is killed."""
    step_timeout_s: float = 300.0
    """So is one that has been in one step for so long."""


class CellConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Prefill and decode apart: how many of each, where, and when it pays."""

    prefill: int = 0
    """Prefill engines of a cell on this machine; 0 with `decode` 0: one engine for both."""
    decode: int = 0
    """Decode engines of a cell on this machine."""
    prefill_urls: tuple[str, ...] = ()
    """Prefill servers that a decode server asks."""
    prefill_api_key: str | None = None
    """Sent to them."""
    bypass_tokens: int = 128
    """With fewer prompt tokens than this to compute, decode computes them itself; 0: never."""
    prefill_timeout_s: float = 120.0
    """After this a decode worker computes the prompt itself."""
    prefill_may_come: bool = False
    """Prefill workers come and go, and there may be none for a while: it is counted what is missed then."""


class RoutingConfig(msgspec.Struct, frozen=True, kw_only=True):
    """How groups are given to workers, and what becomes of them when a worker is lost."""

    routing_policy: str = "kv"
    """What decides who gets a group: `kv`, `least-loaded`, `round-robin` or `session`."""
    session_expiry_s: float = 600.0
    """How long it is remembered where a session was."""
    spread_choices: int = 0
    """A larger group may be split over several decode workers; 0: never."""
    migration_limit: int = 3
    """How often a group may go on elsewhere when its worker is lost; 0: it ends with its worker."""
    migration_wait_s: float = 15.0
    """How long a group waits for a worker when all are lost."""
    queue_timeout_s: float = 60.0
    """How long a group waits for room on a worker before it is refused."""
    engine_restarts: int = 5
    """How often in a row an engine that dies is started again; then the server does without it. 0: never."""


class GatewayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The servers that a gateway stands before."""

    workers: tuple[str, ...] = ()
    """`URL` each, with a role, a kind or both behind it: `URL,prefill,vllm`."""
    role_of: tuple[str, ...] = ()
    """`URL=role`, for workers that do not say it themselves."""
    workers_file: str | None = None
    """A file with one of them a line; what is added or removed there joins or leaves."""
    worker_api_key: str | None = None
    """Sent to them."""
    key_of: tuple[str, ...] = ()
    """`URL=key`: sent to that worker instead."""
    worker_ca_file: str | None = None
    """Certificates that sign those of workers at `https` URLs, in place of the system's."""
    tokenizer_of: tuple[str, ...] = ()
    """`MODEL=folder or hub name`, for workers that do not hand theirs out."""
    leader_timeout_s: float = 30.0
    """How long a prompt's KV may take to show up on a vLLM decode server before the group does without."""
    upstream_timeout_s: float = 300.0
    """A text upstream that sends nothing for so long is given up."""
    worker_timeout_s: float = 5.0
    """One that does not answer for so long gets no groups until it does, and those it has go on elsewhere."""
    start_timeout_s: float = 300.0
    """How long the gateway waits for the first worker that answers requests."""


class RayConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where the replicas of a cell on Ray Serve run, and how many there are."""

    ingress: Ingress = Ingress.GATEWAY
    """Who holds the streams of clients: replicas of their own, or those that decode."""
    gateways: int = 1
    """Gateway replicas."""
    autoscale: bool = False
    """As many prefill and decode replicas as the load wants; `prefill` and `decode` are the most."""
    min_prefill: int = 0
    min_decode: int = 1
    choices_per_decode: int = 64
    """Open choices that a decode replica is to have; with more, another one is started."""
    prompts_per_prefill: int = 4
    """Prompts under way that a prefill replica is to have."""
    scale_up_delay_s: float = 5.0
    """How long more replicas must be wanted: a group of many choices may be over before a new one has started."""
    scale_down_delay_s: float = 60.0
    """How long there must have been less to do before a replica is ended; five times as long before the last one is."""
    cpus_per_worker: float = 1.0
    """CPUs that Ray keeps for each prefill and decode replica; also the threads of its engine, unless those are set."""
    gpus_per_worker: float = 0.0
    resources_of: tuple[str, ...] = ()
    """`ROLE=NAME:AMOUNT`: a custom resource of Ray that replicas of a role (or `gateway`) want."""
    prefill_port: int = 20000
    """Side-channel port of the prefill replica of rank 0."""
    decode_port: int = 22000
    """The same for decode."""
    ray_address: str | None = None
    """Of the cluster, as `ray.init` takes it: `auto`, `local` or `host:port`. None: the one there is, or a new one."""
    app_name: str = "motet"
    """Of the Serve application."""
    prefix_router: bool = False
    """With `direct` ingress behind HAProxy: choose the replica by cached prefix too, through a hook internal to Ray."""


class KVEventsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where others are told which prompt blocks the prefix cache of each engine has."""

    kv_events_port: int | None = None
    """Of the first engine; each has this port and the one after it, for replays. 0: free ones. None: nobody is told."""
    kv_events_host: str = "127.0.0.1"
    """The address at which they listen, and are found."""
    kv_events_topic: str = "kv-events"


class ServerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """All the HTTP side needs to know."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str
    api_keys: tuple[str, ...] = ()
    """With none, every route is open but those that change which workers there are."""
    admin_key: str = ""
    """What `/drain` and `/workers` take in place of an API key; without one, workers are not joined or removed."""
    cors_origins: tuple[str, ...] = ()
    max_n: int = 128
    max_choices: int = 1024
    """Prompts x n of one request."""
    max_waiting_groups: int = 256
    """Groups without a first token yet; one more is answered 503."""
    key_max_requests: int = 0
    """Requests that one API key, or all who bring none, may have under way; one more is answered 429. 0: any number."""
    key_max_choices: int = 0
    """The same for choices."""
    max_body_bytes: int = 32 * 2**20
    drain_timeout_s: float = 30.0
    """How long a stopping server waits for the answers under way."""
    log_level: str = "info"
    """`debug`, `info`, `warning` or `error`."""
    log_format: str = "text"
    """`text` for people, `json` for machines."""
