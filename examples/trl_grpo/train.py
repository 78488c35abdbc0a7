"""Trains a model with TRL's GRPOTrainer. Motet generates the answers with the weights of each step.

    python -m examples.trl_grpo.train --model ~/.cache/motet/smollm2-v1 --out seed1.jsonl

It starts a server, or uses the one at `--server`, which was started with `motet serve smollm2 --rl --dtype float32`.
`run.sh` does this for three seeds. The output file gets one line of JSON per step. With `--peft` the trainer trains a
LoRA adapter, pushes it after each step, and samples from it; a running server then needs no `--rl`.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import (
    AutoModelForCausalLM,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from trl import GRPOConfig, GRPOTrainer

from examples.trl_grpo.reward import THINGS, prompt_about, reward
from examples.trl_grpo.rollouts import Chat, Sampler
from motet import LLM, weights

N = 8
"""Number of answers per prompt. The mean reward of such a group is the baseline of each of its answers."""
PROMPTS = 2
"""Number of prompts per step."""
MAX_TOKENS = 24


ADAPTER = "policy"
"""Name of the adapter in requests."""


class PushAfterEachStep(TrainerCallback):
    """Pushes the initial weights to the server, and then the weights of each step as soon as the step ends."""

    def __init__(self, llm: LLM, *, peft: bool) -> None:
        """`peft`: True to push the adapter of a PEFT model, which has few weights."""
        self.llm = llm
        self.peft = peft
        self.seconds = 0.0
        """Duration of the last push."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._push(kwargs["model"], state.global_step)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._push(kwargs["model"], state.global_step)

    def _push(self, model: Any, step: int) -> None:
        begin = time.perf_counter()
        server, key, version = self.llm.url, self.llm.admin_key, f"step {step}"
        if self.peft:
            weights.push_adapter(server, model, name=ADAPTER, version=version, admin_key=key)
        else:
            weights.push(server, model.named_parameters(), version=version, admin_key=key)
        self.seconds = time.perf_counter() - begin


class Log(TrainerCallback):
    """Writes the figures of each step, and the duration of its parts."""

    def __init__(self, path: Path, pushes: PushAfterEachStep) -> None:
        self.path = path
        self.pushes = pushes
        self.rollout_s = 0.0
        self._begin = 0.0

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self._begin = time.perf_counter()

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        logs = kwargs["logs"]
        if "reward" not in logs:
            return
        line = {
            "step": state.global_step,
            "seed": args.seed,
            "reward": logs["reward"],
            "tokens": logs["completions/mean_length"],
            "rollout_s": round(self.rollout_s, 3),
            "push_s": round(self.pushes.seconds, 3),
            "step_s": round(time.perf_counter() - self._begin, 3),
        }
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(line, flush=True)


def rewards(completions: list[list[dict[str, str]]], thing: list[str], ended: list[bool], **_: Any) -> list[float]:
    """Computes the rewards for TRL. `thing` is a column of the data set, and `ended` comes from the rollouts."""
    answers = zip(completions, thing, ended, strict=True)
    return [reward(turn[0]["content"], thing=name, ended=done) for turn, name, done in answers]


def lora_config() -> object:
    """Returns an adapter of all linear layers."""
    from peft import LoraConfig

    return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")


def train(arguments: argparse.Namespace, llm: LLM) -> None:
    sampler = Sampler(llm, n=N, max_tokens=MAX_TOKENS, adapter=ADAPTER if arguments.peft else None)
    pushes = PushAfterEachStep(llm, peft=arguments.peft)
    log = Log(arguments.out, pushes)

    def rollout(prompts: list[Chat], trainer: GRPOTrainer) -> dict[str, list[Any]]:
        """Generates the answers. TRL repeats each prompt n times in a row; one request returns all its n answers."""
        begin = time.perf_counter()
        seed = arguments.seed * 1_000_000 + trainer.state.global_step * len(prompts)
        answers = sampler.rollouts(prompts[::N], seed=seed)
        end = trainer.processing_class.eos_token_id
        log.rollout_s = time.perf_counter() - begin
        return {**answers, "ended": [tokens[-1] == end for tokens in answers["completion_ids"]]}

    config = GRPOConfig(
        output_dir=str(arguments.out.with_suffix("")),
        seed=arguments.seed,
        max_steps=arguments.steps,
        per_device_train_batch_size=PROMPTS * N,
        num_generations=N,
        max_completion_length=MAX_TOKENS,
        learning_rate=arguments.learning_rate or (1e-4 if arguments.peft else 1e-5),
        lr_scheduler_type="constant",
        beta=0.0,
        use_cpu=True,
        bf16=True,
        gradient_checkpointing=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32),
        reward_funcs=rewards,
        args=config,
        train_dataset=Dataset.from_list([{"prompt": prompt_about(thing), "thing": thing} for thing in THINGS]),
        rollout_func=rollout,
        peft_config=lora_config() if arguments.peft else None,
        callbacks=[pushes, log],
    )
    trainer.train()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder of the model")
    parser.add_argument("--server", help="URL of a server that runs with --rl; by default, one is started")
    parser.add_argument("--seed", type=int, default=1, help="seed of the order of prompts and of all answers")
    parser.add_argument("--steps", type=int, default=32, help="number of steps")
    parser.add_argument("--learning-rate", type=float, help="learning rate; by default 1e-5, with --peft 1e-4")
    parser.add_argument("--peft", action="store_true", help="train a LoRA adapter instead of all weights")
    parser.add_argument(
        "--out", type=Path, default=Path("rewards.jsonl"), help="output file, with one line of JSON per step"
    )
    arguments = parser.parse_args()
    own = {"model": arguments.model, "rl": True, "dtype": "float32", "kv_cache_gb": 1.0}
    with LLM(**own) if arguments.server is None else LLM(url=arguments.server) as llm:
        train(arguments, llm)


if __name__ == "__main__":
    main()
