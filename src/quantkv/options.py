"""Every option of attention, and how each is checked: a field is all that an option is here."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from . import checks
from .names import PRECISIONS

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
BOOLS = (torch.bool,)
LARGEST_SOFTCAP = 512  # kernels compute tanh from an exponential, to 2^-23 of 1: so large, scores are off by 6e-5
PROMPT_QUERIES = 128  # of a sequence: from so many on it is a prompt
WIDEST = 1 << 30  # a window: no position is as large, and their sum is an int32 of the kernels


def option_tensor(*shape: str | int | None, dtypes: tuple[torch.dtype, ...] = FLOATS) -> Any:
    """An option that is a tensor or None. shape: letters of a call's axes, None for any size."""
    return field(default=None, metadata={"shape": shape, "dtypes": dtypes})


@dataclass(frozen=True)
class AttentionOptions:
    """Every option of attention; the defaults are plain causal attention. Sequence s has L keys and n queries; query i
    stands at position `L - n + i`. docs/attention.md has the exact meaning of each.

    causal: a bool, or bool `[S]`: key j <= position.
    window: > 0: `position - j < window`, where not causal also `j - position < window`. 0: no window. At most 2^30.
    chunk_lookback: >= 0: instead of the window, `position // size - j // size <= chunk_lookback` with
        `size = window // (chunk_lookback + 1)`.
    softcap: > 0: `softcap * tanh(score / softcap)`. At most 512.
    sinks: float `[HQ]`, less than infinity: one more term `exp(sink)` in the denominator; -inf: none.
    alibi_slopes: float `[HQ]`: `score += slope * (j - (L - n))`, with alibi_sqrt `slope * -sqrt(position - j)`.
    qq_bias: float `[Q, Q]`: `score += qq_bias[i, j - (L - n)]` between the queries of this call; a row for every query.
    prefix_ranges: int `[S, R, 2]`, inclusive: query and key inside one range see each other, whatever the mask says;
        unused where start >= end. clamp_prefix_to_window: not further back than the window, also where chunks stand in its place.
    output_scale: the output is `clamp(out / output_scale, -448, 448)` as float8_e4m3fn.
    batch_invariant: fixed splits and tiles: a sequence gets the same bits alone and in any batch. On a GPU it takes scratch
        memory: a float32 output for every 1,024 positions that the block table, or max_seq_len, has room for; on Hopper a 16-bit
        one for every 256 at most, or 32 of them if that is more.
    prompt_precision: "8bit": sequences of at least 128 queries get their scores from products of 8-bit integers; "16bit": of the queries'
        own dtype. Values and weights are at 16 bits in both.
    """

    causal: bool | torch.Tensor = field(default=True, metadata={"shape": ("S",), "dtypes": BOOLS})
    window: int = 0
    chunk_lookback: int = -1
    softcap: float = 0.0
    sinks: torch.Tensor | None = option_tensor("HQ")
    alibi_slopes: torch.Tensor | None = option_tensor("HQ")
    alibi_sqrt: bool = False
    qq_bias: torch.Tensor | None = option_tensor(None, None)
    prefix_ranges: torch.Tensor | None = option_tensor("S", None, 2, dtypes=checks.INDEX_DTYPES)
    clamp_prefix_to_window: bool = False
    output_scale: float | None = None
    batch_invariant: bool = False
    prompt_precision: str = "16bit"

    def given(self) -> list[str]:
        """Names of the options that are not at their defaults."""
        values = ((f, getattr(self, f.name)) for f in fields(self))
        return [f.name for f, value in values if value is not f.default and (isinstance(value, torch.Tensor) or value != f.default)]

    def per_sequence(self) -> dict[str, torch.Tensor]:
        """The options that are tensors with an entry for each sequence, by name: they say which keys are read."""
        names = (f.name for f in fields(self) if "S" in f.metadata.get("shape", ()))
        return {name: t for name in names if isinstance(t := getattr(self, name), torch.Tensor)}

    def check(self, axes: dict[str, int], device: torch.device) -> None:
        """ValueError for what no implementation could support. axes: sizes of S and HQ."""
        for f in fields(self):
            value = getattr(self, f.name)
            plain = isinstance(f.default, bool) and isinstance(value, bool)
            if "shape" in f.metadata and value is not f.default and not plain:
                checks.tensor(f.name, value, [axes.get(n, n) for n in f.metadata["shape"]], f.metadata["dtypes"], device)
                checks.no_gradient(f.name, value)
            elif isinstance(f.default, bool) and not isinstance(value, bool):
                checks.refuse(f.name, value, "True or False is needed")
        checks.integer("window", self.window, 0, f"0 (none) or a number of tokens up to {WIDEST:,}", WIDEST)
        checks.integer("chunk_lookback", self.chunk_lookback, -1, "-1 (none) or more")
        allowed = f"0 (none) or a positive number, at most {LARGEST_SOFTCAP}"
        checks.number("softcap", self.softcap, 0, note=allowed, high=LARGEST_SOFTCAP)
        if self.chunk_lookback >= 0 and self.window < self.chunk_lookback + 1:
            allowed = f"chunk_lookback={self.chunk_lookback} needs a window of at least {self.chunk_lookback + 1} tokens"
            checks.refuse("window", self.window, allowed)
        if self.alibi_sqrt and self.alibi_slopes is None:
            checks.refuse("alibi_sqrt", True, "alibi_slopes are needed with it")
        if self.output_scale is not None:
            checks.number("output_scale", self.output_scale, 0, above=True, note="a positive number")
        if not isinstance(self.prompt_precision, str) or self.prompt_precision not in PRECISIONS:
            checks.refuse("prompt_precision", self.prompt_precision, f"one of {', '.join(PRECISIONS)} is needed")

    def check_values(self) -> None:
        """What reads tensors, on a CPU: no sink takes all of the weight."""
        if self.sinks is not None:
            for head, sink in enumerate(self.sinks.tolist()):
                if not sink < math.inf:
                    checks.refuse(f"sinks[{head}]", sink, "a number less than infinity is needed (-inf: no sink)")

    @classmethod
    def of(cls, given: dict[str, Any]) -> AttentionOptions:
        """Options by name. ValueError for a name that is none."""
        unknown = given.keys() - cls.__dataclass_fields__.keys()
        if unknown:
            checks.refuse("options", sorted(unknown), f"allowed: {', '.join(cls.__dataclass_fields__)}")
        return cls(**given)


_SHAPES = {f.name: f.metadata["shape"] for f in fields(AttentionOptions) if "shape" in f.metadata}
TENSORS = tuple(_SHAPES)  # options that may be tensors
PER_LAYER = tuple(name for name, shape in _SHAPES.items() if "S" not in shape)  # those that may differ from layer to layer of a step


def goes_by_position(options: AttentionOptions) -> bool:
    """Whether more than causality depends on where a key stands."""
    tensors = (options.alibi_slopes, options.qq_bias)
    windowed = isinstance(options.window, int) and options.window != 0  # what is no number is refused by name with the call
    return windowed or any(t is not None for t in tensors)
