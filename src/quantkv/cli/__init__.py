"""The command line: `quantkv eval`, `quantkv generate`, `quantkv bench`. Heavy packages are imported by the command that needs them."""

from .main import app

__all__ = ["app"]
