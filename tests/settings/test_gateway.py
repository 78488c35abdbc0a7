"""The settings of a gateway, including the settings that it shares with a server."""

from pathlib import Path

import pytest

from motet.errors import ConfigError
from motet.settings.declaration import ServerCommand
from motet.settings.record import Settings
from motet.settings.resolve import names_of, resolve_settings

URL = "http://a:8000"


def resolved(flags: dict[str, object], environ: dict[str, str] | None = None, file: Path | None = None) -> Settings:
    return resolve_settings(flags, environ=environ or {}, file=file, command=ServerCommand.GATEWAY)


def test_a_gateway_has_settings_of_its_own_and_shares_those_of_http_and_routing() -> None:
    settings = resolved({"workers": [URL], "worker_timeout_s": 2.5, "port": 80, "routing_policy": "session"})
    assert (settings.gateway.workers, settings.gateway.worker_timeout_s) == ((URL,), 2.5)
    assert settings.server(served_model_name="m").port == 80
    assert settings.routing.routing_policy == "session"
    assert settings.routing.engine_restarts == 5
    assert settings.model.model == "smollm2"
    assert settings.rows.keys() == set(names_of(ServerCommand.GATEWAY))


def test_workers_come_from_flags_the_environment_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "motet.toml"
    file.write_text(f'workers = ["{URL},prefill"]\n')
    assert resolved({}, file=file).gateway.workers == (f"{URL},prefill",)
    assert resolved({}, {"MOTET_WORKERS": f"{URL},prefill"}).gateway.workers == (URL, "prefill")
    assert resolved({"workers": [f"{URL},prefill", "http://b"]}).gateway.workers == (URL, "prefill", "http://b")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({}, "a gateway needs workers: --worker URL (repeatable) or --workers-file FILE"),
        ({"workers": [URL], "max_choices": 1, "max_n": 2}, "--max-choices 1 with --max-n 2"),
    ],
)
def test_invalid_settings_are_refused(flags: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(flags)
    assert says in caught.value.message


def test_settings_of_other_commands_are_ignored_in_the_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "motet.toml"
    file.write_text(f'workers = ["{URL}"]\nmax_num_seqs = 2\n')
    environ = {"MOTET_WORKER_TIMEOUT_S": "0", "MOTET_BLOCK_SIZE": "3", "MOTET_PORT": "1"}
    with pytest.raises(ConfigError, match="worker_timeout_s 0"):
        resolved({}, environ, file)
    with pytest.raises(ConfigError, match="block_size 3"):
        resolve_settings({}, environ=environ, file=file)
    settings = resolved({"worker_timeout_s": 3.0}, environ, file)
    assert settings.server(served_model_name="m").max_n == 256
    serving = resolve_settings({"block_size": 16}, environ=environ, file=file)
    assert "workers" not in serving.rows


def test_a_name_that_no_command_knows_is_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean MOTET_WORKERS"):
        resolved({"workers": [URL]}, {"MOTET_WORKER": URL})


def test_the_worker_api_key_is_not_shown() -> None:
    assert resolved({"workers": [URL], "worker_api_key": "secret"}).rows["worker_api_key"].shown == "given"
