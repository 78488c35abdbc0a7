"""Checks at the start of an engine: the logits of its model, and the sameness of its results."""
