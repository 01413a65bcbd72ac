"""What the weights of a model's key projections say about its keys: biases, and channels that are much larger than others."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

LAYER = re.compile(r"\blayers?\.(\d+)\..*\.k_proj\.(weight|bias)$")


class Keys(NamedTuple):
    """layers: whose k_proj was read. biased: of these, how many have a bias. largest_bias: of all, and its layer. ratio: of the longest row
    of a k_proj to its median row, the largest over the layers, and its layer: an outlier channel."""

    layers: int
    biased: int
    largest_bias: float
    bias_layer: int
    ratio: float
    ratio_layer: int


def read(folder: Path) -> Keys | None:
    """From the safetensors files of a transformers directory. None where there are none, or keys are joined with other rows. ValueError,
    naming the file, for one that is damaged."""
    from safetensors import SafetensorError, safe_open

    biases: dict[int, float] = {}
    ratios: dict[int, float] = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    if (match := LAYER.search(name)) is None:
                        continue
                    tensor: Any = opened.get_tensor(name).float()
                    if match[2] == "bias":
                        biases[int(match[1])] = float(tensor.abs().max())
                    elif tensor.ndim == 2:
                        rows = tensor.norm(dim=1)
                        ratios[int(match[1])] = float(rows.max() / rows.median().clamp_min(1e-12))
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file}: cut short or damaged; allowed: a complete safetensors file ({error})") from error
    if not ratios:
        return None
    bias_layer = max(biases, key=biases.__getitem__, default=-1)
    ratio_layer = max(ratios, key=ratios.__getitem__)
    return Keys(len(ratios), len(biases), biases.get(bias_layer, 0.0), bias_layer, ratios[ratio_layer], ratio_layer)
