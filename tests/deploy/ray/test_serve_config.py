"""The application as a config for `serve deploy`."""

from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from motet.deploy.ray.options import check_arguments, serve_config
from motet.errors import ConfigError
from motet.settings.declaration import ServerCommand
from motet.settings.record import Settings
from motet.settings.resolve import resolve_settings


def resolved(flags: dict[str, object], environ: dict[str, str] | None = None, file: Path | None = None) -> Settings:
    return resolve_settings(flags, environ=environ or {}, file=file, command=ServerCommand.RAY)


def written(settings: Settings) -> dict[str, Any]:
    """Returns the config as it is read back from YAML."""
    config: dict[str, Any] = yaml.safe_load(serve_config(settings))
    return config


def args_of(config: dict[str, Any]) -> dict[str, object]:
    (application,) = config["applications"]
    args: dict[str, object] = application["args"]
    return args


FLAGS: dict[str, object] = {
    "model": "org/model",
    "served_model_name": 'naïve: "模型" \U0001f642 #1',
    "host": "0.0.0.0",
    "insecure": True,
    "port": 9000,
    "app_name": "mine: yes",
    "ray_address": "10.0.0.1:6379",
    "ingress": "direct",
    "prefill": 2,
    "decode": 3,
    "resources_of": ["decode=h100:1", "prefill=node:10.0.0.1:0.5"],
    "autoscale": True,
    "prefix_cache": False,
    "cpus_per_worker": 1e-05,
    "cors_origins": ["no", "null", "1.5"],
}


def test_the_config_has_serve_s_address_and_the_application() -> None:
    config = written(resolved(FLAGS))
    assert config["http_options"] == {"host": "0.0.0.0", "port": 9000, "keep_alive_timeout_s": 120}
    assert config["proxy_location"] == "EveryNode"
    (application,) = config["applications"]
    assert (application["name"], application["route_prefix"]) == ("mine: yes", "/")
    assert application["import_path"] == "motet.deploy.ray.app:application"


def test_its_arguments_make_the_same_settings_again() -> None:
    settings = resolved(FLAGS)
    again = resolved(args_of(written(settings)))
    elsewhere = {"port", "app_name", "ray_address"}
    assert {name: row.value for name, row in again.rows.items() if name not in elsewhere} == {
        name: row.value for name, row in settings.rows.items() if name not in elsewhere
    }


def test_an_application_with_only_defaults_has_no_arguments() -> None:
    config = written(resolved({}))
    assert args_of(config) == {}
    assert config["http_options"] == {"host": "127.0.0.1", "port": 8000, "keep_alive_timeout_s": 120}


def test_no_key_is_in_it_whatever_its_source(tmp_path: Path) -> None:
    file = tmp_path / "motet.toml"
    file.write_text('admin_key = "secret-1"\n')
    settings = resolved({"api_keys": ["secret-2", "secret-3"]}, {"MOTET_CLUSTER_KEY": "secret-4"}, file)
    text = serve_config(settings)
    assert "secret-" not in text
    assert "left out: cluster_key, api_keys, admin_key." in text
    assert args_of(written(settings)) == {}


@pytest.mark.parametrize(
    "value", ["", "plain", "# no comment", "- a", "a: b", "'", '"', "\\", "\t\n", "é", "\U0001f642"]
)
def test_every_kind_of_value_is_read_back(value: str) -> None:
    origins = [value if value.strip() else "no blank origin is allowed", "last"]
    args = args_of(written(resolved({"tool_parser": value, "cors_origins": origins})))
    assert (args["tool_parser"], args["cors_origins"]) == (value, origins)


def test_a_misspelt_argument_is_refused_with_the_right_name() -> None:
    with pytest.raises(
        ConfigError, match=r"args: max_modle_len: there is no such setting; did you mean max_model_len\?"
    ):
        check_arguments(["prefill", "max_modle_len"])


def test_a_setting_of_another_command_is_refused() -> None:
    with pytest.raises(ConfigError, match="args: prefill_urls"):
        check_arguments(["prefill_urls"])


def test_the_printed_config_is_accepted() -> None:
    check_arguments(args_of(written(resolved(FLAGS))))
