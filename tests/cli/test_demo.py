"""The receipt has the counts of the workers and the times of the client. A kill reports its pause and what changed."""

from dataclasses import replace

import httpx
import pytest

from motet.cli.conversation import Conversation, StreamedChoice
from motet.cli.demo.command import NO_KILL, command_name, next_steps
from motet.cli.demo.engine_kill import EngineKill
from motet.cli.demo.receipt import Receipt
from motet.deploy.child import BlockSize, CounterSnapshot
from motet.errors import EngineError
from tests.cli.test_servers import motet

SINGLE = CounterSnapshot(
    prompt_tokens=280,
    prefill_tokens=280,
    generation_tokens=480,
    forced_tokens=5,
    spec_decode_num_draft_tokens=31,
    spec_decode_num_accepted_tokens=17,
    forks=3,
    blocks_shared=54,
    bytes_saved=19_906_560,
    trunk_tokens_read=33_320,
    trunk_tokens_unshared=133_280,
    prefills=0,
    kv_transfers=0,
    kv_transfer_bytes=0,
    recomputed_tokens=0,
)
CELL = replace(SINGLE, prefills=1, kv_transfers=1, kv_transfer_bytes=18_000, recomputed_tokens=1)
BLOCK = BlockSize(tokens=16, bytes=1000)


def conversation(*lines: str) -> Conversation:
    ticks = iter(range(100))
    talk = Conversation(2, clock=lambda: next(ticks))
    for line in lines:
        talk.feed(f"data: {line}")
    return talk


def complete() -> Conversation:
    return conversation(
        '{"choices": [{"index": 0, "delta": {"content": "a"}}]}',
        '{"choices": [{"index": 1, "delta": {"content": "b"}}]}',
        '{"choices": [], "usage": {"prompt_tokens": 280, "completion_tokens": 480}}',
        "[DONE]",
    )


def test_a_receipt_shows_the_cost_of_an_answer() -> None:
    assert Receipt.of(complete(), CELL, block=BLOCK).figures() == {
        "n": 2,
        "prefills": 1,
        "transfers": 1,
        "transfer_bytes": 18_000,
        "trunk_bytes": 18_000,
        "recomputed_tokens": 1,
        "prompt_tokens": 280,
        "prompt_tokens_prefilled": 280,
        "completion_tokens": 480,
        "forced_tokens": 5,
        "draft_tokens": 31,
        "accepted_tokens": 17,
        "blocks_shared": 54,
        "bytes_not_copied": 19_906_560,
        "first_token_s": 1,
        "total_s": 4,
        "tokens_per_s": 120.0,
    }


@pytest.mark.parametrize(("prompt_tokens", "blocks"), [(1, 0), (2, 1), (17, 1), (18, 2), (280, 18)])
def test_the_trunk_is_the_blocks_of_the_prompt_without_its_last_token(prompt_tokens: int, blocks: int) -> None:
    assert BLOCK.bytes_of(prompt_tokens - 1) == blocks * BLOCK.bytes


def test_the_sentences_show_the_work_that_was_saved() -> None:
    assert Receipt.of(complete(), CELL, block=BLOCK).sentences() == [
        "1 prefill and 1 KV transfer of 18 kB for 2 answers; with one for each answer it would be 2 and 36 kB.",
        "280 prompt tokens were computed, not 2 x 280 = 560.",
        "480 output tokens in 4.0 s, the first after 1.00 s: 120 tokens/s. 17 of 31 draft tokens were accepted.",
    ]


def test_the_sentences_of_a_single_server_have_no_transfers() -> None:
    sentences = Receipt.of(complete(), SINGLE, block=BLOCK).sentences()
    assert not any("transfer" in sentence for sentence in sentences)
    assert sentences[0] == "280 prompt tokens were computed, not 2 x 280 = 560."


def test_a_stream_without_usage_gives_no_receipt() -> None:
    with pytest.raises(EngineError, match="without usage"):
        Receipt.of(conversation("[DONE]"), CELL, block=BLOCK)


WORKERS = """{"workers": [
    {"id": "prefill-0", "role": "prefill", "pid": 1, "choices_running": 0},
    {"id": "decode-0", "role": "decode", "pid": 2, "choices_running": 0},
    {"id": "decode-1", "role": "decode", "pid": 3, "choices_running": 2}
]}"""


KILLED: list[int] = []


def read(arrivals: list[tuple[float, str]], *, expected: list[StreamedChoice]) -> tuple[EngineKill, Conversation]:
    """Reads the text of choice 0 as it arrives at these seconds. The kill has no effect but to be recorded."""
    now_s = 0.0
    talk = Conversation(2)
    transport = httpx.MockTransport(lambda _: httpx.Response(200, text=WORKERS))
    with httpx.Client(base_url="http://server", transport=transport) as client:
        kill = EngineKill(expected, client=client, kill=KILLED.append, clock=lambda: now_s)
        for second, text in arrivals:
            now_s = second
            talk.answers[0].text += text
            kill.read(talk)
    return kill, talk


def test_the_engine_that_generates_is_killed_in_mid_stream_and_the_pause_is_measured() -> None:
    KILLED.clear()
    expected = [StreamedChoice("0123456789"), StreamedChoice()]
    arrivals = [(1.0, "01"), (9.0, "2"), (9.5, "3456"), (11.0, "789"), (11.1, "")]
    kill, talk = read(arrivals, expected=expected)
    assert KILLED == [3]
    assert kill.figures(talk.answers) == {"worker": "decode-1", "pause_ms": 1500, "identical": 2}
    assert kill.sentence(talk.answers) == (
        "decode-1 (process 3) was killed in mid-stream: a pause of 1500 ms, "
        "and 2 of 2 answers are the same, to the last character."
    )


def test_an_answer_that_changed_is_reported() -> None:
    expected = [StreamedChoice("0123456789"), StreamedChoice()]
    kill, talk = read([(1.0, "01234"), (2.0, "X")], expected=expected)
    assert "1 of 2 answers are the same" in kill.sentence(talk.answers)


def test_answers_that_end_before_the_kill_are_reported() -> None:
    kill, talk = read([], expected=[StreamedChoice("0"), StreamedChoice()])
    assert kill.sentence(talk.answers) == "The answers had ended before an engine could be killed."


@pytest.mark.parametrize(
    ("flags", "says"), [("--decode 1", True), ("--single", True), ("--no-kill", False), ("", False)]
)
def test_a_demo_without_a_kill_says_so_at_once(flags: str, says: bool) -> None:
    """The bug: with one decode engine, the kill that its help announces was left out without a word."""
    result = motet("demo", "--model", "/gone", *flags.split())
    assert result.exit_code != 0  # the model is looked for afterwards
    assert (NO_KILL in result.stdout) is says


@pytest.mark.parametrize("flag", ["--prefill", "--decode"])
def test_a_single_engine_has_no_number_of_prefill_or_decode_engines(flag: str) -> None:
    result = motet("demo", "--model", "/gone", "--single", flag, "3")
    assert result.exit_code != 0
    assert "omit --prefill and --decode" in result.stderr


def test_the_next_steps_have_a_command_that_the_shell_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bug: after `make demo`, which starts .venv/bin/motet, the shell did not find `motet serve`."""
    monkeypatch.setenv("PATH", "")
    assert "\n  .venv/bin/motet serve               the API" in next_steps(command_name(".venv/bin/motet"))
    assert command_name("/motet/src/motet/__main__.py") == "motet"
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    assert command_name("/usr/bin/motet") == "motet"
