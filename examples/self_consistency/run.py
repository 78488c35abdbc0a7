"""Runs the same questions under several policies, and reports what each policy saves.

Needs `pip install openai` and a running server (make serve). Usage: python -m examples.self_consistency.run
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from openai import OpenAI

from examples.self_consistency.questions import Question, make_questions
from examples.self_consistency.report import Answer, Run, save, table

N = 40
"""Maximum number of samples per question."""
WAVE = 24
"""Number of questions after which the next policy runs, so that a slow minute of the machine affects all policies."""

Group = Mapping[str, object]
POLICIES: Mapping[str, Group] = {
    "all": {},
    "agree": {"stop_when": {"agree": 8}, "start": 12},
    "ESC": {"stop_when": {"window": 3}, "start": 9},
    "Adaptive-Consistency": {"stop_when": {"posterior": 0.95}, "start": 8},
    "DeepConf": {
        "stop_when": {"posterior": 0.95},
        "start": 8,
        "confidence": {"window": 8, "warm_up": 8, "percentile": 90},
    },
}
VOTE: Group = {"extract": "last_number", "vote": True, "deterministic": True}
"""Fields that all policies share. Decisions depend only on numbers of tokens, so other load does not change votes."""


class VoteClient:
    """Sends questions to a running server."""

    def __init__(self, url: str, *, temperature: float) -> None:
        self._client = OpenAI(base_url=url, api_key="none")
        self._model = self._client.models.list().data[0].id
        self._temperature = temperature

    def warm_up(self, questions: Sequence[Question]) -> None:
        """Lets the server compute all prompts once, so that the first policy is not slower than the others."""
        for question in questions:
            self._client.completions.create(model=self._model, prompt=question.prompt, max_tokens=1)

    def sample(self, question: Question, *, group: Group, seed: int) -> Answer:
        answer = self._client.completions.create(
            model=self._model,
            prompt=question.prompt,
            n=N,
            max_tokens=64,
            temperature=self._temperature,
            stop="\n",
            seed=seed,  # sample i has seed + i under every policy
            extra_body={"group": {**VOTE, **group}},
        )
        assert answer.usage is not None and answer.model_extra is not None
        report = answer.model_extra["groups"][0]
        return Answer(
            kind=question.kind,
            right=report["vote"]["majority"] == str(question.answer),
            started=report["begun"],
            finished=report["finished"],
            tokens=answer.usage.completion_tokens,
        )


def measure(client: VoteClient, questions: Sequence[Question], *, at_a_time: int) -> list[Run]:
    """Runs all questions under each policy, `at_a_time` of them concurrently. Returns one run per policy."""
    seconds = dict.fromkeys(POLICIES, 0.0)
    answers: dict[str, list[Answer]] = {name: [] for name in POLICIES}
    with ThreadPoolExecutor(at_a_time) as threads:
        for start in range(0, len(questions), WAVE):
            indices = range(start, min(start + WAVE, len(questions)))
            for name, group in POLICIES.items():
                begin = time.perf_counter()
                sample = partial(client.sample, group=group)
                results = threads.map(lambda index, sample=sample: sample(questions[index], seed=index * N), indices)
                answers[name] += results
                seconds[name] += time.perf_counter() - begin
    return [Run(name, at_a_time, seconds[name], answers[name]) for name in POLICIES]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="base URL of the API")
    parser.add_argument("--questions", type=int, default=96, help="number of questions")
    parser.add_argument("--seed", type=int, default=11, help="seed of the questions")
    parser.add_argument("--temperature", type=float, default=0.6, help="sampling temperature")
    parser.add_argument("--at-a-time", type=int, nargs="+", default=[1, 4], help="numbers of concurrent questions")
    parser.add_argument("--out", type=Path, default=Path("runs.json"), help="output file of the answers")
    arguments = parser.parse_args()

    client = VoteClient(arguments.url, temperature=arguments.temperature)
    questions = make_questions(arguments.questions, seed=arguments.seed)
    client.warm_up(questions)
    runs = [run for at_a_time in arguments.at_a_time for run in measure(client, questions, at_a_time=at_a_time)]
    save(runs, arguments.out)
    print(table(runs))


if __name__ == "__main__":
    main()
