"""`motet serve`: resolves the settings, finds the model, and runs a server until a signal ends it."""

import asyncio
import logging
import sys
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console
from rich.table import Table

from motet.cli.options import CELL, ENGINE, HTTP, LIMITS, MODEL, PROCESS, ROUTING, given, option
from motet.config import cache_folder, environment
from motet.deploy.cell import Cell
from motet.deploy.heap import freeze_heap
from motet.deploy.plan import ServerPlan
from motet.deploy.ready import ready_line
from motet.deploy.server import Outcome, run_server
from motet.deploy.stop import StopSignals
from motet.engines.native.client import NativeEngine
from motet.errors import ConfigError
from motet.log import LogFormat, setup_logging
from motet.models import resolve, resolve_tokenizer
from motet.settings import Settings, resolve_settings


def serve(  # sizes: one parameter a flag
    ctx: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="A folder, a hub name, or smollm2 (the default).", show_default=False, metavar="MODEL"),
    ] = None,
    served_model_name: Annotated[
        str | None, option("served_model_name", MODEL, "The name clients use, in place of MODEL.")
    ] = None,
    revision: Annotated[str | None, option("revision", MODEL, "Branch, tag or commit on the hub.")] = None,
    tokenizer: Annotated[
        str | None, option("tokenizer", MODEL, "Folder or hub name of another tokenizer than the model's.")
    ] = None,
    chat_template: Annotated[
        str | None, option("chat_template", MODEL, "File with another Jinja template than the model's.")
    ] = None,
    device: Annotated[str | None, option("device", ENGINE, "auto, cpu, cuda or cuda:K.")] = None,
    dtype: Annotated[str | None, option("dtype", ENGINE, "auto, bfloat16, float16 or float32.")] = None,
    kernels: Annotated[
        str | None, option("kernels", ENGINE, "What computes on the CPU: auto, compiled or torch.")
    ] = None,
    quantization: Annotated[
        str | None, option("quantization", ENGINE, "Weights of the compiled kernels: none (bfloat16) or int8.")
    ] = None,
    max_model_len: Annotated[
        int | None, option("max_model_len", ENGINE, "Prompt and answer together, in tokens; the model's own if unset.")
    ] = None,
    kv_cache_gb: Annotated[float | None, option("kv_cache_gb", ENGINE, "Memory for KV blocks, in GiB.")] = None,
    gpu_memory_utilization: Annotated[
        float | None,
        option("gpu_memory_utilization", ENGINE, "In place of it, the part of a GPU's memory that may be filled."),
    ] = None,
    block_size: Annotated[int | None, option("block_size", ENGINE, "Tokens of a KV block.")] = None,
    max_num_seqs: Annotated[
        int | None, option("max_num_seqs", ENGINE, "Choices that run at once; also the largest group.")
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, option("max_num_batched_tokens", ENGINE, "Tokens of one step.")
    ] = None,
    prefix_cache: Annotated[
        bool | None,
        typer.Option(
            "--prefix-cache/--no-prefix-cache",
            help="Find KV of earlier prompts again (default on).",
            rich_help_panel=ENGINE,
            show_default=False,
        ),
    ] = None,
    cache_answers: Annotated[
        bool | None, option("cache_answers", ENGINE, "Let answers into the prefix cache too, at the price of sameness.")
    ] = None,
    num_threads: Annotated[
        int | None,
        option("num_threads", ENGINE, "CPU threads of an engine; if unset, all cores, or an even share in a cell."),
    ] = None,
    enforce_eager: Annotated[
        bool | None, option("enforce_eager", ENGINE, "On a GPU, launch every operator by itself: no CUDA graphs.")
    ] = None,
    prefill: Annotated[int | None, option("prefill", CELL, "Prefill engines of a cell on this machine.")] = None,
    decode: Annotated[int | None, option("decode", CELL, "Decode engines of a cell on this machine.")] = None,
    role: Annotated[
        str | None, option("role", CELL, "What a server that is no cell does: both, prefill or decode.")
    ] = None,
    prefill_urls: Annotated[
        list[str] | None,
        option("prefill_urls", CELL, "Prefill server that a decode server asks; several times, or URL,URL."),
    ] = None,
    prefill_api_key: Annotated[str | None, option("prefill_api_key", CELL, "Key that prefill servers want.")] = None,
    bypass_tokens: Annotated[
        int | None, option("bypass_tokens", CELL, "Decode computes prompts with fewer new tokens itself; 0: never.")
    ] = None,
    prefill_timeout_s: Annotated[
        float | None, option("prefill_timeout_s", CELL, "Seconds after which decode computes a prompt itself.")
    ] = None,
    side_channel_host: Annotated[
        str | None, option("side_channel_host", CELL, "Address at which other workers reach this one.")
    ] = None,
    side_channel_port: Annotated[
        int | None,
        option("side_channel_port", CELL, "Its port: 20000 for a prefill server, 22000 for a decode server; 0: free."),
    ] = None,
    cluster_key: Annotated[
        str | None, option("cluster_key", CELL, "Workers with another key are refused; a cell makes one of its own.")
    ] = None,
    lease_s: Annotated[
        float | None, option("lease_s", CELL, "Seconds a prefilled prompt is kept without a sign of life.")
    ] = None,
    pull_timeout_s: Annotated[
        float | None, option("pull_timeout_s", CELL, "Seconds after which a prompt that has not come is computed.")
    ] = None,
    routing_policy: Annotated[
        str | None, option("routing_policy", ROUTING, "Who gets a group: kv, least-loaded, round-robin or session.")
    ] = None,
    session_expiry_s: Annotated[
        float | None, option("session_expiry_s", ROUTING, "Seconds for which the worker of a session is remembered.")
    ] = None,
    spread_choices: Annotated[
        int | None, option("spread_choices", ROUTING, "Larger groups may be split over decode workers; 0: never.")
    ] = None,
    migration_limit: Annotated[
        int | None, option("migration_limit", ROUTING, "How often a group may move when its worker is lost.")
    ] = None,
    migration_wait_s: Annotated[
        float | None, option("migration_wait_s", ROUTING, "Seconds a group waits for a worker when all are lost.")
    ] = None,
    queue_timeout_s: Annotated[
        float | None, option("queue_timeout_s", ROUTING, "Seconds a group waits for room on a worker.")
    ] = None,
    engine_restarts: Annotated[
        int | None, option("engine_restarts", ROUTING, "Times in a row an engine that dies is started again.")
    ] = None,
    kv_events_port: Annotated[
        int | None,
        option("kv_events_port", ROUTING, "Tell others of cached blocks: two ports an engine; 0: free ones."),
    ] = None,
    kv_events_host: Annotated[
        str | None, option("kv_events_host", ROUTING, "Address at which they listen, and are found.")
    ] = None,
    kv_events_topic: Annotated[
        str | None, option("kv_events_topic", ROUTING, "What their messages begin with.")
    ] = None,
    max_n: Annotated[int | None, option("max_n", LIMITS, "Choices of one prompt.")] = None,
    max_choices: Annotated[int | None, option("max_choices", LIMITS, "Prompts x n of one request.")] = None,
    max_waiting_groups: Annotated[
        int | None, option("max_waiting_groups", LIMITS, "Groups without a first token; one more is answered 503.")
    ] = None,
    key_max_requests: Annotated[
        int | None, option("key_max_requests", LIMITS, "Requests under way of one API key; one more is 429. 0: any.")
    ] = None,
    key_max_choices: Annotated[
        int | None, option("key_max_choices", LIMITS, "Choices under way of one API key; 0: any number.")
    ] = None,
    max_body_bytes: Annotated[int | None, option("max_body_bytes", LIMITS, "Size of a request's body.")] = None,
    host: Annotated[str | None, option("host", HTTP, "Address to listen on.")] = None,
    port: Annotated[int | None, option("port", HTTP, "Port to listen on; 0 takes a free one.")] = None,
    api_keys: Annotated[
        list[str] | None, option("api_keys", HTTP, "Key that clients must send; may be given several times.")
    ] = None,
    admin_key: Annotated[
        str | None, option("admin_key", HTTP, "Key for /drain and /workers, in place of API keys.")
    ] = None,
    cors_origins: Annotated[
        list[str] | None, option("cors_origins", HTTP, "Origin whose pages may call; may be given several times.")
    ] = None,
    heartbeat_timeout_s: Annotated[
        float | None,
        option("heartbeat_timeout_s", PROCESS, "Seconds without a sign of life after which an engine is killed."),
    ] = None,
    step_timeout_s: Annotated[
        float | None, option("step_timeout_s", PROCESS, "Seconds in one step after which an engine is killed.")
    ] = None,
    drain_timeout_s: Annotated[
        float | None, option("drain_timeout_s", PROCESS, "Seconds that answers under way have when the server stops.")
    ] = None,
    log_level: Annotated[str | None, option("log_level", PROCESS, "debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, option("log_format", PROCESS, "text or json.")] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="TOML file with settings (max_num_seqs = 64).", rich_help_panel=PROCESS, show_default=False),
    ] = None,
    stop_with_stdin: Annotated[
        bool, typer.Option(hidden=True, help="End when standard input ends: for programs that start a server.")
    ] = False,
) -> None:
    """Serve MODEL over the OpenAI API.

    Every flag may also be given as MOTET_<NAME> in the environment, or in a TOML file.
    """
    settings = resolve_settings(given(ctx), environ=environment(), file=config)
    plan = make_plan(settings)
    print_settings(settings)
    setup_logging(
        format=LogFormat(plan.server.log_format), level=logging.getLevelNamesMapping()[plan.server.log_level.upper()]
    )
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        raise typer.Exit(runner.run(run(plan, stop_with_stdin=stop_with_stdin)))


def make_plan(settings: Settings) -> ServerPlan:
    """Finds, or fetches, what the settings name."""
    model, environ = settings.model, environment()
    server = settings.server(served_model_name=model.served_model_name or model.model)
    cache = cache_folder(environ)
    template = read_template(model.chat_template)
    source = resolve(model.model, cache=cache, revision=model.revision, say=say)
    tokenizer = resolve_tokenizer(model.tokenizer or str(source.path), cache=cache, say=say)
    engine = settings.engine(model_path=source.path, model_name=server.served_model_name)
    return ServerPlan(engine, server, tokenizer, template, settings.cell, settings.routing, settings.kv_events)


def read_template(file: str | None) -> str | None:
    if file is None:
        return None
    try:
        return Path(file).expanduser().read_text(encoding="utf-8")
    except FileNotFoundError as exc:
        raise ConfigError(f"--chat-template {file}: there is no such file") from exc
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"--chat-template {file}: cannot be read: {exc}") from exc


async def run(plan: ServerPlan, *, stop_with_stdin: bool) -> Outcome:
    def on_ready(url: str, cell: Cell) -> None:
        freeze_heap()
        typer.echo(ready_line(url, [worker for worker in cell.workers if worker.local]))

    with StopSignals() as signals:
        if stop_with_stdin:
            signals.watch_stdin(sys.stdin)
        return await run_server(plan, start_engine=NativeEngine.start, on_ready=on_ready, signals=signals)


def say(line: str) -> None:
    typer.echo(line, err=True)


def print_settings(settings: Settings) -> None:
    """The table of all settings, on standard error, so that standard output has the ready line alone."""
    table = Table("setting", "value", "from", title="motet serve", title_justify="left", box=None, pad_edge=False)
    for row in settings.rows.values():
        table.add_row(row.name, row.shown, row.source, style="dim" if row.is_default else "bold")
    Console(stderr=True).print(table, markup=False)
