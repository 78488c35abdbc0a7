"""Requests several answers in one form for each question from a server, and validates each of them.

1. A `Question` is a user message, the request fields that require a form, and the checks of the form.
2. `outcome_of` sends all questions, several at a time.
3. `QuestionOutcome` counts valid, truncated and invalid answers.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion, ChatCompletionUserMessageParam

from motet.models.smollm2 import DEFAULT_MODEL

N = 4
CONCURRENCY = 10
MAX_TOKENS = 160
SEED_DISTANCE = 100
"""Distance between the seeds of two questions: choice i of a request has the seed of the request + i."""


@dataclass(frozen=True)
class Question:
    """A question, and the form that its answers must have."""

    name: str
    message: str
    fields: dict[str, object]
    """Fields of the request that require the form."""
    errors: Callable[[str], str]
    """Returns the errors in a complete answer; an empty string if it is valid."""
    can_start: Callable[[str], bool]
    """Returns True if a valid answer can start with this truncated one."""
    few_answers: bool
    """True if the form allows so few answers that several choices can be equal."""


@dataclass
class QuestionOutcome:
    """The answers to some questions, validated and counted."""

    num_valid: int = 0
    num_truncated: int = 0
    invalid: list[str] = field(default_factory=list)
    """Each answer that is not valid, and its error."""
    with_valid: set[str] = field(default_factory=set)
    """Names of questions that have a valid answer."""
    all_equal: set[str] = field(default_factory=set)
    """Names of questions whose answers are all equal although the form allows many answers."""

    def add(self, question: Question, text: str, finish_reason: str) -> None:
        if finish_reason == "length":
            is_start = question.can_start(text.rstrip("\ufffd"))
            error = "" if is_start else "it is truncated, and no continuation could be valid"
        else:
            error = question.errors(text) if finish_reason == "stop" else f"it ended with {finish_reason}"
        if error:
            self.invalid.append(f"{question.name}: {text!r}: {error}")
        elif finish_reason == "length":
            self.num_truncated += 1
        else:
            self.num_valid += 1
            self.with_valid.add(question.name)

    def compare(self, question: Question, texts: Sequence[str | None]) -> None:
        """Compares all answers to a question with each other."""
        if len(set(texts)) == 1 and not question.few_answers:
            self.all_equal.add(question.name)

    @property
    def num_answers(self) -> int:
        """Number of answers that follow their form."""
        return self.num_valid + self.num_truncated

    def __str__(self) -> str:
        return (
            f"{self.num_answers} answers: {self.num_valid} valid, {self.num_truncated} truncated; "
            f"{len(self.invalid)} invalid"
        )


async def outcome_of(client: AsyncOpenAI, questions: Sequence[Question], *, attempt: int = 0) -> QuestionOutcome:
    """Sends the questions, several at a time, each with its own seed. Another attempt uses other seeds."""
    outcome, slots = QuestionOutcome(), asyncio.Semaphore(CONCURRENCY)

    async def answer(number: int, question: Question) -> None:
        async with slots:
            completion = await complete(client, question, seed=number * SEED_DISTANCE + attempt * N)
        for choice in completion.choices:
            outcome.add(question, choice.message.content or "", choice.finish_reason)
        outcome.compare(question, [choice.message.content for choice in completion.choices])

    async with asyncio.TaskGroup() as tasks:
        for number, question in enumerate(questions):
            tasks.create_task(answer(number, question))
    return outcome


async def complete(client: AsyncOpenAI, question: Question, *, seed: int) -> ChatCompletion:
    message: ChatCompletionUserMessageParam = {"role": "user", "content": question.message}
    return await client.chat.completions.create(
        model=DEFAULT_MODEL,
        messages=[message],
        n=N,
        seed=seed,
        temperature=1,
        max_tokens=MAX_TOKENS,
        extra_body=question.fields,
    )
