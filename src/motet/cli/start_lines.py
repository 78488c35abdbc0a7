"""What a server reports while it starts, in lines of the log on standard error.

    settings    the settings that differ from their defaults, with their sources; all with `--log-level debug`
    loading     a spinner with the time on a terminal, else one line
    ready       model, kernels, memory, and the addresses of the API and the page

Then the ready line follows on standard output. It is printed at every log level, since programs wait for it."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from motet.deploy.shutdown import roles_in
from motet.engine import Worker, WorkerReport, WorkerState
from motet.engine_info import EngineInfo
from motet.log import NOTICES, LogFormat, json_line, notice
from motet.sampling_defaults import Defaults
from motet.settings.record import Settings
from motet.settings.server_config import ServerConfig
from motet.system.machine import GIB

LABEL_WIDTH = 10
KERNELS = {
    "avx512": "compiled, for AVX-512 with bf16",
    "avx2": "compiled, for AVX2",
    "torch": "torch's operators, as --kernels or the device requires",
    "cuda": "Triton and CUDA graphs",
}
"""Meaning of `EngineInfo.kernels`."""

StartLine = tuple[str, str, Mapping[str, object]]
"""Label, text, and the fields that the line has in JSON."""


class Start:
    """The start of a server, as a context manager: reports the settings and the current `activity` at its beginning,
    and with `ready` the facts about the server. On a terminal a spinner shows the activity until then."""

    def __init__(self, activity: str, settings: Settings, *, command: str) -> None:
        self._config = settings.server()
        self._activity = activity
        self._settings = settings
        self._command = command
        console = Console(stderr=True)
        is_text = self._config.log_format is LogFormat.TEXT and NOTICES.isEnabledFor(logging.INFO)
        self._spinner = Progress(
            *(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()),
            console=console,
            transient=True,
            disable=not (is_text and console.is_terminal),
        )

    def __enter__(self) -> "Start":
        log_settings(self._settings, self._command)
        if self._spinner.disable:
            notice(self._activity)
        self._spinner.add_task(escape(self._activity))
        self._spinner.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._spinner.stop()

    def ready(self, lines: Iterable[StartLine], ready_line: str, *, url: str) -> None:
        """Ends the spinner, logs the facts about the server, and prints its ready line on standard output: as a JSON
        object with `--log-format json`. Missing kernels are a warning, the other lines are for information."""
        self._spinner.stop()
        is_json = self._config.log_format is LogFormat.JSON
        for label, text, fields in lines:
            level = logging.WARNING if fields.get("kernels_note") else logging.INFO
            notice(f"{label}: {text}" if is_json else f"{label:<{LABEL_WIDTH}}{text}", level=level, **fields)
        typer.echo(json_line(NOTICES.name, ready_line, url=url) if is_json else ready_line)


def log_settings(settings: Settings, command: str) -> None:
    """Reports the settings that differ from their defaults, or all settings at the level `debug`."""
    config = settings.server()
    shown = [row for row in settings.rows.values() if config.log_level == "debug" or not row.is_default]
    if config.log_format is LogFormat.JSON:
        notice(f"settings of {command}", settings={row.name: {"value": row.shown, "from": row.source} for row in shown})
        return
    cells = [(row.name, row.shown, row.source) for row in shown]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        notice("  ".join(f"{text:<{width}}" for text, width in zip(row, widths, strict=True)).rstrip())


def cell_lines(workers: Sequence[Worker], *, url: str, config: ServerConfig) -> Iterator[StartLine]:
    """Yields the facts about a server with local engines, at least one. All engines have equal models and settings."""
    info = workers[-1].engine.info
    yield "model", f"{info.model}, {info.dtype} on {info.device}, {roles_in(workers)}", {"model": info.model}
    yield "kernels", info.kernels_note or KERNELS.get(info.kernels, info.kernels), kernel_facts(info)
    if defaults := info.default_sampling_params:
        yield "defaults", defaults_in_words(defaults), {"default_sampling_params": defaults}
    if info.adapters:
        names = [adapter.name for adapter in info.adapters]
        yield "adapters", ", ".join(names), {"adapters": names}
    yield "memory", memory_in_words(info, num_engines=len(workers)), memory_facts(info)
    yield from addresses(url, config)


def kernel_facts(info: EngineInfo) -> dict[str, object]:
    note = {"kernels_note": info.kernels_note} if info.kernels_note else {}
    return {"kernels": info.kernels, "dtype": info.dtype, "device": info.device, **note}


def memory_facts(info: EngineInfo) -> dict[str, object]:
    num_bytes, tokens = info.num_blocks * info.bytes_per_block, info.num_blocks * info.block_size
    return {"kv_cache_bytes": num_bytes, "kv_cache_tokens": tokens, "kv_cache_reason": info.kv_cache_reason}


def memory_in_words(info: EngineInfo, *, num_engines: int) -> str:
    gib, tokens = info.num_blocks * info.bytes_per_block / GIB, info.num_blocks * info.block_size
    each = " for each engine" if num_engines > 1 else ""
    reason = f" ({info.kv_cache_reason})" if info.kv_cache_reason else ""
    return f"up to {gib:.2f} GiB of KV cache{each}{reason}: {tokens:,} tokens, {info.max_model_len:,} per choice"


def defaults_in_words(defaults: Defaults) -> str:
    """Returns default values of sampling fields as a part of a sentence."""
    return ", ".join(f"{name} {value:g}" for name, value in defaults.items()) + " where a request omits the field"


def gateway_lines(
    models: Sequence[str], workers: Sequence[WorkerReport], *, url: str, config: ServerConfig
) -> Iterator[StartLine]:
    yield "models", ", ".join(models), {"models": list(models)}
    ready = [worker.id for worker in workers if worker.state is WorkerState.READY]
    yield "workers", f"{len(ready)} of {len(workers)} ready: {', '.join(ready)}", {"workers": ready}
    yield from addresses(url, config)


def ray_lines(model: str, replicas: Mapping[str, int], *, url: str, config: ServerConfig) -> Iterator[StartLine]:
    yield "model", model, {"model": model}
    yield "replicas", ", ".join(f"{number} {name}" for name, number in replicas.items()), {"replicas": dict(replicas)}
    yield from addresses(url, config)


def addresses(url: str, config: ServerConfig) -> Iterator[StartLine]:
    yield "API", f"{url}/v1", {"api": f"{url}/v1"}
    if config.page:
        yield "page", f"{url}/", {"page": f"{url}/"}
