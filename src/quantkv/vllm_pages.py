"""How many tokens fit into vLLM's pool of blocks, which gives the pages of layers of several kinds one size. Pure Python.

vLLM 0.33 pads each page to the largest, or puts more tokens into a block where its page divides the largest. Then it cuts the layers into
groups of equal length, and a block holds a page of every layer of a group. Layers of one kind keep their own pages: one group holds them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from .capacity import Capacity, LayerCache
from .geometry import Kind, Model

BLOCK_SIZES = (16, 32, 64, 128)  # tokens of a page that the plug-in reads
IN_FLIGHT = 2 * 8192  # tokens that `vllm serve` schedules and has not settled: two steps of 8,192, its default on an H100 or H200
WORTH_SAYING = 1.01  # of `Pool.padding`
LESS_UNEVEN = 1.5  # buckets of layers whose lengths differ by less become groups of the longest


class Group(NamedTuple):
    """Layers that share a block table: how many, which keys they see, tokens of a block."""

    layers: int
    kind: Kind
    block_size: int

    def blocks(self, tokens: int, in_flight: int) -> int:
        """Blocks that vLLM sets aside for a sequence of so many tokens."""
        window, chunked = self.kind
        if not window:
            return -(-tokens // self.block_size)
        held = min((window if chunked else window - 1) + in_flight, tokens)
        return -(-held // self.block_size) + (not chunked)  # a window may begin within a block


@dataclass(frozen=True)
class Pool:
    """Blocks of one size for all groups of layers.

    block_bytes: of a block. own_bytes: kind of each layer, and the bytes of a token in a page of its own size. block_size: tokens of such a
    page. padded: whether a page is larger than its layer needs.
    """

    block_bytes: int
    groups: tuple[Group, ...]
    own_bytes: tuple[tuple[Kind, int], ...]
    block_size: int
    padded: bool

    def sequence_bytes(self, tokens: int, in_flight: int = IN_FLIGHT) -> int:
        """Bytes that vLLM sets aside for a sequence of so many tokens."""
        return self.block_bytes * sum(group.blocks(tokens, in_flight) for group in self.groups)

    def unpadded_bytes(self, tokens: int, in_flight: int = IN_FLIGHT) -> int:
        """The same if the pages of each layer had their own size."""
        return sum(Group(1, kind, self.block_size).blocks(tokens, in_flight) * self.block_size * size for kind, size in self.own_bytes)

    def padding(self, tokens: int, in_flight: int = IN_FLIGHT) -> float:
        """The one over the other where pages are padded, else 1."""
        return self.sequence_bytes(tokens, in_flight) / self.unpadded_bytes(tokens, in_flight) if self.padded else 1.0

    def tokens(self, nbytes: int, length: int, in_flight: int = IN_FLIGHT) -> int:
        """What vLLM's log calls the size of the cache, in `nbytes` bytes with `--max-model-len length`."""
        return nbytes // self.block_bytes * length // sum(group.blocks(length, in_flight) for group in self.groups)


def pool(model: Model, made: Capacity) -> Pool | None:
    """The pool of a model's layers, on one rank; None where the plug-in does not serve pages of that size, or vLLM plans otherwise: for
    latents and for states of recurrences."""
    kinds = {layer.kind for layer in model.attention.values()}
    sizes = {layer.spec.block_size for layer in made.layers.values()}
    if "latent" in kinds or any(layer.states for layer in model.layers) or not sizes <= set(BLOCK_SIZES):
        return None
    if any(layer.spec.page_bytes % layer.spec.block_size for layer in made.layers.values()):
        return None
    return _pool(made.layers.values())


def _pool(layers: Iterable[LayerCache]) -> Pool:
    layers = list(layers)
    block_size = layers[0].spec.block_size
    own = tuple((layer.kind, layer.spec.block_bytes // block_size) for layer in layers)
    if len({layer.kind for layer in layers}) == 1:
        group = Group(len(layers), layers[0].kind, block_size)
        return Pool(sum(layer.spec.block_bytes for layer in layers), (group,), own, block_size, False)
    page = max(layer.spec.block_bytes for layer in layers)
    buckets: dict[tuple, int] = {}  # layers that vLLM takes for alike
    for layer in layers:
        spec, whole = layer.spec, page // layer.spec.block_bytes
        padded = page % spec.block_bytes != 0
        sizes = spec.block_bytes, spec.num_kv_heads, spec.head_size, spec.head_size_v
        alike = layer.kind, block_size * (1 if padded else whole), padded, sizes
        buckets[alike] = buckets.get(alike, 0) + 1
    least, most = min(buckets.values()), max(buckets.values())
    length = most if most < least * LESS_UNEVEN else least
    groups, longest = [], 0
    for (kind, size, *_), count in buckets.items():
        parts = -(-count // length)
        longest = max(longest, -(-count // parts))
        groups += [Group(len(range(i, count, parts)), kind, size) for i in range(parts)]
    return Pool(longest * page, tuple(groups), own, block_size, any(alike[2] for alike in buckets))
