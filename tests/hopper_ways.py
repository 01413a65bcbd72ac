"""Ways in which Hopper's kernels can serve a call that are not chosen for it: tests compare them with the way that is."""

from quantkv.implementations.hopper import attend
from quantkv.implementations.hopper.decode import unsplit
from quantkv.implementations.hopper.host import launch

UNSPLIT, EXACT, ORDER = unsplit.choose, attend._exact, attend._launch_order


def _patch(monkeypatch, module, name, value):
    """Also for eager calls: what was prepared is forgotten."""
    monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(attend, "_PREPARED", launch.ByShape(attend._shape, attend.Prepared))


def split(monkeypatch, yes=True):
    """Whether calls are split whose work is even without that."""
    _patch(monkeypatch, unsplit, "choose", (lambda call, config, *_: (config, None)) if yes else UNSPLIT)


def by_decode(monkeypatch, yes=True):
    """Whether a few 16-bit rows have a decode kernel of their own, and not the combine kernel."""
    _patch(monkeypatch, attend, "_exact", (lambda call: None) if yes else EXACT)


def small_last(monkeypatch, yes=True):
    """Whether the decode kernel with the least to read is launched last."""
    _patch(monkeypatch, attend, "_launch_order", (lambda *given: ORDER(*given)[::-1]) if yes else ORDER)
