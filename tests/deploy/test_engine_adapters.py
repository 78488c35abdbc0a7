"""LoRA adapters of Motet's own engines: loaded by all engines of a server or by none, kept by engines that restart and
workers that join, and replaced while requests run."""

import asyncio
import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import torch

from motet import weights
from motet.engine import WorkerState
from motet.engine_info import adapter_in
from motet.errors import RequestError
from motet.settings.server_config import CellConfig
from motet.testing.fake_adapters import adapted_token, make_adapter
from motet.types import Role
from tests.deploy.dying import ANSWER, DyingEngine
from tests.deploy.gateways import ADMIN, RunningGateway, address, id_of
from tests.deploy.running import CELL, Running
from tests.error_response import assert_error
from tests.tiny_tokenizer import fake_answer

pytestmark = pytest.mark.anyio

PROMPT = list(range(10, 50))


def names_of(engine: DyingEngine) -> list[str]:
    return [adapter.name for adapter in engine.info.adapters]


async def load(server: Running | RunningGateway, name: str, path: Path, **body: object) -> httpx.Response:
    return await server.http.post(
        "/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)} | body, headers=ADMIN
    )


async def unload(server: Running | RunningGateway, name: str) -> httpx.Response:
    return await server.http.post("/v1/unload_lora_adapter", json={"lora_name": name}, headers=ADMIN)


async def generated(server: Running | RunningGateway, model: str) -> httpx.Response:
    sampling = {"max_tokens": 4, "ignore_eos": True, "seed": 5}
    body = {"model": model, "token_ids": PROMPT, "sampling_params": sampling}
    return await server.http.post("/inference/v1/generate", json=body)


async def tokens(server: Running | RunningGateway, model: str) -> list[int]:
    answer = await generated(server, model)
    assert answer.status_code == 200, answer.text
    ids: list[int] = answer.json()["choices"][0]["token_ids"]
    return ids


def expected(engine: DyingEngine, model: str) -> list[int]:
    return [adapted_token(token, engine.info, model=model) for token in fake_answer(ANSWER)[:4]]


async def cards(server: Running | RunningGateway) -> dict[str, tuple[str | None, str, str]]:
    """Returns parent, root and version of each model."""
    listed = (await server.http.get("/v1/models")).json()["data"]
    return {card["id"]: (card["parent"], card["root"], card["weight_version"]) for card in listed}


@pytest.mark.slow
async def test_all_engines_of_a_cell_load_replace_and_unload_an_adapter(folder: Path, tmp_path: Path) -> None:
    poet, other = make_adapter(tmp_path / "poet", "1"), make_adapter(tmp_path / "other", "2")
    async with Running(folder, cell=CELL, adapters=(f"start={other}",), admin_key="admin") as server:
        engines = [await server.starter.engine(number) for number in (0, 1)]
        for engine in engines:
            engine.let_run()
        assert await cards(server) == {"tiny": (None, "fake", "0"), "start": ("tiny", str(other), "0")}
        loaded = await load(server, "poet", poet)
        assert (loaded.status_code, loaded.text) == (200, "Success: LoRA adapter 'poet' added successfully.")
        assert [names_of(engine) for engine in engines] == [["start", "poet"]] * 2
        assert (await cards(server))["poet"] == ("tiny", str(poet), "1")
        answers = {model: await tokens(server, model) for model in ("tiny", "start", "poet")}
        assert answers == {model: expected(engines[0], model) for model in answers}
        assert len(set(map(tuple, answers.values()))) == 3
        (decode,) = server.starter.of(Role.DECODE)
        assert (decode.record.pulls, decode.record.unused_tickets) == (3, 0)

        refused = await load(server, "poet", other)
        assert_error(refused, status=400, param="lora_name", code="adapter_exists")
        assert "'load_inplace' to True" in refused.json()["error"]["message"]
        replaced = await load(server, "poet", other, load_inplace=True, weight_version="step-7")
        assert replaced.headers["x-motet-weight-version"] == "step-7"
        assert await tokens(server, "poet") == expected(engines[0], "start")
        assert (await cards(server))["poet"] == ("tiny", str(other), "step-7")

        assert (await unload(server, "poet")).text == "Success: LoRA adapter 'poet' removed successfully."
        assert_error(await generated(server, "poet"), status=404, code="model_not_found")
        assert_error(await unload(server, "poet"), status=404, code="model_not_found", param="lora_name")


@pytest.mark.slow
async def test_a_loaded_adapter_changes_nothing_for_the_base_model(folder: Path, tmp_path: Path) -> None:
    first, second = make_adapter(tmp_path / "first", "1"), make_adapter(tmp_path / "second", "2")
    async with Running(folder, admin_key="admin") as server:
        engine = await server.starter.engine(0)
        engine.let_run()
        body = {"prompt": PROMPT, "max_tokens": 1}

        async def fingerprint(**model: str) -> str:
            answer = (await server.http.post("/v1/completions", json=body | model)).json()
            assert answer["model"] == model.get("model", "tiny")
            found: str = answer["system_fingerprint"]
            return found

        base = await fingerprint()
        assert (await load(server, "poet", first)).status_code == 200
        assert await fingerprint() == await fingerprint(model="tiny") == base
        of_first = await fingerprint(model="poet")
        assert (await load(server, "poet", second, load_inplace=True)).status_code == 200
        fingerprints = {base, of_first, await fingerprint(model="poet")}
        assert len(fingerprints) == 3 and all(found.endswith(base) for found in fingerprints)
        shown = (await server.http.get("/metrics")).text
        assert set(re.findall(r'model_name="([^"]*)"', shown)) == {"tiny"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "path", "status", "code"),
    [
        ("tiny", "poet", 400, "invalid_value"),
        ("a=b", "poet", 400, None),
        ("a\nb", "poet", 400, None),
        ("poet", "none", 404, "adapter_not_found"),
        ("poet", "../poet/none", 404, "adapter_not_found"),
    ],
)
async def test_an_operators_mistakes_change_nothing(
    folder: Path, tmp_path: Path, name: str, path: str, status: int, code: str | None
) -> None:
    make_adapter(tmp_path / "poet")
    async with Running(folder, admin_key="admin") as server:
        refused = await load(server, name, tmp_path / path)
        assert_error(refused, status=status, **({} if code is None else {"code": code}))
        assert status != 404 or "must be a folder with adapter_config.json" in refused.json()["error"]["message"]
        assert [*await cards(server)] == ["tiny"]


@pytest.mark.slow
async def test_if_one_engine_cannot_load_an_adapter_all_keep_what_they_had(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = make_adapter(tmp_path / "a", "1"), make_adapter(tmp_path / "b", "2")
    async with Running(folder, cell=CELL, admin_key="admin") as server:
        engines = [await server.starter.engine(number) for number in (0, 1)]
        assert (await load(server, "poet", first, weight_version="v1")).status_code == 200
        before = [engine.info.adapters for engine in engines]
        send = DyingEngine.send

        async def failing(engine: DyingEngine, order: object) -> object:
            if engine is engines[1] and getattr(order, "path", "") == str(second):
                raise RequestError("its rank is too high", code="invalid_adapter")
            return await send(engine, order)  # type: ignore[arg-type]

        monkeypatch.setattr(DyingEngine, "send", failing)
        for name in ("poet", "new"):
            refused = await load(server, name, second, load_inplace=True)
            assert_error(refused, status=400, param="lora_path", code="invalid_adapter")
            assert [engine.info.adapters for engine in engines] == before
        assert (await load(server, "two", first)).status_code == 200
        full = await load(server, "three", first)
        assert_error(full, status=400, code="too_many_adapters")


@pytest.mark.slow
async def test_an_engine_that_restarts_has_the_adapters_before_it_gets_requests(folder: Path, tmp_path: Path) -> None:
    start, poet = make_adapter(tmp_path / "start", "1"), make_adapter(tmp_path / "poet", "2")
    async with Running(folder, restarts=3, adapters=(f"start={start}",), admin_key="admin") as server:
        first = await server.starter.engine(0)
        first.let_run()
        assert (await load(server, "poet", poet)).status_code == 200
        assert (await unload(server, "start")).status_code == 200
        before = first.info.adapters
        first.die()
        second = await server.starter.engine(1)
        second.let_run()
        fleet = server.cell.router.fleet
        while fleet.members[0].state is not WorkerState.READY:
            await fleet.changes.wait()
        assert second.info.adapters == before
        assert await tokens(server, "poet") == expected(first, "poet")


@pytest.mark.slow
async def test_an_adapter_whose_folder_has_changed_is_not_served_by_an_engine_that_restarts(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    poet = make_adapter(tmp_path / "poet", "1")
    async with Running(folder, restarts=3, admin_key="admin") as server:
        first = await server.starter.engine(0)
        assert (await load(server, "poet", poet)).status_code == 200
        make_adapter(poet, "another")
        first.die()
        second = await server.starter.engine(1)
        fleet = server.cell.router.fleet
        while fleet.members[0].state is not WorkerState.READY:
            await fleet.changes.wait()
        second.let_run()
        assert second.info.adapters == ()
        assert "no longer contains version 1 of the adapter" in caplog.text
        assert (await generated(server, "tiny")).status_code == 200


class PeftLike:
    """The part of a PEFT model that `push_adapter` uses."""

    active_adapter = "default"

    def __init__(self, value: float) -> None:
        self._value = value
        config = {"r": 1, "lora_alpha": 2, "peft_type": "LORA", "target_modules": {"q_proj"}}
        self.peft_config = {"default": SimpleNamespace(to_dict=lambda: config)}

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        start = "base_model.model.model.layers.0.self_attn.q_proj"
        yield f"{start}.base_layer.weight", torch.zeros(2, 2)
        for part in "AB":
            yield f"{start}.lora_{part}.default.weight", torch.full((1, 2), self._value)


@pytest.mark.slow
@pytest.mark.parametrize("way", [None, weights.Delivery.HTTP])
async def test_a_trainer_pushes_an_adapter_after_each_step(folder: Path, way: weights.Delivery | None) -> None:
    async with Running(folder, restarts=3, admin_key="admin") as server:
        engine = await server.starter.engine(0)
        engine.let_run()
        push = partial(weights.push_adapter, str(server.http.base_url), name="policy", admin_key="admin", way=way)
        digests = []
        for step, version in ((1.0, "step 1"), (2.0, None)):
            pushed = await asyncio.to_thread(push, PeftLike(step), version=version)
            adapter = adapter_in(engine.info, "policy")
            assert adapter is not None
            assert pushed == adapter.version == (version or "2")
            digests.append(adapter.digest)
            assert await tokens(server, "policy") == expected(engine, "policy")
        assert len(set(digests)) == 2
        engine.die()
        restarted = await server.starter.engine(1)
        fleet = server.cell.router.fleet
        while fleet.members[0].state is not WorkerState.READY:
            await fleet.changes.wait()
        restarted.let_run()
        assert restarted.info.adapters == engine.info.adapters
        no_config = partial(weights.push_adapter, str(server.http.base_url), {"a": torch.zeros(1)}, name="policy")
        with pytest.raises(ValueError, match="adapter_config"):
            no_config()


@pytest.mark.slow
async def test_groups_of_an_adapter_move_after_another_one_with_equal_tensors_was_replaced(
    folder: Path, tmp_path: Path
) -> None:
    one, two = make_adapter(tmp_path / "1", "1"), make_adapter(tmp_path / "2", "2")
    cell = CellConfig(decode=2)
    async with Running(folder, cell=cell, adapters=(f"poet={one}",), admin_key="admin") as server:
        engines = [await server.starter.engine(number) for number in (0, 1)]
        for path in (one, two):
            assert (await load(server, "step", path, load_inplace=True)).status_code == 200
        answer = asyncio.ensure_future(generated(server, "poet"))
        await asyncio.wait([asyncio.ensure_future(e.submitted.wait()) for e in engines], return_when="FIRST_COMPLETED")
        first, second = engines if engines[0].submitted.is_set() else reversed(engines)
        first.steps.release()
        while first.record.generated_tokens == 0:
            await server.cell.router.fleet.capacity.wait_at_most(0.01)
        second.let_run()
        first.die()
        assert (await answer).json()["choices"][0]["token_ids"] == expected(second, "poet")


@pytest.mark.slow
async def test_a_gateway_loads_adapters_on_its_motet_workers_and_on_workers_that_restart(
    folder: Path, tmp_path: Path
) -> None:
    poet = make_adapter(tmp_path / "poet", "1")
    async with (
        Running(folder) as one,
        Running(folder, restarts=3) as two,
        RunningGateway(one, two) as gateway,
    ):
        engines = [await server.starter.engine(0) for server in (one, two)]
        for engine in engines:
            engine.let_run()
        assert (await load(gateway, "poet", poet)).status_code == 200
        assert [names_of(engine) for engine in engines] == [["poet"]] * 2
        assert (await cards(gateway))["poet"] == ("fake", str(poet), "1")
        assert await tokens(gateway, "poet") == expected(engines[0], "poet")
        missing = await load(gateway, "none", tmp_path / "none")
        assert_error(missing, status=404, code="adapter_not_found", param="lora_path")
        assert (await unload(gateway, "poet")).status_code == 200
        assert [names_of(engine) for engine in engines] == [[], []]
        assert_error(await generated(gateway, "poet"), status=404, code="model_not_found")


@pytest.mark.slow
async def test_a_worker_that_joins_a_gateway_gets_its_adapters(folder: Path, tmp_path: Path) -> None:
    poet = make_adapter(tmp_path / "poet", "1")
    async with Running(folder) as one, Running(folder) as two, RunningGateway(one) as gateway:
        assert (await load(gateway, "poet", poet)).status_code == 200
        joined = await gateway.http.post("/workers", json={"url": address(two)}, headers=ADMIN)
        assert joined.status_code < 300, joined.text
        await gateway.until_state(id_of(two), WorkerState.READY)
        (engine,) = two.starter.engines
        adapter = adapter_in(engine.info, "poet")
        assert adapter is not None
        assert (adapter.version, adapter.root) == ("1", str(poet))
