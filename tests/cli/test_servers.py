"""The command line: its flags, the plans made from them, and errors in one line."""

import re
from pathlib import Path

import pytest
import typer
import yaml  # type: ignore[import-untyped]
from typer.testing import CliRunner, Result

from motet.cli.flags import server_command
from motet.cli.main import app
from motet.cli.servers import check_extra
from motet.deploy.gateway_models import TokenizerRules
from motet.deploy.server_plan import ServerPlan, gateway_plan, server_plan
from motet.deploy.shutdown import gateway_ready_line, ray_ready_line, ready_line, url_in
from motet.engine import Worker, WorkerReport, WorkerState
from motet.errors import ConfigError
from motet.models.progress import SILENT
from motet.models.smollm2 import FOLDER
from motet.settings.declaration import Panel, ServerCommand
from motet.settings.record import Settings
from motet.settings.resolve import names_of, resolve_settings
from motet.settings.server_config import SETTINGS
from motet.testing.fake_engine import FakeEngine, fake_info
from motet.text.formats import ParserNames
from motet.types import Role
from tests.models.model_folders import write_model
from tests.tiny_tokenizer import save_tiny_tokenizer


def motet(*arguments: str, **environ: str) -> Result:
    return CliRunner().invoke(app, list(arguments), env=environ)


def fails(result: Result, code: int, *words: str) -> None:
    assert result.exit_code == code, result.output
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert result.stderr.startswith("motet: ")
    assert all(word in result.stderr for word in words), result.stderr


@pytest.mark.parametrize(
    ("typed", "found"),
    [("ser", ["serve"]), ("serve --max-num", ["--max-num-seqs", "--max-num-batched-tokens"]), ("models l", ["list"])],
)
def test_a_shell_completes_commands_and_flags(typed: str, found: list[str]) -> None:
    words = f"motet {typed}"
    environ = {"_MOTET_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    assert CliRunner().invoke(app, env=environ, prog_name="motet").output.split() == found


@pytest.mark.slow
def test_invalid_settings_are_refused() -> None:
    fails(motet("serve", "--port", "70000"), 2, "--port 70000", "65535")
    fails(motet("serve", "--max-n", "300"), 2, "--max-n 300", "max_num_seqs 256")
    fails(motet("serve", "--block-size", "4"), 2, "--block-size 4", "one of 8, 16, 32, 64, 128")
    fails(motet("serve", "--block-size", "256"), 2, "--block-size 256", "one of 8, 16, 32, 64, 128")
    fails(motet("serve", MOTET_PROT="1"), 2, "MOTET_PROT", "did you mean MOTET_PORT?")
    fails(motet("serve", "--config", "/gone.toml"), 2, "--config /gone.toml")


def test_a_missing_model_is_named() -> None:
    fails(motet("serve", "./gone"), 3, "./gone")


def test_a_broken_model_is_named(tmp_path: Path) -> None:
    (write_model(tmp_path) / "model.safetensors").write_bytes(b"")
    fails(motet("serve", str(tmp_path)), 3, "model.safetensors")


def test_a_missing_chat_template_is_named(tmp_path: Path) -> None:
    fails(motet("serve", str(write_model(tmp_path)), "--chat-template", "/gone.jinja"), 2, "--chat-template")


@pytest.mark.parametrize("flag", ["--tool-parser", "--reasoning-parser"])
def test_the_error_for_an_unknown_parser_lists_the_known_ones(tmp_path: Path, flag: str) -> None:
    """The parser is checked before the model, since finding the model can take long."""
    fails(motet("serve", str(tmp_path / "gone"), flag, "mine"), 2, f"{flag} mine is unknown; use one of auto, none, ")
    fails(motet("gateway", "--worker", "http://127.0.0.1:1", flag, "mine"), 2, f"{flag} mine is unknown")


def test_an_unknown_flag_is_a_usage_error() -> None:
    assert motet("serve", "--no-such-flag").exit_code == 2


@pytest.mark.parametrize("command", ServerCommand)
def test_help_lists_every_setting_of_a_command_and_no_other(command: ServerCommand) -> None:
    lines = motet(command, "--help-all").output.splitlines()
    shown = {word for line in lines if re.match("  -", line) for word in line.split()[:3]}
    assert {name for name, one in SETTINGS.items() if one.flag in shown} == set(names_of(command))


def test_help_shows_the_meaning_range_and_default_of_a_setting() -> None:
    text = "".join(motet("ray", "--help-all").output.split())
    for name in names_of(ServerCommand.RAY):
        assert "".join(SETTINGS[name].documented_for(ServerCommand.RAY).full_help.split()) in text


@pytest.mark.parametrize(
    ("command", "words"),
    [("serve", "Ray|replicas?|gateways?"), ("gateway", "Ray|replicas?|cells?"), ("ray", "cells?|this machine")],
)
def test_help_of_settings_speaks_of_its_command_alone(command: str, words: str) -> None:
    """The bug: `--port` of `motet serve` was "not 0 on Ray", and `--insecure` of a gateway named flags of a server."""
    settings = [SETTINGS[name] for name in names_of(ServerCommand(command))]
    shown = [one.documented_for(ServerCommand(command)).full_help for one in settings if one.panel is not Panel.RAY]
    assert [text for text in shown if re.search(rf"\b({words})\b", text, re.IGNORECASE)] == []
    own = {flag for one in settings for flag in (one.flag_for(True), one.flag_for(False), one.flag)}
    assert {flag for text in shown for flag in re.findall(r"--[a-z-]+", text)} <= own


def test_a_list_flag_that_is_not_given_keeps_the_value_of_the_environment() -> None:
    """The bug: the flag was an empty tuple, which replaced the keys in MOTET_API_KEYS."""
    received: list[Settings] = []
    probe = typer.Typer()

    @probe.command()
    @server_command(ServerCommand.GATEWAY)
    def check(settings: Settings, *, stop_with_stdin: bool) -> int:
        received.append(settings)
        return 0

    flags = "--cors-origin a --cors-origin b --worker http://a"
    assert CliRunner().invoke(probe, flags, env={"MOTET_API_KEYS": "secret"}).exit_code == 0
    (settings,) = received
    assert settings.rows["api_keys"].value == ("secret",)
    assert settings.rows["cors_origins"].value == ("a", "b")


def test_models_pull_prints_the_folder_and_list_names_it(tmp_path: Path) -> None:
    folder = write_model(tmp_path / FOLDER)
    assert motet("models", "pull", MOTET_CACHE_DIR=str(tmp_path)).stdout.strip() == str(folder)
    listed = motet("models", "list", MOTET_CACHE_DIR=str(tmp_path)).stdout
    assert "smollm2" in listed
    assert str(folder) in listed


def test_a_default_model_that_was_not_pulled_is_listed_as_such(tmp_path: Path) -> None:
    assert "motet models pull" in motet("models", "list", MOTET_CACHE_DIR=str(tmp_path)).stdout


def plan_of(flags: dict[str, object], folder: Path) -> ServerPlan:
    return server_plan(resolve_settings(flags, environ={}), cache=folder / "cache", progress=SILENT)


def test_engines_read_the_given_tokenizer_instead_of_the_model_s_own(tmp_path: Path) -> None:
    model = save_tiny_tokenizer(write_model(tmp_path / "model"))
    other = save_tiny_tokenizer(tmp_path / "other")
    assert plan_of({"model": str(model)}, tmp_path).engine.tokenizer_path == str(model)
    plan = plan_of({"model": str(model), "tokenizer": str(other)}, tmp_path)
    assert plan.engine.tokenizer_path == str(plan.tokenizer_path) == str(other)


def test_a_plan_follows_the_settings(tmp_path: Path) -> None:
    model = save_tiny_tokenizer(write_model(tmp_path / "model"))
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}")
    flags: dict[str, object] = {
        "model": str(model),
        "served_model_name": "mine",
        "chat_template": str(template),
        "dtype": "float32",
        "tool_parser": "mistral",
        "reasoning_parser": "none",
    }
    plan = plan_of(flags, tmp_path)
    assert (plan.engine.model_path, plan.engine.model_name, plan.engine.dtype) == (str(model), "mine", "float32")
    assert plan.engine.model_root == str(model)
    assert (plan.server.served_model_name, plan.tokenizer_path, plan.chat_template) == ("mine", model, "{{ messages }}")
    assert plan.parsers == ParserNames(tools="mistral", reasoning="none")


def test_another_tokenizer_replaces_the_model_s(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    other = save_tiny_tokenizer(tmp_path / "tokenizer")
    flags: dict[str, object] = {"model": str(model), "tokenizer": str(other)}
    assert plan_of(flags, tmp_path).tokenizer_path == other


def test_a_template_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.jinja").write_bytes(b"\xff\xfe\xff")
    flags: dict[str, object] = {"model": str(write_model(tmp_path / "m")), "chat_template": str(tmp_path / "t.jinja")}
    with pytest.raises(ConfigError, match="cannot be read"):
        plan_of(flags, tmp_path)


def workers(*roles: Role) -> list[Worker]:
    return [
        Worker(f"{role}-{i}", FakeEngine(lambda *_: [0], info=fake_info(role=role)), "here")
        for i, role in enumerate(roles)
    ]


@pytest.mark.parametrize(
    ("roles", "says"),
    [
        ([Role.BOTH], "(1,024 KV blocks of 16 tokens"),
        ([Role.DECODE], "(decode server, 1,024 KV blocks of 16 tokens"),
        ([Role.BOTH, Role.BOTH], "(2 engines, each with 1,024 KV blocks"),
        ([Role.PREFILL, Role.PREFILL, Role.DECODE], "(2 prefill and 1 decode engines, each with 1,024 KV blocks"),
    ],
)
def test_the_ready_line_has_the_url_of_the_server(roles: list[Role], says: str) -> None:
    line = ready_line("http://127.0.0.1:8000", workers(*roles))
    assert url_in(line) == "http://127.0.0.1:8000"
    assert says in line


def test_another_line_has_no_url() -> None:
    assert url_in("something else at http://127.0.0.1:8000 ") is None


URL = "http://127.0.0.1:1"


def gateway_settings(**flags: object) -> Settings:
    return resolve_settings({"workers": [URL], **flags}, environ={}, command=ServerCommand.GATEWAY)


def test_invalid_gateway_settings_are_refused() -> None:
    fails(motet("gateway"), 2, "a gateway needs workers", "--worker URL")
    fails(motet("gateway", "--worker", "nowhere"), 2, "--worker nowhere")
    fails(motet("gateway", "--worker", URL, "--chat-template", "/gone.jinja"), 2, "--chat-template")


def test_a_gateway_that_finds_no_worker_ends_with_an_error() -> None:
    result = motet("gateway", "--worker", URL, "--port", "0", "--start-timeout", "0.05", "--log-level", "error")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "motet: no worker could answer requests within 0.05 s\n" in result.stderr
    assert "\n  127.0.0.1:1 (http://127.0.0.1:1) is " in result.stderr


def test_a_gateway_s_plan_follows_the_settings(tmp_path: Path) -> None:
    tokenizer = save_tiny_tokenizer(tmp_path / "tokenizer")
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}")
    plan = gateway_plan(
        gateway_settings(
            tokenizer=str(tokenizer),
            tokenizer_of=(f"org/other={tokenizer}",),
            chat_template=str(template),
            reasoning_parser="qwen3",
            served_model_name="mine",
        ),
        cache=tmp_path,
        progress=SILENT,
    )
    parsers = ParserNames(reasoning="qwen3")
    assert plan.tokenizers == TokenizerRules({"org/other": tokenizer}, tokenizer, "{{ messages }}", parsers)
    assert plan.server.served_model_name == "mine"


def test_without_settings_name_and_tokenizer_come_from_the_workers(tmp_path: Path) -> None:
    plan = gateway_plan(gateway_settings(), cache=tmp_path, progress=SILENT)
    assert (plan.tokenizers, plan.server.served_model_name) == (TokenizerRules({}), "")


@pytest.mark.parametrize(("ids", "says"), [(["a:1"], "(1 worker: a:1)"), (["a:1", "b:2"], "(2 workers: a:1, b:2)")])
def test_the_ready_line_has_the_url_of_the_gateway(ids: list[str], says: str) -> None:
    workers = [WorkerReport(id=id, address="there", state=WorkerState.READY) for id in ids]
    away = WorkerReport(id="gone", address="there", state=WorkerState.DEAD)
    line = gateway_ready_line("http://127.0.0.1:8000", ["tiny", "other"], workers=[*workers, away])
    assert "is ready: tiny, other at " in line
    assert url_in(line) == "http://127.0.0.1:8000"
    assert line.endswith(says)


@pytest.mark.slow
def test_invalid_ray_settings_are_refused() -> None:
    fails(motet("ray", "--ingress", "both"), 2, "--ingress both", "gateway, direct")
    fails(motet("ray", "--prefill", "1"), 2, "--prefill 1", "--decode at least 1")
    fails(motet("ray", "--gpus-per-worker", "2"), 2, "--gpus-per-worker 2.0", "an engine uses one GPU")
    fails(motet("ray", "--resources-of", "decode"), 2, "--resources-of decode", "decode=h100:1")
    fails(motet("ray", "--tool-parser", "mine"), 2, "--tool-parser mine is unknown")
    fails(motet("ray", MOTET_INGRES="direct"), 2, "MOTET_INGRES", "did you mean MOTET_INGRESS?")


def test_without_the_extra_the_error_names_the_package_to_install() -> None:
    with pytest.raises(ConfigError, match=r"pip install '\.\[ray\]' in Motet's folder"):
        check_extra(lambda name: None)
    check_extra(lambda name: name)


def test_the_config_is_printed_and_nothing_else() -> None:
    result = motet(
        *("ray", "org/model", "--prefill", "1", "--decode", "2", "--ingress", "direct", "--api-key", "secret"),
        *("--resources-of", "decode=h100:1", "--resources-of", "gateway=edge:1", "--print-config"),
        MOTET_MAX_NUM_SEQS="64",
    )
    assert (result.exit_code, result.stderr) == (0, "")
    assert "secret" not in result.stdout
    (application,) = yaml.safe_load(result.stdout)["applications"]
    assert application["args"] == {
        "model": "org/model",
        "max_num_seqs": 64,
        "prefill": 1,
        "decode": 2,
        "ingress": "direct",
        "resources_of": ["decode=h100:1", "gateway=edge:1"],
    }


def test_the_ready_line_has_the_url_of_the_cell() -> None:
    replicas = {"gateway": 1, "decode": 2, "prefill": 1, "directory": 1}
    line = ray_ready_line("tiny", "http://127.0.0.1:8000", replicas=replicas)
    assert url_in(line) == "http://127.0.0.1:8000"
