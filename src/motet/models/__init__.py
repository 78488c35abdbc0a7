"""Where weights come from: a local folder, the hub, or the default small model. Importing it loads no torch."""

from motet.models.source import ModelSource, resolve, resolve_tokenizer

__all__ = ["ModelSource", "resolve", "resolve_tokenizer"]
