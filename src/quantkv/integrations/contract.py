"""The names of an engine that an adapter relies on, and what breaks without each."""

from __future__ import annotations

import importlib
import inspect
import logging
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Name:
    """A name of an engine.

    path: dotted, from the module. breaks: what does without it. takes: parameters that are passed to it, or that it passes to a method of
    ours. has: attributes, fields or members that are read or replaced.
    """

    path: str
    breaks: str
    takes: tuple[str, ...] = ()
    has: tuple[str, ...] = ()


def names_of(engine: str) -> Callable[..., Name]:
    """What makes a `Name` of an engine: its path within the engine's package, what breaks, and `takes` and `has` as words in a string."""

    def name(path: str, breaks: str, takes: str = "", has: str = "") -> Name:
        return Name(f"{engine}.{path}", breaks, tuple(takes.split()), tuple(has.split()))

    return name


def is_tested(engine: str, version: str, tested: tuple[str, ...], variable: str, what: str, missing: Callable[[], list[str]]) -> bool:
    """Whether a version of an engine is one that an adapter was tested with, or is to be served all the same; else the log says what it
    lacks.

    tested: what versions begin with. variable: of the environment, which asks for any version with "1". what: is not registered, in words.
    """
    if version.startswith(tested) or os.environ.get(variable) == "1":
        return True
    logging.getLogger(f"{engine.lower()}.quantkv").warning(
        "quantkv: not tested with %s %s (tested: %s), so its %s are not registered; %s=1 does so anyway; what it lacks: %s",
        engine,
        version,
        ", ".join(name + "x" if name.endswith(".") else name for name in tested),
        what,
        variable,
        "; ".join(missing()) or "nothing that the adapter relies on by name",
    )
    return False


def lacking(names: tuple[Name, ...]) -> list[str]:
    """What the engine that is installed lacks of `names`, each with what breaks: `vllm.a.b (types)`, `vllm.a.b: parameter c (drafts)`."""
    return [f"{lack} ({name.breaks})" for name in names for lack in _lacks(name)]


def _lacks(name: Name) -> Iterator[str]:
    try:
        found = _resolve(name.path)
    except (ImportError, AttributeError):
        yield name.path
        return
    if name.takes:
        parameters = inspect.signature(found).parameters
        open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        yield from (f"{name.path}: parameter {p}" for p in name.takes if p not in parameters and not open_ended)
    yield from (f"{name.path}: {attribute}" for attribute in name.has if not _has(found, attribute))


def _resolve(path: str) -> Any:
    """The object of a dotted path: a module, of a module, or an attribute of a class."""
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            found = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        for name in parts[count:]:
            found = getattr(found, name)
        return found
    raise ImportError(path)


def _has(owner: Any, attribute: str) -> bool:
    """Whether a class or an object has an attribute, or its instances get one."""
    return hasattr(owner, attribute) or any(attribute in _of_instances(cls) for cls in getattr(owner, "__mro__", ()))


def _of_instances(cls: type) -> set[str]:
    """Fields, and names that its methods read or set."""
    codes = (getattr(inspect.unwrap(made), "__code__", None) for made in vars(cls).values() if inspect.isfunction(made))
    return {*vars(cls).get("__annotations__", ()), *(name for code in codes if code is not None for name in code.co_names)}
