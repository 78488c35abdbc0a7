"""Paged KV cache: who holds which block (`pool`), which blocks lie free (`runs`), what a block holds (`prefix`), the
memory itself (`storage`)."""
