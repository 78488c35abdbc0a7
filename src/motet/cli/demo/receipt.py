"""The cost of one request with n choices, in words and as JSON: the workers' counters, and the client's times."""

from dataclasses import dataclass

from motet.cli.conversation import Conversation, CountedUsage
from motet.deploy.child import BlockSize, CounterSnapshot
from motet.errors import EngineError
from motet.models.progress import size_text


@dataclass(frozen=True)
class Receipt:
    n: int
    usage: CountedUsage
    first_token_s: float
    total_s: float
    spent: CounterSnapshot
    trunk_bytes: int
    """KV bytes of the prompt except its last token, which the decode worker computes: the minimum to transfer."""

    @classmethod
    def of(cls, answers: Conversation, spent: CounterSnapshot, *, block: BlockSize) -> "Receipt":
        if answers.usage is None or answers.total_s is None or answers.first_s is None:
            raise EngineError("the stream ended without usage")
        trunk_bytes = block.bytes_of(answers.usage.prompt_tokens - 1)
        first_s, total_s = round(answers.first_s, 3), round(answers.total_s, 3)
        return cls(len(answers.answers), answers.usage, first_s, total_s, spent, trunk_bytes)

    @property
    def tokens_per_s(self) -> float:
        return round(self.usage.completion_tokens / self.total_s, 1)

    def sentences(self) -> list[str]:
        """Returns what the request cost, and what n separate requests cost in other systems."""
        n, prompt, spent = self.n, self.usage.prompt_tokens, self.spent
        drafts, accepted = spent.spec_decode_num_draft_tokens, spent.spec_decode_num_accepted_tokens
        sentences = []
        if spent.prefills:  # disaggregated
            sentences.append(
                f"{count(spent.prefills, 'prefill')} and {count(spent.kv_transfers, 'KV transfer')} of "
                f"{size_text(spent.kv_transfer_bytes)} for {n} answers; "
                f"with one for each answer it would be {n} and {size_text(n * self.trunk_bytes)}."
            )
        sentences += [
            f"{spent.prefill_tokens:,} prompt tokens were computed, not {n} x {prompt} = {n * prompt:,}.",
            f"{self.usage.completion_tokens:,} output tokens in {self.total_s:.1f} s, the first after "
            f"{self.first_token_s:.2f} s: {self.tokens_per_s:.0f} tokens/s."
            f"{f' {accepted} of {drafts} draft tokens were accepted.' if drafts else ''}",
        ]
        return sentences

    def figures(self) -> dict[str, float]:
        spent = self.spent
        return {
            "n": self.n,
            "prefills": spent.prefills,
            "transfers": spent.kv_transfers,
            "transfer_bytes": spent.kv_transfer_bytes,
            "trunk_bytes": self.trunk_bytes,
            "recomputed_tokens": spent.recomputed_tokens,
            "prompt_tokens": self.usage.prompt_tokens,
            "prompt_tokens_prefilled": spent.prefill_tokens,
            "completion_tokens": self.usage.completion_tokens,
            "forced_tokens": spent.forced_tokens,
            "draft_tokens": spent.spec_decode_num_draft_tokens,
            "accepted_tokens": spent.spec_decode_num_accepted_tokens,
            "blocks_shared": spent.blocks_shared,
            "bytes_not_copied": spent.bytes_saved,
            "first_token_s": self.first_token_s,
            "total_s": self.total_s,
            "tokens_per_s": self.tokens_per_s,
        }


def count(number: int, name: str) -> str:
    """Returns a number with its noun: `1 prefill`, `2 prefills`."""
    return f"{number} {name}{'s' * (number != 1)}"
