"""What the answers of the demo cost, by the workers' own counters, and what did not happen."""

import json
from dataclasses import dataclass

from rich.table import Table

from motet.cli.conversation import Conversation
from motet.deploy.figures import BlockSize, Figures
from motet.errors import EngineError


@dataclass(frozen=True)
class Receipt:
    """One request with n choices."""

    n: int
    prefills: int
    """Groups prefilled by one engine for another; 0 where one engine does it all."""
    transfers: int
    transfer_bytes: int
    trunk_bytes: int
    """KV of the prompt without its last token, which decode computes itself: all that has to be moved."""
    recomputed_tokens: int
    """Prompt tokens that were moved or could have been, and were computed on the decode engine."""
    prompt_tokens: int
    prompt_tokens_prefilled: int
    completion_tokens: int
    blocks_shared: int
    bytes_not_copied: int
    first_token_s: float
    total_s: float
    tokens_per_s: float

    @classmethod
    def of(cls, talk: Conversation, spent: Figures, block: BlockSize) -> "Receipt":
        if talk.usage is None or talk.total_s is None or talk.first_s is None:
            raise EngineError("the stream ended without a usage")
        return cls(
            n=len(talk.answers),
            prefills=spent.prefills,
            transfers=spent.kv_transfers,
            transfer_bytes=spent.kv_transfer_bytes,
            trunk_bytes=block.bytes_of(talk.usage.prompt_tokens - 1),
            recomputed_tokens=spent.recomputed_tokens,
            prompt_tokens=talk.usage.prompt_tokens,
            prompt_tokens_prefilled=spent.prefill_tokens,
            completion_tokens=talk.usage.completion_tokens,
            blocks_shared=spent.blocks_shared,
            bytes_not_copied=spent.bytes_saved,
            first_token_s=round(talk.first_s, 3),
            total_s=round(talk.total_s, 3),
            tokens_per_s=round(talk.usage.completion_tokens / talk.total_s, 1),
        )

    def table(self) -> Table:
        table = Table("what it cost", "", "instead of", box=None, pad_edge=False)
        if self.prefills:
            self._add_handover(table)
        n, prompt = self.n, self.prompt_tokens
        table.add_row("prompt tokens computed", f"{self.prompt_tokens_prefilled} of {prompt}", f"{n * prompt}")
        table.add_row("answer tokens", f"{self.completion_tokens} in {n} choices")
        table.add_row("KV blocks shared", f"{self.blocks_shared}")
        table.add_row("KV bytes not copied", f"{self.bytes_not_copied:,}")
        table.add_row("first token", f"{self.first_token_s} s")
        table.add_row("total", f"{self.total_s} s, {self.tokens_per_s} tokens/s")
        return table

    def _add_handover(self, table: Table) -> None:
        """Prefill and decode apart: what n choices cost elsewhere stands in the last column."""
        n = self.n
        table.add_row("prefills", f"{self.prefills}", f"{n}, one for each choice")
        table.add_row("KV transfers", f"{self.transfers}", f"{n}, one for each choice")
        table.add_row("KV bytes moved", f"{self.transfer_bytes:,}", f"{n * self.trunk_bytes:,}")
        table.add_row("KV bytes of the prompt", f"{self.trunk_bytes:,}")
        table.add_row("prompt tokens run on decode", f"{self.recomputed_tokens}", f"{n}, one for each choice")

    def json(self) -> str:
        return json.dumps(self.__dict__)
