"""The command line: `quantkv eval` and `quantkv generate`. Heavy packages are imported by the command that needs them."""

from .main import app

__all__ = ["app"]
