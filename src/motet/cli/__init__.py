"""The command line: `motet serve`, `motet models`, `motet chat`, `motet demo`, `motet version`."""

from motet.cli.app import app

__all__ = ["app"]
