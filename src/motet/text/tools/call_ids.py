"""Ids of calls. Templates show them to the model, so each format makes its own kind."""

import secrets
import string

ALPHANUMERIC = string.ascii_letters + string.digits


def call_id() -> str:
    """As OpenAI's: `call_` and 24 characters."""
    return "call_" + "".join(secrets.choice(ALPHANUMERIC) for _ in range(24))


def mistral_call_id() -> str:
    """Mistral's templates refuse ids that are not exactly 9 letters and digits."""
    return "".join(secrets.choice(ALPHANUMERIC) for _ in range(9))
