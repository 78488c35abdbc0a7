"""Paged KV cache: who holds which block, which are free, what they hold (`pool`); the memory itself (`storage`)."""
