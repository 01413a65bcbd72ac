"""`python -m quantkv`: the command line."""

from quantkv.cli import app

app()
