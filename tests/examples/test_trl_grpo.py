"""The example with TRL: its rollouts and pushes train a tiny model, here in a plain loop, in `make clients` with
TRL."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from examples.trl_grpo.plot import table
from examples.trl_grpo.reward import prompt_about, reward
from examples.trl_grpo.rollouts import Sampler
from motet import LLM, weights
from motet.deploy.child import ChildServer
from motet.settings.server_config import environment
from tests.clients.installed import LLM_PACKAGES, TRL, WEIGHTS_PACKAGES
from tests.clients.running import run
from tests.examples.test_vllm_pd import fake_program, flags_of
from tests.forked import ForkingProcess
from tests.tiny_models import save_tiny_model
from tests.tiny_tokenizer import save_tiny_tokenizer
from tools.layers import SOURCE, imports_of

ROOT = Path(__file__).parents[2]
N, PROMPTS, MAX_TOKENS = 8, 2, 12
STEPS = 12
LETTER_IDS = range(100, 160)
"""Tokens for which the tiny policy gets a reward: a sixth of its vocabulary."""
SAME = 1e-4
"""Tolerance in nats: the engine and the trainer add in different orders, in float32."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_tokenizer(save_tiny_model("llama", tmp_path_factory.mktemp("model")))


@pytest.fixture
def server(model: Path, tmp_path: Path, forking: ForkingProcess) -> Iterator[ChildServer]:
    arguments = [str(model), "--served-model-name", "tiny", "--rl", "--dtype", "float32", "--threads", "1"]
    environ = {**environment(), "TMPDIR": str(tmp_path)}
    with forking.server([*arguments, "--kv-cache-gb", "0.05"], environ=environ) as running:
        yield running


def logprobs(policy: Any, answers: dict[str, list[Any]]) -> list[torch.Tensor]:
    """Returns the trainer's log-probability of each token of each answer."""
    found = []
    for prompt, tokens in zip(answers["prompt_ids"], answers["completion_ids"], strict=True):
        logits = policy(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        found.append(logits.log_softmax(-1).gather(-1, torch.tensor(tokens)[:, None])[:, 0])
    return found


@pytest.mark.slow
def test_a_policy_learns_from_a_server_that_always_has_its_weights(model: Path, server: ChildServer) -> None:
    """Runs steps of GRPO. At every step the server and the trainer have the same log-probabilities."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    sampler = Sampler(LLM(url=server.url), n=N, max_tokens=MAX_TOKENS)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    rewards = []
    for step in range(STEPS):
        weights.push(server.url, policy.named_parameters(), version=f"step {step}")
        answers = sampler.rollouts([prompt_about(f"thing {i}") for i in range(PROMPTS)], seed=step * PROMPTS * N)
        assert all(answers["prompt_ids"][i * N] == answers["prompt_ids"][i * N + N - 1] for i in range(PROMPTS))
        ours = logprobs(policy, answers)
        reported = [torch.tensor(values) for values in answers["logprobs"]]
        assert max((a - b).abs().max().item() for a, b in zip(ours, reported, strict=True)) < SAME
        gained = torch.tensor(
            [sum(token in LETTER_IDS for token in tokens) / len(tokens) for tokens in answers["completion_ids"]]
        ).view(PROMPTS, N)
        advantages = ((gained - gained.mean(1, keepdim=True)) / (gained.std(1, keepdim=True) + 1e-4)).flatten()
        loss = -torch.stack([a * one.mean() for a, one in zip(advantages, ours, strict=True)]).mean()
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        rewards.append(gained.mean().item())
    assert sum(rewards[-3:]) > 1.5 * sum(rewards[:3]), rewards


@pytest.mark.slow
def test_equal_seeds_give_equal_answers_in_one_request_or_several(server: ChildServer) -> None:
    prompts = [prompt_about("a boat"), prompt_about("a sea")]
    llm = LLM(url=server.url)
    both = Sampler(llm, n=N, max_tokens=MAX_TOKENS).rollouts(prompts, seed=5)
    alone = Sampler(llm, n=1, max_tokens=MAX_TOKENS).rollouts(prompts[1:], seed=5 + N + 3)
    assert [both[name][N + 3] for name in both] == [alone[name][0] for name in both]


@pytest.mark.parametrize(
    ("text", "ended", "gained"),
    [
        ("A harbor is a place for boats.", True, 1.0),
        ("A harbor is a place for boats.", False, 0.0),
        ("A harbor is a place for boats", True, 0.0),
        ("A harbor is a place. It is for boats.", True, 0.0),
        ("It is a place for boats.", True, 0.0),
        ("A harbor.", True, 0.0),
        ("harbor " * 16 + "end.", True, 0.0),
    ],
)
def test_an_answer_is_rewarded_by_a_rule(text: str, ended: bool, gained: float) -> None:
    assert reward(text, thing="a harbor", ended=ended) == gained


def test_figures_are_of_the_first_and_the_last_ten_steps() -> None:
    steps = [
        {"step": i, "seed": 3, "reward": float(i > 10), "tokens": 20 - i, "rollout_s": 1, "push_s": 0.5, "step_s": 4}
        for i in range(1, 21)
    ]
    assert table([steps]).splitlines()[-1] == "| 3 | 0.00 | 1.00 | 14 to 4 | 1.00 | 0.50 | 4.00 |"


FAKE_MOTET = """\
#!/usr/bin/env bash
echo "motet $*" >> {folder}/output
[ "$1" = models ] && echo /the/model || exec sleep 60
"""
FAKE_PYTHON = """\
#!/usr/bin/env bash
echo "python $*" >> {folder}/output
"""
FAKE_CURL = "#!/usr/bin/env bash\ngrep --quiet 'motet serve' {folder}/output\n"


@pytest.mark.slow
def test_one_command_serves_and_trains_with_three_seeds(tmp_path: Path) -> None:
    """The programs of the example are replaced by scripts that report how they were started."""
    for name, script in (("motet", FAKE_MOTET), ("python", FAKE_PYTHON), ("curl", FAKE_CURL)):
        fake_program(tmp_path / "bin", name, script)
    path = f"{tmp_path / 'bin'}:{environment()['PATH']}"
    environ = {**environment(), "PATH": path, "ENVIRONMENT": str(tmp_path), "OUT": str(tmp_path / "out")}
    run([str(ROOT / "examples" / "trl_grpo" / "run.sh"), "5"], environ, tmp_path)
    pulled, *others = (tmp_path / "bin" / "output").read_text().splitlines()
    assert pulled == "motet models pull smollm2"
    (served,) = [line for line in others if line.startswith("motet serve")]
    assert {"--rl", "--dtype"} <= set(served.split()) and flags_in(served) <= flags_of("serve")
    *trained, plotted = [line for line in others if line.startswith("python")]
    assert ["--model /the/model" in line and f"--seed {i} --steps 5" in line for i, line in enumerate(trained, 1)] == [
        True, True, True,
    ]  # fmt: skip
    assert plotted.startswith("python -m examples.trl_grpo.plot")


def flags_in(command: str) -> set[str]:
    return {part for part in command.split() if part.startswith("--")}


def test_the_environment_of_trl_has_what_the_example_imports_from_motet() -> None:
    """The bug: `motet.weights` had come to import msgspec, and the environment was neither complete nor made again."""
    assert packages_of(SOURCE / "motet" / "weights.py") == names_of(WEIGHTS_PACKAGES)
    assert packages_of(SOURCE / "motet" / "llm" / "llm.py") == names_of(LLM_PACKAGES)
    assert {*WEIGHTS_PACKAGES, *LLM_PACKAGES} <= set(TRL.packages)


def names_of(packages: tuple[str, ...]) -> set[str]:
    return {package.partition("==")[0].replace("-", "_") for package in packages}


def packages_of(module: Path) -> set[str]:
    """Returns the packages that a module imports when it is loaded, with all modules of Motet that it imports then."""
    files, packages = [module], set()
    for file in files:
        for target in (one.target for one in imports_of(file) if one.at_top):
            paths = (SOURCE / name.replace(".", "/") for name in (target, target.rpartition(".")[0]))
            files += {path.with_suffix(".py") for path in paths if path.with_suffix(".py").is_file()} - set(files)
            packages.add(target.partition(".")[0])
    assert len(files) > 4
    return packages - sys.stdlib_module_names - {"motet"}


@pytest.mark.clients
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("flags", [(), ("--peft",)], ids=["weights", "adapter"])
def test_trl_s_trainer_trains_a_tiny_model(
    model: Path, server: ChildServer, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    out = tmp_path / "steps.jsonl"
    python = TRL.installed() / "bin" / "python"
    environ = {**environment(), "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", "TRL_EXPERIMENTAL_SILENCE": "1"}
    command = [str(python), "-m", "examples.trl_grpo.train", "--model", str(model), "--server", server.url]
    run([*command, "--steps", "3", "--out", str(out), *flags], environ, ROOT)
    steps = [json.loads(line) for line in out.read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert all(step["tokens"] > 0 and step["push_s"] > 0 for step in steps)
