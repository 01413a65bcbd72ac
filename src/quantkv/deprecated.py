"""Names that were public in the release before this one: they work, and warn with what to write. Pure Python."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

T = TypeVar("T")
IMPLEMENTATIONS = {"dense": "prefill"}
OPTIONS = {"--exact": "--full-precision"}  # of the command line


def warn(old: str, new: str, level: int = 3) -> None:
    """DeprecationWarning for an old name. level: frames from here to the line that used it."""
    warnings.warn(f"{old} is deprecated and goes with the next 0.x release: write {new}", DeprecationWarning, stacklevel=level)


def implementation(name: str) -> str:
    """The name that an implementation has now."""
    if not isinstance(name, str):
        return name
    if name in IMPLEMENTATIONS:
        warn(f"implementation={name!r}", f"{IMPLEMENTATIONS[name]!r}", level=4)
    return IMPLEMENTATIONS.get(name, name)


def option(word: str) -> str:
    """A word of a command line, with the name that an option has now."""
    name, equals, value = word.partition("=")
    if name in OPTIONS:
        warn(name, OPTIONS[name])
    return OPTIONS.get(name, name) + equals + value


def current(given: dict[str, Any], what: str, level: int = 3, **names: str) -> dict[str, Any]:
    """Arguments or keys by the names of now. names: old=new. ValueError where both are given."""
    if names.keys().isdisjoint(given):
        return given
    made = dict(given)
    for old, new in names.items():
        if old in made:
            if new in made:
                raise ValueError(f"{what}{old}={made[old]!r}: it is called {new} now, which is given too; one of them is needed")
            warn(f"{what}{old}", f"{what}{new}", level + 1)
            made[new] = made.pop(old)
    return made


def keywords(**names: str) -> Callable[[T], T]:
    """A decorator of a function, or of a class for its constructor: keyword arguments are taken by their old names too. names: old=new.
    A class has the old names as attributes as well."""

    def decorate(what: T) -> T:
        function = what.__init__ if isinstance(what, type) else what

        @functools.wraps(function)
        def call(*args: Any, **given: Any) -> Any:
            return function(*args, **current(given, "", **names))

        if not isinstance(what, type):
            return call
        what.__init__ = call
        return attributes(**names)(what)

    return decorate


def attributes(**names: str) -> Callable[[T], T]:
    """A decorator of a class: it has attributes by their old names too. names: old=new."""

    def decorate(owner: T) -> T:
        for old, new in names.items():
            setattr(owner, old, _attribute(owner.__name__, old, new))
        return owner

    return decorate


def _attribute(owner: str, old: str, new: str) -> property:
    def get(self: Any) -> Any:
        warn(f"{owner}.{old}", new)
        return getattr(self, new)

    return property(get, doc=f"Deprecated: {new}.")


def module(name: str, home: str, moved: dict[str, str] | Iterable[str]) -> Callable[[str], Any]:
    """`__getattr__` of module `name` whose contents are in module `home` now. moved: old name to new name."""
    names = moved if isinstance(moved, dict) else {name: name for name in moved}

    def get(attribute: str) -> Any:
        if attribute not in names:
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        warn(f"{name}.{attribute}", f"{home}.{names[attribute]}")
        return getattr(importlib.import_module(home), names[attribute])

    return get
