"""Small questions of arithmetic, made by rule from a seed, with the prompt that shows the model how to answer them."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import cycle, islice

NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Iris", "Jack")
THINGS = ("apples", "books", "eggs", "marbles", "cookies", "stickers", "pencils", "cards")

SHOTS = """\
Q: What is 4 + 9?
A: We add 9 to 4. 4 + 9 = 13. The answer is 13.

Q: Mia has 8 stamps and finds 3 more. How many stamps does Mia have?
A: Mia has 8 stamps and finds 3 more, so she has 8 + 3 = 11 stamps. The answer is 11.

Q: What is 15 - 6?
A: We take 6 from 15. 15 - 6 = 9. The answer is 9.

Q: Tom has 12 coins and gives 5 of them away. How many coins does Tom have?
A: Tom has 12 coins and gives 5 away, so he has 12 - 5 = 7 coins. The answer is 7.

Q: What is 6 times 3?
A: 6 times 3 is 6 * 3 = 18. The answer is 18.

Q: Leo buys 4 bags with 5 shells in each. How many shells does Leo have?
A: There are 4 bags with 5 shells in each, so he has 4 * 5 = 20 shells. The answer is 20.

Q: Which number is greater, 31 or 27?
A: 31 is greater than 27. The answer is 31.

"""
"""Questions with answers, which a small model imitates."""


@dataclass(frozen=True)
class Question:
    kind: str
    text: str
    answer: int

    @property
    def prompt(self) -> str:
        return f"{SHOTS}Q: {self.text}\nA:"


def total(dice: random.Random) -> Question:
    a, b = dice.randint(2, 12), dice.randint(2, 9)
    return Question("total", f"What is {a} + {b}?", a + b)


def product(dice: random.Random) -> Question:
    a, b = dice.randint(2, 9), dice.randint(2, 9)
    return Question("product", f"What is {a} times {b}?", a * b)


def gain(dice: random.Random) -> Question:
    name, things, a, b = dice.choice(NAMES), dice.choice(THINGS), dice.randint(3, 12), dice.randint(2, 9)
    return Question("gain", f"{name} has {a} {things} and finds {b} more. How many {things} does {name} have?", a + b)


def loss(dice: random.Random) -> Question:
    name, things, a, b = dice.choice(NAMES), dice.choice(THINGS), dice.randint(9, 19), dice.randint(2, 8)
    text = f"{name} has {a} {things} and gives {b} of them away. How many {things} does {name} have?"
    return Question("loss", text, a - b)


def bags(dice: random.Random) -> Question:
    name, things, a, b = dice.choice(NAMES), dice.choice(THINGS), dice.randint(2, 9), dice.randint(2, 9)
    text = f"{name} buys {a} bags with {b} {things} in each. How many {things} does {name} have?"
    return Question("bags", text, a * b)


def greater(dice: random.Random) -> Question:
    a, b = dice.sample(range(10, 100), 2)
    return Question("greater", f"Which number is greater, {a} or {b}?", max(a, b))


KINDS: tuple[Callable[[random.Random], Question], ...] = (total, product, gain, loss, bags, greater)


MOST = 60 * len(KINDS)
"""Most questions that are made at once; the rules have a few more."""


def questions(count: int, *, seed: int) -> list[Question]:
    """Returns different questions, one of each kind in turn, none of them answered in SHOTS."""
    if count > MOST:
        raise ValueError(f"the rules make at most {MOST} different questions, not {count}")
    dice, seen, made = random.Random(seed), set[str](), list[Question]()
    for kind in islice(cycle(KINDS), count):
        question = kind(dice)
        while question.text in seen or question.text in SHOTS:
            question = kind(dice)
        seen.add(question.text)
        made.append(question)
    return made
