import math

import pytest
import torch

from quantkv.cli import metrics
from quantkv.cli.metrics import Comparison


def brute_force(reference, logits, ids):
    """Per position, in float64, straight from the definitions."""
    kl, same, loss, reference_loss = 0.0, 0, 0.0, 0.0
    for i, (a, b) in enumerate(zip(reference.double(), logits.double())):
        p, q = a.exp() / a.exp().sum(), b.exp() / b.exp().sum()
        kl += sum(x * math.log(x / y) for x, y in zip(p.tolist(), q.tolist()))
        same += int(p.argmax() == q.argmax())
        if i + 1 < len(ids):
            loss -= math.log(q[ids[i + 1]])
            reference_loss -= math.log(p[ids[i + 1]])
    return kl, same, loss, reference_loss


@pytest.mark.parametrize("at_once", [1, 3 * 37, 1 << 20])  # one row, three rows (not a divisor of 20), all rows
def test_agrees_with_float64(monkeypatch, at_once):
    monkeypatch.setattr(metrics, "ELEMENTS_AT_ONCE", at_once)
    torch.manual_seed(0)
    contexts = [(torch.randn(20, 37) * 2, torch.randint(0, 37, (20,))) for _ in range(2)]
    compared, sums = Comparison(), [0.0] * 4
    for reference, ids in contexts:
        logits = reference + torch.randn_like(reference) * 0.5
        compared.add(reference, logits, ids)
        sums = [a + b for a, b in zip(sums, brute_force(reference, logits, ids))]
    kl, same, loss, reference_loss = sums
    assert compared.kl == pytest.approx(kl / 40, rel=1e-5)
    assert compared.top1 == 100 * same / 40
    assert compared.perplexity == pytest.approx(math.exp(loss / 38), rel=1e-5)
    assert compared.reference_perplexity == pytest.approx(math.exp(reference_loss / 38), rel=1e-5)
    assert compared.perplexity_change == pytest.approx(100 * (math.exp((loss - reference_loss) / 38) - 1), rel=1e-3)


def test_same_logits_cost_nothing():
    logits, compared = torch.randn(8, 50), Comparison()
    compared.add(logits, logits, torch.randint(0, 50, (8,)))
    assert (compared.kl, compared.top1, compared.perplexity_change) == (0, 100, 0)


def test_nan_is_not_hidden():
    logits, compared = torch.randn(8, 50), Comparison()
    compared.add(logits, logits.clone().fill_(math.nan), torch.randint(0, 50, (8,)))
    assert math.isnan(compared.kl) and math.isnan(compared.perplexity)


def test_refuses_shapes_that_do_not_fit():
    with pytest.raises(ValueError, match="vocabulary"):
        Comparison().add(torch.randn(8, 50), torch.randn(8, 49), torch.zeros(8, dtype=torch.long))
