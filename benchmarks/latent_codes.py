"""Codes for latents (DeepSeek's MLA) that were weighed, by the bytes of a token and what attention loses, on a CPU:

    python benchmarks/latent_codes.py

Beside the formats of quantkv: scales of smaller groups, the mean taken off, rounding by a Hessian, more bits for the directions in which
latents vary most (of the covariance's eigenvectors, on which a code of its own for each part would be needed), a trellis of 4 bits. The
rows are those of `latent_quality.py`, and latents "as a model's": of falling spectrum, with a mean and 4 large channels, behind absorbed
queries and output projections of 16 heads. Errors are of the output of attention behind the output projection, relative to float64.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import torch
from latent_quality import FP8_BYTES, LATENT, ROPE, SCALE, TOKENS, fp8, latents, relative

from quantkv.formats.levels import boundaries, levels
from quantkv.maps import named_map
from quantkv.rounding import Rounding, root_mean_square, round_to_levels, unbiased

HEADS, NOPE, VALUE, QUERIES = 16, 128, 128, 16
SPARE = 2 * ROPE  # bytes of the rotated dimensions
ROTATED_INT8, SPARE_INT8 = ", rotated dimensions int8", ROPE + 4
HADAMARD = named_map("rht", LATENT)[0].float() / LATENT**0.5
Code = Callable[[torch.Tensor, tuple[torch.Tensor, ...]], torch.Tensor]  # rows [T, D], Hessians [D, D] -> rows as they are read back


def rounded(rows: torch.Tensor, bits: int) -> torch.Tensor:
    """Nearest Gaussian levels, one unbiased fp16 scale for each row of the last axis."""
    size = root_mean_square(rows)
    unit = rows / size
    found = levels(bits)[torch.bucketize(unit.contiguous(), boundaries(bits))]
    scale = size * unbiased(unit.square().sum(-1, keepdim=True), (unit * found).sum(-1, keepdim=True))
    return found * scale.half().float()


def plain(bits: int, group: int = LATENT, turn: bool = True) -> Code:
    def code(rows, hessian):
        y = rows @ HADAMARD.T if turn else rows
        y = rounded(y.unflatten(1, (-1, group)), bits).flatten(1)
        return y @ HADAMARD if turn else y

    return code


def uniform(group: int) -> Code:
    """4 bits between the least and the largest number of a group, as int4."""

    def code(rows, hessian):
        y = (rows @ HADAMARD.T).unflatten(1, (-1, group))
        low, high = y.amin(-1, keepdim=True), y.amax(-1, keepdim=True)
        step = ((high - low) / 15).half().float()
        zero = (-low / step).round().clamp(0, 15)
        return ((((y / step) + zero).round().clamp(0, 15) - zero) * step).flatten(1) @ HADAMARD

    return code


def int8(rows: torch.Tensor) -> torch.Tensor:
    """Whole numbers up to 127, and a scale for each row."""
    step = rows.abs().amax(1, keepdim=True) / 127
    return (rows / step).round() * step


def centred(inner: Code) -> Code:
    """Without the mean row, which softmax does not see and an output gets back whole."""

    def code(rows, hessian):
        mean = rows.mean(0)
        return inner(rows - mean, hessian) + mean

    return code


def by_hessian(bits: int, of: int = 0) -> Code:
    """of: 0: of queries and output projections, 1: of output projections alone."""

    def code(rows, hessian):
        hessian = hessian[of]
        turned = HADAMARD @ hessian @ HADAMARD.T
        turned = (turned + turned.T) / 2 / turned.diagonal().mean()
        y = (rows @ HADAMARD.T)[:, None]
        codes, scale = round_to_levels(y, Rounding.of(turned[None]), levels(bits))
        return (levels(bits)[codes] * scale.half().float())[:, 0] @ HADAMARD

    return code


def by_variance(*parts: tuple[int, int]) -> Code:
    """Directions of the rows' covariance, the largest first: (how many, bits) of each part. Each part is rotated by itself and has a scale
    of its own."""

    def code(rows, hessian):
        mean = rows.mean(0)
        y = (rows - mean).double()
        _, vectors = torch.linalg.eigh(y.T @ y)
        y, start, read = (y @ vectors.flip(1)).float(), 0, []
        for count, bits in parts:
            part = y[:, start : start + count]
            matrix = named_map("rht", count)[0].float() / count**0.5
            read.append(rounded(part @ matrix.T, bits) @ matrix)
            start += count
        return (torch.cat(read, 1).double() @ vectors.flip(1).T).float() + mean

    return code


def trellis(bits: int = 4, memory: int = 6) -> Code:
    """Trellis-coded: each number is one of 2^bits levels of a larger codebook, chosen by 2^memory states (Ungerboeck's convolutional code
    of rate 1/2, four subsets of a codebook of twice as many levels)."""

    def code(rows, hessian):
        y = rows @ HADAMARD.T
        size = root_mean_square(y)
        unit = (y / size).T.contiguous()  # [D, T]
        count = 2 ** (bits + 1)
        table = torch.special.ndtri((torch.arange(count) + 0.5).double() / count).float() * 3**0.5 * 0.62
        table = lloyd(table)
        states = 2**memory
        feed = {2: (0o2, 0o5), 3: (0o04, 0o13), 4: (0o04, 0o23), 5: (0o10, 0o45), 6: (0o024, 0o103), 7: (0o126, 0o235), 8: (0o362, 0o515)}
        h1, h0 = feed[memory]
        state = torch.arange(states)
        moves = []
        for bit in (0, 1):  # systematic feedback form: the state's low bit is the parity
            parity = state & 1
            following = (state >> 1) ^ ((h0 >> 1) * parity) ^ ((h1 >> 1) * bit)
            moves.append((following % states, 2 * bit + parity))
        cost = torch.full((states, unit.shape[1]), 1e30)
        cost[0] = 0
        best, chosen = [], []
        for x in unit:
            near = (x[None, :, None] - table.view(-1, 4).T[:, None, :]).square()  # [4, T, levels of the subset]
            least, level = near.min(2)
            new = torch.full_like(cost, 1e30)
            came = torch.zeros(states, unit.shape[1], dtype=torch.long)
            taken = torch.zeros_like(came)
            for following, subset in moves:
                candidate = cost + least[subset]
                for s in range(states):
                    t = int(following[s])
                    better = candidate[s] < new[t]
                    new[t] = torch.where(better, candidate[s], new[t])
                    came[t] = torch.where(better, s, came[t])
                    taken[t] = torch.where(better, level[subset[s]] * 4 + subset[s], taken[t])
            cost = new
            best.append(came)
            chosen.append(taken)
        s = cost.argmin(0)
        found = torch.empty_like(unit)
        for i in range(len(unit) - 1, -1, -1):
            found[i] = table[chosen[i].gather(0, s[None])[0]]
            s = best[i].gather(0, s[None])[0]
        found = found.T
        unit = unit.T
        scale = size * unbiased(unit.square().sum(-1, keepdim=True), (unit * found).sum(-1, keepdim=True))
        return (found * scale.half().float()) @ HADAMARD

    return code


def lloyd(table: torch.Tensor) -> torch.Tensor:
    """The best levels for a normal source by rounding to the nearest, from `table` on; a trellis uses each fourth."""
    x = torch.special.ndtri((torch.arange(200_000).double() + 0.5) / 200_000)
    table = table.double()
    for _ in range(300):
        code = torch.bucketize(x, (table[1:] + table[:-1]) / 2)
        table = torch.zeros_like(table).index_add(0, code, x) / torch.bincount(code, minlength=len(table)).clamp_min(1)
    return table.float()


CODES: tuple[tuple[str, float, Code], ...] = (
    ("fp8, 4 scales (vLLM's)", FP8_BYTES, lambda rows, hessian: fp8(rows)),
    ("int4", 256 + 4 + SPARE, uniform(512)),
    ("int4 without the mean" + ROTATED_INT8, 256 + 4 + SPARE_INT8, centred(uniform(512))),
    ("int4, groups of 64", 256 + 8 * 4 + SPARE, uniform(64)),
    ("int4, groups of 32", 256 + 16 * 4 + SPARE, uniform(32)),
    ("levels4", 256 + 2 + SPARE, plain(4)),
    ("levels4, not rotated", 256 + 2 + SPARE, plain(4, turn=False)),
    ("levels4, groups of 128", 256 + 8 + SPARE, plain(4, 128)),
    ("levels4, groups of 32", 256 + 32 + SPARE, plain(4, 32)),
    ("levels4 without the mean", 256 + 2 + SPARE, centred(plain(4))),
    ("levels4 by the Hessian", 256 + 2 + SPARE, by_hessian(4)),
    ("levels4 by the Hessian, without the mean", 256 + 2 + SPARE, centred(by_hessian(4))),
    ("levels4 by the Hessian of outputs, without the mean", 256 + 2 + SPARE, centred(by_hessian(4, 1))),
    ("trellis of 4 bits, 64 states, without the mean", 256 + 2 + SPARE, centred(trellis(4))),
    ("128 x 8, 128 x 4, 256 x 2 bits by variance", 256 + 6 + SPARE, by_variance((128, 8), (128, 4), (256, 2))),
    ("256 x 5, 256 x 3 bits by variance", 256 + 4 + SPARE, by_variance((256, 5), (256, 3))),
    ("256 x 6, 256 x 2 bits by variance", 256 + 4 + SPARE, by_variance((256, 6), (256, 2))),
    ("256 x 6, 256 x 4 bits by variance", 320 + 4 + SPARE, by_variance((256, 6), (256, 4))),
    ("levels5 without the mean", 320 + 2 + SPARE, centred(plain(5))),
    ("levels5 by the Hessian, without the mean", 320 + 2 + SPARE, centred(by_hessian(5))),
    ("256 x 6, 256 x 5 bits by variance", 352 + 4 + SPARE, by_variance((256, 6), (256, 5))),
    ("levels5 without the mean" + ROTATED_INT8, 320 + 2 + SPARE_INT8, centred(plain(5))),
    ("levels5 by the Hessian of outputs, without the mean" + ROTATED_INT8, 320 + 2 + SPARE_INT8, centred(by_hessian(5, 1))),
    ("trellis of 5 bits, 64 states, without the mean" + ROTATED_INT8, 320 + 2 + SPARE_INT8, centred(trellis(5))),
    ("levels6", 384 + 2 + SPARE, plain(6)),
    ("levels6 without the mean", 384 + 2 + SPARE, centred(plain(6))),
)


def as_a_models() -> torch.Tensor:
    """Latents `[T, LATENT]` of a falling spectrum, after a norm, with a mean and four large channels."""
    g = torch.Generator().manual_seed(3)
    basis = torch.linalg.qr(torch.randn(LATENT, LATENT, generator=g))[0]
    spread = torch.arange(1, LATENT + 1) ** -0.5
    rows = (torch.randn(TOKENS, LATENT, generator=g) * spread) @ basis.T
    rows = rows + 0.02 * torch.randn(LATENT, generator=g)
    rows[:, [3, 77, 200, 401]] *= 8
    return rows / root_mean_square(rows)  # RMSNorm


def problems() -> Iterator[tuple[str, torch.Tensor, float]]:
    """Rows, and how far the up-projections' spectrum falls."""
    for kind, rows in latents():
        yield kind, rows / rows.square().mean().sqrt(), 0.0
    yield "as a model's", as_a_models(), 0.5


def projections(fall: float, g: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """`W_UK [HEADS, NOPE, LATENT]` and the output projection behind `W_UV`, `[HEADS, hidden, LATENT]`: the latter of rank VALUE for each
    head. fall: the exponent by which the singular values of both fall, along directions of their own."""
    basis = torch.linalg.qr(torch.randn(LATENT, LATENT, generator=g))[0]
    spread = torch.arange(1, LATENT + 1).float() ** -fall
    up = torch.randn(HEADS, NOPE, LATENT, generator=g) * spread @ basis.T / LATENT**0.5
    values = torch.randn(HEADS, VALUE, LATENT, generator=g) * spread @ basis.T / LATENT**0.5
    out = torch.randn(HEADS, 1024, VALUE, generator=g) / (HEADS * VALUE) ** 0.5
    return up, out @ values


def attended(absorbed: torch.Tensor, turned: torch.Tensor, rows: torch.Tensor, rotated: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """What comes of attention over rows, behind the output projection: `[QUERIES, hidden]` in float64."""
    score = (absorbed.double() @ rows.double().T + turned.double() @ rotated.double().T) * SCALE
    return torch.einsum("hql,hol->qo", score.softmax(-1) @ rows.double(), out.double())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="codes whose name has this; fp8 is always there")
    only = parser.parse_args().only
    codes = [code for code in CODES if only in code[0] or code is CODES[0]]
    table: dict[str, list[str]] = {name: [f"{name}", f"{size:.0f}"] for name, size, _ in codes}
    kinds = []
    for kind, rows, fall in problems():
        kinds.append(kind)
        g = torch.Generator().manual_seed(4)
        rows = rows.bfloat16().float()
        rotated = torch.randn(TOKENS, ROPE, generator=g)
        up, out = projections(fall, g)
        absorbed = torch.randn(QUERIES, HEADS, NOPE, generator=g).transpose(0, 1) @ up  # [HEADS, QUERIES, LATENT]
        wanted = rows[torch.randint(0, TOKENS, (QUERIES,), generator=g)]
        absorbed = absorbed / absorbed.square().mean().sqrt() + wanted - rows.mean(0)  # each looks at one key above others
        turned = torch.randn(HEADS, QUERIES, ROPE, generator=g)
        centre = rows - rows.mean(0)
        of_values = sum(w.T @ w for w in out)
        spread = [(centre @ w.T).square().sum(1).mean() for w in out]
        of_keys = sum(SCALE**2 * (q.T @ q / QUERIES) * size for q, size in zip(absorbed, spread))
        seen = of_keys + of_values, of_values

        want, base = attended(absorbed, turned, rows, rotated, out), 0.0
        for name, _, code in codes:
            kept = int8(rotated) if name.endswith(ROTATED_INT8) else rotated
            error = relative(attended(absorbed, turned, code(rows, seen), kept, out), want)
            base = base or error
            table[name].append(f"{error / base:.2f}" if error is not base else f"{error:.4f}")
            print(kind, name, f"{error:.4f} {error / base:.2f}", flush=True)
    print("\n| code | bytes | " + " | ".join(kinds) + " |\n" + "|---|--:|" + "--:|" * len(kinds))
    for line in table.values():
        print("| " + " | ".join(line) + " |")


if __name__ == "__main__":
    main()
