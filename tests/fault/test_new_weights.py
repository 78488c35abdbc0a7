"""A cell gets new weights under load, and engines are killed during the update. Each answer equals the answer of a
server that was started on the weights of its version, and all engines have one version afterwards."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from motet.deploy.server import Outcome
from motet.engine_orders import ApplyWeights, EngineOrder, PrepareWeights
from tests.error_response import assert_error
from tests.fault.answers import Answer, fetch_answer, lines_of
from tests.fault.children import BODIES as BODIES_OF_SERVERS
from tests.fault.children import POLL_S, Servers, answer, client_of
from tests.fault.fault_requests import (
    CHAT,
    COMPLETIONS,
    ENDLESS,
    ENDLESS_ENGINE,
    GENERATE,
    STREAMED,
    chat,
    completion,
)
from tests.fault.faults import kill
from tests.fault.oracle import Undisturbed
from tests.fault.running_cell import RunningCell
from tests.forked import ForkingProcess
from tests.patience import PATIENCE_S
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

BODIES = [(CHAT, chat("a chat", n=3)), (COMPLETIONS, completion("texts", n=2, prompts=2))]
RL: dict[str, object] = {"rl": True}


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model with other weights."""
    return save_tiny_tokenizer(save_tiny_model("llama", tmp_path_factory.mktemp("other"), seed=4))


@pytest.fixture(scope="module")
async def expected(folder: Path, other: Path, forking: ForkingProcess) -> AsyncIterator[dict[str, list[Answer]]]:
    """The answers to all bodies, by the version of the weights."""
    async with AsyncExitStack() as stack:
        servers = {"0": Undisturbed(folder, forking.spawn, stack), "1": Undisturbed(other, forking.spawn, stack)}
        answers = {
            version: [await server.answer(route, body) for route, body in BODIES] for version, server in servers.items()
        }
        assert answers["0"] != answers["1"]
        yield answers


async def answers_of(cell: RunningCell) -> list[Answer]:
    return list(await asyncio.gather(*(fetch_answer(cell.http, route, body) for route, body in BODIES)))


async def update(cell: RunningCell, folder: Path) -> str:
    """Updates the cell, and returns the version."""
    answer = await cell.http.post("/update_weights", json={"weight_dir": str(folder)})
    version: str = answer.raise_for_status().json()["weight_version"]
    return version


async def versions(cell: RunningCell) -> set[str]:
    await cell.restored()
    return {cell.engine(member.id).info.weight_version for member in cell.fleet.members}


async def test_answers_after_an_update_equal_a_server_started_with_the_new_weights(
    folder: Path, other: Path, forking: ForkingProcess, expected: dict[str, list[Answer]]
) -> None:
    """The same prompts were requested before, so their KV is in every cache. A stream runs during the update."""
    async with RunningCell(folder, spawn=forking.spawn, server=RL) as cell:
        assert await answers_of(cell) == expected["0"]
        body = chat("under way", STREAMED, n=4, max_tokens=200)
        async with cell.started_stream(CHAT, body) as stream:
            await cell.http.post("/pause", params={"mode": "keep"})
            assert (await cell.http.get("/is_paused")).json() == {"is_paused": True}
            assert await update(cell, other) == "1"
            assert not stream.has_ended
            await cell.http.post("/resume")
            answer = await stream.rest()
        assert answer.usage is not None and answer.usage.completion_tokens == 4 * 200
        before = await cell.stats("prefill-0")
        assert await answers_of(cell) == expected["1"]
        assert (await cell.stats("prefill-0")).prefills - before.prefills == 3
        assert (await cell.http.get("/weight_info")).json() == {"weight_version": "1"}
        assert await versions(cell) == {"1"}
        for worker in ("prefill-0", "decode-0", "decode-1"):
            killed = cell.engine(worker)
            kill(killed)
            await killed.died.wait()
            assert await versions(cell) == {"1"}
            assert await answers_of(cell) == expected["1"]


@pytest.mark.parametrize(("order", "version"), [(PrepareWeights, "0"), (ApplyWeights, "1")])
async def test_if_an_engine_is_killed_during_an_update_all_have_one_version_afterwards(
    order: type[EngineOrder],
    version: str,
    folder: Path,
    other: Path,
    forking: ForkingProcess,
    expected: dict[str, list[Answer]],
) -> None:
    async with RunningCell(folder, spawn=forking.spawn, server=RL) as cell:
        cell.engine("decode-1").killed_by = order
        answer = await cell.http.post("/update_weights", json={"weight_dir": str(other)})
        assert (answer.status_code == 200) == (version == "1"), answer.text
        assert await versions(cell) == {version}
        assert await answers_of(cell) == expected[version]
        assert await update(cell, other) == str(int(version) + 1)
        assert await answers_of(cell) == expected["1"]


async def test_weights_that_cannot_be_used_are_refused_and_the_old_ones_still_serve(
    folder: Path, forking: ForkingProcess, expected: dict[str, list[Answer]], tmp_path: Path
) -> None:
    wrong = save_tiny_model("qwen3", tmp_path / "wrong")
    async with RunningCell(folder, spawn=forking.spawn, server=RL) as cell:
        refused = await cell.http.post("/update_weights", json={"weight_dir": str(wrong)})
        assert_error(refused, status=400, param="weight_dir", code="invalid_weights")
        missing = "tensor model.layers.0.self_attn.k_norm.weight: the model has no such tensor"
        assert missing in refused.json()["error"]["message"]
        assert await versions(cell) == {"0"}
        assert await answers_of(cell) == expected["0"]


async def test_a_pause_ends_groups_where_they_are_or_waits_for_them_and_new_ones_wait(
    long_folder: Path, forking: ForkingProcess, expected: dict[str, list[Answer]]
) -> None:
    body = chat("under way", STREAMED, n=4, max_tokens=300)
    async with RunningCell(long_folder, spawn=forking.spawn, server=RL, **ENDLESS_ENGINE) as cell:
        complete = await fetch_answer(cell.http, CHAT, body)
        async with cell.started_stream(CHAT, body) as stream:
            waiting = asyncio.create_task(cell.http.post("/pause", params={"mode": "wait", "new_requests": "wait"}))
            await cell.until(lambda: cell.router.waiting.paused)
            new = asyncio.create_task(answers_of(cell))
            assert await stream.rest() == complete
            assert (await waiting).json() == {"status": "paused"}
        await cell.until_submitted(0, queued=3)
        await cell.http.post("/resume")
        assert await new == expected["0"]
        async with cell.started_stream(CHAT, body | {"max_tokens": ENDLESS}) as stream:
            assert (await cell.http.post("/pause")).json() == {"status": "paused"}
            cut = await stream.rest()
        assert (await cell.http.post(CHAT, json=body)).status_code == 503
        assert (await cell.http.post("/pause", params={"new_requests": "wait"})).json() == {"status": "paused"}
        assert {choice.finish_reason for choice in cut.choices.values()} == {"abort"}
        for index, choice in cut.choices.items():
            text = choice.text.removesuffix("\ufffd")  # half a character, if it was cut there
            known = complete.choices[index].text.removesuffix("\ufffd")
            assert text and text[: len(known)] == known[: len(text)]
        assert cut.usage is not None and 4 < cut.usage.completion_tokens < 4 * ENDLESS
        queued = asyncio.create_task(answers_of(cell))
        await cell.until_submitted(0, queued=3)
        assert (await cell.http.post("/abort_requests", json={"request_ids": ["unknown"]})).json()["aborted"] == 0
        assert (await cell.http.post("/abort_requests")).json() == {"status": "aborted", "aborted": 3}
        for answer in await queued:
            assert {(choice.text, choice.finish_reason) for choice in answer.choices.values()} == {("", "abort")}
        await cell.http.post("/resume")
        assert await answers_of(cell) == expected["0"]
        await cell.check_nothing_left()


async def test_an_answer_reports_the_weight_version_of_each_token(
    long_folder: Path, other: Path, forking: ForkingProcess
) -> None:
    """The engine generates while it reads the new weights: some 30 tokens on an idle machine, and any number on a busy
    one. The rest of each choice equals the answer to a request that resumes it with its first tokens."""
    sampling = {"n": 3, "max_tokens": 400, "seed": 7, "ignore_eos": True}
    body = {"token_ids": [*range(10, 60)], "sampling_params": sampling}
    endless = {**body, "sampling_params": sampling | {"max_tokens": ENDLESS}, "stream": True}
    async with RunningCell(long_folder, spawn=forking.spawn, server=RL, **ENDLESS_ENGINE) as cell:
        first = (await cell.http.post(GENERATE, json=body)).json()["choices"]
        assert all(choice["weight_versions"] == [{"version": "0", "start": 0, "end": 400}] for choice in first)
        generated: dict[int, list[int]] = {index: [] for index in range(3)}
        spans: dict[int, list[dict[str, Any]]] = {}
        before, enough = await generated_tokens(cell), 20
        updated = aborted = False
        async with cell.http.stream("POST", GENERATE, json=endless) as response:
            async for line in lines_of(response):
                for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
                    generated[choice["index"]].extend(choice["token_ids"])
                    if choice["finish_reason"]:
                        spans[choice["index"]] = choice["weight_versions"]
                if min(map(len, generated.values())) < enough or aborted:
                    continue
                if not updated:
                    updated = await update(cell, other) == "1"
                    enough = 10 + (await generated_tokens(cell) - before) // 3  # more than each choice has at this time
                else:
                    aborted = (await cell.http.post("/abort_requests")).json()["aborted"] == 1
        at = {index: spans[index][0]["end"] for index in spans}
        for index, tokens in generated.items():
            assert 20 <= at[index] < len(tokens) < ENDLESS
            expected = [
                {"version": "0", "start": 0, "end": at[index]},
                {"version": "1", "start": at[index], "end": len(tokens)},
            ]
            assert spans[index] == expected
            assert tokens[: at[index]][:400] == first[index]["token_ids"][: at[index]]
        started = [{"index": index, "token_ids": tokens[: at[index]]} for index, tokens in sorted(generated.items())]
        del sampling["n"]
        sampling["max_tokens"] = max(map(len, generated.values()))
        rest = (await cell.http.post(GENERATE, json={**body, "choices": started})).json()["choices"]
        for choice in rest:
            index = choice["index"]
            assert generated[index][at[index] :] == choice["token_ids"][: len(generated[index]) - at[index]]
            assert choice["weight_versions"][0]["version"] == "1"


async def generated_tokens(cell: RunningCell) -> int:
    return sum([(await cell.stats(worker)).generated_tokens for worker in ("decode-0", "decode-1")])


async def test_a_request_that_slime_aborts_ends_with_its_output_tokens(
    long_folder: Path, forking: ForkingProcess
) -> None:
    """slime's partial rollouts keep the output, and request the rest later."""
    sampling = {"temperature": 0.0, "ignore_eos": True}
    body = {"input_ids": [*range(10, 60)], "return_logprob": True, "rid": "sample-1"}
    short, long = ({**body, "sampling_params": sampling | {"max_new_tokens": number}} for number in (300, ENDLESS))
    async with RunningCell(long_folder, spawn=forking.spawn, server=RL, **ENDLESS_ENGINE) as cell:
        first = (await cell.http.post("/generate", json=short)).json()["output_ids"]
        before = (await cell.stats("decode-0")).generated_tokens
        running = asyncio.create_task(cell.http.post("/generate", json=long))
        async with asyncio.timeout(PATIENCE_S):
            while (await cell.stats("decode-0")).generated_tokens == before:
                pass  # each query takes some time
        # Otherwise the answer could end before the abort.
        assert (await cell.http.post("/pause", params={"mode": "keep"})).is_success
        assert (await cell.http.get("/v1/loads")).json()["loads"][0]["num_running_reqs"] == 1
        assert (await cell.http.post("/abort_request", json={"rid": "another"})).json()["aborted"] == 0
        assert (await cell.http.post("/abort_request", json={"rid": "sample-1"})).json()["aborted"] == 1
        assert (await cell.http.post("/resume")).is_success
        cut = (await running).json()
        assert cut["meta_info"]["finish_reason"]["type"] == "abort"
        generated = cut["output_ids"]
        assert 0 < len(generated) < ENDLESS
        assert [token for _, token, _ in cut["meta_info"]["output_token_logprobs"]] == generated
        assert generated[:300] == first[: len(generated)]
        await cell.check_nothing_left()


@pytest.mark.long
async def test_a_gateway_distinguishes_workers_with_two_versions(
    folder: Path, other: Path, forking: ForkingProcess
) -> None:
    """Each group has a single version. When all workers have the new version, all groups have it."""
    bodies = BODIES_OF_SERVERS[:2]  # each has one prompt, and so one group
    async with AsyncExitStack() as stack:
        servers = Servers(folder, stack, forking, "--rl")
        await servers.start(2)
        old = [await answer(await stack.enter_async_context(client_of(servers[1])), body) for body in bodies]
        gateway = await stack.enter_async_context(servers.gateway(servers[0].url, servers[1].url))
        http = await stack.enter_async_context(client_of(gateway))
        assert [await answer(http, body) for body in bodies] == old
        for number, expected_versions in enumerate((["0", "1"], ["1", "1"])):
            async with client_of(servers[number]) as own:
                await own.post("/update_weights", json={"weight_dir": str(other)})
                new = [await answer(own, body) for body in bodies]
            await until_versions(http, expected_versions)
            answers = [[await answer(http, body) for body in bodies] for _ in range(4)]
            for found in answers:
                for place, text in enumerate(found):
                    assert text in ((old[place], new[place]) if number == 0 else (new[place],))
        assert not set(old) & set(new)


async def until_versions(http: httpx.AsyncClient, versions: list[str]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            workers = (await http.get("/status")).json()["workers"]
            if sorted(worker["weight_version"] for worker in workers) == versions:
                return
            await asyncio.sleep(POLL_S)


async def test_a_server_that_is_stopped_while_it_is_paused_lets_its_answers_end(
    folder: Path, forking: ForkingProcess
) -> None:
    body = chat("under way", STREAMED, n=2, max_tokens=200)
    async with RunningCell(folder, spawn=forking.spawn, server=RL) as cell:
        complete = await fetch_answer(cell.http, CHAT, body)
        async with cell.started_stream(CHAT, body) as stream:
            await cell.http.post("/pause", params={"mode": "keep"})
            cell.signals.receive()
            assert await stream.rest() == complete
        assert await cell.outcome() is Outcome.STOPPED
