"""A sample of a layer's key projection: what tells two models of one geometry apart.

A digest would change with the dtype that weights are loaded in; a sample of numbers, compared by distance, does not. Samples of unrelated
models are 1.4 apart, those of one model in 16 bits and in 8 less than 0.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from .checks import refuse

SAMPLE = 64  # numbers of a sample
FARTHEST = 0.5  # relative distance of two samples of one model: fine-tuned and quantized weights are far below
KEY_PROJECTIONS = ("k_proj", "qkv_proj", "query_key_value", "c_attn", "Wqkv", "wqkv", "key_proj", "k_lin")  # the first that a layer has
LARGE_BIAS = 8.0  # of a key projection: larger than most keys' numbers, so that it alone sets the step of a quantized key
BIASED = (  # of the model, the largest bias, the format, and what takes biases off
    "quantkv: the keys of %s have biases of up to %.0f, and format %r stores them with these: at 4 bits the answer is garbage, at "
    "8 it loses more than it must; %s takes them off"
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def sample(weight: Any) -> torch.Tensor | None:
    """`[64]` float16 of a weight of two dimensions: numbers at equal strides, scaled to length 1.

    None where no sample can be taken: another type than floats of 16 bits and more, as of packed weights; weights without storage; zeros.
    """
    if not isinstance(weight, torch.Tensor) or weight.dtype not in DTYPES or weight.ndim != 2 or weight.is_meta or not weight.numel():
        return None
    places = torch.arange(SAMPLE, device=weight.device) * (weight.numel() - 1) // (SAMPLE - 1)
    taken = weight.detach()[places // weight.shape[1], places % weight.shape[1]].double().cpu()
    length = taken.norm()
    return (taken / length).half() if bool(length.isfinite()) and length > 0 else None


def of_module(module: torch.nn.Module) -> torch.Tensor | None:
    """The `sample` of an attention module's key projection; None where it has none that is known by name."""
    return sample(_of_key_projection(module, "weight"))


def largest_key_bias(module: torch.nn.Module) -> float:
    """The largest number of the biases of an attention module's key projection; 0.0 where it has none."""
    bias = _of_key_projection(module, "bias")
    return 0.0 if bias is None or bias.is_meta or not bias.numel() else float(bias.detach().abs().max())


def _of_key_projection(module: torch.nn.Module, what: str) -> torch.Tensor | None:
    """The weight or the bias of an attention module's key projection; None where it has none that is known by name."""
    found = {name.rpartition(".")[2]: getattr(part, what, None) for name, part in module.named_modules()}
    return next((found[name] for name in KEY_PROJECTIONS if isinstance(found.get(name), torch.Tensor)), None)


def of_checkpoint(folder: str | Path) -> dict[int, torch.Tensor]:
    """Samples by layer, of the safetensors files of a model's folder. A layer is left out where its projection is named otherwise, is
    packed, or is named twice, as in a model of two towers; so is every layer of a folder that is none or cannot be read."""
    found: dict[int, list[torch.Tensor | None]] = {}
    try:
        for number, weight in _in_checkpoint(folder, "weight"):
            found.setdefault(number, []).append(sample(weight))
    except Exception:  # whoever loads the weights says what is wrong with them
        return {}
    return {number: of[0] for number, of in found.items() if len(of) == 1 and of[0] is not None}


def largest_key_bias_of_checkpoint(folder: str | Path) -> float:
    """The largest number of the biases of all layers' key projections, in the safetensors files of a model's folder; 0.0 where there are
    none, and of a folder that is none or cannot be read."""
    try:
        return max((float(bias.abs().max()) for _, bias in _in_checkpoint(folder, "bias") if bias.dtype in DTYPES), default=0.0)
    except Exception:  # as above
        return 0.0


def _in_checkpoint(folder: str | Path, what: str) -> Iterator[tuple[int, torch.Tensor]]:
    """Layer, and weight or bias, of each key projection in the safetensors files of a folder."""
    from safetensors import safe_open

    for file in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                words = name.split(".")
                numbers = [int(word) for word in words if word.isdecimal()]
                if words[-1] == what and words[-2] in KEY_PROJECTIONS and len(numbers) == 1:
                    yield numbers[0], tensors.get_tensor(name)


def check(made_for: Mapping[int, torch.Tensor], found: Mapping[int, torch.Tensor | None]) -> None:
    """ValueError naming the first layer whose two samples are of different models. A layer that one side lacks is not compared."""
    for number in sorted(made_for.keys() & found.keys()):
        ours, theirs = made_for[number], found[number]
        if ours is None or theirs is None:
            continue
        distance = float((ours.double() - theirs.double()).norm())
        if not distance <= FARTHEST:
            allowed = f"at most {FARTHEST} is of one model: make one of this model by `quantkv calibrate MODEL`"
            refuse("calibration", f"made of other weights: those of layer {number} are {distance:.2f} apart", allowed)
