"""The settings of a cell on Ray Serve."""

from contextlib import nullcontext
from pathlib import Path

import pytest

from motet.errors import ConfigError
from motet.settings.declaration import ServerCommand
from motet.settings.named_worker import resources_by_role
from motet.settings.ray_config import Ingress, RayConfig
from motet.settings.record import Settings
from motet.settings.resolve import names_of, resolve_settings
from motet.settings.server_config import SETTINGS


def resolved(flags: dict[str, object], environ: dict[str, str] | None = None, file: Path | None = None) -> Settings:
    return resolve_settings(flags, environ=environ or {}, file=file, command=ServerCommand.RAY)


def test_ray_has_settings_of_its_own_and_shares_those_of_a_server() -> None:
    settings = resolved({"ingress": "direct", "gateways": 2, "prefill": 1, "decode": 3, "port": 80, "max_num_seqs": 64})
    assert (settings.ray.ingress, settings.ray.gateways) == (Ingress.DIRECT, 2)
    assert (settings.cell.prefill, settings.cell.decode) == (1, 3)
    assert settings.server(served_model_name="m").max_n == 64
    assert settings.rows.keys() == set(names_of(ServerCommand.RAY))
    assert not {"role", "side_channel_port", "prefill_urls", "workers"} & set(names_of(ServerCommand.RAY))
    assert not {"ingress", "gateways"} & set(names_of(ServerCommand.SERVE))


def test_ray_settings_come_from_flags_the_environment_and_a_file(tmp_path: Path) -> None:
    file = tmp_path / "motet.toml"
    file.write_text('resources_of = ["decode=h100:1", "gateway=edge:0.1"]\nautoscale = true\nrole = "prefill"\n')
    settings = resolved({"app_name": "mine"}, {"MOTET_INGRESS": "direct", "MOTET_GPUS_PER_WORKER": "0.5"}, file)
    assert settings.ray == RayConfig(
        resources_of=("decode=h100:1", "gateway=edge:0.1"),
        autoscale=True,
        app_name="mine",
        ingress=Ingress.DIRECT,
        gpus_per_worker=0.5,
    )


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ({"min_prefill": 1}, "--min-prefill 1 with prefill 0 (default): --prefill is the maximum"),
        ({"min_decode": 3, "decode": 2}, "--min-decode 3 with --decode 2: --decode is the maximum"),
        ({"prefill": 1}, "--decode at least 1"),
        (
            {"prefill": 4, "decode": 1, "decode_port": 20003},
            "prefill_port 20000 (default) with --decode-port 20003: each replica's port",
        ),
        ({"decode": 37, "decode_port": 65500}, "--decode-port 65500 with --decode 37: each replica's port"),
        ({"prefill": 2, "decode": 1, "prefill_port": 65535}, "--prefill-port 65535 with --prefill 2"),
        ({"port": 0}, "--port 0 with ingress gateway (default): clients must know"),
    ],
)
def test_invalid_settings_are_refused_and_the_flag_is_named(flags: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(flags)
    assert says in caught.value.message


@pytest.mark.parametrize(
    "flags",
    [
        {"min_prefill": 1, "prefill": 1, "decode": 1},
        {"decode_port": 65500, "decode": 36},
        {"decode_port": 0, "prefill_port": 0, "prefill": 9000, "decode": 9000},
        {"gpu_memory_utilization": 0.9, "prefill": 1, "decode": 1, "gpus_per_worker": 1.0},
    ],
)
def test_valid_settings_are_not_refused(flags: dict[str, object]) -> None:
    resolved(flags)


def test_replicas_that_share_a_gpu_cannot_each_fill_it() -> None:
    flags: dict[str, object] = {"gpu_memory_utilization": 0.9, "prefill": 1, "decode": 1, "gpus_per_worker": 0.5}
    with pytest.raises(ConfigError, match="--gpu-memory-utilization"):
        resolved(flags)


@pytest.mark.parametrize(
    ("prefill_port", "decode_port", "apart"),
    [(20000, 20003, True), (20000, 20002, False), (20003, 20000, True), (20003, 20001, False), (0, 0, True)],
)
def test_first_ports_differ_by_the_replicas_of_the_lower_one(prefill_port: int, decode_port: int, apart: bool) -> None:
    flags: dict[str, object] = {"prefill": 3, "decode": 3, "prefill_port": prefill_port, "decode_port": decode_port}
    with nullcontext() if apart else pytest.raises(ConfigError, match="must be further apart"):
        resolved(flags)


def test_resources_are_given_by_role() -> None:
    texts = ["decode=h100:1", "decode=node:10.0.0.1:0.5", "gateway=edge:2"]
    assert resources_by_role(texts) == {"decode": {"h100": 1.0, "node:10.0.0.1": 0.5}, "gateway": {"edge": 2.0}}


@pytest.mark.parametrize(
    "text", ["", "decode", "decode=h100", "decode=:1", "decode=h100:", "decode=a:0", "decode=a:nan"]
)
def test_an_invalid_resource_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is not ROLE=NAME:AMOUNT"):
        resources_by_role([text])


CHOSEN: dict[str, object] = {
    "model": "org/model",
    "api_keys": ["one", "two"],
    "cors_origins": ["http://a", "http://b"],
    "resources_of": ["decode=h100:1", "gateway=edge:0.1"],
    "ingress": "direct",
    "autoscale": True,
    "prefix_cache": False,
    "prefill": 2,
    "decode": 2,
    "cpus_per_worker": 1.5,
    "max_num_seqs": 64,
    "ray_address": "10.0.0.1:6379",
    "served_model_name": "Ein Modell, 模型 🙂",
}


def test_chosen_settings_give_the_same_settings_elsewhere() -> None:
    """Replicas get the chosen settings, and so does a config for `serve deploy`."""
    settings = resolved(CHOSEN, {"MOTET_CLUSTER_KEY": "secret", "MOTET_MAX_WAITING_GROUPS": "7"})
    chosen = settings.chosen()
    assert chosen.keys() == CHOSEN.keys() | {"cluster_key", "max_waiting_groups"}
    again = resolved(chosen)
    assert {name: row.value for name, row in again.rows.items()} == {
        name: row.value for name, row in settings.rows.items()
    }
    assert again.chosen() == chosen
    assert (again.ray, again.cell) == (settings.ray, settings.cell)


def test_settings_of_this_machine_are_not_chosen_for_others() -> None:
    """The bug: every replica got the address of the machine on which `motet ray` was started."""
    here = {"MOTET_SIDE_CHANNEL_HOST": "10.1.0.1"}
    assert resolved({}, here).chosen() == {}
    assert resolved({"side_channel_host": "10.1.0.1"}, here).chosen() == {"side_channel_host": "10.1.0.1"}


def test_every_setting_of_ray_can_be_chosen() -> None:
    """A value of each kind is passed on, although JSON cannot represent some of them."""
    defaults = {name: SETTINGS[name].default for name in names_of(ServerCommand.RAY)}
    flags = {name: value for name, value in defaults.items() if value not in (None, ())}
    settings = resolved(flags)
    assert settings.chosen().keys() == flags.keys()
    assert resolved(settings.chosen()).chosen() == settings.chosen()
