"""The benchmark of post-training measures every way of an update, and each of its targets can be missed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench.rollout.__main__ import main
from bench.rollout.results import FLOAT32_MEAN, RolloutResults, ServedBatch, targets
from bench.rollout.timed_updates import UpdateCost
from bench.rollout.trainer import LogprobMismatch, Rollout, TrainedPolicy
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer

SMALL = [
    "--prompts", "2", "--n", "3", "--prompt-tokens", "20", "--max-tokens", "6", "--generate-prompts", "1",
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_tokenizer(save_tiny_model("llama", tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def policy(model: Path) -> TrainedPolicy:
    return TrainedPolicy(model)


def results_that_meet() -> RolloutResults:
    results = RolloutResults(train_s=3.0)
    for server, speed in (("Motet", 130.0), ("vLLM", 100.0)):
        results.served.append(ServedBatch(server, "bfloat16", 1.0, speed))
        results.compared(server, "bfloat16", "start", True, LogprobMismatch(0.01, 0.02, 5))
    for after in ("start", "memory"):
        results.compared("Motet", "float32", after, False, LogprobMismatch(FLOAT32_MEAN, 0.1, 5))
    results.updates["memory, bfloat16"] = UpdateCost(taken_s=1.0, silent_s=1.0, usual_s=0.1)
    return results


def missed(results: RolloutResults) -> list[str]:
    return [target.what for target in targets(results) if not target.met]


def test_targets_are_met_at_their_limits() -> None:
    assert missed(results_that_meet()) == []
    assert len(targets(results_that_meet())) == 5


def test_each_target_can_be_missed_alone() -> None:
    slow, distant, drifted, silent = (results_that_meet() for _ in range(4))
    slow.served[0] = replace(slow.served[0], tokens_per_s=129.0)
    assert missed(slow) == ["tokens/s / vLLM's, bf16"]
    distant.mismatches[0] = replace(distant.mismatches[0], mismatch=LogprobMismatch(0.012, 0.02, 5))
    assert missed(distant) == ["mismatch / vLLM's, bf16"]
    drifted.mismatches[-1] = replace(drifted.mismatches[-1], mismatch=LogprobMismatch(2 * FLOAT32_MEAN, 0.1, 5))
    assert missed(drifted) == ["mismatch in float32 after memory, in 0.0001 nats"]
    silent.updates["memory, bfloat16"] = UpdateCost(taken_s=1.0, silent_s=1.1, usual_s=0.1)
    assert missed(silent) == ["seconds without a token, memory, bfloat16"]


def test_a_figure_that_was_not_measured_misses_its_target() -> None:
    assert len(missed(RolloutResults())) == 3


def test_generation_has_its_share_of_a_step_that_also_trains_and_updates() -> None:
    results = results_that_meet()
    assert [results.share(one) for one in results.served] == [1 / (1 + 3 + 1), 1 / (1 + 3)]


@pytest.mark.slow
def test_the_trainers_own_log_probabilities_have_no_mismatch(policy: TrainedPolicy) -> None:
    """Checks that `rounded` compares with rounded weights, and restores the weights afterwards."""
    prompt, tokens = [5, 6, 7], [8, 9, 10, 11]
    before = [tensor.clone() for _, tensor in policy.named_tensors()]
    logits = policy.model(torch.tensor([[*prompt, *tokens]])).logits[0, 2:-1]
    reported = logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0].tolist()
    assert policy.mismatch([Rollout(prompt, tokens, reported)], rounded=False).mean < 1e-6
    assert policy.mismatch([Rollout(prompt, tokens, reported)], rounded=True).mean > 1e-4
    shifted = Rollout(prompt, tokens, [logprob + 0.5 for logprob in reported])
    assert policy.mismatch([shifted], rounded=False).p99 == pytest.approx(0.5, abs=1e-5)
    assert all(torch.equal(old, new) for old, (_, new) in zip(before, policy.named_tensors(), strict=True))


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.usefixtures("all_forked")
def test_a_server_is_measured_with_every_way_of_an_update(
    model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bench.rollout.timed_updates.STREAMED_N", 2)
    assert main(["--model", str(model), "--dtypes", "float32", *SMALL]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert set(report["updates"]) == {f"{way}, float32" for way in ("folder", "memory", "http")}
    mean = {one["after"]: one["mismatch"]["mean"] for one in report["mismatches"]}
    assert set(mean) == {"start", "stale", "folder", "memory", "http"}
    assert all(mean[after] < FLOAT32_MEAN < mean["stale"] for after in mean if after != "stale")
    assert [one["server"] for one in report["served"]] == ["Motet", "generate"]
    for update in report["updates"].values():
        assert min(update["usual_s"], update["silent_s"], update["taken_s"]) > 0
