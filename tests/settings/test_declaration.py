"""Every declaration has a clear meaning and a default that is allowed, and refuses values out of its range."""

import re
from itertools import product

import pytest

from motet.errors import ConfigError
from motet.settings.declaration import ServerCommand
from motet.settings.resolve import names_of, resolve_settings
from motet.settings.server_config import RECORDS, SETTINGS

A_WORKER = {"workers": ["http://a:8000"]}


def refusal_of(name: str, value: object) -> str:
    command = SETTINGS[name].commands[0]
    needed = A_WORKER if command is ServerCommand.GATEWAY else {}
    with pytest.raises(ConfigError) as caught:
        resolve_settings({**needed, name: value}, environ={}, command=command)
    return caught.value.message


def test_every_name_and_every_flag_belongs_to_one_setting() -> None:
    assert len(SETTINGS) == sum(len(settings) for settings in RECORDS.values())
    assert len({one.flag for one in SETTINGS.values()}) == len(SETTINGS)
    assert {name for command in ServerCommand for name in names_of(command)} == SETTINGS.keys()


def test_the_meaning_of_a_setting_is_in_sentences() -> None:
    assert [one.name for one in SETTINGS.values() if not re.fullmatch(r"[A-Za-z].*\w.*[.]", one.help)] == []


def test_the_default_is_a_value_that_is_allowed() -> None:
    assert {one.name: one.refusal(one.default) for one in SETTINGS.values() if one.refusal(one.default)} == {}


def test_only_keys_are_secrets() -> None:
    keys = {
        name for name in SETTINGS if name.endswith(("_key", "_keys")) or name in ("key_of", "key_priority", "key_share")
    }
    keys -= {"cache_salt_per_key"}
    assert {name for name, one in SETTINGS.items() if one.secret} == keys


@pytest.mark.parametrize(
    ("names", "values"),
    [
        ("port side_channel_port", (-1, 65536)),
        ("kv_events_port", (-1, 65535)),
        ("prefill_port decode_port", (-1, 70000)),
        ("block_size", (0, 1, 4, 24, 256, 512)),
        ("max_num_seqs max_n max_waiting_groups max_body_bytes num_threads gateways", (0,)),
        ("min_decode choices_per_decode prompts_per_prefill", (0,)),
        ("max_model_len", (1,)),
        ("key_max_requests key_max_choices spread_choices migration_limit engine_restarts", (-1,)),
        ("bypass_tokens prefill decode min_prefill", (-1,)),
        ("kv_cache_gb", (0.0, float("nan"), float("inf"))),
        ("gpu_memory_utilization", (0.0, 1.1)),
        ("cpus_per_worker", (0.0, float("nan"))),
        ("gpus_per_worker", (-1.0, 1.5, 2.0, float("inf"))),
        ("lease_s", (2.9, float("inf"))),
        ("pull_timeout_s", (0.0, float("inf"))),
        ("heartbeat_timeout_s", (0.9, float("nan"))),
        ("step_timeout_s prefill_timeout_s session_expiry_s queue_timeout_s", (0.0,)),
        ("start_timeout_s leader_timeout_s upstream_timeout_s", (0.0,)),
        ("migration_wait_s drain_timeout_s", (-1.0, float("inf"))),
        ("scale_up_delay_s scale_down_delay_s", (-1.0,)),
        ("worker_timeout_s", (1.9,)),
        ("device", ("tpu", "cuda:", "cpu ")),
        ("dtype", ("int8",)),
        ("kernels", ("cuda",)),
        ("quantization", ("int4",)),
        ("role", ("prefil",)),
        ("ingress", ("both",)),
        ("routing_policy", ("best",)),
        ("log_level", ("loud",)),
        ("log_format", ("xml",)),
        ("model app_name", (" ",)),
        ("served_model_name host", ("",)),
        ("side_channel_host", ("", "0.0.0.0", "::", "*")),
        ("kv_events_host", ("", "0.0.0.0")),
        ("api_keys", (["k", ""],)),
        ("prefill_urls", (["host:8000"], ["http://host:port"], ["http://host:65536"], ["http://a b"], ["http://:8000"])),
        ("prefill_urls", (["http://[::1"], ["http://a", "http://a/"], ["http://\ud800"])),
        ("workers", (["a"], ["http://a:8000", "http://a:8000/v1"], ["prefill"])),
        ("role_of", (["http://a"], ["http://a=cook"])),
        ("key_of", (["http://a"], ["a=secret"], ["http://a=k\n"])),
        ("worker_api_key worker_key", ("k\n", "a b")),
        ("tokenizer_of", (["model"], ["=folder"], ["model="])),
        ("resources_of", (["decode:h100"], ["both=h100:1"])),
    ],
)  # fmt: skip
def test_an_invalid_value_is_refused_and_its_flag_named(names: str, values: tuple[object, ...]) -> None:
    for name, value in product(names.split(), values):
        assert refusal_of(name, value).startswith(f"{SETTINGS[name].flag} "), (name, value)


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        (
            "num_threads",
            10_000,
            "--threads 10000: must be 1 to 1024: more threads than cores only wait for each other",
        ),
        ("port", 70000, "--port 70000: must be 0 (any free port) to 65535"),
        ("block_size", 256, "--block-size 256: must be one of 8, 16, 32, 64, 128"),
        ("lease_s", 2.0, "--lease 2.0: must be at least 3: a reader sends a heartbeat every second"),
        ("migration_limit", -1, "--migration-limit -1: must be 0 (never) or more"),
        ("gpu_memory_utilization", 2.0, "--gpu-memory-utilization 2.0: must be above 0 and at most 1"),
        ("gpus_per_worker", 2.0, "--gpus-per-worker 2.0: must be 0 to 1: an engine uses one GPU"),
        ("min_prefill", -1, "--min-prefill -1: must be 0 or more"),
        ("ingress", "both", "--ingress both: must be one of gateway, direct"),
        ("device", "tpu", "--device tpu: must be auto, cpu, cuda or cuda:K"),
        ("role", "prefil", "--role prefil: must be one of prefill, decode, both"),
        ("workers", ["http://a", "http://a/"], "--worker http://a, http://a/: http://a is named twice"),
        ("role_of", ["http://a=cook"], "--role-of http://a=cook: http://a=cook: a role is one of"),
        ("key_of", ["a=secret"], "--key-of 1 given: must be URL=KEY, such as http://host:8000=secret"),
        ("api_keys", [""], "--api-key 1 given: must be keys of ASCII characters that are not blank"),
        ("app_name", " ", "--app-name  : must be not empty"),
    ],
)
def test_a_refusal_names_the_allowed_values_and_the_reason(name: str, value: object, says: str) -> None:
    assert refusal_of(name, value).startswith(says)


def test_help_ends_with_the_range_and_the_default_in_its_unit() -> None:
    shown = {name: SETTINGS[name].full_help.partition(" [")[2] for name in SETTINGS}
    assert shown["queue_timeout_s"] == "above 0; default: 60 s]"
    assert shown["kv_cache_gb"].startswith("above 0; default: 2 GiB; on a CPU with little memory, ")
    assert shown["max_model_len"] == "at least 2; default: the model's maximum, or its original length with LongRoPE]"
    assert shown["prefix_cache"] == "default: on]"
    assert shown["worker_api_key"] == ""
