"""The spans inside a group: its wait, its prefill, its placements, its moves."""

import msgspec
import pytest

from motet.errors import EngineDiedError
from motet.settings.server_config import CellConfig
from motet.tracing.context import TraceContext
from motet.types import GenerateRequest
from tests.clock import settle
from tests.routing.scene import APART, ControlledPrefill, Received, Scene, group, uninterrupted
from tests.tracing.recorded import RecordedTracer

pytestmark = pytest.mark.anyio

PARENT = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331")


def traced(name: str = "g", *, flags: int = 1, n: int = 2) -> GenerateRequest:
    return msgspec.structs.replace(group(name, n=n), traceparent=msgspec.structs.replace(PARENT, flags=flags))


def names(tracer: RecordedTracer) -> list[str]:
    """Returns the names of all spans, by their start. All must be children of the group."""
    assert {(one.trace_id, one.parent_id) for one in tracer.records} <= {(PARENT.trace_id, PARENT.span_id)}
    return [one.name for one in sorted(tracer.records, key=lambda one: one.start_ns)]


async def test_a_group_that_is_prefilled_separately(tracer: RecordedTracer) -> None:
    scene, request = Scene(*APART, tracer=tracer), traced()
    assert await Received().read(scene.router.generate(request), request) == await uninterrupted(request)
    assert names(tracer) == ["queue", "prefill", "decode"]
    prefill, decode = tracer.one("prefill"), tracer.one("decode")
    assert prefill.attributes["motet.worker"] == "prefill-0"
    assert prefill.end_ns <= decode.start_ns
    contexts = [one.traceparent for engine in scene.all for one in engine.prefills + engine.requests]
    assert [context and context.span_id for context in contexts] == [prefill.span_id, decode.span_id]


async def test_a_group_that_moves_has_one_span_for_the_move_whatever_fails_in_it(tracer: RecordedTracer) -> None:
    scene, request = Scene("both-0", "both-1", "both-2", tracer=tracer), traced()
    stream, received = scene.router.generate(request), Received()
    received.take(await anext(stream), request)
    (left,) = scene.generating()
    scene.kill(left)
    others = sorted(scene.engines.keys() - {left})
    for name in others:
        scene.engines[name].refusal = EngineDiedError("gone too") if name == others[0] else None
    assert await received.read(stream, request) == await uninterrupted(request)
    move, stays = tracer.one("move"), tracer.named("decode")
    assert (move.attributes["motet.move.cause"], move.error) == ("died", "")
    assert move.attributes["motet.move.from"] == left
    assert move.attributes["motet.move.to"] == stays[-1].attributes["motet.worker"] == others[1]
    assert stays[0].error and not stays[-1].error


async def test_a_move_that_fails_has_the_reason(tracer: RecordedTracer) -> None:
    scene, request = Scene("both-0", limit=0, tracer=tracer), traced()
    stream = scene.router.generate(request)
    await anext(stream)
    scene.kill("both-0")
    with pytest.raises(EngineDiedError):
        await Received().read(stream, request)
    assert names(tracer) == ["queue", "decode"]
    assert tracer.one("decode").error == "EngineDiedError"


async def test_a_worker_that_leaves_is_a_cause(tracer: RecordedTracer) -> None:
    scene, request = Scene("both-0", "both-1", tracer=tracer), traced()
    stream = scene.router.generate(request)
    await anext(stream)
    await scene.leave(scene.generating()[0])
    await Received().read(stream, request)
    assert tracer.one("move").attributes["motet.move.cause"] == "leaving"


async def test_the_trace_of_a_group_shows_how_long_it_waited_for_capacity(tracer: RecordedTracer) -> None:
    scene = Scene("both-0", max_choices=2, tracer=tracer)
    first = scene.submit("first", 2)
    request = traced("second")
    second = scene.router.generate(request)
    assert tracer.records == []
    await first.read()
    assert [one.name for one in tracer.records] == ["queue"]
    await Received().read(second, request)
    assert names(tracer) == ["queue", "decode"]


async def test_prefill_that_fails_and_a_client_that_leaves_end_their_spans(tracer: RecordedTracer) -> None:
    scene = Scene(*APART, cell=CellConfig(bypass_tokens=0), tracer=tracer)
    scene.engines["prefill-0"].during_prefill = controlled = ControlledPrefill()
    stream = scene.router.generate(traced())
    await controlled.entered.wait()
    await stream.aclose()
    await settle()
    assert names(tracer) == ["queue", "prefill"]
    assert tracer.one("prefill").error == ""


async def test_a_group_that_is_not_sampled_or_has_no_trace_leaves_no_span(tracer: RecordedTracer) -> None:
    scene = Scene("both-0", tracer=tracer)
    for request in (traced("a", flags=0), group("b")):
        await Received().read(scene.router.generate(request), request)
    assert tracer.records == []
    assert [one.traceparent for one in scene.requests] == [msgspec.structs.replace(PARENT, flags=0), None]


@pytest.fixture
def tracer() -> RecordedTracer:
    return RecordedTracer()
