"""Unchanged tools read log-probabilities of texts that they send: most come from the cache, and vLLM's are the same.

`VLLM_VENV` names a virtual environment with vLLM. Without it, nothing is compared with vLLM.
"""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.servers.peer_server import all_cores, peer_server
from bench.servers.vllm import MODEL_NAME, VLLMSetup
from motet.deploy.child import ChildServer
from motet.models.smollm2 import DEFAULT_MODEL, Smollm2
from motet.settings.server_config import cache_folder, environment
from tests.clients.installed import LM_EVAL, LM_EVAL_SCORES, SCRIPTS
from tests.clients.recorder import Recorder
from tests.clients.running import run
from tests.status import metric_sum

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.clients, pytest.mark.timeout(1200)]


def lm_eval(url: str, model: str, environ: dict[str, str], folder: Path, *options: str) -> dict[str, Any]:
    """Returns results and log-likelihoods of several requests at a time. `options`: further arguments of the script."""
    folder.mkdir()
    python = str(LM_EVAL.installed() / "bin" / "python")
    run([python, str(SCRIPTS / LM_EVAL_SCORES), url, model, *options], environ, folder, timeout_s=600)
    runs: dict[str, dict[str, Any]] = json.loads((folder / "runs.json").read_text())
    return runs["several"]


def test_lm_eval_has_the_same_results_by_both_routes_and_mostly_from_the_cache(
    recorded: Recorder, clean: dict[str, str], tmp_path: Path
) -> None:
    before = httpx.get(f"{recorded.url}/metrics").text
    found = lm_eval(recorded.url, DEFAULT_MODEL, clean, tmp_path / "completions", "2")
    assert recorded.refused() == []
    after = httpx.get(f"{recorded.url}/metrics").text
    sent, computed = (
        metric_sum(after, name) - metric_sum(before, name)
        for name in ("motet:prompt_tokens_total", "motet:prefill_tokens_total")
    )
    assert computed < 0.25 * sent
    recorded.clear()
    scored = lm_eval(
        recorded.url, DEFAULT_MODEL, clean, tmp_path / "score", "1", str(ROOT / "examples" / "lm_eval_motet.py")
    )
    assert (scored["results"], scored["samples"]) == (found["results"], found["samples"])
    assert {exchange["path"] for exchange in recorded.exchanges if exchange["body"]} == {"/v1/score", "/tokenize"}


def test_lm_eval_has_the_same_results_with_vllm_in_float32(clean: dict[str, str], tmp_path: Path) -> None:
    if not (venv := environment().get("VLLM_VENV")):
        pytest.skip("VLLM_VENV names no virtual environment with vLLM")
    with ChildServer([DEFAULT_MODEL, "--dtype", "float32", "--kv-cache-gb", "0.5"]) as server:
        motet = lm_eval(server.url, DEFAULT_MODEL, clean, tmp_path / "motet", "1")
    weights = Smollm2(cache_folder(environment())).folder
    flags = ("--dtype", "float32", "--enable-tokenizer-info-endpoint")
    with peer_server(VLLMSetup(Path(venv), weights, all_cores()[:1], flags)) as peer:
        peer.wait_until_ready()
        vllm = lm_eval(peer.url, MODEL_NAME, clean, tmp_path / "vllm", "1")
    assert motet["results"]["sums_choice"] == vllm["results"]["sums_choice"]
    assert motet["results"]["licence_text"] == pytest.approx(vllm["results"]["licence_text"], rel=1e-4)
    for task, samples in motet["samples"].items():
        ours, theirs = (
            [response[0] if isinstance(response, list) else response for sample in one for response in sample]
            for one in (samples, vllm["samples"][task])
        )
        assert ours == pytest.approx(theirs, abs=0.01 if task == "licence_text" else 0.001)
