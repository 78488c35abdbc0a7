"""Each check of `motet doctor` with what it looks for present, missing or broken, and the command as a process."""

import ctypes
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import psutil
import pytest
from typer.testing import CliRunner

from motet.cli import doctor
from motet.cli.doctor import (
    CHECKS,
    Finding,
    Subject,
    Verdict,
    check_disk,
    check_hub,
    check_kernels,
    check_memory,
    check_model,
    check_open_files,
    check_port,
    check_processor,
    check_python,
    check_ray,
    check_torch,
    check_transport,
    run_checks,
)
from motet.cli.main import app
from motet.engines.native import compiled_kernels
from motet.errors import StartupError
from motet.settings.resolve import resolve_settings
from motet.system.machine import GIB, MachineMemory, Processor
from tests.models.gguf_files import write_gguf
from tests.models.model_folders import write_model
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer

Monkey = pytest.MonkeyPatch
TORCH: dict[str, Any] = {"version": "2.13.0+cpu", "cuda": None, "gpus": [], "triton": False, "nvidia": False}
MODEL: dict[str, Any] = {
    "architecture": "LlamaForCausalLM",
    "dtype": "bfloat16",
    "device": "cpu",
    "max_model_len": 8192,
    "weights_bytes": GIB,
    "kv_cache_bytes": 2 * GIB,
    "kv_cache_tokens": 93200,
    "kv_cache_reason": "default",
}


def subject(
    *, environ: Mapping[str, str] | None = None, parts: Mapping[str, Any] | None = None, **flags: Any
) -> Subject:
    return Subject(resolve_settings(flags, environ={}), environ or {}, lambda: parts or {})


def is_warning(finding: Finding, *words: str) -> None:
    assert finding.verdict is Verdict.WARNING
    assert all(word in f"{finding.found} {finding.meaning} {finding.remedy}" for word in words), finding


def is_problem(finding: Finding, *words: str) -> None:
    assert finding.verdict is Verdict.PROBLEM
    assert all(word in f"{finding.found} {finding.meaning} {finding.remedy}" for word in words), finding


def test_python_and_system_are_named() -> None:
    assert check_python(subject()).found.startswith(f"Python {sys.version_info.major}.{sys.version_info.minor}")


@pytest.mark.parametrize(
    ("flags", "name", "verdict"),
    [
        ({"avx512f", "avx512_bf16", "avx2", "fma"}, "AVX-512 with bf16", Verdict.OK),
        ({"avx512f", "avx2", "fma"}, "AVX2", Verdict.OK),
        ({"sse4_2"}, "", Verdict.WARNING),
    ],
)
def test_the_processor_s_best_instruction_set_is_named(
    flags: set[str], name: str, verdict: Verdict, monkeypatch: Monkey
) -> None:
    monkeypatch.setattr(doctor, "processor", lambda: Processor("Example 9000", frozenset(flags)))
    finding = check_processor(subject())
    assert (finding.verdict, name in finding.found) == (verdict, True)
    assert "Example 9000" in finding.found


def test_a_processor_is_not_judged_by_instruction_sets_that_are_not_known(monkeypatch: Monkey) -> None:
    monkeypatch.setattr(doctor, "processor", lambda: Processor("Example 9000"))
    is_warning(check_processor(subject()), "does not report")


def test_the_kernels_that_run_are_named_and_missing_ones_have_a_remedy(monkeypatch: Monkey) -> None:
    monkeypatch.setattr(doctor, "running_kind", lambda: "avx2")
    monkeypatch.setattr(doctor, "missing_kernels", lambda: None)
    assert check_kernels(subject()).found == "compiled, avx2"
    monkeypatch.setattr(doctor, "running_kind", lambda: None)
    monkeypatch.setattr(doctor, "missing_kernels", lambda: "The kernels are missing: install g++.")
    is_warning(check_kernels(subject()), "The kernels are missing", "install g++")


def test_a_machine_for_which_there_are_no_kernels_has_no_remedy(monkeypatch: Monkey) -> None:
    monkeypatch.setattr(compiled_kernels, "of_kind", lambda kind: None)
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    finding = check_kernels(subject())
    assert "only for Linux on x86-64" in finding.meaning and "slower" in finding.meaning
    assert finding.remedy == ""


def test_kernels_of_other_sources_are_a_problem(monkeypatch: Monkey) -> None:
    class OtherKernels:
        def motet_sizes(self, sizes: object) -> None: ...

    monkeypatch.setattr(ctypes, "CDLL", lambda path: OtherKernels())
    monkeypatch.setattr(compiled_kernels, "_path", lambda kind: Path("other.so"))
    monkeypatch.setattr(compiled_kernels, "of_kind", compiled_kernels.of_kind.__wrapped__)
    is_problem(check_kernels(subject()), "other sources", "make setup")
    with pytest.raises(StartupError, match=r"other sources.*: run make setup"):
        compiled_kernels.library()


def test_memory_says_what_serve_would_choose_for_the_kv_cache(monkeypatch: Monkey) -> None:
    monkeypatch.setattr(doctor, "read_memory", lambda: MachineMemory(8 * GIB, 5 * GIB))
    finding = check_memory(subject(parts={"model": MODEL}))
    assert (finding.verdict, finding.found) == (Verdict.OK, "5.0 of 8.0 GiB are available")
    assert "2.00 GiB of KV cache (default): 93,200 tokens" in finding.meaning
    assert check_memory(subject()).verdict is Verdict.OK
    is_warning(check_memory(subject(parts={"model": {**MODEL, "kv_cache_bytes": 4 * GIB}})), "lower --kv-cache-gb")
    gpu = subject(parts={"model": {**MODEL, "device": "cuda:0", "kv_cache_bytes": 80 * GIB}})
    assert check_memory(gpu).verdict is Verdict.OK
    cell = subject(parts={"model": MODEL}, prefill=1, decode=3)
    is_problem(check_memory(cell), "cannot hold the weights", "for each of 4 engines", "a smaller model")


def test_a_full_or_protected_disk_is_a_warning(tmp_path: Path, monkeypatch: Monkey) -> None:
    stored = subject(environ={"MOTET_CACHE_DIR": str(tmp_path / "not" / "there")})
    assert "GiB free for" in check_disk(stored).found
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1))
    is_warning(check_disk(stored), "MOTET_CACHE_DIR")
    monkeypatch.setattr(os, "access", lambda *_: False)
    is_warning(check_disk(stored), "not writable", "MOTET_CACHE_DIR")


def test_a_port_in_use_names_the_program_that_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        is_problem(
            check_port(subject(port=port)),
            f"--port {port}: ",
            f"(process {os.getpid()}) listens there",
            "give another --port",
        )
    assert check_port(subject(port=port)).verdict is Verdict.OK


@pytest.mark.parametrize(
    ("host", "says"),
    [
        ("no-such-host.invalid", "--host no-such-host.invalid: no such host"),
        ("192.0.2.1", "--host 192.0.2.1: this machine has no such address"),
    ],
)
def test_a_host_at_which_no_server_can_listen_is_a_problem(host: str, says: str) -> None:
    """The bug: doctor had no `--host`, and would have named the program that listens on the port of another address."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        finding = check_port(subject(host=host, port=server.getsockname()[1], insecure=True))
    is_problem(finding, says, "give another --host")
    assert str(os.getpid()) not in finding.found


def test_an_address_that_others_reach_needs_an_api_key() -> None:
    is_warning(check_port(subject(host="0.0.0.0", port=0, insecure=True)), "0.0.0.0:0 is free", "--api-key")
    assert check_port(subject(host="0.0.0.0", port=0, api_keys=["secret"])).verdict is Verdict.OK


def test_the_command_checks_the_address_that_it_is_given(monkeypatch: Monkey) -> None:
    monkeypatch.setattr(doctor, "run_checks", lambda subject: [check_port(subject)])
    monkeypatch.setattr(doctor, "run_probe", lambda settings, environ: {})
    result = CliRunner().invoke(app, ["doctor", "--host", "::1", "--port", "0", "--json"])
    assert [finding["found"] for finding in json.loads(result.stdout)["findings"]] == ["[::1]:0 is free"]


def test_a_program_of_another_user_has_no_name(monkeypatch: Monkey) -> None:
    def refused(kind: str) -> None:
        raise psutil.AccessDenied

    monkeypatch.setattr(psutil, "net_connections", refused)
    with socket.create_server(("127.0.0.1", 0)) as server:
        is_problem(check_port(subject(port=server.getsockname()[1])), "another program listens there")


def test_a_model_that_is_not_downloaded_is_no_problem(tmp_path: Path) -> None:
    finding = check_model(subject(environ={"MOTET_CACHE_DIR": str(tmp_path)}))
    assert finding.verdict is Verdict.OK
    assert "is not on this machine" in finding.found
    assert "motet models pull" in finding.remedy


def test_a_model_that_cannot_be_downloaded_is_a_problem(monkeypatch: Monkey) -> None:
    """The bug: with the name of no model, or without a network, "A server can run"."""
    offline = {"HF_ENDPOINT": "http://127.0.0.1:1"}
    is_problem(check_model(subject(model="org/never-seen", environ=offline)), "is not on this machine", "127.0.0.1:1")
    is_problem(check_model(subject(model="smollm3", environ=offline)), "did you mean smollm2?")
    is_problem(check_model(subject(model="/never/seen", environ=offline)), "there is no such folder")
    monkeypatch.setattr(httpx, "head", lambda url, timeout: None)
    assert check_model(subject(model="org/never-seen")).remedy == "motet models pull org/never-seen"


def test_a_gguf_file_is_checked(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    is_problem(check_model(subject(model=str(file))), "has a broken header: it ends too early")
    metadata = {"block_count": 1}
    write_gguf(file, "qwen3", {"output_norm.weight": np.ones(8)}, metadata=metadata)
    finding = check_model(subject(model=str(file), environ={"MOTET_CACHE_DIR": str(tmp_path)}))
    assert finding.verdict is Verdict.OK and finding.found == f"{file} is a GGUF file"


def test_a_model_folder_is_checked(tmp_path: Path) -> None:
    folder = save_tiny_tokenizer(write_model(tmp_path / "model"))
    finding = check_model(subject(model=str(folder), parts={"model": MODEL}))
    assert finding.verdict is Verdict.OK
    assert finding.meaning == "LlamaForCausalLM is supported; bfloat16, up to 8,192 tokens"
    unsupported = subject(model=str(folder), parts={"model": {"error": "NovelForCausalLM; supported are ..."}})
    is_problem(check_model(unsupported), "NovelForCausalLM")
    is_problem(check_model(subject(model=str(folder))), "in time")
    (folder / "model.safetensors").write_bytes(b"")
    is_problem(check_model(subject(model=str(folder), parts={"model": MODEL})), "model.safetensors")


@pytest.mark.parametrize(
    ("facts", "verdict", "words"),
    [
        (TORCH, Verdict.OK, "engines run on the CPU"),
        ({**TORCH, "cuda": "13.0", "gpus": ["H200"]}, Verdict.OK, "H200"),
        ({**TORCH, "cuda": "13.0", "nvidia": True}, Verdict.WARNING, "nvidia-smi"),
        ({**TORCH, "nvidia": True}, Verdict.WARNING, "CUDA build of torch"),
        ({"error": "ImportError: libtorch"}, Verdict.PROBLEM, "libtorch"),
        (None, Verdict.PROBLEM, "in time"),
    ],
)
def test_torch_s_build_is_compared_with_the_machine(
    facts: Mapping[str, Any] | None, verdict: Verdict, words: str
) -> None:
    finding = check_torch(subject(parts=None if facts is None else {"torch": facts}))
    assert finding.verdict is verdict
    assert words in f"{finding.found} {finding.meaning} {finding.remedy}"


def test_the_transport_of_a_cell_is_named() -> None:
    assert "NIXL is installed" in check_transport(subject(parts={"transport": {"kind": "nixl"}})).found
    assert "pip install nixl-cu13" in check_transport(subject(parts={"transport": {"kind": "shared-memory"}})).remedy
    is_warning(check_transport(subject(parts={"transport": {"error": "NIXL cannot start"}})), "NIXL cannot start")
    is_warning(check_transport(subject()), "in time")


def test_ray_is_optional_and_its_cluster_is_found(tmp_path: Path, monkeypatch: Monkey) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "2.60.0")
    cluster = tmp_path / "ray_current_cluster"
    assert "no cluster was found" in check_ray(subject(), cluster).found
    with socket.create_server(("127.0.0.1", 0)) as server:
        cluster.write_text(address := f"127.0.0.1:{server.getsockname()[1]}")
        assert f"a cluster runs at {address}" in check_ray(subject(), cluster).found
    assert "no cluster was found" in check_ray(subject(environ={"RAY_ADDRESS": "auto"}), cluster).found

    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", missing)
    assert check_ray(subject(), cluster).found == "not installed"


def test_too_few_open_files_are_a_warning(monkeypatch: Monkey) -> None:
    monkeypatch.setattr(doctor, "allow_open_files", lambda: 1024)
    is_warning(check_open_files(subject()), "512 connections", "ulimit -n")
    monkeypatch.setattr(doctor, "allow_open_files", lambda: 65536)
    assert check_open_files(subject()).found == "up to 65,536"
    monkeypatch.setattr(doctor, "allow_open_files", lambda: None)
    assert check_open_files(subject()).found == "no limit"


def test_the_hub_and_the_token_are_reported_without_the_token(monkeypatch: Monkey) -> None:
    requested: list[str] = []
    monkeypatch.setattr(httpx, "head", lambda url, timeout: requested.append(url))
    finding = check_hub(subject(environ={"HF_TOKEN": "secret", "HF_ENDPOINT": "http://mirror"}))
    assert (finding.verdict, finding.found) == (Verdict.OK, "http://mirror answers; HF_TOKEN is set")
    assert requested == ["http://mirror"]
    monkeypatch.undo()
    is_warning(check_hub(subject(environ={"HF_ENDPOINT": "http://127.0.0.1:1"})), "HF_TOKEN is not set", "network")


def test_a_check_that_fails_or_hangs_is_a_warning_and_delays_no_other() -> None:
    def check_failing(subject: Subject) -> Finding:
        raise RuntimeError("no such file")

    def check_hanging(subject: Subject) -> Finding:
        threading.Event().wait()
        raise AssertionError

    failing, hanging, python = run_checks(subject(), [check_failing, check_hanging, check_python], limit_s=0.05)
    is_warning(failing, "this check failed", "no such file")
    is_warning(hanging, "took longer than 0.05 s")
    assert python.verdict is Verdict.OK


def test_the_exit_code_says_if_a_server_can_run(monkeypatch: Monkey) -> None:
    results = [Finding("a", Verdict.OK, "there"), Finding("b", Verdict.WARNING, "[red]missing", "slow", "install it")]
    monkeypatch.setattr(doctor, "run_checks", lambda subject: results)
    monkeypatch.setattr(doctor, "run_probe", lambda settings, environ: {})
    result = CliRunner().invoke(app, ["doctor"])
    assert result.exit_code == 0
    assert "[red]missing" in result.stdout
    assert "A server can run." in result.stdout
    results.append(Finding("c", Verdict.PROBLEM, "broken"))
    result = CliRunner().invoke(app, ["doctor", "--json"])
    assert result.exit_code == 1
    report = json.loads(result.stdout)
    assert report["can_run"] is False
    assert report["findings"][1] == {
        "check": "b", "verdict": "warning", "found": "[red]missing", "meaning": "slow", "remedy": "install it"
    }  # fmt: skip


def test_a_wrong_variable_is_a_problem(monkeypatch: Monkey) -> None:
    monkeypatch.setattr(doctor, "run_checks", lambda subject: [])
    monkeypatch.setattr(doctor, "run_probe", lambda settings, environ: {})
    result = CliRunner().invoke(app, ["doctor", "--json"], env={"MOTET_MAX_N": "many"})
    assert result.exit_code == 1
    assert "MOTET_MAX_N" in json.loads(result.stdout)["findings"][0]["found"]


def test_a_probe_that_crashes_leaves_the_parts_before_the_crash(tmp_path: Path, monkeypatch: Monkey) -> None:
    program = tmp_path / "python"
    lines = ("#!/bin/sh", '[ -O "$TORCHINDUCTOR_CACHE_DIR" ] && echo \'{"torch": {"version": "1"}}\'', "kill -9 $$", "")
    program.write_text("\n".join(lines))
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program))
    settings = resolve_settings({"model": str(tmp_path)}, environ={})
    assert doctor.run_probe(settings, {}) == {"torch": {"version": "1"}}


def test_no_finding_moves_the_cursor_of_a_terminal(monkeypatch: Monkey) -> None:
    """Names of programs and of a model's architecture come from others."""
    odd = Finding("port", Verdict.PROBLEM, "another\x1b[2J", "\x1b]52;c;x\x07", "end \u202e it")
    monkeypatch.setattr(doctor, "run_checks", lambda subject: [odd])
    monkeypatch.setattr(doctor, "run_probe", lambda settings, environ: {})
    output = CliRunner().invoke(app, ["doctor"]).stdout
    assert r"another\x1b[2J" in output
    assert all(char.isprintable() or char == "\n" for char in output)


def test_a_huge_file_with_the_address_of_a_cluster_is_not_read(tmp_path: Path) -> None:
    cluster = tmp_path / "ray_current_cluster"
    with cluster.open("wb") as file:
        file.truncate(2**40)
    assert "no cluster was found" in check_ray(subject(), cluster).found


@pytest.mark.long
def test_the_command_checks_this_machine_and_leaves_no_process(tmp_path: Path) -> None:
    folder = save_tiny_tokenizer(save_tiny_model("llama", tmp_path / "model"))
    environ = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:1", "MOTET_CACHE_DIR": str(tmp_path)}  # noqa: TID251
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    command = [sys.executable, "-m", "motet", "doctor", str(folder), "--port", "0", "--json"]
    result = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=300, check=False)
    report = json.loads(result.stdout)
    assert (result.returncode, report["can_run"]) == (0, True), result
    found = {finding["check"]: finding for finding in report["findings"]}
    assert len(found) == len(CHECKS)
    assert found["model"]["meaning"].startswith("LlamaForCausalLM is supported; float32")
    assert "of KV cache" in found["memory"]["meaning"]
    assert found["KV transfer"]["verdict"] == "ok"
    assert found["torch"]["found"].startswith("torch 2.")
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before
