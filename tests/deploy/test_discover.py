"""What kind of server a worker is found to be."""

from collections.abc import Iterable, Sequence
from functools import partial

import pytest

from motet.deploy.discover import FoundServer, Way
from motet.engines.wire import EngineReport
from motet.errors import EngineDiedError, EngineError, EngineSilentError, MotetError, OtherServerError
from motet.text.tokenizer import Tokenizer
from motet.types import EngineKind
from tests.deploy.kept import KeptFake, report

pytestmark = pytest.mark.anyio

URL = "http://10.0.0.1:8000"
OTHER = OtherServerError("10.0.0.1 answered 404: Not Found")


class ScriptedWay:
    """Reports what it is told to, one after the other."""

    def __init__(self, kind: EngineKind, answers: Iterable[EngineReport | MotetError], asked: list[EngineKind]) -> None:
        self._kind = kind
        self._answers = iter(answers)
        self._asked = asked

    async def report(self) -> EngineReport:
        self._asked.append(self._kind)
        answer = next(self._answers)
        if isinstance(answer, MotetError):
            raise answer
        return answer

    def kept(self, report: EngineReport) -> KeptFake:
        return KeptFake(report.engine_id)

    async def tokenizer(self) -> dict[str, bytes]:
        return {"kind": self._kind.encode()}

    async def check(self, tokenizer: Tokenizer, model: str) -> None:
        raise AssertionError("nobody has a tokenizer")


Answers = Sequence[EngineReport | MotetError]


class Asked:
    """A server of which each way of asking has its answers."""

    def __init__(
        self, *, kind: EngineKind | None = None, motet: Answers = (), vllm: Answers = (), openai: Answers = ()
    ) -> None:
        self.asked: list[EngineKind] = []
        self._answers = {
            EngineKind.MOTET: iter(motet),
            EngineKind.VLLM: iter(vllm),
            EngineKind.OPENAI: iter(openai),
        }
        self.server = FoundServer(URL, {kind: partial(self._way, kind) for kind in EngineKind}, kind)

    def _way(self, kind: EngineKind) -> Way:
        return ScriptedWay(kind, self._answers[kind], self.asked)


async def test_a_server_of_ours_is_asked_as_nothing_else() -> None:
    asked = Asked(motet=[report("a"), report("b")])
    assert (await asked.server.report()).engine_id == "a"
    assert (await asked.server.report()).engine_id == "b"
    assert asked.asked == [EngineKind.MOTET] * 2


async def test_who_is_none_of_ours_is_asked_as_vllm_and_then_as_any() -> None:
    asked = Asked(motet=[OTHER], vllm=[OTHER], openai=[report("a"), report("a")])
    assert (await asked.server.report()).engine_id == "a"
    await asked.server.report()
    assert asked.asked == [EngineKind.MOTET, EngineKind.VLLM, EngineKind.OPENAI, EngineKind.OPENAI]
    assert await asked.server.tokenizer() == {"kind": b"openai"}
    assert asked.server.kept(report("a")).engine_id == "a"


async def test_who_was_named_as_one_kind_is_asked_as_that_alone() -> None:
    asked = Asked(kind=EngineKind.OPENAI, openai=[report("a")])
    await asked.server.report()
    assert asked.asked == [EngineKind.OPENAI]


@pytest.mark.parametrize("error", [EngineDiedError("refused"), EngineSilentError("no answer")])
async def test_who_is_not_to_be_reached_is_asked_once(error: EngineDiedError) -> None:
    asked = Asked(motet=[error])
    with pytest.raises(type(error), match=error.message):
        await asked.server.report()
    assert asked.asked == [EngineKind.MOTET]


async def test_a_server_of_ours_that_refuses_is_not_taken_for_one_of_texts() -> None:
    asked = Asked(motet=[EngineError("it speaks engine protocol 2, and this server 1")])
    with pytest.raises(EngineError, match=r"^it speaks engine protocol 2"):
        await asked.server.report()
    assert asked.asked == [EngineKind.MOTET]


async def test_who_is_nothing_is_told_what_each_kind_of_question_brought() -> None:
    asked = Asked(motet=[OTHER], vllm=[OTHER], openai=[EngineError("/v1/models answered 401")])
    with pytest.raises(EngineError) as caught:
        await asked.server.report()
    assert caught.value.message == (
        "http://10.0.0.1:8000 is no server that can be a worker; asked as motet: 10.0.0.1 answered 404: Not Found; "
        "as vllm: 10.0.0.1 answered 404: Not Found; as openai: /v1/models answered 401"
    )


async def test_a_server_that_has_become_another_is_found_out_again() -> None:
    asked = Asked(motet=[OTHER, report("ours")], vllm=[report("theirs"), OTHER])
    assert (await asked.server.report()).engine_id == "theirs"
    assert (await asked.server.report()).engine_id == "ours"
    assert asked.asked == [EngineKind.MOTET, EngineKind.VLLM, EngineKind.VLLM, EngineKind.MOTET]


async def test_what_a_server_is_is_not_forgotten_while_it_is_away() -> None:
    asked = Asked(motet=[OTHER], vllm=[report("a"), EngineDiedError("refused"), report("b")])
    await asked.server.report()
    with pytest.raises(EngineDiedError):
        await asked.server.report()
    assert (await asked.server.report()).engine_id == "b"
    assert asked.asked == [EngineKind.MOTET, *[EngineKind.VLLM] * 3]


async def test_a_server_of_texts_that_was_gone_may_come_back_as_vllm() -> None:
    """Which answers as one of texts too, and would be used as one for good."""
    asked = Asked(motet=[OTHER, OTHER], vllm=[OTHER, report("b")], openai=[report("a"), EngineDiedError("refused")])
    assert (await asked.server.report()).engine_id == "a"
    with pytest.raises(EngineDiedError):
        await asked.server.report()
    assert (await asked.server.report()).engine_id == "b"


async def test_a_server_of_texts_that_was_silent_is_still_one() -> None:
    asked = Asked(motet=[OTHER], vllm=[OTHER], openai=[report("a"), EngineSilentError("no answer"), report("a")])
    await asked.server.report()
    with pytest.raises(EngineSilentError):
        await asked.server.report()
    assert (await asked.server.report()).engine_id == "a"
