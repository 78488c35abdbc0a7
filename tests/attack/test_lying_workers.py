"""Workers of a gateway that lie: their groups move to other workers, they get no more groups, and `/status` has the
reason."""

import json
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from motet.engine import WorkerState
from motet.engines.http import MAX_REPORT_BYTES
from motet.engines.wire import EngineReport, frame
from motet.routing.groups.placement import ResponseCheck
from motet.types import ChoiceDelta, GenerateRequest, GroupDelta
from tests.attack.lying_server import REPORT, lying
from tests.deploy.gateways import BODY, RunningGateway
from tests.deploy.running import EXPECTED, Running, texts
from tests.error_response import assert_error
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.anyio


def answer_with(choice: ChoiceDelta) -> Callable[[GenerateRequest], bytes]:
    return lambda request: frame(GroupDelta(request.request_id, (choice,)))


@pytest.fixture
def long_distrust(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that lies gets no more groups for longer than the test takes, on any machine."""
    monkeypatch.setattr("motet.routing.workers.member.DISTRUST_S", PATIENCE_S)


STREAMS: dict[str, tuple[Callable[[GenerateRequest], bytes], str]] = {
    "wrong index": (answer_with(ChoiceDelta(7, (5,))), "choice 7, which is not open"),
    "not a frame": (lambda _: b"HTTP/1.1 500 \r\n\r\n", "not a frame of engine protocol"),
    "gigabytes": (lambda _: b"\x7f\xff\xff\xff\0", "2147483647 bytes"),
}


@pytest.mark.slow
@pytest.mark.usefixtures("long_distrust")
@pytest.mark.parametrize(("answer", "reason"), STREAMS.values(), ids=STREAMS)
async def test_the_groups_of_a_lying_worker_move_to_another_worker(
    folder: Path, answer: Callable[[GenerateRequest], bytes], reason: str
) -> None:
    async with (
        lying(folder, answer=answer) as liar,
        Running(folder) as honest,
        RunningGateway(liar.url, honest) as gateway,
    ):
        honest.engine.let_run()
        for _ in range(3):
            assert texts((await gateway.chat()).text) == EXPECTED
        num_reports = liar.num_reports
        await gateway.until_state(liar.id, WorkerState.DEAD)
        while liar.num_reports < num_reports + 3:  # it reports that it is ready
            await gateway.http.get("/health")
        worker = (await gateway.http.get("/status")).json()["workers"][0]
        assert (worker["state"], len(liar.groups)) == ("dead", 1)
        assert reason in worker["note"]


@pytest.mark.slow
async def test_an_unexpected_error_in_an_answer_counts_as_a_fault_of_its_worker(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def check(_: ResponseCheck, delta: GroupDelta) -> None:
        if len(delta.choices[0].token_ids) == 3:
            raise OverflowError("int too large")

    monkeypatch.setattr(ResponseCheck, "check", check)
    async with (
        lying(folder, answer=answer_with(ChoiceDelta(0, (5, 5, 5)))) as liar,
        Running(folder) as honest,
        RunningGateway(liar.url, honest) as gateway,
    ):
        honest.engine.let_run()
        assert texts((await gateway.chat()).text) == EXPECTED
        assert len(liar.groups) == 1
    assert "int too large" in caplog.text


@pytest.mark.slow
async def test_a_client_gets_the_reason_if_there_is_no_other_worker(folder: Path) -> None:
    async with lying(folder, answer=answer_with(ChoiceDelta(0, (5,)))) as liar, RunningGateway(liar.url) as gateway:
        answer = await gateway.http.post("/v1/chat/completions", json={**BODY, "stream": False, "logprobs": True})
        assert_error(answer, status=503, code="worker_fault")
        assert "http" not in answer.text
        assert len(liar.groups) == 1


NO_BLOCKS = msgspec.structs.replace(REPORT, info=msgspec.structs.replace(REPORT.info, block_size=0))
REPORTS: dict[str, tuple[EngineReport | bytes, str]] = {
    "block_size 0": (NO_BLOCKS, "block_size 0; 1 to 65536 is allowed"),
    "endless": (b"\xc4" * (MAX_REPORT_BYTES + 1), f"an answer of more than {MAX_REPORT_BYTES} bytes"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("lie", "reason"), REPORTS.values(), ids=REPORTS)
async def test_a_worker_whose_report_is_impossible_gets_no_groups(
    folder: Path, lie: EngineReport | bytes, reason: str
) -> None:
    async with (
        lying(folder, report=lie) as liar,
        Running(folder) as honest,
        RunningGateway(liar.url, honest) as gateway,
    ):
        honest.engine.let_run()
        for _ in range(2):
            assert texts((await gateway.chat()).text) == EXPECTED
        worker = (await gateway.http.get("/status")).json()["workers"][0]
        assert worker["state"] == "dead" and reason in worker["note"]
        assert liar.groups == []


def panicking(folder: Path) -> dict[str, bytes]:
    tokenizer = json.loads((folder / "tokenizer.json").read_bytes())
    tokenizer["model"]["continuing_subword_prefix"] = "xyz"  # longer than the parts of its merges
    return {"tokenizer.json": json.dumps(tokenizer).encode()}


FILES: dict[str, Callable[[Path], dict[str, bytes]]] = {
    "tokenizer that makes its library panic": panicking,
    "template that is nested too deeply": lambda _: {
        "chat_template.jinja": b"{{" + b"(" * 3000 + b"1" + b")" * 3000 + b"}}"
    },
    "template that is not text": lambda _: {"chat_template.jinja": b"\xff"},
    "empty": lambda _: {"tokenizer.json": b""},
}


@pytest.mark.slow
@pytest.mark.parametrize("files", FILES.values(), ids=FILES)
async def test_an_unusable_tokenizer_of_one_worker_is_fetched_from_another_worker(
    folder: Path, files: Callable[[Path], dict[str, bytes]]
) -> None:
    async with (
        lying(folder, files=files(folder), answer=STREAMS["wrong index"][0]) as liar,
        Running(folder) as honest,
        RunningGateway(liar.url, honest) as gateway,
    ):
        honest.engine.let_run()
        assert texts((await gateway.chat()).text) == EXPECTED


@pytest.mark.slow
@pytest.mark.usefixtures("long_distrust")
async def test_an_answer_without_data_moves_to_another_worker(folder: Path) -> None:
    async with (
        lying(folder) as liar,
        Running(folder) as honest,
        RunningGateway(liar.url, honest, gateway={"upstream_timeout_s": 0.1}) as gateway,
    ):
        honest.engine.let_run()
        for _ in range(3):
            assert texts((await gateway.chat()).text) == EXPECTED
        worker = (await gateway.http.get("/status")).json()["workers"][0]
        assert (worker["state"], len(liar.groups)) == ("dead", 1)
        assert worker["note"] == f"{liar.id} sent nothing of an answer for 0.1 s"
