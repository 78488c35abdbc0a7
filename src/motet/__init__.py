"""Motet: an OpenAI-compatible LLM server for many samples of one prompt. Importing it loads no torch."""

__version__ = "0.1.0"
