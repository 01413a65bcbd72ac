"""What attention over latents (DeepSeek's MLA) loses by how they are stored, beside vLLM's fp8 layout, on a CPU:

    python benchmarks/latent_quality.py [--formats int4 levels4 ..]

Latents of 512 numbers are random, or correlated in one of four ways; rotated dimensions stay at 16 bits. Errors are relative: the norm of
the difference over the norm, of the rows that are read back and of the output of attention, against float64 over the rows as given.
"fp8" is vLLM's layout of 656 bytes a token: e4m3 with a float32 scale for each 128 numbers. "bound": what no code of so many bits for each
number can be below on random rows, 2^-bits (the rate-distortion function of a normal source). No calibration, no full-precision tokens.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import torch

from quantkv import PagedCache, get_format

LATENT, ROPE, TOKENS, QUERIES, SCALE = 512, 64, 4096, 64, (128 + 64) ** -0.5
FP8_BYTES = 512 + 4 * 4 + 2 * 64
FORMATS = ("int8", "fp8_token", "levels8", "levels6", "levels5", "int4", "tq4", "levels4")


def latents() -> Iterator[tuple[str, torch.Tensor]]:
    """Rows `[TOKENS, LATENT]` of mean square 1, by how they are correlated."""
    g = torch.Generator().manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=g)
    yield "random", draw(TOKENS, LATENT)
    yield "of rank 64", draw(TOKENS, 64) @ draw(64, LATENT) / 8 + 0.1 * draw(TOKENS, LATENT)
    rows = draw(TOKENS, LATENT)
    for i in range(1, TOKENS):
        rows[i] = 0.95 * rows[i - 1] + (1 - 0.95**2) ** 0.5 * rows[i]
    yield "in time", rows
    rows = draw(TOKENS, LATENT)
    rows[:, :4] *= 20
    yield "4 channels x 20", rows
    yield "with a mean", 0.5 * draw(TOKENS, LATENT) + 2 * draw(LATENT)


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm())


def fp8(rows: torch.Tensor) -> torch.Tensor:
    """vLLM's layout, read back."""
    blocks = rows.unflatten(-1, (4, 128))
    scale = blocks.abs().amax(-1, keepdim=True) / 448
    return ((blocks / scale).to(torch.float8_e4m3fn).float() * scale).flatten(-2)


def stored(name: str, rows: torch.Tensor) -> tuple[torch.Tensor, float]:
    """Rows as a cache holds them, and its bytes for a token."""
    cache = PagedCache(get_format(name).latent_spec(LATENT, ROPE), TOKENS // 16)
    slots = torch.arange(TOKENS)
    cache.write(rows[:, None], torch.zeros(TOKENS, 1, ROPE), slots)
    return cache.dequantize(slots)[0][:, 0], cache.spec.bytes_per_token


def attention(q: torch.Tensor, rows: torch.Tensor, rotated: torch.Tensor) -> torch.Tensor:
    score = q.double() @ torch.cat([rows, rotated], 1).double().T * SCALE
    return score.softmax(-1) @ rows.double()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    given = parser.parse_args()
    g = torch.Generator().manual_seed(1)
    print("format      bytes  rows   | relative error of the output, and how many times that of fp8")
    for kind, rows in latents():
        rows = (rows / rows.square().mean().sqrt()).bfloat16().float()
        rotated = torch.randn(TOKENS, ROPE, generator=g).bfloat16().float()
        keys = torch.cat([rows, rotated], 1)
        flat = torch.randn(QUERIES, LATENT + ROPE, generator=g)
        sharp = 2 * flat + keys[torch.randint(0, TOKENS, (QUERIES,), generator=g)]  # each looks at one key above all
        wants = [attention(q, rows, rotated) for q in (flat, sharp)]
        base = [relative(attention(q, fp8(rows), rotated), want) for q, want in zip((flat, sharp), wants)]
        print(f"{kind}\n  fp8       {FP8_BYTES:5}  {relative(fp8(rows), rows):.4f} | all keys {base[0]:.4f}         one key {base[1]:.4f}")
        for name in given.formats:
            got, size = stored(name, rows)
            errors = [relative(attention(q, got, rotated), want) for q, want in zip((flat, sharp), wants)]
            ratios = [f"{error:.4f} ({error / fp8_error:.2f}x)" for error, fp8_error in zip(errors, base)]
            print(f"  {name:<9} {size:5.0f}  {relative(got, rows):.4f} | all keys {ratios[0]} one key {ratios[1]}")
    print(f"bound: {2.0**-4:.4f} of rows at 4 bits, {2.0**-5:.4f} at 5, {2.0**-6:.4f} at 6")


if __name__ == "__main__":
    main()
