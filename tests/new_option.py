"""An option for each query head, made outside the package: the output of head h times `head_gain[h]`."""

from dataclasses import dataclass, replace

import torch

from quantkv.implementations.reference import attend as reference
from quantkv.options import AttentionOptions, option_tensor


@dataclass(frozen=True)
class Options(AttentionOptions):
    """1. options.py: the field, with its axes. Checks, operators and the cut of a mixed batch are loops over fields."""

    head_gain: torch.Tensor | None = option_tensor("HQ")


stock = reference.compute


def compute(call, *arguments, **how):
    """2. implementations/reference/attend.py: what it means, and that it is supported."""
    out, lse = stock(replace(call, options=AttentionOptions()), *arguments, **how)
    return out * call.options.head_gain[:, None], lse


SUPPORTED = reference.SUPPORTED | {"head_gain"}
