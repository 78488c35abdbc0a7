"""The lines with which a server starts: in text, as JSON, on a terminal, and at every log level."""

import io
import json
from collections.abc import Sequence

import msgspec
import pytest
from rich.console import Console

from motet.cli import start_lines
from motet.cli.start_lines import Start, cell_lines, gateway_lines, ray_lines
from motet.deploy.shutdown import ready_line, url_in
from motet.engine import Worker, WorkerReport, WorkerState
from motet.log import setup_logging
from motet.settings.resolve import resolve_settings
from motet.testing.fake_engine import FakeEngine, fake_info
from motet.types import Role

URL = "http://127.0.0.1:8000"
NOTE = "The compiled kernels are missing (no compiler), so torch's operators run instead: install g++."
Capture = pytest.CaptureFixture[str]


def workers(*roles: Role, **facts: object) -> list[Worker]:
    same = {"kernels": "avx512", "kv_cache_reason": "default", "dtype": "bfloat16", "bytes_per_block": 2**20, **facts}
    infos = [msgspec.structs.replace(fake_info(), role=role, device="cpu", **same) for role in roles]
    return [Worker(f"{i}", FakeEngine(lambda *_: [0], info=info), "here") for i, info in enumerate(infos)]


def start(flags: dict[str, object], engines: Sequence[Worker]) -> None:
    settings = resolve_settings(flags, environ={"MOTET_MAX_N": "9"})
    config = settings.server()
    setup_logging(format=config.log_format, level=config.log_level)
    with Start("loading tiny", settings, command="motet serve") as starting:
        starting.ready(cell_lines(engines, url=URL, config=config), ready_line(URL, engines), url=URL)


def test_a_server_starts_with_what_differs_and_five_lines_about_itself(capsys: Capture) -> None:
    start({"port": 1234, "api_keys": ["secret"]}, workers(Role.BOTH))
    captured = capsys.readouterr()
    assert captured.err.splitlines() == [
        "port      1234     --port",
        "api_keys  1 given  --api-key",
        "max_n     9        MOTET_MAX_N",
        "loading tiny",
        "model     fake, bfloat16 on cpu, 1 engine",
        "kernels   compiled, for AVX-512 with bf16",
        "memory    up to 1.00 GiB of KV cache (default): 16,384 tokens, 4,096 per choice",
        "API       http://127.0.0.1:8000/v1",
        "page      http://127.0.0.1:8000/",
    ]
    assert url_in(captured.out) == URL


def test_missing_kernels_are_a_warning_with_the_remedy(capsys: Capture) -> None:
    start({"log_level": "warning"}, workers(Role.BOTH, kernels_note=NOTE))
    captured = capsys.readouterr()
    assert captured.err == f"kernels   {NOTE}\n"
    assert url_in(captured.out) == URL


def test_at_the_level_error_only_the_ready_line_is_left(capsys: Capture) -> None:
    start({"log_level": "error"}, workers(Role.BOTH, kernels_note=NOTE))
    captured = capsys.readouterr()
    assert captured.err == ""
    assert url_in(captured.out) == URL


def test_at_the_level_debug_all_settings_are_shown(capsys: Capture) -> None:
    start({"log_level": "debug"}, workers(Role.BOTH))
    lines = [line.split() for line in capsys.readouterr().err.splitlines()]
    assert ["host", "127.0.0.1", "default"] in lines
    assert ["max_n", "9", "MOTET_MAX_N"] in lines


def test_in_json_every_line_is_an_object_with_its_facts(capsys: Capture) -> None:
    start({"log_format": "json", "api_keys": ["secret"]}, workers(Role.PREFILL, Role.DECODE))
    captured = capsys.readouterr()
    lines = [json.loads(line) for line in captured.err.splitlines()]
    facts = {key: value for line in lines for key, value in line.items()}
    assert facts["settings"]["api_keys"] == {"value": "1 given", "from": "--api-key"}
    assert (facts["kernels"], facts["dtype"], facts["kv_cache_reason"]) == ("avx512", "bfloat16", "default")
    assert (facts["kv_cache_bytes"], facts["kv_cache_tokens"]) == (2**30, 16384)
    assert (facts["api"], facts["page"]) == (f"{URL}/v1", f"{URL}/")
    assert json.loads(captured.out)["url"] == url_in(captured.out) == URL


def test_a_terminal_shows_what_the_server_waits_for_and_then_only_the_facts(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(start_lines, "Console", lambda stderr: Console(file=screen, force_terminal=True, width=80))
    start({}, workers(Role.BOTH))
    assert "loading tiny" in screen.getvalue()
    assert "loading tiny" not in capsys.readouterr().err


def test_gateways_and_ray_start_with_lines_of_the_same_style() -> None:
    config = resolve_settings({"page": False}, environ={}).server()
    reports = [
        WorkerReport(id=id, address="there", state=state)
        for id, state in (("a:1", WorkerState.READY), ("b:2", WorkerState.DEAD))
    ]
    lines = gateway_lines(["tiny", "other"], reports, url=URL, config=config)
    assert [(label, text) for label, text, _ in lines] == [
        ("models", "tiny, other"),
        ("workers", "1 of 2 ready: a:1"),
        ("API", "http://127.0.0.1:8000/v1"),
    ]
    lines = ray_lines("tiny", {"gateway": 1, "decode": 2}, url=URL, config=config)
    assert [(label, text) for label, text, _ in lines] == [
        ("model", "tiny"),
        ("replicas", "1 gateway, 2 decode"),
        ("API", "http://127.0.0.1:8000/v1"),
    ]
