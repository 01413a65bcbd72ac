"""What a cache costs: a teacher-forced model's predictions, compared token by token with the exact cache's, and shares that are right."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

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
    kl_of_contexts: list[float] = field(default_factory=list)

    def add(self, reference: torch.Tensor, logits: torch.Tensor, ids: torch.Tensor) -> None:
        """Add one context: logits `[T, vocabulary]` of both runs, tokens `[T]` int64. Softmax in float32 or wider."""
        if reference.shape != logits.shape or ids.shape != logits.shape[:1]:
            raise ValueError(
                f"shapes {tuple(reference.shape)}, {tuple(logits.shape)}, {tuple(ids.shape)}: [T, vocabulary] twice and [T] are needed"
            )
        rows = max(1, ELEMENTS_AT_ONCE // logits.shape[1])
        before = self.divergence
        for start in range(0, len(ids), rows):
            stop = start + rows
            p, q = _log_softmax(reference[start:stop]), _log_softmax(logits[start:stop])
            self.divergence += (p.exp() * (p - q)).sum(-1).double().sum().item()
            self.same_top1 += int((p.argmax(-1) == q.argmax(-1)).sum())
            target = ids[start + 1 : stop + 1, None].to(p.device)
            self.reference_loss -= p[: len(target)].gather(1, target).double().sum().item()
            self.loss -= q[: len(target)].gather(1, target).double().sum().item()
        self.kl_of_contexts.append((self.divergence - before) / len(ids))
        self.predictions += len(ids)
        self.targets += len(ids) - 1

    @property
    def perplexity(self) -> float:
        """Perplexity of the text, under the quantized cache."""
        return math.exp(self.loss / self.targets)

    @property
    def reference_perplexity(self) -> float:
        """Perplexity of the text, under the exact cache."""
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
    def kl_error(self) -> float:
        """Standard error of `kl`, from how the contexts, which are of one length, differ; NaN for one context."""
        return standard_error(self.kl_of_contexts)

    @property
    def top1(self) -> float:
        """Share of predictions with the same most likely token, in percent."""
        return 100 * self.same_top1 / self.predictions


@dataclass
class Share:
    """Predictions that are right, of those that were asked, in groups that stand and fall together: a passage, a code."""

    right: list[int] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)

    def add(self, right: int, asked: int) -> None:
        """One group."""
        self.right.append(right)
        self.asked.append(asked)

    def __add__(self, other: Share) -> Share:
        return Share(self.right + other.right, self.asked + other.asked)

    @property
    def percent(self) -> float:
        """NaN where nothing was asked."""
        return 100 * sum(self.right) / sum(self.asked) if sum(self.asked) else math.nan

    @property
    def error(self) -> float:
        """Standard error of `percent`, from how the groups differ (a ratio estimator: they may be of several sizes); NaN for one group."""
        groups, total = len(self.asked), sum(self.asked)
        if groups < 2 or not total:
            return math.nan
        mean = sum(self.right) / total
        squares = sum((right - mean * asked) ** 2 for right, asked in zip(self.right, self.asked))
        return 100 * math.sqrt(squares * groups / (groups - 1)) / total

    @property
    def whole(self) -> float:
        """Groups of which every prediction is right, in percent; NaN where there is none."""
        return 100 * sum(map(int.__eq__, self.right, self.asked)) / len(self.asked) if self.asked else math.nan


def standard_error(values: Sequence[float]) -> float:
    """Standard error of their mean; NaN for fewer than two."""
    count = len(values)
    if count < 2:
        return math.nan
    mean = sum(values) / count
    return math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1) / count)


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
