"""Rounding of rows by a Hessian: codes that cost the reader least, in the bytes that a format has anyway.

What an error e of a cached row costs is `e^T M e`, M the second moments of what the row is multiplied with: the queries for a key, the
output projection's columns for a value. Codes are chosen one dimension after the other, each making up for the errors before it (LDLQ,
QuIP, arXiv 2307.13304).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

CANDIDATES = (0.85, 1.0, 1.15, 1.3)  # scales to try, in units of the row's root mean square
TINY = torch.finfo(torch.float32).tiny
DAMPING = 1e-4  # of the Hessian's mean diagonal: what keeps it positive definite


class Rounding(NamedTuple):
    """A Hessian, and what follows from it. `e^T hessian e = sum_i gain_i (e_i + sum_{j < i} feedback_ij e_j)^2`.

    hessian: `[HK or 1, D, D]` float32, positive definite. feedback: of its shape, strictly lower triangular. gain: `[HK or 1, D]`.
    """

    hessian: torch.Tensor
    feedback: torch.Tensor
    gain: torch.Tensor

    @classmethod
    def of(cls, hessian: torch.Tensor) -> Rounding:
        """hessian: `[HK or 1, D, D]`, symmetric. ValueError where it is not positive semidefinite."""
        wide, size = hessian.double(), hessian.shape[-1]
        mean = wide.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
        wide = wide + DAMPING * mean * torch.eye(size, dtype=torch.float64, device=hessian.device)
        root, failed = torch.linalg.cholesky_ex(wide.flip(-1, -2))  # the last dimension, which can mend most, is eliminated first
        if bool(failed.any()):
            raise ValueError("hessian: a positive semidefinite matrix for each head is needed")
        scale = root.diagonal(dim1=-2, dim2=-1)
        unit = (root / scale[..., None, :]).mT.flip(-1, -2)  # lower triangular, ones on the diagonal
        return cls(wide.float(), unit.tril(-1).float().contiguous(), scale.square().flip(-1).float().contiguous())

    def weigh(self, rows: torch.Tensor) -> torch.Tensor:
        """`rows M` of rows `[T, HK, D]` float32, in float64 on the way."""
        return (rows.double().transpose(0, 1) @ self.hessian.double()).transpose(0, 1).float()


def root_mean_square(rows: torch.Tensor) -> torch.Tensor:
    """`[..., D]` -> `[..., 1]`; never zero."""
    return rows.square().mean(-1, keepdim=True).sqrt().clamp_min(TINY)


def round_to_levels(rows: torch.Tensor, rounding: Rounding, levels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes int64 `[T, HK, D]` and scales `[T, HK, 1]` of rows `[T, HK, D]` float32, so that `scale * levels[code]` costs little.

    levels: `[n]` float32, rising. Of the candidates the one with the largest cosine, by the Hessian, to the row is taken; its scale is
    then such that row and rounded row have the product that the row has with itself: what reads it is not biased.
    """
    tokens, _, size = rows.shape
    boundaries = (levels[1:] + levels[:-1]) / 2
    tried = root_mean_square(rows) * torch.tensor(CANDIDATES, device=rows.device)  # [T, HK, C]

    def by_dimension(t: torch.Tensor) -> torch.Tensor:  # [T, HK, D] -> [D, HK, C * T] in units of each candidate
        return (t.permute(2, 1, 0)[:, :, None] / tried.permute(1, 2, 0)).flatten(2).contiguous()

    target, product = by_dimension(rows), by_dimension(rounding.weigh(rows))
    itself = (target * product).sum(0)  # row M row
    codes = torch.empty(target.shape, dtype=torch.uint8, device=rows.device)
    cost, dot = torch.zeros_like(itself), torch.zeros_like(itself)
    original = target.clone()
    feedback, gain = rounding.feedback.transpose(0, 1), rounding.gain.mT  # [D, HK or 1, D], [D, HK or 1]
    for i in range(size):
        code = torch.bucketize(target[i], boundaries)
        value = levels[code]
        codes[i] = code
        cost.addcmul_(gain[i, :, None], (target[i] - value).square_())
        dot.addcmul_(product[i], value)
        if i + 1 < size:
            target[i + 1 :].addcmul_(feedback[i + 1 :, :, i, None], original[i] - value)
    length = (cost - itself + 2 * dot).clamp_min(TINY)  # rounded M rounded
    cosine = dot.clamp_min(0).square() / (length * itself.clamp_min(TINY))  # squared: candidates differ in units
    best = cosine.unflatten(1, (len(CANDIDATES), tokens)).argmax(1, keepdim=True)  # [HK, 1, T]

    def chosen(t: torch.Tensor) -> torch.Tensor:  # [HK, C * T] -> [T, HK, 1]
        return t.unflatten(1, (len(CANDIDATES), tokens)).gather(1, best).permute(2, 0, 1)

    scale = tried.gather(2, best.permute(2, 0, 1)) * unbiased(chosen(itself), chosen(dot))
    codes = codes.unflatten(2, (len(CANDIDATES), tokens))
    codes = codes.gather(2, best.expand(size, -1, 1, -1))[:, :, 0].permute(2, 1, 0).long()
    return codes, scale


def unbiased(itself: torch.Tensor, dot: torch.Tensor) -> torch.Tensor:
    """What a rounded row is multiplied by so that its product with the row is the row's with itself; within a factor of two."""
    return (itself / dot.clamp_min(TINY)).clamp(0.5, 2.0)
