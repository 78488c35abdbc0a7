"""Paged KV cache: the holders, the names and the free runs of blocks (`pool`); the memory itself (`storage`)."""
