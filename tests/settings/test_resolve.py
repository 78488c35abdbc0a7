"""Settings: which source wins, who is named, what is refused."""

from pathlib import Path

import pytest

from motet.errors import ConfigError
from motet.settings import Settings, resolve_settings
from motet.settings.record import setting_fields
from motet.types import Role


def resolved(
    flags: dict[str, object] | None = None, environ: dict[str, str] | None = None, file: Path | None = None
) -> Settings:
    return resolve_settings(flags or {}, environ=environ or {}, file=file)


def refused(flags: dict[str, object] | None = None, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        resolved(flags, environ)
    assert caught.value.exit_code == 2
    return caught.value.message


def test_nothing_given_is_all_defaults() -> None:
    settings = resolved()
    assert {row.source for row in settings.rows.values()} == {"default"}
    assert settings.model.model == "smollm2"
    assert settings.engine(model_path=Path("/m"), model_name="m").max_num_seqs == 256
    assert settings.server(served_model_name="m").host == "127.0.0.1"


def test_a_flag_wins_over_the_environment_over_a_file_over_the_default(tmp_path: Path) -> None:
    file = tmp_path / "motet.toml"
    file.write_text("port = 1\nmax_waiting_groups = 1\nmax_num_seqs = 300\n")
    environ = {"MOTET_PORT": "2", "MOTET_MAX_WAITING_GROUPS": "2"}
    rows = resolved({"port": 3, "host": None}, environ, file).rows
    assert (rows["port"].value, rows["port"].source) == (3, "--port")
    assert (rows["max_waiting_groups"].value, rows["max_waiting_groups"].source) == (2, "MOTET_MAX_WAITING_GROUPS")
    assert (rows["max_num_seqs"].value, rows["max_num_seqs"].source) == (300, str(file))
    assert (rows["host"].value, rows["host"].source) == ("127.0.0.1", "default")


def test_the_environment_speaks_of_numbers_switches_and_lists() -> None:
    environ = {
        "MOTET_KV_CACHE_GB": "0.5",
        "MOTET_PREFIX_CACHE": "false",
        "MOTET_API_KEYS": "one, two",
        "MOTET_MAX_MODEL_LEN": "1000",
        "HOME": "/root",
    }
    settings = resolved(environ=environ)
    engine = settings.engine(model_path=Path("/m"), model_name="m")
    assert (engine.kv_cache_gb, engine.prefix_cache, engine.max_model_len) == (0.5, False, 1000)
    assert settings.server(served_model_name="m").api_keys == ("one", "two")


def test_the_file_may_be_named_by_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "motet.toml"
    file.write_text('api_keys = ["k"]\n')
    rows = resolved(environ={"MOTET_CONFIG": str(file), "MOTET_CACHE_DIR": "/tmp/x"}).rows
    assert (rows["api_keys"].value, rows["api_keys"].source) == (("k",), str(file))


def test_keys_are_never_shown() -> None:
    rows = resolved({"api_keys": ["secret-1", "secret-2"]}).rows
    assert rows["api_keys"].shown == "2 given"
    assert resolved().rows["api_keys"].shown == "-"


def test_other_secrets_are_never_shown_either() -> None:
    flags: dict[str, object] = {
        "cluster_key": "secret-1",
        "admin_key": "secret-3",
        "prefill_api_key": "secret-2",
        "role": "decode",
        "prefill_urls": ["http://p"],
    }
    rows = resolved(flags).rows
    names = ("admin_key", "cluster_key", "prefill_api_key")
    assert [rows[name].shown for name in names] == ["given"] * 3
    assert [resolved().rows[name].shown for name in names] == ["-"] * 3


def test_a_cell_has_a_record_of_its_own() -> None:
    cell = resolved({"prefill": 2, "decode": 1, "bypass_tokens": 0}).cell
    assert (cell.prefill, cell.decode, cell.bypass_tokens) == (2, 1, 0)
    assert (resolved().cell.prefill, resolved().cell.decode) == (0, 0)


def test_prefill_servers_may_be_named_one_by_one_or_with_commas() -> None:
    three = ("http://a:1", "https://b", "http://c:3/x")
    flags: dict[str, object] = {"role": "decode", "prefill_urls": ["http://a:1, https://b", "http://c:3/x"]}
    assert resolved(flags).cell.prefill_urls == three
    environ = {"MOTET_ROLE": "decode", "MOTET_PREFILL_URLS": "http://a:1,https://b,http://c:3/x"}
    assert resolved(environ=environ).cell.prefill_urls == three


def test_the_role_of_a_server_is_one_of_three() -> None:
    engine = resolved({"role": "prefill", "side_channel_port": 7}).engine(model_path=Path("/m"), model_name="m")
    assert (engine.role, engine.side_channel_port) == (Role.PREFILL, 7)
    assert refused({"role": "prefil"}) == "--role prefil: must be one of prefill, decode, both"


def test_defaults_give_way_to_what_was_set() -> None:
    rows = resolved({"max_num_seqs": 16}).rows
    assert (rows["max_n"].value, rows["max_n"].source) == (16, "default, from max_num_seqs")
    rows = resolved({"max_num_seqs": 2000, "max_n": 1500}).rows
    assert rows["max_num_batched_tokens"].value == 2000
    assert rows["max_choices"].value == 1500


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ({"port": 70000}, "--port 70000"),
        ({"port": -1}, "--port -1"),
        ({"max_n": 512, "max_num_seqs": 256}, "--max-n 512 with --max-num-seqs 256"),
        ({"max_n": 512}, "--max-n 512 with max_num_seqs 256 (default)"),
        ({"max_n": 0}, "--max-n 0"),
        ({"max_n": 8, "max_choices": 4}, "--max-choices 4 with --max-n 8"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 16}, "--max-num-batched-tokens 8 with --max-num-seqs 16"),
        ({"max_num_seqs": 0}, "--max-num-seqs 0"),
        ({"cache_answers": True, "prefix_cache": False}, "--cache-answers yes with --no-prefix-cache no"),
        ({"block_size": 24}, "--block-size 24"),
        ({"block_size": 512}, "--block-size 512"),
        ({"kv_cache_gb": 0.0}, "--kv-cache-gb 0.0"),
        ({"kv_cache_gb": float("nan")}, "--kv-cache-gb nan"),
        ({"gpu_memory_utilization": 1.1}, "--gpu-memory-utilization 1.1"),
        ({"gpu_memory_utilization": 0.9, "device": "cpu"}, "--gpu-memory-utilization 0.9 with --device cpu"),
        ({"gpu_memory_utilization": 0.9, "prefill": 1, "decode": 1}, "--gpu-memory-utilization 0.9 with --prefill 1"),
        ({"drain_timeout_s": float("inf")}, "--drain-timeout inf"),
        ({"max_model_len": 1}, "--max-model-len 1"),
        ({"num_threads": 0}, "--threads 0"),
        ({"device": "tpu"}, "--device tpu"),
        ({"dtype": "int8"}, "--dtype int8"),
        ({"kernels": "cuda"}, "--kernels cuda"),
        ({"quantization": "int4"}, "--quantization int4"),
        ({"quantization": "int8", "kernels": "torch"}, "--quantization int8 with --kernels torch"),
        ({"log_level": "loud"}, "--log-level loud"),
        ({"api_keys": [""]}, "--api-key 1 given"),
        ({"admin_key": " "}, "--admin-key given with api_keys -"),
        ({"admin_key": "k", "api_keys": ["j", "k "]}, "--admin-key given with --api-key 2 given"),
        ({"model": " "}, "MODEL"),
        ({"served_model_name": ""}, "--served-model-name"),
        ({"drain_timeout_s": -1.0}, "--drain-timeout -1.0"),
        ({"max_waiting_groups": 0}, "--max-waiting-groups 0"),
        ({"max_body_bytes": 0}, "--max-body-bytes 0"),
        ({"key_max_requests": -1}, "--key-max-requests -1"),
        ({"key_max_choices": -1}, "--key-max-choices -1"),
        ({"host": ""}, "--host"),
        ({"prefill": 1}, "--prefill 1 with decode 0 (default)"),
        ({"routing_policy": "best"}, "--routing-policy best: must be one of kv, least-loaded, round-robin, session"),
        ({"session_expiry_s": 0.0}, "--session-expiry 0"),
        ({"spread_choices": -1}, "--spread-choices -1"),
        ({"migration_limit": -1}, "--migration-limit -1"),
        ({"migration_wait_s": -1.0}, "--migration-wait -1"),
        ({"queue_timeout_s": 0.0}, "--queue-timeout 0"),
        ({"engine_restarts": -1}, "--engine-restarts -1"),
        ({"prefill": -1, "decode": 1}, "--prefill -1"),
        ({"prefill": 1, "decode": -1}, "--decode -1"),
        ({"prefill": 1, "decode": 1, "role": "decode"}, "--role decode with --prefill 1"),
        ({"prefill": 1, "decode": 1, "prefill_urls": ["http://a"]}, "--prefill-url http://a with --prefill 1"),
        ({"prefill_urls": ["http://a"]}, "--prefill-url http://a with role both (default)"),
        ({"prefill_urls": ["http://a"], "role": "prefill"}, "--prefill-url http://a with --role prefill"),
        ({"prefill_urls": ["host:8000"], "role": "decode"}, "--prefill-url host:8000"),
        ({"prefill_urls": ["http://host:port"], "role": "decode"}, "--prefill-url http://host:port"),
        ({"prefill_urls": ["http://host:65536"], "role": "decode"}, "--prefill-url http://host:65536"),
        ({"prefill_urls": ["http://a b"], "role": "decode"}, "--prefill-url http://a b"),
        ({"prefill_urls": ["http://:8000"], "role": "decode"}, "--prefill-url http://:8000"),
        ({"prefill_urls": ["http://[::1"], "role": "decode"}, "--prefill-url http://[::1"),
        ({"prefill_urls": ["http://a", "http://a/"], "role": "decode"}, "--prefill-url http://a, http://a/"),
        ({"bypass_tokens": -1}, "--bypass-tokens -1"),
        ({"prefill_timeout_s": 0.0}, "--prefill-timeout 0.0"),
        ({"side_channel_host": "0.0.0.0"}, "--side-channel-host 0.0.0.0"),
        ({"side_channel_host": ""}, "--side-channel-host"),
        ({"side_channel_port": 65536}, "--side-channel-port 65536"),
        ({"side_channel_port": 9, "prefill": 1, "decode": 1}, "--side-channel-port 9 with --prefill 1"),
        ({"lease_s": 2.9}, "--lease 2.9"),
        ({"pull_timeout_s": float("inf")}, "--pull-timeout inf"),
        ({"heartbeat_timeout_s": 0.9}, "--heartbeat-timeout 0.9"),
        ({"heartbeat_timeout_s": float("nan")}, "--heartbeat-timeout nan"),
        ({"step_timeout_s": 0.0}, "--step-timeout 0.0"),
        ({"kv_events_port": 65535}, "--kv-events-port 65535"),
        ({"kv_events_port": 65531, "prefill": 2, "decode": 1}, "--kv-events-port 65531"),
        ({"kv_events_port": -1}, "--kv-events-port -1"),
        ({"kv_events_port": 0, "prefix_cache": False}, "--kv-events-port 0 with --no-prefix-cache no"),
        ({"kv_events_host": "0.0.0.0"}, "--kv-events-host 0.0.0.0"),
    ],
)
def test_what_cannot_be_is_refused_by_name(flags: dict[str, object], names: str) -> None:
    assert refused(flags).startswith(names)


def test_the_source_to_blame_is_named() -> None:
    assert refused(environ={"MOTET_PORT": "70000"}).startswith("port 70000 (MOTET_PORT)")


def test_an_unknown_variable_is_refused_with_the_nearest_name() -> None:
    assert "did you mean MOTET_MAX_NUM_SEQS?" in refused(environ={"MOTET_MAX_NUM_SEQ": "1"})


def test_variables_of_a_kubernetes_service_are_explained() -> None:
    assert "enableServiceLinks" in refused(environ={"MOTET_PORT": "tcp://10.0.0.1:8000"})
    assert "enableServiceLinks" in refused(environ={"MOTET_SERVICE_HOST": "10.0.0.1"})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("prot = 1", "did you mean port?"),
        ('port = "8000"', None),
        ("port = 1.5", "port: expected `int`, got `float`"),
        ("[server]\nport = 1", "no such setting"),
        ("port = ", "cannot be read as TOML"),
    ],
)
def test_a_file_is_checked(tmp_path: Path, content: str, says: str | None) -> None:
    file = tmp_path / "motet.toml"
    file.write_text(content)
    if says is None:
        assert resolved(file=file).rows["port"].value == 8000
        return
    with pytest.raises(ConfigError, match="motet") as caught:
        resolved(file=file)
    assert says in caught.value.message


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--config .*gone\.toml: there is no such file"):
        resolved(file=tmp_path / "gone.toml")


def test_a_value_that_is_no_number_is_named() -> None:
    assert refused(environ={"MOTET_PORT": "http"}) == "MOTET_PORT=http: expected `int`, got `str`"


def test_every_setting_but_the_model_has_a_default() -> None:
    assert [field.name for field in setting_fields().values() if field.required] == []
