"""What a cache format costs: a teacher-forced model's predictions, compared token by token with the exact cache's."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

ELEMENTS_AT_ONCE = 1 << 20  # of the logits: temporaries stay in the processor's cache (10x faster than all rows at once)


@dataclass
class Comparison:
    """Sums over the contexts added so far.

    Position i of a context predicts its token i + 1, so the last position counts for KL and top-1, not for perplexity.
    """

    predictions: int = 0
    targets: int = 0
    loss: float = 0.0
    reference_loss: float = 0.0
    divergence: float = 0.0
    same_top1: int = 0

    def add(self, reference: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor) -> None:
        """Add one context: logits `[T, vocabulary]` of both runs, tokens `[T]` int64. Softmax in float32 or wider."""
        if reference.shape != logits.shape or ids.shape != logits.shape[:1]:
            raise ValueError(
                f"shapes {tuple(reference.shape)}, {tuple(logits.shape)}, {tuple(ids.shape)}: [T, vocabulary] twice and [T] are needed"
            )
        rows = max(1, ELEMENTS_AT_ONCE // logits.shape[1])
        for start in range(0, len(ids), rows):
            stop = start + rows
            p, q = _log_softmax(reference[start:stop]), _log_softmax(logits[start:stop])
            self.divergence += (p.exp() * (p - q)).sum(-1).double().sum().item()
            self.same_top1 += int((p.argmax(-1) == q.argmax(-1)).sum())
            target = ids[start + 1 : stop + 1, None].to(p.device)
            self.reference_loss -= p[: len(target)].gather(1, target).double().sum().item()
            self.loss -= q[: len(target)].gather(1, target).double().sum().item()
        self.predictions += len(ids)
        self.targets += len(ids) - 1

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss / self.targets)

    @property
    def reference_perplexity(self) -> float:
        return math.exp(self.reference_loss / self.targets)

    @property
    def perplexity_change(self) -> float:
        """In percent of the exact cache's perplexity."""
        return 100 * math.expm1((self.loss - self.reference_loss) / self.targets)

    @property
    def kl(self) -> float:
        """Mean over the predictions of KL(exact || quantized), in nats. NaN logits give NaN."""
        return self.divergence / self.predictions

    @property
    def top1(self) -> float:
        """Share of predictions with the same most likely token, in percent."""
        return 100 * self.same_top1 / self.predictions


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
