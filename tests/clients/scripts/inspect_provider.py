"""Inspect with Motet's provider, which it finds by the entry point: a policy of all requests, and log-probabilities of
prompts, in chats and in completions."""

import asyncio

from inspect_ai.model import GenerateConfig, ModelOutput, get_model
from scene import MODEL, QUESTION, SEED, URL

GROUP = {"stop_when": {"finished": 2}, "keep": "finished"}
OWN = {"stop_when": {"finished": 3}, "keep": "finished"}


def check_prompt(output: ModelOutput) -> None:
    """Checks that all tokens of the prompt but the first have a log-probability."""
    scored = output.choices[0].prompt_logprobs
    assert scored is not None and len(scored.content) > 2
    assert all(token.logprob <= 0 for token in scored.content[1:])


async def main() -> None:
    model = get_model(f"motet/{MODEL}", group=GROUP)
    several = GenerateConfig(num_choices=6, max_tokens=8, seed=SEED)
    assert len((await model.generate(QUESTION, config=several)).choices) >= 2
    own = await model.generate(QUESTION, config=several.merge(GenerateConfig(extra_body={"group": OWN})))
    assert len(own.choices) >= 3
    scored = GenerateConfig(max_tokens=1, logprobs=True, top_logprobs=2, prompt_logprobs=1)
    check_prompt(await get_model(f"motet/{MODEL}").generate(QUESTION, config=scored))
    completions = get_model(f"openai-api-completions/motet/{MODEL}", base_url=URL, api_key="none")
    check_prompt(await completions.generate(QUESTION, config=scored))


asyncio.run(main())
