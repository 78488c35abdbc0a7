"""Checks at the start of an engine: whether its logits are right, and whether its results are batch-invariant."""
