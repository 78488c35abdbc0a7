"""`motet doctor`: what a server needs, what is there, what that means, and what to do about it.

Each check is a function of a `Subject` and returns a `Finding`. Checks run at the same time, each with a time limit,
and a check that fails or hangs becomes a warning. What needs torch, NIXL or the model's config is found by a process
of its own (`engines.native.probe`), which ends with this command."""

import errno
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from functools import partial
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

import httpx
import msgspec
import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from motet import __version__
from motet.deploy.connection import allow_open_files
from motet.deploy.listen import address_at, listen
from motet.engines.native.compiled_kernels import missing_kernels, running_kind
from motet.engines.native.kv.cache_size import ENGINE_BYTES
from motet.errors import ConfigError, ModelLoadError, StartupError
from motet.log import escaped
from motet.models.folder import check_model as check_model_folder
from motet.models.folder import check_tokenizer
from motet.models.model_source import check_download_name, local_folder
from motet.models.smollm2 import DEFAULT_MODEL
from motet.settings.record import Settings
from motet.settings.resolve import resolve_settings
from motet.settings.server_config import cache_folder, environment
from motet.system.machine import GIB, cores, listener_on, processor, read_memory, torch_environ
from motet.system.threads import in_daemon_thread
from motet.transfer.ticket import is_loopback

CHECK_S = 10.0
"""Time limit of a check that does not wait for the probe."""
PROBE_S = 90.0
"""Time limit of the probe: importing torch takes 2 s on an idle machine, and 20 s on a busy one."""
HUB_S = 3.0
HUB = "https://huggingface.co"
LOW_DISK = 2 * GIB
INSTRUCTION_SETS = (
    ({"avx512f", "avx512_bf16"}, "AVX-512 with bf16", "the fastest compiled kernels support it"),
    ({"avx2", "fma"}, "AVX2", "compiled kernels support it; they are faster with AVX-512 and bf16"),
)
RAY_CLUSTER = Path("/tmp/ray/ray_current_cluster")
"""File in which Ray stores the address of the cluster that runs on this machine."""
MAX_ADDRESS_CHARS = 300


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    """A server cannot run."""


SIGNS = {Verdict.OK: ("ok", "green"), Verdict.WARNING: ("warning", "yellow"), Verdict.PROBLEM: ("problem", "bold red")}


@dataclass(frozen=True)
class Finding:
    """The result of a check."""

    check: str
    verdict: Verdict
    found: str
    meaning: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Subject:
    """What is checked: a server with these settings, in this environment."""

    settings: Settings
    environ: Mapping[str, str]
    probe: Callable[[], Mapping[str, Mapping[str, Any]]]
    """Returns the parts that the probe has reported, when it has ended."""

    @property
    def model(self) -> str:
        return self.settings.model.model

    @property
    def cache(self) -> Path:
        return cache_folder(self.environ)

    @property
    def hub(self) -> str:
        return self.environ.get("HF_ENDPOINT") or HUB

    @property
    def num_engines(self) -> int:
        return max(1, self.settings.cell.prefill + self.settings.cell.decode)


Check = Callable[[Subject], Finding]


def check_python(subject: Subject) -> Finding:
    found = f"Python {platform.python_version()}, {platform.system()} on {platform.machine()}, Motet {__version__}"
    return Finding("Python", Verdict.OK, found)


def check_processor(subject: Subject) -> Finding:
    cpu = processor()
    found = f"{cpu.name}, {cores()} cores for this process"
    for needed, name, meaning in INSTRUCTION_SETS:
        if needed <= cpu.instruction_sets:
            return Finding("processor", Verdict.OK, f"{found}, {name}", meaning)
    meaning = "it has no instruction set for which there are compiled kernels"
    if not cpu.instruction_sets:
        meaning = "this system does not report its instruction sets"
    return Finding("processor", Verdict.WARNING, found, meaning)


def check_kernels(subject: Subject) -> Finding:
    try:
        kind, note = running_kind(), missing_kernels()
    except StartupError as error:
        found, _, remedy = error.message.rpartition(": ")
        return Finding("kernels", Verdict.PROBLEM, found, "an engine cannot start", remedy)
    if kind is not None:
        return Finding("kernels", Verdict.OK, f"compiled, {kind}", "an engine runs them for bfloat16 and float32")
    reason, _, remedy = (note or "").rpartition(": ")
    return Finding("kernels", Verdict.WARNING, "missing", reason or str(note), remedy.rstrip(".") if reason else "")


def check_memory(subject: Subject) -> Finding:
    memory, model = read_memory(), subject.probe().get("model", {})
    found = f"{memory.available_bytes / GIB:.1f} of {memory.total_bytes / GIB:.1f} GiB are available"
    if "kv_cache_bytes" not in model:
        return Finding("memory", Verdict.OK, found)
    each = f" for each of {subject.num_engines} engines" if subject.num_engines > 1 else ""
    weights = model["weights_bytes"]
    meaning = (
        f"weights of {weights / GIB:.2f} GiB and up to {model['kv_cache_bytes'] / GIB:.2f} GiB of KV cache{each} "
        f"({model['kv_cache_reason']}): {model['kv_cache_tokens']:,} tokens"
    )
    if model["device"] != "cpu":
        return Finding("memory", Verdict.OK, found, meaning)
    remedy, weights_gb = "end other programs, or serve a smaller model", f"{weights / GIB:.1f} GiB{each}"
    if subject.num_engines * (weights + ENGINE_BYTES) > memory.available_bytes:
        return Finding("memory", Verdict.PROBLEM, found, f"it cannot hold the weights, {weights_gb}", remedy)
    if subject.num_engines * (weights + ENGINE_BYTES + model["kv_cache_bytes"]) > memory.available_bytes:
        remedy = "end other programs, or lower --kv-cache-gb"
        return Finding("memory", Verdict.WARNING, found, f"{meaning}: more than is available", remedy)
    return Finding("memory", Verdict.OK, found, meaning)


def check_disk(subject: Subject) -> Finding:
    folder = next(path for path in (subject.cache, *subject.cache.parents) if path.exists())
    free = shutil.disk_usage(folder).free
    found = f"{free / GIB:.1f} GiB free for {subject.cache}"
    if not os.access(folder, os.W_OK):
        return Finding(
            "disk", Verdict.WARNING, f"{folder} is not writable", "no model can be stored", "set MOTET_CACHE_DIR"
        )
    if free < LOW_DISK:
        return Finding("disk", Verdict.WARNING, found, "a model may not fit", "free space, or set MOTET_CACHE_DIR")
    return Finding("disk", Verdict.OK, found)


def check_port(subject: Subject) -> Finding:
    config = subject.settings.server()
    try:
        listen(config.host, config.port).close()
    except ConfigError as error:
        code = error.__cause__.errno if isinstance(error.__cause__, OSError) else None
        listener = listener_on(config.port) if code == errno.EADDRINUSE else None
        found = f"--port {config.port}: {listener} listens there" if listener else error.message
        remedy = "give another --port" if code in (errno.EADDRINUSE, errno.EACCES) else "give another --host"
        remedy = f"end that program, or {remedy}" if listener else remedy
        return Finding("port", Verdict.PROBLEM, found, "a server cannot start there", remedy)
    found = f"{address_at(config.host, config.port)} is free"
    if config.api_keys or is_loopback(config.host):
        return Finding("port", Verdict.OK, found)
    meaning = "a server for everyone who reaches that address starts only with --api-key or --insecure"
    return Finding("port", Verdict.WARNING, found, meaning, "give --api-key (better in MOTET_API_KEYS)")


def check_model(subject: Subject) -> Finding:
    folder = local_folder(subject.model, cache=subject.cache)
    if folder is None:
        return check_download(subject)
    try:
        check_model_folder(folder)
        check_tokenizer(folder)
    except ModelLoadError as error:
        return Finding("model", Verdict.PROBLEM, error.message, "an engine cannot start with it", "download it again")
    facts = subject.probe().get("model", {"error": "its config could not be read in time"})
    if "error" in facts:
        return Finding("model", Verdict.PROBLEM, f"{subject.model} in {folder}", str(facts["error"]))
    meaning = f"{facts['architecture']} is supported; {facts['dtype']}, up to {facts['max_model_len']:,} tokens"
    return Finding("model", Verdict.OK, f"{subject.model} in {folder}", meaning)


def check_download(subject: Subject) -> Finding:
    """Checks a model that is not on this machine."""
    model = subject.model
    try:
        check_download_name(model)
    except ModelLoadError as error:
        return Finding("model", Verdict.PROBLEM, error.message, "there is nothing to serve", "name another model")
    if Path(model).expanduser().is_file():  # checked above
        return Finding(
            "model", Verdict.OK, f"{model} is a GGUF file", "motet serve makes its config at the first start"
        )
    found = f"{model} is not on this machine"
    if model != DEFAULT_MODEL and (reason := hub_error(subject)):
        remedy = "check the network, or name a local folder"
        return Finding("model", Verdict.PROBLEM, found, f"it cannot be downloaded: {reason}", remedy)
    return Finding(
        "model", Verdict.OK, found, "motet serve downloads it at its first start", f"motet models pull {model}"
    )


def check_torch(subject: Subject) -> Finding:
    facts = subject.probe().get("torch", {"error": "torch could not be imported in time"})
    if error := facts.get("error"):
        return Finding("torch", Verdict.PROBLEM, str(error), "an engine cannot start", "install Motet again")
    build = f"for CUDA {facts['cuda']}" if facts["cuda"] else "for CPUs"
    found = f"torch {facts['version']}, built {build}"
    if facts["gpus"]:
        return Finding("torch", Verdict.OK, f"{found}; {', '.join(facts['gpus'])}", "--device auto uses the first GPU")
    if facts["nvidia"]:
        remedy = "check the driver with nvidia-smi" if facts["cuda"] else "install a CUDA build of torch"
        return Finding(
            "torch", Verdict.WARNING, found, "this machine has an NVIDIA driver, but torch sees no GPU", remedy
        )
    return Finding("torch", Verdict.OK, found, "engines run on the CPU")


def check_transport(subject: Subject) -> Finding:
    facts = subject.probe().get("transport", {"error": "no transport started in time"})
    if error := facts.get("error"):
        meaning = "prefill and decode engines cannot exchange KV; a server with one engine needs none"
        return Finding("KV transfer", Verdict.WARNING, str(error), meaning)
    if facts["kind"] == "nixl":
        return Finding("KV transfer", Verdict.OK, "NIXL is installed and starts", "a cell can have several machines")
    meaning = "a cell can have this machine only; NIXL is missing or cannot start"
    remedy = "for cells on several machines: pip install nixl-cu13 (Linux only)"
    return Finding("KV transfer", Verdict.OK, "shared memory", meaning, remedy)


def check_ray(subject: Subject, cluster_file: Path = RAY_CLUSTER) -> Finding:
    try:
        found = f"Ray {metadata.version('ray')}"
    except metadata.PackageNotFoundError:
        return Finding("Ray", Verdict.OK, "not installed", "only motet ray needs it", "pip install '.[ray]'")
    address = subject.environ.get("RAY_ADDRESS", "")
    if not address and cluster_file.is_file():
        with cluster_file.open() as file:  # any user can have made it, with any size
            address = file.read(MAX_ADDRESS_CHARS)
    if address and answers(address.strip()):
        return Finding("Ray", Verdict.OK, f"{found}; a cluster runs at {address.strip()}", "motet ray joins it")
    return Finding("Ray", Verdict.OK, f"{found}; no cluster was found", "motet ray starts one on this machine")


def answers(address: str) -> bool:
    """Returns True if a program accepts connections at `HOST:PORT`."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1).close()
    except (OSError, ValueError):
        return False
    return True


def check_open_files(subject: Subject) -> Finding:
    limit, connections = allow_open_files(), subject.settings.server().max_connections
    if limit is None or limit // 2 >= connections:
        return Finding("open files", Verdict.OK, "no limit" if limit is None else f"up to {limit:,}")
    meaning = f"a server accepts {limit // 2:,} connections at once, instead of {connections:,}"
    return Finding("open files", Verdict.WARNING, f"up to {limit:,}", meaning, "raise the limit: ulimit -n")


def check_hub(subject: Subject) -> Finding:
    token = "HF_TOKEN is set" if subject.environ.get("HF_TOKEN") else "HF_TOKEN is not set"
    if error := hub_error(subject):
        meaning = "models of the hub cannot be downloaded; models on this machine can be served"
        return Finding("hub", Verdict.WARNING, f"{error}; {token}", meaning, "check the network")
    return Finding("hub", Verdict.OK, f"{subject.hub} answers; {token}", "gated and private models need a token")


def hub_error(subject: Subject) -> str | None:
    """Returns the reason why the hub cannot be reached; None if it answers."""
    try:
        httpx.head(subject.hub, timeout=HUB_S)
    except httpx.HTTPError as error:
        return f"{subject.hub} does not answer ({error})"
    return None


CHECKS: Sequence[Check] = (
    check_python, check_processor, check_kernels, check_memory, check_disk, check_port, check_model,
    check_torch, check_transport, check_ray, check_open_files, check_hub,
)  # fmt: skip
USE_PROBE = frozenset({check_memory, check_model, check_torch, check_transport})


def run_checks(subject: Subject, checks: Iterable[Check] = CHECKS, *, limit_s: float = CHECK_S) -> list[Finding]:
    """Runs the checks at the same time, and returns their findings in order."""
    waiting = [(check, in_daemon_thread(partial(check, subject), name=name_of(check))) for check in checks]
    return [
        _result(name_of(check), finding, limit_s=limit_s + (PROBE_S if check in USE_PROBE else 0))
        for check, finding in waiting
    ]


def name_of(check: Check) -> str:
    return check.__name__.removeprefix("check_").replace("_", " ")


def _result(name: str, finding: Future[Finding], *, limit_s: float) -> Finding:
    try:
        return finding.result(limit_s)
    except TimeoutError:
        return Finding(name, Verdict.WARNING, f"this check took longer than {limit_s:g} s")
    except Exception as error:
        return Finding(name, Verdict.WARNING, f"this check failed: {error!r}")


def run_probe(settings: Settings, environ: Mapping[str, str]) -> Mapping[str, Mapping[str, Any]]:
    """Runs the probe, and returns the parts that it reported before it ended or was killed."""
    folder = local_folder(settings.model.model, cache=cache_folder(environ))
    engine = settings.engine(model_path=folder or Path(), model_name=settings.model.model)
    num_engines = max(1, settings.cell.prefill + settings.cell.decode)
    engine = replace(engine, num_engines=num_engines, model_path=str(folder or ""))
    command = [sys.executable, "-m", "motet.engines.native.probe"]
    with TemporaryDirectory(prefix="motet-") as torch_folder:
        try:
            output = subprocess.run(
                command, input=msgspec.json.encode(engine), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                timeout=PROBE_S, check=False, env=torch_environ(environ, torch_folder),
            ).stdout  # fmt: skip
        except subprocess.TimeoutExpired as expired:
            output = expired.stdout or b""
    parts: dict[str, Mapping[str, Any]] = {}
    for line in output.splitlines():
        parts |= json.loads(line)
    return parts


def shown(findings: Sequence[Finding]) -> Table:
    table = Table("", "what", "what is there", "what it means", "what to do", box=None, pad_edge=False)
    for finding in findings:
        sign, style = SIGNS[finding.verdict]
        texts = (finding.check, finding.found, finding.meaning, finding.remedy)
        table.add_row(Text(sign, style), *(Text(escaped(text, keep="\n")) for text in texts))
    return table


def doctor(
    model: Annotated[
        str | None,
        typer.Argument(help="Folder or name of a model. Without it, MOTET_MODEL or smollm2.", show_default=False),
    ] = None,
    *,
    host: Annotated[
        str | None,
        typer.Option(help="Address of the server. Without it, MOTET_HOST or 127.0.0.1.", show_default=False),
    ] = None,
    port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Port of the server. Without it, MOTET_PORT or 8000.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Check what a server needs on this machine, and say what to do. The exit code is 0 if a server can run, else 1."""
    environ, findings = environment(), []
    # A server at any address is checked here, since the API key is not given to this command.
    flags = {"model": model, "host": host, "port": port, "insecure": None if host is None else True}
    try:
        settings = resolve_settings(flags, environ=environ)
    except ConfigError as error:
        findings.append(Finding("settings", Verdict.PROBLEM, error.message, "motet serve does not start", "correct it"))
        settings = resolve_settings(flags, environ={})
    console = Console() if sys.stdout.isatty() else Console(width=160)
    probe = in_daemon_thread(partial(run_probe, settings, environ), name="probe")
    with Console(stderr=True).status("checking this machine"):
        findings += run_checks(Subject(settings, environ, probe.result))
    can_run = not any(finding.verdict is Verdict.PROBLEM for finding in findings)
    if as_json:
        typer.echo(json.dumps({"can_run": can_run, "findings": [asdict(finding) for finding in findings]}, indent=2))
    else:
        console.print(shown(findings))
        console.print("A server can run." if can_run else "A server cannot run until the problems are solved.")
    raise typer.Exit(0 if can_run else 1)
