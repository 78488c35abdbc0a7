"""The questions, and the rule that rewards their answers."""

import re

SYSTEM = "Answer in one short sentence."
MIN_WORDS, MAX_WORDS = 4, 16
THINGS = (
    "a harbor", "a violin", "bread", "a compass", "honey", "a bridge", "rain", "a lighthouse", "paper", "a clock",
    "salt", "a garden", "a mirror", "thunder", "a library", "cheese", "a candle", "a river", "glass", "a bicycle",
    "a desert", "a choir", "wool", "a telescope",
)  # fmt: skip
ENDS_IN_ONE_SENTENCE = re.compile(r"[^.!?\n]+[.!?]")


def prompt_about(thing: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"What is {thing}?"}]


def reward(text: str, *, thing: str, ended: bool) -> float:
    """Returns 1 if the answer ends on its own, is one sentence of 4 to 16 words, and names the thing; otherwise 0."""
    words = len(text.split())
    one_sentence = ENDS_IN_ONE_SENTENCE.fullmatch(text.strip()) is not None
    named = thing.split()[-1] in text.lower()
    return float(ended and one_sentence and named and MIN_WORDS <= words <= MAX_WORDS)
