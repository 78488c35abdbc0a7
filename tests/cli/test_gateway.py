"""`motet gateway` on the command line."""

from pathlib import Path

import pytest

from motet.cli.gateway import make_plan
from motet.deploy.ready import gateway_ready_line, url_in
from motet.deploy.tokenizers import TokenizerRules
from motet.engines.base import WorkerReport, WorkerState
from motet.settings import Settings, resolve_settings
from motet.settings.record import GATEWAY, flag_of
from motet.text.formats import ParserNames
from tests.cli.test_commands import fails, motet
from tests.tiny_tokenizer import save_tiny_tokenizer

URL = "http://127.0.0.1:1"


def settings(**flags: object) -> Settings:
    return resolve_settings({"workers": [URL], **flags}, environ={}, names=GATEWAY)


def test_every_setting_of_a_gateway_has_a_flag_and_no_other() -> None:
    text = motet("gateway", "--help", COLUMNS="200", TERMINAL_WIDTH="200").output
    assert [name for name in GATEWAY if f" {flag_of(name)} " not in text] == []
    assert "--max-num-seqs" not in text


def test_settings_that_cannot_be_are_refused() -> None:
    fails(motet("gateway"), 2, "a gateway needs workers", "--worker URL")
    fails(motet("gateway", "--worker", "nowhere"), 2, "--worker nowhere")
    fails(motet("gateway", "--worker", URL, "--chat-template", "/gone.jinja"), 2, "--chat-template")


def test_a_gateway_that_finds_no_worker_says_so_and_ends() -> None:
    result = motet("gateway", "--worker", URL, "--port", "0", "--start-timeout", "0.05", "--log-level", "error")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "motet: no worker that answers requests was there within 0.05 s\n" in result.stderr
    assert "\n  127.0.0.1:1 (http://127.0.0.1:1) is " in result.stderr


def test_a_plan_follows_the_settings(tmp_path: Path) -> None:
    tokenizer = save_tiny_tokenizer(tmp_path / "tokenizer")
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages }}")
    plan = make_plan(
        settings(
            tokenizer=str(tokenizer),
            tokenizer_of=(f"org/other={tokenizer}",),
            chat_template=str(template),
            reasoning_parser="qwen3",
            served_model_name="mine",
        )
    )
    parsers = ParserNames(reasoning="qwen3")
    assert plan.tokenizers == TokenizerRules({"org/other": tokenizer}, tokenizer, "{{ messages }}", parsers)
    assert plan.server.served_model_name == "mine"


def test_what_the_workers_say_is_left_to_them() -> None:
    plan = make_plan(settings())
    assert (plan.tokenizers, plan.server.served_model_name) == (TokenizerRules({}), "")


@pytest.mark.parametrize(("ids", "says"), [(["a:1"], "(1 worker: a:1)"), (["a:1", "b:2"], "(2 workers: a:1, b:2)")])
def test_the_ready_line_tells_programs_where_the_gateway_is(ids: list[str], says: str) -> None:
    workers = [WorkerReport(id=id, address="there", state=WorkerState.READY) for id in ids]
    away = WorkerReport(id="gone", address="there", state=WorkerState.DEAD)
    line = gateway_ready_line("http://127.0.0.1:8000", ["tiny", "other"], [*workers, away])
    assert "is ready: tiny, other at " in line
    assert url_in(line) == "http://127.0.0.1:8000"
    assert line.endswith(says)
