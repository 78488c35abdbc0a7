"""The flags of the commands: what each setting says in `--help`, said once, and what was typed as settings again."""

import inspect
from collections.abc import Callable, Collection, Mapping
from types import UnionType
from typing import Annotated, Any, Final, TypeVar, get_args, get_origin

import typer
from msgspec.structs import FieldInfo
from typer.models import OptionInfo

from motet.settings.record import flag_of, setting_fields
from motet.types import Ingress, Role

MODEL, ENGINE, LIMITS, HTTP, PROCESS = "Model", "Engine", "Limits", "HTTP", "Process"
CELL = "Prefill and decode"
ON_RAY = "Ray"
ROUTING = "Workers"
WORKERS = "Servers"

OPTIONS: Final[Mapping[str, Mapping[str, str]]] = {
    WORKERS: {
        "workers": "A worker: URL, or URL,role,kind with one or both; may be given several times.",
        "role_of": "Its role, as URL=prefill or URL=decode, if it does not say it itself.",
        "workers_file": "A file with one worker a line; lines added or removed later join or leave.",
        "worker_api_key": "Key that the workers want.",
        "key_of": "Key that one of them wants, as URL=KEY.",
        "worker_ca_file": "File with the certificates that sign those of workers at https URLs.",
        "tokenizer_of": "Tokenizer of a model whose workers hand out none: MODEL=FOLDER or a hub name.",
        "leader_timeout_s": "Seconds a prompt's KV may take to reach a vLLM decode server.",
        "upstream_timeout_s": "Seconds without a byte after which a text upstream is given up.",
        "worker_timeout_s": "Seconds without an answer after which a worker's groups go on elsewhere.",
        "start_timeout_s": "Seconds to wait for the first worker that answers requests.",
    },
    MODEL: {
        "served_model_name": "The name clients use, in place of MODEL.",
        "revision": "Branch, tag or commit on the hub.",
        "tokenizer": "Folder or hub name of another tokenizer than the model's.",
        "chat_template": "File with another Jinja template than the model's.",
        "tool_parser": "How the model writes tool calls: auto (by its template), none or a name.",
        "reasoning_parser": "How it marks what it thinks: auto (by its template), none or a name.",
    },
    ENGINE: {
        "device": "auto, cpu, cuda or cuda:K.",
        "dtype": "auto, bfloat16, float16 or float32.",
        "kernels": "What computes on the CPU: auto, compiled or torch.",
        "quantization": "Weights of the compiled kernels: none (bfloat16) or int8.",
        "max_model_len": "Prompt and answer together, in tokens; the model's own if unset.",
        "kv_cache_gb": "Memory for KV blocks, in GiB.",
        "gpu_memory_utilization": "In place of it, the part of a GPU's memory that may be filled.",
        "block_size": "Tokens of a KV block.",
        "max_num_seqs": "Choices that run at once; also the largest group.",
        "max_num_batched_tokens": "Tokens of one step.",
        "prefix_cache": "Find KV of earlier prompts again (default on).",
        "cache_answers": "Let answers into the prefix cache too, at the price of sameness.",
        "num_threads": "CPU threads of an engine; if unset, all cores, or an even share in a cell.",
        "enforce_eager": "On a GPU, launch every operator by itself: no CUDA graphs.",
    },
    CELL: {
        "prefill": "Prefill engines of a cell on this machine.",
        "decode": "Decode engines of a cell on this machine.",
        "role": "What a server that is no cell does: both, prefill or decode.",
        "prefill_urls": "Prefill server that a decode server asks; several times, or URL,URL.",
        "prefill_api_key": "Key that prefill servers want.",
        "bypass_tokens": "Decode computes prompts with fewer new tokens itself; 0: never.",
        "prefill_timeout_s": "Seconds after which decode computes a prompt itself.",
        "side_channel_host": "Address at which other workers reach this one.",
        "side_channel_port": "Its port: 20000 for a prefill server, 22000 for a decode server; 0: free.",
        "cluster_key": "Workers with another key are refused; a cell makes one of its own.",
        "lease_s": "Seconds a prefilled prompt is kept without a sign of life.",
        "pull_timeout_s": "Seconds after which a prompt that has not come is computed.",
    },
    ROUTING: {
        "routing_policy": "Who gets a group: kv, least-loaded, round-robin or session.",
        "session_expiry_s": "Seconds for which the worker of a session is remembered.",
        "spread_choices": "Larger groups may be split over decode workers; 0: never.",
        "migration_limit": "How often a group may move when its worker is lost.",
        "migration_wait_s": "Seconds a group waits for a worker when all are lost.",
        "queue_timeout_s": "Seconds a group waits for room on a worker.",
        "engine_restarts": "Times in a row an engine that dies is started again.",
        "kv_events_port": "Tell others of cached blocks: two ports an engine; 0: free ones.",
        "kv_events_host": "Address at which they listen, and are found.",
        "kv_events_topic": "What their messages begin with.",
    },
    ON_RAY: {
        "ingress": "Who holds clients' streams: gateway (outlive workers) or direct (no hop).",
        "gateways": "Gateway replicas.",
        "autoscale": "As many prefill and decode replicas as the load wants.",
        "min_prefill": "The fewest prefill replicas, with --autoscale.",
        "min_decode": "The fewest decode replicas, with --autoscale.",
        "choices_per_decode": "Open choices a decode replica should have, with --autoscale.",
        "prompts_per_prefill": "Prompts under way a prefill replica should have, with --autoscale.",
        "scale_up_delay_s": "Seconds of more load before another replica is started.",
        "scale_down_delay_s": "Seconds of less load before a replica ends; the last one: 5 times that.",
        "cpus_per_worker": "CPUs kept for a prefill or decode replica, and its engine's threads.",
        "gpus_per_worker": "GPUs kept for a prefill or decode replica.",
        "resources_of": "Custom resource that replicas of a role (or gateway) want: ROLE=NAME:AMOUNT.",
        "prefill_port": "Side-channel port of the first prefill replica; 0: free ones.",
        "decode_port": "Side-channel port of the first decode replica; 0: free ones.",
        "ray_address": "Cluster to join: auto, host:port or local (a new one); if unset, one there is.",
        "app_name": "Name of the Serve application.",
        "prefix_router": "With direct ingress and HAProxy: choose by cached prefix too.",
    },
    LIMITS: {
        "max_n": "Choices of one prompt.",
        "max_choices": "Prompts x n of one request.",
        "max_waiting_groups": "Groups without a first token; one more is answered 503.",
        "key_max_requests": "Requests under way of one API key; one more is 429. 0: any.",
        "key_max_choices": "Choices under way of one API key; 0: any number.",
        "max_body_bytes": "Size of a request's body.",
    },
    HTTP: {
        "host": "Address to listen on.",
        "port": "Port to listen on; 0 takes a free one.",
        "api_keys": "Key that clients must send; may be given several times.",
        "admin_key": "Key for /drain and /workers, in place of API keys.",
        "cors_origins": "Origin whose pages may call; may be given several times.",
    },
    PROCESS: {
        "heartbeat_timeout_s": "Seconds without a sign of life after which an engine is killed.",
        "step_timeout_s": "Seconds in one step after which an engine is killed.",
        "drain_timeout_s": "Seconds that answers under way have when the server stops.",
        "log_level": "debug, info, warning or error.",
        "log_format": "text or json.",
    },
}
"""Panel -> setting -> help, in the order in which `--help` shows them."""

Command = TypeVar("Command", bound=Callable[..., None])


def takes(names: Collection[str], **other_helps: str) -> Callable[[Command], Command]:
    """Gives a command the flags of these settings; `other_helps`: where words of its own are better, default and all.
    What was typed is read by `given`; typer passes it too, to a parameter such as `**_flags`."""

    def give(command: Command) -> Command:
        own = list(inspect.signature(command).parameters.values())
        first = [one for one in own if one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        last = [one for one in own if one.kind is inspect.Parameter.KEYWORD_ONLY]
        flags = [
            _parameter(name, option(name, panel, help, own=other_helps.get(name)))
            for panel, options in OPTIONS.items()
            for name, help in options.items()
            if name in names
        ]
        command.__signature__ = inspect.Signature([*first, *flags, *last])  # type: ignore[attr-defined]
        return command

    return give


def option(name: str, panel: str, help: str, *, own: str | None = None) -> OptionInfo:
    """The flag of a setting. Without a default of its own: only what was typed overrides file and environment. `own`:
    in place of `help` and the default."""
    default = setting_fields()[name].default
    shown = "" if default is None or default in ((), "") or isinstance(default, bool) else f" (default {default})"
    flag = f"--{name.replace('_', '-')}/{flag_of(name)}" if default is True else flag_of(name)
    info: OptionInfo = typer.Option(flag, help=own or help + shown, rich_help_panel=panel, show_default=False)
    return info


def given(ctx: typer.Context) -> dict[str, object]:
    """The settings among the flags that were typed; a list flag that was not is empty."""
    flags: dict[str, object] = {name: ctx.params.get(name) for name in setting_fields()}
    return {name: value for name, value in flags.items() if value not in (None, [], ())}


def _parameter(name: str, info: OptionInfo) -> inspect.Parameter:
    kind = _kind(setting_fields()[name])
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, info],
    )


def _kind(field: FieldInfo) -> Any:
    """What the command line makes of a setting's type."""
    kind = field.type
    if isinstance(kind, UnionType):
        kind = next(part for part in get_args(kind) if part is not type(None))
    if get_origin(kind) is tuple:
        return list[str]
    return str if kind in (Role, Ingress) else kind
