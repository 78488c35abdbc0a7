"""A fleet whose workers serve several models, and the workers of one model as one engine."""

import msgspec
import pytest

from motet.block_names import block_names
from motet.engine import WorkerState
from motet.engine_info import ModelCard
from motet.errors import NoWorkerError
from motet.ids import ModelName
from motet.routing.choosing.survey import survey
from motet.routing.router import Router
from motet.routing.workers.serving import WorkKind
from motet.types import Role
from tests.routing.kinds import ADAPTER, FRENCH, A, B, KindsScene
from tests.routing.scene import group

pytestmark = pytest.mark.anyio

TEXT = ModelCard(name=ModelName("t"), root="somewhere/t", max_model_len=99)


def ready(server: KindsScene, model: str, work: WorkKind = WorkKind.GENERATE) -> list[str]:
    serving = server.fleet.catalog.serving(model)
    return [member.id for member in (serving.prefill if work is WorkKind.PREFILL else serving.generate).members]


def names(server: KindsScene) -> list[str]:
    return list(server.fleet.catalog.models())


async def test_a_model_keeps_its_place_until_its_last_worker_is_removed() -> None:
    server = KindsScene("decode-b-vllm-0", "decode-a-motet-0", "decode-b-motet-0")
    server.offer("decode-a-motet-0", ADAPTER)
    assert names(server) == [B, A, FRENCH]
    server.fleet.mark("decode-a-motet-0", WorkerState.DEAD)
    server.fleet.remove("decode-b-vllm-0")
    assert names(server) == [B, A, FRENCH]
    server.fleet.remove("decode-b-motet-0")
    assert names(server) == [A, FRENCH]
    server.start("decode-b-motet-0")
    assert names(server) == [A, FRENCH, B]


async def test_an_adapter_that_its_worker_has_lost_is_unknown_and_gets_nothing() -> None:
    server = KindsScene("decode-a-motet-0", "decode-a-motet-1")
    assert ready(server, FRENCH) == []
    server.offer("decode-a-motet-1", ADAPTER)
    assert ready(server, FRENCH) == ["decode-a-motet-1"]
    assert server.fleet.catalog.models()[FRENCH] == ADAPTER
    server.offer("decode-a-motet-1")
    assert (ready(server, FRENCH), names(server)) == ([], [A])


async def test_a_new_offer_wakes_waiters_and_is_kept_until_the_worker_returns() -> None:
    server = KindsScene("decode-a-motet-0")
    changed = server.fleet.changes.wait()
    server.fleet.set_models("decode-a-motet-0", [ADAPTER])
    assert changed.done()
    unchanged = server.fleet.changes.wait()
    server.fleet.set_models("decode-a-motet-0", [ADAPTER])
    server.fleet.set_models("unknown", [ADAPTER])
    assert not unchanged.done()
    unchanged.cancel()
    server.start("decode-a-motet-0")
    assert ready(server, FRENCH) == ["decode-a-motet-0"]


async def test_prefill_workers_generate_only_if_no_other_worker_with_the_model_could() -> None:
    server = KindsScene("prefill-a-motet-0", "prefill-b-motet-0", "decode-b-motet-0")
    fleet = server.fleet
    assert (ready(server, A), ready(server, B)) == (["prefill-a-motet-0"], ["decode-b-motet-0"])
    assert (fleet.catalog.serving(A).has_decode, fleet.catalog.serving(A).has_prefill) == (False, False)
    assert (fleet.catalog.serving(B).has_decode, fleet.catalog.serving(B).has_prefill) == (True, True)
    fleet.mark("decode-b-motet-0", WorkerState.DEAD)
    assert (ready(server, A), ready(server, B)) == (["prefill-a-motet-0"], [])


async def test_workers_of_the_model_and_of_unknown_models_are_expected() -> None:
    fleet = KindsScene("decode-a-motet-0", "decode-b-motet-0").fleet
    fleet.give_up("decode-a-motet-0")
    assert (
        fleet.catalog.serving(A).worker_expected,
        fleet.catalog.serving(B).worker_expected,
        fleet.catalog.serving("unknown model").worker_expected,
    ) == (
        False,
        True,
        False,
    )
    fleet.expect("to-come", "somewhere", role=Role.DECODE)
    assert (fleet.catalog.serving(A).worker_expected, fleet.catalog.serving("unknown model").worker_expected) == (
        True,
        True,
    )
    assert fleet.catalog.ready("unknown model") == ()


async def test_text_upstreams_are_members_and_get_no_groups() -> None:
    server = KindsScene("decode-a-motet-0")
    fleet = server.fleet
    fleet.expect("upstream", "https://there", takes_texts=True)
    assert fleet.catalog.texts("t") == []
    member = fleet.put_text("upstream", [TEXT])
    assert member is not None
    assert (member.facts.takes_texts, member.state, member.worker) == (True, WorkerState.READY, None)
    assert fleet.catalog.texts("t") == [member]
    assert [report.id for report in fleet.reports()] == ["decode-a-motet-0", "upstream"]
    assert ready(server, "") == ["decode-a-motet-0"]
    assert (ready(server, "t"), fleet.catalog.serving("t").has_decode, fleet.catalog.serving("t").worker_expected) == (
        [],
        False,
        False,
    )
    assert (fleet.catalog.only_text("t"), fleet.catalog.only_text(A), fleet.catalog.only_text("unknown")) == (
        True,
        False,
        False,
    )
    assert fleet.catalog.models()[TEXT.name] == TEXT
    fleet.mark("upstream", WorkerState.SILENT)
    assert (fleet.catalog.texts("t"), names(server)) == ([], [A, "t"])


async def test_check_finds_open_choices_of_text_upstreams() -> None:
    fleet = KindsScene().fleet
    fleet.expect("upstream", "https://there", takes_texts=True)
    member = fleet.put_text("upstream", [TEXT])
    assert member is not None
    load = member.load
    load.given_choices += 1
    with pytest.raises(AssertionError, match="upstream is loaded"):
        fleet.check()
    fleet.put_text("upstream", [TEXT])  # another start, with an empty load
    load.given_choices -= 1
    fleet.check()
    assert fleet.put_text("removed", [TEXT]) is None


async def test_the_info_of_a_model_comes_from_its_workers_and_outlasts_them() -> None:
    server = KindsScene("decode-a-motet-0", "decode-b-vllm-0")
    server.offer("decode-a-motet-0", ADAPTER)
    of = {model: server.router.of(model) for model in (A, B, FRENCH, ModelName("unknown"))}
    assert (of[A].info.model, of[A].info.block_size) == (A, 16)
    assert (of[B].info.model, of[B].info.block_size) == (B, 128)
    assert (of[FRENCH].info.model, of[FRENCH].info.max_model_len) == (FRENCH, 2048)
    assert (of[A].info.role, of[A].info.transfer) == (Role.BOTH, None)
    assert Router(server.fleet, role=Role.DECODE).of(A).info.transfer is not None
    server.fleet.remove("decode-a-motet-0")
    assert (of[A].info.model, of[A].info.block_size) == (A, 16)
    with pytest.raises(NoWorkerError, match="no worker serves unknown now"):
        assert of[ModelName("unknown")].info


async def test_the_figures_of_a_model_come_from_its_workers() -> None:
    server = KindsScene("decode-a-motet-0", "decode-a-motet-1", "decode-b-vllm-0")
    of_a, of_b = (server.router.of(model) for model in (A, B))
    stream = of_a.generate(group())
    assert (await of_a.stats()).choices_waiting == 2
    assert (await of_b.stats()).choices_waiting == 0
    await stream.aclose()
    server.engines["decode-b-vllm-0"].die()
    with pytest.raises(NoWorkerError):
        await of_b.stats()
    await server.fleet.evict("decode-b-vllm-0", NoWorkerError("gone"))


async def test_groups_of_a_model_go_to_its_workers_and_end_without_one() -> None:
    server = KindsScene("decode-a-motet-0", "decode-b-vllm-0")
    of = {model: server.router.of(model) for model in (A, B, FRENCH)}
    streams = [of[model].generate(group(f"of {model}")) for model in (A, A, B)]
    assert [len(server.engines[name].requests) for name in server.engines] == [2, 1]
    with pytest.raises(NoWorkerError):
        of[FRENCH].generate(group("of nobody"))
    for stream in streams:
        await stream.aclose()


async def test_cached_blocks_are_looked_up_by_each_worker_s_own_block_size() -> None:
    server = KindsScene("decode-a-motet-0", "decode-a-vllm-0", "decode-a-vllm-1")
    request = msgspec.structs.replace(group(prompt_tokens=400), model=A)
    server.fleet.cached_blocks.stored("decode-a-motet-0", block_names(request.prompt[:160], 16, salt=""))
    server.fleet.cached_blocks.stored("decode-a-vllm-0", block_names(request.prompt, 128, salt=""))
    known = survey(server.fleet, WorkKind.GENERATE, request=request)
    assert known is not None
    assert [(one.cached_tokens, one.block_size) for one in known.candidates] == [(160, 16), (384, 128), (0, 128)]


async def test_blocks_of_an_adapter_differ_from_blocks_of_its_base_model() -> None:
    server = KindsScene("decode-a-vllm-0")
    server.offer("decode-a-vllm-0", ADAPTER, ModelCard(name=ModelName("alias"), max_model_len=4096))
    request = msgspec.structs.replace(group(prompt_tokens=400), model=FRENCH)
    plain, alias = (msgspec.structs.replace(request, model=ModelName(name)) for name in (A, "alias"))
    cached = block_names(request.prompt, 128, salt="")

    def found() -> list[int]:
        surveys = (survey(server.fleet, WorkKind.GENERATE, request=one) for one in (plain, alias, request))
        return [known.candidates[0].cached_tokens for known in surveys if known is not None]

    server.fleet.cached_blocks.stored("decode-a-vllm-0", cached)
    assert found() == [384, 384, 0]
    server.fleet.cached_blocks.removed("decode-a-vllm-0", cached)
    server.fleet.cached_blocks.stored("decode-a-vllm-0", block_names(request.prompt, 128, salt="", adapter=FRENCH))
    assert found() == [0, 0, 384]
