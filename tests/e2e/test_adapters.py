"""A cell with separate prefill and decode serves a model and its adapters: by name, replaced while a group runs, and
after the loss of a worker."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from motet.deploy.child import ChildServer
from motet.settings.server_config import environment
from tests.engines.native.adapter_files import save_adapter
from tests.forked import ForkingProcess
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.slow

PROMPT = list(range(20, 90))
TOKENS = 48
MANY_TOKENS = 2_000
"""Enough that a choice does not end before the test has seen its first tokens and changed the server."""


@pytest.fixture(scope="module")
def adapters(long_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("adapters")
    return {name: save_adapter(long_folder, place / name, seed=seed) for seed, name in enumerate(("poet", "sql"), 1)}


@pytest.fixture(scope="module")
def cell(
    long_folder: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory, forking: ForkingProcess
) -> Iterator[ChildServer]:
    environ = {**environment(), "TMPDIR": str(tmp_path_factory.mktemp("cell"))}
    arguments = [
        str(long_folder), "--served-model-name", "tiny", "--kv-cache-gb", "0.05", "--threads", "1", "--prefill", "1",
        "--decode", "2", "--bypass-tokens", "1", "--admin-key", "admin", "--adapter", f"poet={adapters['poet']}",
    ]  # fmt: skip
    with forking.server(arguments, environ=environ) as server:
        yield server


@pytest.fixture(scope="module")
def client(cell: ChildServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=cell.url, timeout=PATIENCE_S, headers={"authorization": "Bearer admin"}) as http:
        yield http


def body_of(model: str, n: int = 1, seed: int = 7, tokens: int = TOKENS) -> dict[str, object]:
    sampling = {"seed": seed, "n": n, "max_tokens": tokens, "ignore_eos": True}
    return {"model": model, "token_ids": PROMPT, "sampling_params": sampling}


def generated(client: httpx.Client, model: str, n: int = 1, seed: int = 7, tokens: int = TOKENS) -> list[list[int]]:
    answer = client.post("/inference/v1/generate", json=body_of(model, n, seed, tokens))
    assert answer.status_code == 200, answer.text
    choices = sorted(answer.json()["choices"], key=lambda choice: int(choice["index"]))
    return [choice["token_ids"] for choice in choices]


def load(client: httpx.Client, name: str, path: Path, **fields: object) -> None:
    answer = client.post("/v1/load_lora_adapter", json={"lora_name": name, "lora_path": str(path)} | fields)
    assert answer.status_code == 200, answer.text


def workers(client: httpx.Client) -> dict[str, dict[str, Any]]:
    return {worker["id"]: worker for worker in client.get("/status").json()["workers"]}


def test_a_model_and_its_adapters_are_served_by_name(client: httpx.Client, adapters: dict[str, Path]) -> None:
    load(client, "sql", adapters["sql"])
    answers = {model: generated(client, model, n=3) for model in ("tiny", "poet", "sql")}
    assert len({json.dumps(answer) for answer in answers.values()}) == 3
    for model, answer in answers.items():
        assert [generated(client, model, seed=7 + i)[0] for i in range(3)] == answer
    response = client.post("/inference/v1/generate", json=body_of("sql"))
    assert response.headers["x-motet-prefill-worker"] == "prefill-0"
    listed = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
    assert (listed["sql"]["parent"], listed["sql"]["root"]) == ("tiny", str(adapters["sql"]))
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "sql"}).status_code == 200
    assert client.post("/inference/v1/generate", json=body_of("sql")).status_code == 404
    assert generated(client, "tiny:poet") == [answers["poet"][0]]


def test_a_group_continues_with_an_adapter_that_replaces_its_own(
    client: httpx.Client, adapters: dict[str, Path]
) -> None:
    load(client, "step", adapters["poet"], weight_version="v1")
    first = generated(client, "step")[0]
    load(client, "step", adapters["sql"], weight_version="v2", load_inplace=True)
    second = generated(client, "step")[0]
    load(client, "step", adapters["poet"], weight_version="v1", load_inplace=True)
    body = {"model": "step", "prompt": PROMPT, "max_tokens": MANY_TOKENS, "ignore_eos": True, "seed": 7, "stream": True}
    body |= {"return_token_ids": True, "return_weight_versions": True}
    tokens: list[int] = []
    versions: list[dict[str, Any]] = []
    with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            (choice,) = json.loads(line[6:])["choices"]
            tokens += choice.get("token_ids") or []
            versions = choice.get("weight_versions") or versions
            if len(tokens) >= 4 and not versions and "v2" not in str(client.get("/v1/models").text):
                load(client, "step", adapters["sql"], weight_version="v2", load_inplace=True)
    assert [span["version"] for span in versions] == ["v1", "v2"]
    assert tokens[:4] == first[:4] and first != second
    assert client.post("/v1/unload_lora_adapter", json={"lora_name": "step"}).status_code == 200


def test_after_the_loss_of_a_worker_choices_of_an_adapter_continue_with_the_same_tokens(client: httpx.Client) -> None:
    expected = generated(client, "poet", n=2, tokens=MANY_TOKENS)
    body = {"model": "poet", "prompt": PROMPT, "max_tokens": MANY_TOKENS, "ignore_eos": True, "seed": 7, "stream": True}
    tokens: dict[int, list[int]] = {0: [], 1: []}
    killed = ""
    with client.stream("POST", "/v1/completions", json=body | {"n": 2, "return_token_ids": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                assert "error" not in json.loads(line[6:]), line
                for choice in json.loads(line[6:])["choices"]:
                    tokens[choice["index"]] += choice.get("token_ids") or []
            if not killed and all(tokens.values()):
                running = [id for id, one in workers(client).items() if one["choices_running"] and "decode" in id]
                killed = running[0] if running else "none"
                if running:
                    assert client.post(f"/workers/{killed}/kill").status_code < 300
    assert killed.startswith("decode") and [tokens[0], tokens[1]] == expected
    for _ in range(3):
        assert generated(client, "poet", n=2) == [choice[:TOKENS] for choice in expected]
