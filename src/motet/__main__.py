"""`python -m motet` is the command line, for programs that know the interpreter and not where `motet` lies."""

from motet.cli import app

app()
