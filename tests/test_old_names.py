"""Names of the release before: each works, warns, and says what to write."""

import warnings

import pytest

torch = pytest.importorskip("torch")

from quantkv import deprecated, implementations  # noqa: E402
from quantkv.testing import Batch  # noqa: E402


def says(old, new):
    """The warning of an old name."""
    return pytest.warns(DeprecationWarning, match=f"{old} is deprecated.*: write {new}")


def test_prefill_was_called_dense():
    call = Batch.make("int4", (130,), (130,), dtype=torch.float32).call()
    with says("implementation='dense'", "'prefill'"):
        assert implementations.resolve(call, "dense") == ("prefill", {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert implementations.resolve(call, "prefill") == ("prefill", {})


def test_both_names_at_once_are_refused():
    @deprecated.keywords(old="new")
    def function(new=0):
        return new

    with says("old", "new"):
        assert function(old=3) == 3
    with pytest.raises(ValueError, match="old=3: it is called new now"):
        function(old=3, new=4)
