"""`--device`."""

from __future__ import annotations

import torch


def named(device: str | None) -> str:
    """The device of that name; None: cuda if there is one, else cpu. ValueError, with those that are here, for any other."""
    present = [f"cuda:{i}" for i in range(torch.cuda.device_count())] if torch.cuda.is_available() else []
    if device is None:
        return "cuda" if present else "cpu"
    try:
        torch.ones(1, device=device).item()  # a device without storage can make a tensor, but holds no number
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise ValueError(f"--device {device!r}: PyTorch has no such device here; allowed: {', '.join(['cpu', *present])}") from error
    return device
