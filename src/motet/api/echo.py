"""The prompts of a request that asked for `echo`: their text, and their log-probabilities once they are known."""

from collections.abc import Sequence

from motet.api.plan import Plan
from motet.api.schema_completion import Prompt
from motet.text.logprobs import CompletionLogprobs, Echo, echo, prompt_logprobs
from motet.text.tokenizer import Tokenizer
from motet.types import PromptReport


class Echoes:
    """`prompts` as they came, in the order of the plan's groups: a text is repeated as it was written."""

    def __init__(self, plan: Plan, prompts: Sequence[Prompt], tokenizer: Tokenizer, *, num_top: int | None) -> None:
        self._plan = plan
        self._tokenizer = tokenizer
        self._num_top = num_top
        self._echoes = [
            _echo(tokenizer, group.prompt, prompt, skip_special_tokens=plan.rules.skip_special_tokens)
            for group, prompt in zip(plan.groups, prompts, strict=True)
        ]

    def text(self, group: int) -> str:
        return self._echoes[group].text

    def logprobs(self, group: int, report: PromptReport | None) -> CompletionLogprobs | None:
        if self._num_top is None or report is None or report.logprobs is None:
            return None
        return prompt_logprobs(
            self._tokenizer,
            self._plan.groups[group].prompt,
            report.logprobs,
            self._echoes[group].offsets,
            num_top=self._num_top,
        )


def _echo(tokenizer: Tokenizer, ids: Sequence[int], prompt: Prompt, *, skip_special_tokens: bool) -> Echo:
    shown = echo(tokenizer, ids, skip_special_tokens=skip_special_tokens)
    return Echo(prompt, shown.offsets) if isinstance(prompt, str) else shown
