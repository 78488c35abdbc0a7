"""Asks a server for several answers in one form, and judges each of them."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletion, ChatCompletionUserMessageParam

from motet.models.smollm2 import DEFAULT_MODEL

N = 4
AT_ONCE = 10
MAX_TOKENS = 160
SEEDS_APART = 100
"""Distance between the seeds of two questions: choice i of a request is drawn with its seed + i."""


@dataclass(frozen=True)
class Question:
    """A question, and what an answer must be."""

    name: str
    ask: str
    fields: dict[str, object]
    """The fields of the request that demand the form."""
    faults: Callable[[str], str]
    """Returns what is wrong with a whole answer; empty if it is valid."""
    begins: Callable[[str], bool]
    """Returns True if an answer that was cut off may begin like this."""
    few: bool
    """True if the form allows so few answers that several may well agree."""


@dataclass
class Outcome:
    """The answers to some questions, judged and counted."""

    valid: int = 0
    cut: int = 0
    wrong: list[str] = field(default_factory=list)
    """Each answer that is not valid, and why."""
    with_valid: set[str] = field(default_factory=set)
    """Questions that have a valid answer."""
    alike: set[str] = field(default_factory=set)
    """Questions whose answers are all the same though they need not be."""

    def take(self, question: Question, text: str, finish_reason: str) -> None:
        if finish_reason == "length":
            fault = "" if question.begins(text.rstrip("\ufffd")) else "it was cut, and could not have gone on"
        else:
            fault = question.faults(text) if finish_reason == "stop" else f"it ended with {finish_reason}"
        if fault:
            self.wrong.append(f"{question.name}: {text!r}: {fault}")
        elif finish_reason == "length":
            self.cut += 1
        else:
            self.valid += 1
            self.with_valid.add(question.name)

    def take_together(self, question: Question, texts: Sequence[str | None]) -> None:
        if len(set(texts)) == 1 and not question.few:
            self.alike.add(question.name)

    def __str__(self) -> str:
        return f"{self.valid + self.cut} answers: {self.valid} valid, {self.cut} cut; {len(self.wrong)} faults"


async def outcome_of(client: AsyncOpenAI, questions: Sequence[Question], *, turn: int = 0) -> Outcome:
    """Asks the questions, several at once, each with its own seed; another turn uses other seeds."""
    outcome, room = Outcome(), asyncio.Semaphore(AT_ONCE)

    async def ask(number: int, question: Question) -> None:
        async with room:
            answer = await asked(client, question, seed=number * SEEDS_APART + turn * N)
        for choice in answer.choices:
            outcome.take(question, choice.message.content or "", choice.finish_reason)
        outcome.take_together(question, [choice.message.content for choice in answer.choices])

    async with asyncio.TaskGroup() as tasks:
        for number, question in enumerate(questions):
            tasks.create_task(ask(number, question))
    return outcome


async def asked(client: AsyncOpenAI, question: Question, *, seed: int) -> ChatCompletion:
    message: ChatCompletionUserMessageParam = {"role": "user", "content": question.ask}
    return await client.chat.completions.create(
        model=DEFAULT_MODEL,
        messages=[message],
        n=N,
        seed=seed,
        temperature=1,
        max_tokens=MAX_TOKENS,
        extra_body=question.fields,
    )
