"""Functions of an engine's tensors, replayed as CUDA graphs."""

import pytest
import torch

from quantkv.integrations.repeated import Repeated

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.mark.parametrize("device", DEVICES)
def test_every_call_counts_once(device):
    """Captured or not: what it adds is what the tensors hold when it is called, over the part that it is called with."""
    ran, total = [], torch.zeros(8, dtype=torch.int64, device=device)

    def add(given, target):
        ran.append(len(given))
        target[: len(given)] += given + 1

    repeated, numbers = Repeated(add), torch.zeros(8, dtype=torch.int64, device=device)
    expected = torch.zeros(8, dtype=torch.int64)
    for step, count in enumerate([3, 3, 3, 5, 3, 3, 8, 8, 8, 5, 5]):
        numbers.fill_(step)
        repeated(numbers[:count], target=total, kind=count > 4)
        expected[:count] += step + 1
    assert torch.equal(total.cpu(), expected)
    assert len(ran) == (11 if device == "cpu" else 4 + 3)  # as they are, and captured
    repeated.clear()
    repeated(numbers[:3], target=total)
    assert len(ran) == (12 if device == "cpu" else 8)
