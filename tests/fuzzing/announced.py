"""Refusals that an implementation announces: one that was chosen by name may say that it does not serve a call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from quantkv import implementations


class Refused(Exception):
    """A call that the implementation, chosen by name, announced not to serve: neither right nor wrong."""


@contextmanager
def announced(implementation: str) -> Iterator[None]:
    """Turns the ValueError of a call that `implementations.refusal` refuses, in the words of the implementation, into `Refused`. Any other
    exception is a failure and passes; so does every refusal by "auto", which serves all calls."""
    reasons, ask = [], implementations.refusal

    def noted(name: str, call: implementations.Call) -> str | None:
        reason = ask(name, call)
        if name == implementation and reason is not None:
            reasons.append(f"implementation={name!r}: {reason}")
        return reason

    implementations.refusal = noted
    try:
        yield
    except ValueError as error:
        if str(error) not in reasons:
            raise
        raise Refused(str(error)) from error
    finally:
        implementations.refusal = ask
