"""The command line: `motet serve`, `gateway`, `ray`, `models`, `chat`, `demo` and `version`."""

from motet.cli.main import app

__all__ = ["app"]
