"""The engine processes that follow from the settings."""

from dataclasses import replace
from pathlib import Path

import pytest

from motet.deploy.server_plan import ServerPlan, adapter_folders, engine_configs
from motet.errors import ConfigError
from motet.log import LogFormat
from motet.settings.engine_config import EngineConfig
from motet.settings.server_config import CellConfig, ServerConfig
from motet.types import Role


def plan(*, cell: CellConfig | None = None, engine: EngineConfig | None = None) -> ServerPlan:
    return ServerPlan(
        engine or EngineConfig(model_path="/m", model_name="m"),
        ServerConfig(served_model_name="m"),
        tokenizer_path=Path("/m"),
        chat_template=None,
        cell=cell or CellConfig(),
    )


def test_a_single_server_is_one_engine_with_all_cores() -> None:
    configs = engine_configs(plan(), cores=8)
    assert list(configs) == ["engine-0"]
    assert configs["engine-0"].num_threads is None
    assert configs["engine-0"].role is Role.BOTH


def test_a_cell_is_one_engine_for_each_worker_with_its_role() -> None:
    configs = engine_configs(plan(cell=CellConfig(prefill=2, decode=1)), cores=8)
    assert {name: config.role for name, config in configs.items()} == {
        "prefill-0": Role.PREFILL,
        "prefill-1": Role.PREFILL,
        "decode-0": Role.DECODE,
    }


@pytest.mark.parametrize(("cores", "chosen", "threads"), [(8, None, 2), (3, None, 1), (1, None, 1), (8, 5, 5)])
def test_the_engines_of_a_cell_share_the_cores_unless_threads_are_set(
    cores: int, chosen: int | None, threads: int
) -> None:
    engine = EngineConfig(model_path="/m", model_name="m", num_threads=chosen)
    configs = engine_configs(plan(cell=CellConfig(prefill=2, decode=1), engine=engine), cores=cores)
    assert {config.num_threads for config in configs.values()} == {threads}


def test_every_cell_has_a_cluster_key_of_its_own_and_free_ports() -> None:
    one, other = (engine_configs(plan(cell=CellConfig(prefill=1, decode=1)), cores=2) for _ in range(2))
    assert len({config.cluster_key for config in one.values()}) == 1
    assert one["prefill-0"].cluster_key != other["prefill-0"].cluster_key
    assert len(one["prefill-0"].cluster_key) == 32
    assert {config.side_channel_port for config in (*one.values(), *other.values())} == {0}


def test_a_cluster_key_that_was_set_stays() -> None:
    engine = EngineConfig(model_path="/m", model_name="m", cluster_key="shared")
    configs = engine_configs(plan(cell=CellConfig(prefill=1, decode=1), engine=engine), cores=2)
    assert {config.cluster_key for config in configs.values()} == {"shared"}


@pytest.mark.parametrize(
    ("role", "chosen", "port"),
    [(Role.PREFILL, None, 20000), (Role.DECODE, None, 22000), (Role.PREFILL, 0, 0), (Role.PREFILL, 4321, 4321)],
)
def test_a_server_with_a_role_has_its_side_channel_at_the_default_or_set_port(
    role: Role, chosen: int | None, port: int
) -> None:
    engine = EngineConfig(model_path="/m", model_name="m", role=role, side_channel_port=chosen)
    (name, config), *_ = engine_configs(plan(engine=engine), cores=2).items()
    assert (name, config.role, config.side_channel_port) == (f"{role}-0", role, port)


def test_engines_share_the_memory_and_log_as_their_server_does() -> None:
    server = ServerConfig(served_model_name="m", log_format=LogFormat.JSON, log_level="error")
    shared = replace(plan(cell=CellConfig(prefill=1, decode=2)), server=server)
    configs = engine_configs(shared, cores=2, available_bytes=2**30).values()
    assert {(config.available_bytes, config.num_engines) for config in configs} == {(2**30, 3)}
    assert {(config.log_format, config.log_level) for config in configs} == {("json", "error")}


@pytest.mark.parametrize(
    ("path", "reason"), [(".", "no adapter_config.json in this folder"), ("none", "no such folder")]
)
def test_a_folder_without_an_adapter_is_refused_with_the_reason(tmp_path: Path, path: str, reason: str) -> None:
    engine = EngineConfig(model_path="/m", model_name="m", adapters=(f"sql={tmp_path / path}",))
    with pytest.raises(ConfigError, match=f"--adapter sql=.*: there is {reason}"):
        adapter_folders(engine)
