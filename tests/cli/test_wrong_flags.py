"""Every flag of every command refuses a wrong value with exit code 2 and one line that names it.

The flags are taken from the commands, so that a new one is tested too."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from motet.cli.main import COMMANDS, MODELS, load
from motet.settings.declaration import ServerCommand
from motet.settings.server_config import SETTINGS
from motet.settings.vllm_flags import ADVICE, UNUSED
from tests.cli.test_servers import fails, motet
from tests.deploy.tls.authority import Authority
from tests.settings.test_wrong_values import NAMES_OF_PARSERS, WITHOUT_WRONG_TEXTS, wrong_texts

WORKER = ("--worker", "http://127.0.0.1:1")
WRONG_NUMBER = {"it must be a number from 1 on": "0"}
"""A wrong number for flags with this advice; 2 is wrong for all others."""
LIKE_VLLM = [
    *(
        f"{flag}={WRONG_NUMBER.get(ADVICE[flag], '2') if value else 'true'}"
        for flag, value in UNUSED.items()
        if flag in ADVICE
    ),
    "--trust-remote-code",
    "--kv-transfer-config={}",
]
FILES = ("chat_template", "workers_file", "worker_ca_file", "worker_cert_file", "ssl_certfile")
WITH_CERTIFICATE = {
    "ssl_keyfile": "ssl_certfile",
    "ssl_ca_certs": "ssl_certfile",
    "worker_key_file": "worker_cert_file",
}
"""Files that are an error without a certificate, and the settings of the certificate."""
PAGES = [*((name,) for name in COMMANDS), *(("models", name) for name in MODELS)]


def parameters_of(page: tuple[str, ...]) -> Iterator[Any]:
    entry = COMMANDS[page[0]] if len(page) == 1 else MODELS[page[1]]
    yield from (param for param in load(page[-1], entry).params if param.param_type_name == "option")


@pytest.mark.slow
@pytest.mark.parametrize("command", ServerCommand)
def test_every_setting_of_a_command_line_refuses_a_wrong_value(command: ServerCommand) -> None:
    for param in parameters_of((command,)):
        if param.name not in SETTINGS or param.name in WITHOUT_WRONG_TEXTS | NAMES_OF_PARSERS:
            continue
        declared = SETTINGS[param.name]
        needed = WORKER if command is ServerCommand.GATEWAY and param.name != "workers" else ()
        if declared.kind is bool:
            for flag in (*param.opts, *param.secondary_opts):
                fails(motet(command, *needed, f"{flag}=maybe"), 2, flag)
        else:
            wrong = next(iter(wrong_texts(declared)))
            fails(motet(command, *needed, declared.flag, wrong), 2, declared.flag)


@pytest.mark.parametrize("page", PAGES, ids=" ".join)
def test_every_other_flag_refuses_a_wrong_value(page: tuple[str, ...]) -> None:
    for param in parameters_of(page):
        if param.is_flag:
            fails(motet(*page, f"{param.opts[0]}=maybe"), 2, param.opts[0])
        elif param.rich_help_panel is None and param.type_descriptor.annotation in (int, float):
            low = [] if param.min is None else [str(param.min - 1)]
            for wrong in ["abc", "", *low]:
                fails(motet(*page, param.opts[0], wrong), 2, param.opts[0])
        elif param.rich_help_panel is None:
            fails(motet(*page, param.opts[0]), 2, param.opts[0])  # no value


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named_with_its_flag(name: str) -> None:
    """These files are read when the plan of the gateway is made, or when it starts."""
    worker = () if name == "workers_file" else WORKER
    result = motet("gateway", *worker, SETTINGS[name].flag, "/gone", "--port", "0", "--log-level", "error")
    fails(result, 2, SETTINGS[name].flag, "/gone")


@pytest.mark.parametrize("name", WITH_CERTIFICATE)
def test_a_missing_file_that_needs_a_certificate_is_named_with_its_flag(name: str, tmp_path: Path) -> None:
    certificate, key = Authority(tmp_path).sign("server")
    both = tmp_path / "both.pem"
    both.write_text(certificate.read_text() + key.read_text())
    certificate_flag, flag = SETTINGS[WITH_CERTIFICATE[name]].flag, SETTINGS[name].flag
    result = motet("gateway", *WORKER, certificate_flag, str(both), flag, "/gone", "--port", "0")
    fails(result, 2, flag, "/gone")
    fails(motet("gateway", *WORKER, flag, str(key)), 2, flag, certificate_flag)


def test_every_file_is_tested() -> None:
    files = {name for name, declared in SETTINGS.items() if declared.placeholder == "FILE"}
    assert files == {*FILES, *WITH_CERTIFICATE}
    fails(motet("serve", "--config", "/gone"), 2, "--config /gone")
    fails(motet("serve", MOTET_CONFIG="/gone"), 2, "MOTET_CONFIG=/gone")


@pytest.mark.parametrize("flag", LIKE_VLLM)
def test_a_flag_of_vllm_gets_advice(flag: str) -> None:
    """The bug: the most similar flags of Motet were suggested, which do something else, or none."""
    name = flag.partition("=")[0]
    fails(motet("serve", flag), 2, f"No such option: {name}, which vLLM has: {ADVICE[name]} (")


def test_no_flag_of_motet_is_called_one_of_vllm() -> None:
    assert not {flag for param in parameters_of(("serve",)) for flag in param.opts} & {*ADVICE, *UNUSED}
