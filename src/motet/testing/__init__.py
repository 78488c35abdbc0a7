"""Fakes for tests and benches; nothing of the product imports them."""
