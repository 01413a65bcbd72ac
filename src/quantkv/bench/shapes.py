"""What is measured: the shape of one call."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields

KINDS = ("decode", "verify", "step", "write", "prefill")
MOST_NUMBERS = 1 << 40  # of a tensor: more fits no memory
MOST_VERIFIED = 16  # queries of a sequence; with more it is a prefill


@dataclass(frozen=True)
class Shape:
    """One call. Its text is the letters with their numbers joined by "x", those at their default left out: `B8xL32768`.

    B: sequences. L: keys of each, new ones included. Q: queries of each. N: tokens to write, 0 where attention alone is measured;
    with L a step: the last N of each sequence are written, then attended to by as many queries.
    HQ, HK: query and kv heads. D: head size. DV: that of V, 0 where it is D. P: tokens of a page. W: sliding window, 0 for none.
    """

    B: int = 1
    L: int = 0
    Q: int = 1
    N: int = 0
    HQ: int = 32
    HK: int = 8
    D: int = 128
    DV: int = 0
    P: int = 16
    W: int = 0

    def __post_init__(self) -> None:
        for name in ("B", "Q", "HQ", "HK", "D", "P"):
            if getattr(self, name) < 1:
                raise ValueError(f"shape {self}: {name} must be positive")
        if (tokens := max(self.num_tokens, self.Q, self.P, self.W) * self.HQ * self.D) > MOST_NUMBERS:
            raise ValueError(f"shape {self}: {tokens:,} numbers in a tensor; at most {MOST_NUMBERS:,}")
        if not self.L and not self.N:
            raise ValueError(f"shape {self}: L, keys to attend to, or N, tokens to write, or both")
        if self.L and self.N and self.N != self.Q:
            raise ValueError(f"shape {self}: a step writes as many tokens as it has queries, Q={self.Q}")
        if self.L and self.Q > self.L:
            raise ValueError(f"shape {self}: Q={self.Q} queries are among the L={self.L} keys")
        if self.HQ % self.HK:
            raise ValueError(f"shape {self}: HQ={self.HQ} is no multiple of HK={self.HK}")

    @classmethod
    def parse(cls, text: str, **given: int) -> Shape:
        """The shape that `str` writes, with other defaults where they are given. ValueError for anything else."""
        names = {f.name for f in fields(cls)}
        values: dict[str, int] = {}
        for part in text.split("x"):
            match = re.fullmatch(r"([A-Z]+)(\d+)", part)
            if not match or match[1] not in names or match[1] in values:
                raise ValueError(f"shape {text!r}: numbers after {', '.join(sorted(names))}, joined by 'x': B8xL32768xP64")
            values[match[1]] = int(match[2])
        return cls(**{**given, **values})

    def __str__(self) -> str:
        return "x".join(f"{f.name}{getattr(self, f.name)}" for f in fields(self) if getattr(self, f.name) != f.default)

    @property
    def kind(self) -> str:
        """What is timed: "write", "step" (a write and the decode that reads it), "decode", "verify" or "prefill"."""
        if self.N:
            return "step" if self.L else "write"
        return "decode" if self.Q == 1 else "verify" if self.Q <= MOST_VERIFIED else "prefill"

    @property
    def head_size_v(self) -> int:
        """Head size of V."""
        return self.DV or self.D

    @property
    def num_tokens(self) -> int:
        """Tokens that lie in the cache."""
        return self.B * self.L or self.N

    @property
    def tokens_read(self) -> int:
        """Tokens that attention must read: those that some query sees."""
        return self.B * min(self.L, self.W + self.Q - 1 if self.W else self.L)

    @property
    def flops(self) -> float:
        """Operations of the two products of attention over the keys that each query sees."""
        context = self.L - self.Q
        pairs = sum(min(context + i + 1, self.W or self.L) for i in range(self.Q))
        return 2.0 * self.B * self.HQ * (self.D + self.head_size_v) * pairs


def shapes(*texts: str) -> tuple[Shape, ...]:
    """Shapes from their names, such as B64xL8192xQ4. ValueError for a name that says none."""
    return tuple(Shape.parse(text) for text in texts)


# The shapes that the design's tables and targets are in.
DEFAULT = {
    "decode": shapes("B8xL32768", "B64xL8192", "L131072", "B128xL1024", "B16xL2048", "L2048"),
    "verify": shapes("B64xL8192xQ4", "B64xL8192xQ8"),
    "step": shapes("L2048xN1"),
    "write": shapes("N8192", "N64"),
    "prefill": shapes("L16384xQ4096"),
}
# What a CPU gets through in seconds.
SMALL = {
    "decode": shapes("B2xL512xHQ8xHK2", "L2048xHQ8xHK2"),
    "verify": shapes("B2xL512xQ4xHQ8xHK2"),
    "step": shapes("B2xL512xN1xHQ8xHK2"),
    "write": shapes("N256xHK2xHQ8"),
    "prefill": shapes("L512xQ128xHQ8xHK2"),
}
