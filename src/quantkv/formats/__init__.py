"""The formats that come with quantkv, one family a file or folder. Importing this package registers them all, by their names' order."""

from importlib import import_module
from pkgutil import iter_modules

from ..format import available_formats, get_format

__all__ = ["available_formats", "get_format"]

for _module in iter_modules(__path__):  # a family is here because its file is: nothing lists them
    import_module(f"{__name__}.{_module.name}")
