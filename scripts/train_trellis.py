"""Train the numbers of the 2-bit trellis: `python scripts/train_trellis.py SEED` prints `formats/trellis/pairs.py` and, its error.

Lloyd's algorithm over the paths that the search chooses for Gaussian rows; noise that fades keeps it from settling early."""

import sys

import torch

from quantkv.formats.trellis.search import CHAIN, STATES, search

ROUNDS, SETTLE, ROWS, NOISE = 400, 40, 4000, 0.15


def windows(codes: torch.Tensor) -> torch.Tensor:
    """`[T, C]` codes -> which of the 256 pairs each one stands for."""
    before = torch.nn.functional.pad(codes[:, :-1], (1, 0))
    return before.long() * STATES + codes.long()


def choose(rows: torch.Tensor, pairs: torch.Tensor) -> torch.Tensor:
    return windows(search(rows[:, None], pairs.view(STATES, STATES, 2), None)[0][:, 0]).flatten()


def main(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    pairs = torch.randn(STATES * STATES, 2, generator=generator)
    for step in range(ROUNDS):
        rows = torch.randn(ROWS, CHAIN, generator=generator)
        chosen = choose(rows, pairs)
        count = torch.bincount(chosen, minlength=len(pairs))[:, None] + 1
        pairs = (torch.zeros_like(pairs).index_add_(0, chosen, rows.view(-1, 2)) + pairs) / count
        if step < ROUNDS - SETTLE:
            pairs = pairs + NOISE * (1 - step / (ROUNDS - SETTLE)) ** 2 * torch.randn(pairs.shape, generator=generator)
    rows = torch.randn(5 * ROWS, CHAIN, generator=generator)
    error = (rows - pairs.half().float()[choose(rows, pairs.half().float())].view_as(rows)).square().mean().item()
    print(f"seed {seed}: mean squared error {error:.5f}", file=sys.stderr)
    text = pairs.half().view(torch.uint8).numpy().tobytes().hex()
    print('"""The numbers of the trellis: fp16, little-endian, `[16, 16, 2]`: by the code before, the code, and which of the two.')
    print('Trained on a Gaussian by scripts/train_trellis.py."""\n\nPAIRS = (')
    print("\n".join(f'    "{text[i : i + 128]}"' for i in range(0, len(text), 128)) + "\n)")


if __name__ == "__main__":
    main(int(sys.argv[1]))
