"""What a right engine finds: the error of each format beside 16 bits, of rows and of attention over them, on a CPU.

    python benchmarks/expected_errors.py benchmarks/results/expected-errors.json

Rows and queries are normal numbers. They are written into a `PagedCache` as they are: no calibration, no full-precision tokens. Errors are
relative: the norm of the difference over the norm, of rows that are read back and of attention over them, which is compared with
attention in float64 over the rows that were written. docs/engine.md shows them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

import quantkv
from quantkv import PagedCache, get_format

FORMATS = (
    *("int8", "fp8_token", "levels8", "fp8", "k8v4", "levels6", "levels5"),
    *("int4", "tq4", "levels4", "tq3", "levels3", "int2", "trellis2"),
)
SEQUENCES, LENGTH, HQ, HK, D, PAGE = 4, 1024, 32, 8, 128, 16


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def exact(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention of one query a sequence, in float64: [S, HQ, D]."""
    keys, values = (rows.double().unflatten(0, (SEQUENCES, LENGTH)).repeat_interleave(HQ // HK, 2) for rows in (key, value))
    weights = torch.einsum("shd,slhd->shl", query.double(), keys).mul(D**-0.5).softmax(-1)
    return torch.einsum("shl,slhd->shd", weights, values)


def errors(name: str) -> dict[str, object]:
    """Of a format: `row_error` and `attention_error`."""
    generator = torch.Generator().manual_seed(0)
    draw = lambda tokens, heads: torch.randn(tokens, heads, D, generator=generator)
    query, key, value = draw(SEQUENCES, HQ), draw(SEQUENCES * LENGTH, HK), draw(SEQUENCES * LENGTH, HK)
    cache = PagedCache(get_format(name).cache_spec(HK, D, block_size=PAGE), SEQUENCES * LENGTH // PAGE)
    slots = torch.arange(SEQUENCES * LENGTH)
    cache.write(key, value, slots)
    table = torch.arange(SEQUENCES * LENGTH // PAGE, dtype=torch.int32).view(SEQUENCES, -1)
    out = cache.attend(query, block_table=table, seq_lens=torch.full((SEQUENCES,), LENGTH, dtype=torch.int32))
    rows = relative(torch.stack(cache.dequantize(slots)), torch.stack([key, value]))
    return {"format": name, "row_error": rows, "attention_error": relative(out, exact(query, key, value))}


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    found = [errors(name) for name in FORMATS]
    sizes = {"sequences": SEQUENCES, "length": LENGTH, "heads": HQ, "kv_heads": HK, "head_size": D}
    values = {"device": "cpu", "versions": {"torch": torch.__version__, "quantkv": quantkv.__version__}, **sizes, "formats": found}
    Path(sys.argv[1]).write_text(json.dumps(values, indent=1) + "\n")


if __name__ == "__main__":
    main()
