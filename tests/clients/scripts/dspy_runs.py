"""DSPy: n completions of one prompt, and n predictions with types, by a JSON Schema."""

from typing import Literal

import dspy
import litellm
from scene import KEY, MAX_TOKENS, MODEL, QUESTION, SEED, URL


class Choose(dspy.Signature):
    """Choose a boat."""

    wish: str = dspy.InputField()
    kind: Literal["sail", "motor"] = dspy.OutputField()
    fast: bool = dspy.OutputField()


def main() -> None:
    known = {"litellm_provider": "openai", "mode": "chat", "supports_response_schema": True}
    litellm.register_model({f"openai/{MODEL}": known})
    given = {"api_base": URL, "api_key": KEY, "cache": False, "temperature": 1.0, "seed": SEED}
    model = dspy.LM(f"openai/{MODEL}", engine="litellm", max_tokens=MAX_TOKENS, **given)
    texts = model(QUESTION, n=4, max_tokens=8)
    assert len(texts) == 4
    with dspy.context(lm=model, adapter=dspy.JSONAdapter()):
        told = dspy.Predict(Choose, n=3)(wish=QUESTION)
    assert len(told.completions) == 3
    assert all(kind in ("sail", "motor") for kind in told.completions.kind)
    assert all(isinstance(fast, bool) for fast in told.completions.fast)


main()
