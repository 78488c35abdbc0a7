"""A gateway determines the kind of a worker's server, and which workers can serve together."""

from collections.abc import Sequence
from functools import partial
from itertools import count

import msgspec
import pytest

from motet.deploy.discover import CompatibilityCheck, FoundServer, WorkerProbe
from motet.engine import WorkerState
from motet.engine_info import UNKNOWN_VOCABULARY, EngineInfo, EngineKind
from motet.engines.upstream.text_upstream import TextUpstream
from motet.engines.wire import EngineReport
from motet.errors import EngineDiedError, EngineError, EngineSilentError, MotetError, OtherServerError
from motet.ids import ModelName
from motet.testing.fake_engine import fake_info
from motet.types import Role
from tests.deploy.keeper_scene import report

pytestmark = pytest.mark.anyio

URL = "http://10.0.0.1:8000"
OTHER = OtherServerError("10.0.0.1 answered 404: Not Found")


Answers = Sequence[EngineReport | MotetError]


class ProbedServer:
    """A server with a list of answers for each kind of probe."""

    def __init__(
        self, *, kind: EngineKind | None = None, motet: Answers = (), vllm: Answers = (), openai: Answers = ()
    ) -> None:
        self.probes: list[EngineKind] = []
        self._answers = {
            EngineKind.MOTET: iter(motet),
            EngineKind.VLLM: iter(vllm),
            EngineKind.OPENAI: iter(openai),
        }
        self.found = FoundServer(URL, {kind: partial(self._probe, kind) for kind in EngineKind}, kind=kind)

    def _probe(self, kind: EngineKind) -> WorkerProbe:
        async def report() -> EngineReport:
            self.probes.append(kind)
            answer = next(self._answers[kind])
            if isinstance(answer, MotetError):
                raise answer
            return answer

        async def tokenizer() -> dict[str, bytes]:
            return {"kind": kind.encode()}

        return WorkerProbe(report, no_engine, tokenizer)


def no_engine(report: EngineReport) -> TextUpstream:
    raise AssertionError("only reports are requested")


async def test_a_motet_server_is_only_probed_as_motet() -> None:
    server = ProbedServer(motet=[report("a"), report("b")])
    assert (await server.found.report()).engine_id == "a"
    assert (await server.found.report()).engine_id == "b"
    assert server.probes == [EngineKind.MOTET] * 2


async def test_a_third_party_server_is_probed_as_vllm_and_then_as_openai() -> None:
    server = ProbedServer(motet=[OTHER], vllm=[OTHER], openai=[report("a"), report("a")])
    assert (await server.found.report()).engine_id == "a"
    await server.found.report()
    assert server.probes == [EngineKind.MOTET, EngineKind.VLLM, EngineKind.OPENAI, EngineKind.OPENAI]
    tokenizer = server.found.probe.tokenizer
    assert tokenizer is not None and await tokenizer() == {"kind": b"openai"}


async def test_a_server_with_a_named_kind_is_only_probed_as_that_kind() -> None:
    server = ProbedServer(kind=EngineKind.OPENAI, openai=[report("a")])
    await server.found.report()
    assert server.probes == [EngineKind.OPENAI]


@pytest.mark.parametrize("error", [EngineDiedError("refused"), EngineSilentError("no answer")])
async def test_a_server_that_cannot_be_reached_is_probed_once(error: EngineDiedError) -> None:
    server = ProbedServer(motet=[error])
    with pytest.raises(type(error), match=error.message):
        await server.found.report()
    assert server.probes == [EngineKind.MOTET]


async def test_a_motet_server_that_refuses_is_not_used_as_a_text_upstream() -> None:
    server = ProbedServer(motet=[EngineError("it speaks engine protocol 2, and this server 1")])
    with pytest.raises(EngineError, match=r"^it speaks engine protocol 2"):
        await server.found.report()
    assert server.probes == [EngineKind.MOTET]


async def test_the_error_for_an_unknown_kind_of_server_has_the_answer_to_each_probe() -> None:
    server = ProbedServer(motet=[OTHER], vllm=[OTHER], openai=[EngineError("/v1/models answered 401")])
    with pytest.raises(EngineError) as caught:
        await server.found.report()
    assert caught.value.message == (
        "http://10.0.0.1:8000 cannot be a worker; tried as motet: 10.0.0.1 answered 404: Not Found; "
        "as vllm: 10.0.0.1 answered 404: Not Found; as openai: /v1/models answered 401"
    )


async def test_a_server_of_a_new_kind_at_the_same_address_is_recognised() -> None:
    server = ProbedServer(motet=[OTHER, report("motet")], vllm=[report("vllm"), OTHER])
    assert (await server.found.report()).engine_id == "vllm"
    assert (await server.found.report()).engine_id == "motet"
    assert server.probes == [EngineKind.MOTET, EngineKind.VLLM, EngineKind.VLLM, EngineKind.MOTET]


async def test_the_kind_of_a_server_is_kept_while_it_is_unavailable() -> None:
    server = ProbedServer(motet=[OTHER], vllm=[report("a"), EngineDiedError("refused"), report("b")])
    await server.found.report()
    with pytest.raises(EngineDiedError):
        await server.found.report()
    assert (await server.found.report()).engine_id == "b"
    assert server.probes == [EngineKind.MOTET, *[EngineKind.VLLM] * 3]


async def test_a_text_upstream_that_was_unavailable_can_return_as_vllm() -> None:
    """Regression: a vLLM server also answers as a text upstream does, and stayed one forever."""
    server = ProbedServer(
        motet=[OTHER, OTHER], vllm=[OTHER, report("b")], openai=[report("a"), EngineDiedError("refused")]
    )
    assert (await server.found.report()).engine_id == "a"
    with pytest.raises(EngineDiedError):
        await server.found.report()
    assert (await server.found.report()).engine_id == "b"


async def test_a_text_upstream_that_was_silent_stays_a_text_upstream() -> None:
    server = ProbedServer(
        motet=[OTHER], vllm=[OTHER], openai=[report("a"), EngineSilentError("no answer"), report("a")]
    )
    await server.found.report()
    with pytest.raises(EngineSilentError):
        await server.found.report()
    assert (await server.found.report()).engine_id == "a"


NUMBERS = count()
VLLM: EngineInfo = msgspec.structs.replace(
    fake_info(),
    kind=EngineKind.VLLM,
    vocab_size=UNKNOWN_VOCABULARY,
    eos_token_ids=(),
    dtype="auto",
    fingerprint="vllm-0.32.0",
    block_size=128,
)


def new_id() -> str:
    """Returns a new worker id."""
    return f"worker-{next(NUMBERS)}"


def reported(info: EngineInfo, **changes: object) -> EngineReport:
    changed = msgspec.structs.replace(info, **changes)
    return EngineReport(version="0", engine_id="e", state=WorkerState.READY, info=changed)


OTHERS = [
    ({"eos_token_ids": (0, 1)}, "it ends answers with the tokens (0, 1), and other workers of fake (0,)"),
    ({"dtype": "bfloat16"}, "it computes in bfloat16, and other workers of fake none"),
    (
        {"fingerprint": "motet-1_kernels-1f-int8_x86_64-AVX512_none-same"},
        "it computes in none with int8 weights, and other workers of fake none",
    ),
]


@pytest.mark.parametrize(("other", "says"), OTHERS)
def test_the_first_worker_of_a_model_determines_the_facts_of_the_others(other: dict[str, object], says: str) -> None:
    check = CompatibilityCheck()
    assert check.problem(new_id(), reported(fake_info()), role=None) is None
    assert check.problem(new_id(), reported(fake_info(), **other), role=None) == says
    assert check.problem(new_id(), reported(fake_info()), role=None) is None


@pytest.mark.parametrize("other", [other for other, _ in OTHERS])
def test_the_facts_of_a_model_hold_until_its_last_worker_has_left(other: dict[str, object]) -> None:
    check, old, changed = CompatibilityCheck(), reported(fake_info()), reported(fake_info(), **other)
    assert [check.problem(id, old, role=None) for id in ("a", "b", "b")] == [None] * 3
    check.forget("a")
    assert check.problem("a", changed, role=None) is not None
    assert check.problem("b", changed, role=None) is None  # the only worker left has restarted with other facts
    assert check.problem("a", changed, role=None) is None
    assert check.problem("c", old, role=None) is not None


@pytest.mark.parametrize("other", [other for other, _ in OTHERS])
def test_a_worker_with_another_model_always_fits(other: dict[str, object]) -> None:
    check = CompatibilityCheck()
    assert check.problem(new_id(), reported(fake_info()), role=None) is None
    assert check.problem(new_id(), reported(fake_info(), model=ModelName("other"), **other), role=None) is None


def test_machines_and_roles_can_differ() -> None:
    check = CompatibilityCheck()
    for info in (
        fake_info(role=Role.PREFILL),
        fake_info(role=Role.DECODE, max_model_len=100),
        msgspec.structs.replace(fake_info(), fingerprint="motet-1_torch-2_aarch64-SVE_none-similar", block_size=32),
    ):
        assert check.problem(new_id(), reported(info), role=None) is None


def test_engines_of_two_kinds_are_compared_by_the_facts_that_both_report() -> None:
    check = CompatibilityCheck()
    assert check.problem(new_id(), reported(VLLM), role=None) is None
    assert check.problem(new_id(), reported(fake_info()), role=None) is None
    assert check.problem(new_id(), reported(VLLM, eos_token_ids=(0,)), role=None) is None
    says = "it ends answers with the tokens (1,), and other workers of fake (0,)"
    assert check.problem(new_id(), reported(VLLM, eos_token_ids=(1,)), role=None) == says
    says = "it computes in fp8, and other workers of fake auto"
    assert check.problem(new_id(), reported(VLLM, dtype="fp8"), role=None) == says


def test_a_worker_with_an_unexpected_role_is_unused_and_does_not_set_the_model() -> None:
    check = CompatibilityCheck()
    assert check.problem(new_id(), reported(fake_info(role=Role.DECODE, vocab_size=9)), role=Role.PREFILL) == (
        "it was named with role prefill, but its role is decode"
    )
    assert check.problem(new_id(), reported(fake_info()), role=None) is None


def test_a_text_upstream_reports_no_sizes() -> None:
    info = msgspec.structs.replace(fake_info(), kind=EngineKind.OPENAI)
    assert CompatibilityCheck().problem(new_id(), reported(info, num_blocks=0, max_num_seqs=0), role=None) is None
