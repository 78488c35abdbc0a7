"""Settings: the source that wins, the source that an error names, and the values that are refused."""

from pathlib import Path

import pytest

from motet.errors import ConfigError
from motet.settings.record import Settings
from motet.settings.resolve import arguments_of, resolve_settings, secrets_of
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


def test_without_any_source_all_settings_are_defaults() -> None:
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


def test_the_environment_can_set_numbers_and_switches_and_lists() -> None:
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


def test_the_environment_can_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "motet.toml"
    file.write_text('api_keys = ["k"]\n')
    rows = resolved(environ={"MOTET_CONFIG": str(file), "MOTET_CACHE_DIR": "/tmp/x"}).rows
    assert (rows["api_keys"].value, rows["api_keys"].source) == (("k",), str(file))


def test_secrets_are_counted_and_never_shown() -> None:
    flags: dict[str, object] = {
        "api_keys": ["secret-1", "secret-2"],
        "cluster_key": "secret-3",
        "admin_key": "secret-4",
        "worker_key": "secret-5",
        "role": "decode",
        "prefill_urls": ["http://p"],
    }
    names = ("api_keys", "cluster_key", "admin_key", "worker_key")
    rows = resolved(flags).rows
    assert [rows[name].shown for name in names] == ["2 given", "given", "given", "given"]
    assert [resolved().rows[name].shown for name in names] == ["-"] * 4


def test_a_cell_has_a_record_of_its_own() -> None:
    cell = resolved({"prefill": 2, "decode": 1, "bypass_tokens": 0}).cell
    assert (cell.prefill, cell.decode, cell.bypass_tokens) == (2, 1, 0)
    assert (resolved().cell.prefill, resolved().cell.decode) == (0, 0)


@pytest.mark.parametrize(("alias", "dtype"), [("half", "float16"), ("float", "float32"), ("bfloat16", "bfloat16")])
def test_dtypes_have_the_aliases_of_vllm(alias: str, dtype: str) -> None:
    assert resolved({"dtype": alias}).engine().dtype == resolved(environ={"MOTET_DTYPE": alias}).engine().dtype == dtype


def test_prefill_servers_can_be_repeated_or_separated_by_commas() -> None:
    three = ("http://a:1", "https://b", "http://c:3/x")
    flags: dict[str, object] = {"role": "decode", "prefill_urls": ["http://a:1, https://b", "http://c:3/x"]}
    assert resolved(flags).cell.prefill_urls == three
    environ = {"MOTET_ROLE": "decode", "MOTET_PREFILL_URLS": "http://a:1,https://b,http://c:3/x"}
    assert resolved(environ=environ).cell.prefill_urls == three


def test_the_role_of_a_server_is_one_of_three() -> None:
    engine = resolved({"role": "prefill", "side_channel_port": 7}).engine(model_path=Path("/m"), model_name="m")
    assert (engine.role, engine.side_channel_port) == (Role.PREFILL, 7)
    assert refused({"role": "prefil"}) == "--role prefil: must be one of prefill, decode, both"


def test_defaults_adapt_to_settings_that_were_given() -> None:
    rows = resolved({"max_num_seqs": 16}).rows
    assert (rows["max_n"].value, rows["max_n"].source) == (16, "default, from max_num_seqs")
    rows = resolved({"max_num_seqs": 2000, "max_n": 1500}).rows
    assert rows["max_num_batched_tokens"].value == 2000
    assert rows["max_choices"].value == 1500


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ({"max_n": 512, "max_num_seqs": 256}, "--max-n 512 with --max-num-seqs 256"),
        ({"max_n": 512}, "--max-n 512 with max_num_seqs 256 (default)"),
        ({"max_n": 8, "max_choices": 4}, "--max-choices 4 with --max-n 8"),
        ({"max_num_batched_tokens": 8, "max_num_seqs": 16}, "--max-num-batched-tokens 8 with --max-num-seqs 16"),
        ({"cache_answers": True, "prefix_cache": False}, "--cache-answers with --no-prefix-cache: the prefix cache"),
        ({"gpu_memory_utilization": 0.9, "device": "cpu"}, "--gpu-memory-utilization 0.9 with --device cpu"),
        ({"gpu_memory_utilization": 0.9, "prefill": 1, "decode": 1}, "--gpu-memory-utilization 0.9 with --prefill 1"),
        ({"quantization": "int8", "kernels": "torch"}, "--quantization int8 with --kernels torch"),
        ({"admin_key": " "}, "--admin-key given: must be neither blank"),
        ({"admin_key": "clé"}, "--admin-key given: must be ASCII characters"),
        ({"api_keys": ["k", "clé"]}, "--api-key 2 given: must be keys of ASCII characters"),
        ({"admin_key": "k", "api_keys": ["j", "k "]}, "--admin-key given with --api-key 2 given"),
        ({"worker_key": "k", "api_keys": ["k"]}, "--worker-key given with --api-key 1 given"),
        ({"worker_key": "k", "admin_key": "k"}, "--worker-key given with --admin-key given: must"),
        ({"key_priority": ["j=0"], "api_keys": ["k"]}, "--key-priority 1 given with --api-key 1 given"),
        ({"key_priority": ["secret"], "api_keys": ["secret"]}, "--key-priority 1 given: must be KEY=NUMBER"),
        ({"key_priority": ["secret=x"], "api_keys": ["secret"]}, "--key-priority 1 given: must be KEY=NUMBER"),
        ({"key_share": ["j=2"], "api_keys": ["k"]}, "--key-share 1 given with --api-key 1 given"),
        ({"key_share": ["secret=0"], "api_keys": ["secret"]}, "--key-share 1 given: must be KEY=WEIGHT"),
        ({"key_share": ["secret=1e9"], "api_keys": ["secret"]}, "--key-share 1 given: must be KEY=WEIGHT"),
        ({"host": "0.0.0.0"}, "--host 0.0.0.0: anyone who reaches that address"),
        ({"host": "10.0.0.1", "admin_key": "boss"}, "--host 10.0.0.1: anyone who reaches that address"),
        (
            {"role": "decode", "side_channel_host": "10.0.0.1"},
            "--side-channel-host 10.0.0.1: anyone who reaches that address",
        ),
        (
            {"role": "prefill", "side_channel_host": "10.0.0.1"},
            "--side-channel-host 10.0.0.1: anyone who reaches that address",
        ),
        ({"role": "prefill", "side_channel_host": "10.0.0.1", "cluster_key": " "}, "--cluster-key given: must be not"),
        ({"prefill": 1}, "--prefill 1 with decode 0 (default)"),
        ({"prefill": 1, "decode": 1, "role": "decode"}, "--role decode with --prefill 1"),
        ({"prefill": 1, "decode": 1, "prefill_urls": ["http://a"]}, "--prefill-url http://a with --prefill 1"),
        ({"prefill_urls": ["http://a"]}, "--prefill-url http://a with role both (default)"),
        ({"prefill_urls": ["http://a"], "role": "prefill"}, "--prefill-url http://a with --role prefill"),
        ({"side_channel_port": 9, "prefill": 1, "decode": 1}, "--side-channel-port 9 with --prefill 1"),
        ({"kv_events_port": 65531, "prefill": 2, "decode": 1}, "--kv-events-port 65531 with --prefill 2"),
        ({"kv_events_port": 0, "prefix_cache": False}, "--kv-events-port 0 with --no-prefix-cache: without"),
    ],
)
def test_settings_that_exclude_each_other_are_refused_by_name(flags: dict[str, object], names: str) -> None:
    assert refused(flags).startswith(names)


@pytest.mark.parametrize(
    "flags",
    [
        {"host": "0.0.0.0", "api_keys": ["k"]},
        {"host": "0.0.0.0", "insecure": True},
        {"host": "::1"},
        {"host": "localhost"},
        {"role": "decode", "side_channel_host": "10.0.0.1", "cluster_key": "k"},
        {"role": "decode", "side_channel_host": "10.0.0.1", "insecure": True},
        {"prefill": 1, "decode": 1, "side_channel_host": "10.0.0.1"},
    ],
)
def test_a_server_leaves_loopback_with_keys_or_if_forced(flags: dict[str, object]) -> None:
    resolved(flags)


def test_an_error_names_the_source_of_the_value(tmp_path: Path) -> None:
    assert refused(environ={"MOTET_PORT": "70000"}).startswith("port 70000 (MOTET_PORT)")
    file = tmp_path / "motet.toml"
    file.write_text("block_size = 4")
    with pytest.raises(ConfigError, match=r"block_size 4 \(.*motet\.toml\): must be one of 8, 16, 32, 64, 128"):
        resolved(file=file)


def test_a_switch_that_is_on_can_be_given_in_both_forms() -> None:
    assert resolved({"prefix_cache": True}).rows["prefix_cache"].source == "--prefix-cache"
    assert resolved({"prefix_cache": False}).rows["prefix_cache"].source == "--no-prefix-cache"


def test_a_variable_that_only_tests_read_is_not_a_setting() -> None:
    assert "no such setting" in refused(environ={"MOTET_VLLM_VENV": "/venv"})


def test_an_unknown_variable_is_refused_with_the_nearest_name() -> None:
    assert "did you mean MOTET_MAX_NUM_SEQS?" in refused(environ={"MOTET_MAX_NUM_SEQ": "1"})


def test_only_a_similar_name_is_suggested() -> None:
    assert refused(environ={"MOTET_X": "1"}) == (
        "MOTET_X: there is no such setting; `motet serve --help-all` and docs/settings.md list them"
    )


def test_variables_of_a_kubernetes_service_are_explained() -> None:
    assert "enableServiceLinks" in refused(environ={"MOTET_PORT": "tcp://10.0.0.1:8000"})
    assert "enableServiceLinks" in refused(environ={"MOTET_SERVICE_HOST": "10.0.0.1"})


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("prot = 1", "did you mean port?"),
        ('port = "8000"', None),
        ("port = 1.5", "port: must be a whole number, 0 (any free port) to 65535"),
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


def test_a_value_that_is_not_a_number_is_named() -> None:
    assert refused(environ={"MOTET_PORT": "http"}) == (
        "MOTET_PORT=http: must be a whole number, 0 (any free port) to 65535"
    )


def test_values_become_a_command_line_and_secrets_variables() -> None:
    values = {"max_num_seqs": "4", "prefix_cache": False, "adapters": ["a=x", "b=y"], "admin_key": "secret"}
    arguments = ["--max-num-seqs", "4", "--no-prefix-cache", "--adapter", "a=x", "--adapter", "b=y"]
    assert arguments_of(values, config=Path("a.toml")) == ["--config", "a.toml", *arguments]
    assert secrets_of({**values, "api_keys": ["a", "b"]}) == {"MOTET_ADMIN_KEY": "secret", "MOTET_API_KEYS": "a,b"}
