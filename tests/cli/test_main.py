"""`motet` and its help: version, one style for all commands, completion, and how little it imports."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from motet import __version__
from motet.cli.help import PlainCommand
from motet.cli.main import COMMANDS, MODELS, app, load
from motet.settings.declaration import ServerCommand
from motet.settings.server_config import SETTINGS
from tests.cli.test_servers import fails, motet

HEAVY = ("uvloop", "fastapi", "uvicorn", "aiohttp", "numpy", "httpx", "rich", "motet.deploy.server")
PAGES = [(), *((name,) for name in COMMANDS), ("models",), *(("models", name) for name in MODELS)]


def loaded() -> Iterator[PlainCommand]:
    for table in (COMMANDS, MODELS):
        for name, entry in table.items():
            yield load(name, entry)


@pytest.mark.parametrize("arguments", ["version", "--version", "-V"])
def test_the_version_is_the_package_s(arguments: str) -> None:
    result = motet(arguments)
    assert (result.stdout, result.exit_code) == (f"{__version__}\n", 0)


def test_the_summary_of_a_command_starts_its_help() -> None:
    summaries = [entry.summary for table in (COMMANDS, MODELS) for entry in table.values()]
    helps = [" ".join((command.help or "").split()) for command in loaded()]
    starts = [summary.removesuffix(".") for summary in summaries]
    assert [start for start, text in zip(starts, helps, strict=True) if not text.startswith(start)] == []


@pytest.mark.parametrize("page", PAGES, ids=" ".join)
@pytest.mark.parametrize("width", [80, 120])
def test_every_page_of_help_fits_and_has_examples(page: tuple[str, ...], width: int) -> None:
    result = CliRunner().invoke(app, [*page, "--help"], terminal_width=width, prog_name="motet")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line for line in lines if len(line) > width] == []
    assert not any(mark in result.stdout for mark in ("│", "<bool>", "[default: off]") if page != ("ray",))
    example = lines[lines.index("Examples:") + 1]
    assert example.strip().startswith("motet " + " ".join(page))


@pytest.mark.parametrize("command", ServerCommand)
def test_a_short_page_shows_the_common_settings_and_names_the_long_one(command: ServerCommand) -> None:
    text = motet(command, "--help").stdout
    flags = {name: one.flag for name, one in SETTINGS.items() if command in one.commands}
    shown = {name for name, flag in flags.items() if f"  {flag} " in text}
    assert shown == {name for name in flags if SETTINGS[name].common}
    assert 10 <= len(shown) <= 24
    assert f"{command} --help-all shows {len(flags) - len(shown)} more settings." in text


def test_examples_use_flags_that_exist() -> None:
    for command in loaded():
        flags = {flag for param in command.params for flag in (*param.opts, *param.secondary_opts)}
        words = [word for example in command.examples for word in example.partition("  #")[0].split()]
        assert [word for word in words if word.startswith("-") and word not in flags] == []


@pytest.mark.parametrize("command", ["serve", "ray"])
def test_the_model_can_be_an_argument_or_a_flag_but_not_two_models(command: str) -> None:
    for arguments in (["./gone"], ["--model", "./gone"], ["./gone", "--model", "./gone"]):
        result = motet(command, *arguments, "--tool-parser", "mine")
        fails(result, 2, "--tool-parser mine")
    fails(motet(command, "a/b", "--model", "c/d"), 2, "MODEL a/b and --model c/d differ")


def test_a_switch_can_be_given_in_both_forms_on_the_command_line() -> None:
    fails(motet("serve", "--no-rl", "--port", "-1"), 2, "--port -1")
    fails(motet("serve", "--cache-answers", "--no-prefix-cache"), 2, "--cache-answers with --no-prefix-cache")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serv"], ["serv", "Did you mean 'serve'?"]),
        (["--no-such-flag"], ["--no-such-flag"]),
        (["serve", "--no-such-flag"], ["--no-such-flag", "serve --help"]),
        (["serve", "--port"], ["--port"]),
        (["serve", "--rl=maybe"], ["--rl"]),
        (["chat", "-n", "0"], ["-n"]),
        (["models", "gone"], ["gone", "models --help"]),
    ],
)
def test_a_command_line_that_cannot_be_parsed_is_one_line(arguments: list[str], words: list[str]) -> None:
    fails(motet(*arguments), 2, *words)


def test_errors_are_json_if_the_log_is() -> None:
    for arguments in (["serve", "--log-format=json", "--gone"], ["serve", "--port", "-1", "--log-format", "json"]):
        assert motet(*arguments).stderr.startswith('{"time":')
    assert motet("serve", "--gone", MOTET_LOG_FORMAT="json").stderr.startswith('{"time":')


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["--help"], ["serve", "--port", "-1"]])
def test_answers_that_need_no_server_import_none(arguments: list[str]) -> None:
    """Starts a process, since imports of other tests would count. The number of modules is the same on all machines."""
    program = f"""
import sys
sys.argv = ["motet", *{arguments!r}]
from motet.cli import app
try:
    app()
except SystemExit:
    heavy = [name for name in {HEAVY!r} if name in sys.modules]
    assert not heavy, heavy
    assert len(sys.modules) < 450, sorted(sys.modules)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert "Assertion" not in result.stderr


@pytest.mark.slow
def test_bash_completes_with_the_script_that_motet_prints() -> None:
    """Starts bash and the installed `motet`, as a user's shell does."""
    script = f"""
        PATH="{Path(sys.executable).parent}:$PATH"
        eval "$(motet --show-completion bash)"
        for words in ser "serve --max-num-s" "serve --no-pref"; do
            COMP_WORDS=(motet $words); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
            _motet_completion motet
            echo "${{COMPREPLY[@]}}"
        done
    """
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.splitlines() == ["serve", "--max-num-seqs", "--no-prefix-cache"]
