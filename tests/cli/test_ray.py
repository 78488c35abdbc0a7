"""`motet ray` on the command line, as far as it needs no Ray."""

import subprocess
import sys

import pytest
import yaml  # type: ignore[import-untyped]

from motet.cli.options import ON_RAY, OPTIONS
from motet.cli.ray import check_extra
from motet.config import RayConfig
from motet.deploy.ready import ray_ready_line, url_in
from motet.errors import ConfigError
from motet.settings.record import RAY, flag_of, setting_fields
from tests.cli.test_commands import fails, motet


def test_every_setting_of_ray_has_a_flag_and_no_other() -> None:
    text = motet("ray", "--help", COLUMNS="200", TERMINAL_WIDTH="200").output
    assert [name for name in RAY if f" {flag_of(name)} " not in text] == []
    for name in ("role", "side_channel_port", "prefill_urls", "workers"):
        assert f" {flag_of(name)} " not in text


def test_every_setting_of_ray_is_explained_in_its_panel() -> None:
    assert list(OPTIONS[ON_RAY]) == [field for field in RayConfig.__struct_fields__ if field in OPTIONS[ON_RAY]]
    assert set(OPTIONS[ON_RAY]) == set(RayConfig.__struct_fields__)


def test_prefill_and_decode_are_explained_as_replicas() -> None:
    text = motet("ray", "--help", COLUMNS="200", TERMINAL_WIDTH="200").output
    assert "Prefill replicas" in text
    assert "on this machine" not in text


def test_settings_that_cannot_be_are_refused() -> None:
    fails(motet("ray", "--ingress", "both"), 2, "--ingress both", "gateway, direct")
    fails(motet("ray", "--prefill", "1"), 2, "--prefill 1", "--decode at least 1")
    fails(motet("ray", "--resources-of", "decode"), 2, "--resources-of decode", "decode=h100:1")
    fails(motet("ray", "--tool-parser", "mine"), 2, "--tool-parser mine is unknown")
    fails(motet("ray", MOTET_INGRES="direct"), 2, "MOTET_INGRES", "did you mean MOTET_INGRESS?")


def test_without_the_extra_it_is_said_what_to_install() -> None:
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


@pytest.mark.slow
def test_no_command_imports_ray_before_it_is_needed() -> None:
    """It costs seconds, and may not be there."""
    program = (
        "import sys, motet.cli, motet.deploy.ray.worker, motet.deploy.ray.serve_config; sys.exit('ray' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def test_the_ready_line_tells_programs_where_the_cell_is() -> None:
    line = ray_ready_line("tiny", "http://127.0.0.1:8000", {"gateway": 1, "decode": 2, "prefill": 1, "directory": 1})
    assert url_in(line) == "http://127.0.0.1:8000"


def test_defaults_said_in_words_of_its_own_are_those_of_the_settings() -> None:
    text = motet("ray", "--help", COLUMNS="200", TERMINAL_WIDTH="200").output
    for name in ("host", "port", "drain_timeout_s", "prefill"):
        (line,) = [line for line in text.splitlines() if f" {flag_of(name)} " in line]
        default = setting_fields()[name].default
        assert f"(default {default:g})" in line if isinstance(default, float) else f"(default {default})" in line
