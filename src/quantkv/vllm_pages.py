"""How many tokens fit into vLLM's pool of blocks, which have one size for the layers of several kinds. Pure Python.

vLLM 0.33 cuts the layers into groups that share a block table; a block holds a page of every layer of one group. Left to itself it also
pads each page to the largest, or puts more tokens into a block where its page divides the largest. The plug-in packs instead: it chooses
the layers of each group and the tokens of its blocks so that the groups' blocks come out equally large, whatever their layers' pages are.
Layers of one kind keep their own pages: one group holds them.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from .capacity import GATED_DELTA, Capacity
from .geometry import Kind, Model, positive
from .spec import ITEM_BYTES

BLOCK_SIZES = (16, 32, 64, 128)  # tokens of a page that the plug-in reads
IN_FLIGHT = 2 * 8192  # tokens that `vllm serve` schedules and has not settled: two steps of 8,192, its default on an H100 or H200
WORTH_SAYING = 1.03  # of `Pool.padding`
WORTH_PACKING = 1.02  # of `Pool.density`
LESS_UNEVEN = 1.5  # buckets of layers whose lengths differ by less become groups of the longest
RECORD_ALIGNMENT = 16  # bytes
TABLE_TOKENS = 128  # rows of a block table have room for a multiple of so many
MOST_GROUPS = 8  # of one kind: each has a block table, which takes time in every step
LARGEST = 512  # tokens of a block, where vLLM has not chosen more
PER_PAGE = 0.1  # likewise a page that the kernels read, for each token in it
HELD = 2  # blocks of a sequence's states in each group, with prefix caching
TYPICAL = 16384  # tokens of a sequence, by which blocks beside states are chosen
# What a block table, a token between two prefixes that vLLM can share, and a token of a block are worth, as a share of the pool.
PER_GROUP, PER_SHARED_TOKEN, PER_BLOCK_TOKEN = 1 / 1000, 1 / 200_000, 1 / 20_000

# What a configuration calls heads, their size, groups, numbers of a state for each number of a head, and taps of the convolution.
MAMBA_2 = {
    "nemotron_h": ("mamba_num_heads", "mamba_head_dim", "n_groups", "ssm_state_size", "conv_kernel"),
    "granitemoehybrid": ("mamba_n_heads", "mamba_d_head", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"),
}


class PooledLayer(NamedTuple):
    """A layer of the pool on one rank.

    kind: which keys are seen; None: it keeps a state. nbytes: of a token of all kv heads, or of a state. alike: equal for layers that
    vLLM takes for alike, where their kinds and bytes are equal too.
    """

    kind: Kind | None
    nbytes: int
    alike: Hashable = None


class Group(NamedTuple):
    """Layers that share a block table.

    layers: their places among the pool's. kind: which keys they see; None: they keep states. block_size: tokens of a block.
    held: of states, blocks of a sequence however long it is. pages: that the kernels read, in a block of each layer.
    """

    layers: tuple[int, ...]
    kind: Kind | None
    block_size: int
    held: int = 1
    pages: int = 1

    def blocks(self, tokens: int, in_flight: int) -> int:
        """Blocks that vLLM sets aside for a sequence of so many tokens."""
        if self.kind is None:
            return self.held
        window, chunked = self.kind
        if not window:
            return -(-tokens // self.block_size)
        held = min((window if chunked else window - 1) + in_flight, tokens)
        return -(-held // self.block_size) + (not chunked)  # a window may begin within a block


@dataclass(frozen=True)
class Pool:
    """Blocks of one size for all groups of layers.

    block_bytes: of a block. layers: of the model. block_size: tokens of a page of a layer's own size. packed: whether the plug-in has
    chosen groups and blocks. padded: whether a page is larger than its layer needs.
    """

    block_bytes: int
    groups: tuple[Group, ...]
    layers: tuple[PooledLayer, ...]
    block_size: int
    packed: bool = False
    padded: bool = False

    def sequence_bytes(self, tokens: int, in_flight: int = IN_FLIGHT) -> int:
        """Bytes that vLLM sets aside for a sequence of so many tokens."""
        return self.block_bytes * sum(group.blocks(tokens, in_flight) for group in self.groups)

    def unpadded_bytes(self, tokens: int, in_flight: int = IN_FLIGHT) -> int:
        """The same if the pages of each layer had their own size."""
        held = max((group.held for group in self.groups if group.kind is None), default=1)
        size = self.block_size
        return sum(
            layer.nbytes * held if layer.kind is None else Group((), layer.kind, size).blocks(tokens, in_flight) * size * layer.nbytes
            for layer in self.layers
        )

    def padding(self, tokens: int, in_flight: int = IN_FLIGHT) -> float:
        """The one over the other, where layers have several kinds; else 1."""
        if len(self.groups) == 1:
            return 1.0
        return self.sequence_bytes(tokens, in_flight) / self.unpadded_bytes(tokens, in_flight)

    def tokens(self, nbytes: int, length: int, in_flight: int = IN_FLIGHT) -> int:
        """What vLLM's log calls the size of the cache, in `nbytes` bytes with `--max-model-len length`."""
        return nbytes // self.block_bytes * length // sum(group.blocks(length, in_flight) for group in self.groups)

    @property
    def density(self) -> float:
        """Bytes of a token over those that its layers need: the mean of a short sequence, of which windows hold every token, and a long
        one. States are left out."""
        taken = [(group.kind, self.block_bytes / group.block_size) for group in self.groups if group.kind is not None]
        needed = [(layer.kind, layer.nbytes) for layer in self.layers if layer.kind is not None]
        short = sum(size for _, size in taken) / sum(size for _, size in needed)
        full = sum(size for kind, size in needed if not kind.window)
        return (short + sum(size for kind, size in taken if not kind.window) / full) / 2 if full else short


def table_width(tokens: int, block_size: int) -> int:
    """Blocks that a row of vLLM's block tables has room for, where sequences have so many tokens at most."""
    step = TABLE_TOKENS // math.gcd(TABLE_TOKENS, block_size)
    blocks = -(-tokens // block_size)
    return -(-blocks // step) * step


def page_tokens(block_size: int, largest: int = BLOCK_SIZES[-1]) -> int:
    """Tokens of a page that the kernels read, at most `largest`, of a block of a packed pool."""
    if block_size in BLOCK_SIZES and block_size <= largest:
        return block_size
    return next(size for size in (64, 32, 16) if size <= largest and block_size % size == 0)


def pool(model: Model, made: Capacity, ranks: int = 1) -> Pool | None:
    """The pool of a model's layers, on one of `ranks` ranks; None where the plug-in does not serve pages of that size, or vLLM plans
    otherwise: for latents, and for families whose states are not known here."""
    kinds = {layer.kind for layer in model.attention.values()}
    sizes = {layer.spec.block_size for layer in made.layers.values()}
    if "latent" in kinds or not sizes <= set(BLOCK_SIZES):
        return None
    specs = [(layer.kind, layer.spec) for layer in made.layers.values()]
    if any(spec.page_bytes % spec.block_size for _, spec in specs):
        return None
    layers = [
        PooledLayer(kind, spec.block_bytes // spec.block_size, (spec.num_kv_heads, spec.head_size, spec.head_size_v))
        for kind, spec in specs
    ]
    page = BLOCK_SIZES[0 if any(layer.full_precision_bytes for layer in made.layers.values()) else -1]
    states = sum(layer.states for layer in model.layers)
    if not states:
        return pool_of(layers, sizes.pop(), page)
    state = state_bytes(model, ranks)
    if state is None or any(layer.states and layer.heads is not None for layer in model.layers):
        return None
    return pool_beside_states([*layers, *[PooledLayer(None, state)] * states], HELD, sizes.pop(), page)


def state_bytes(model: Model, ranks: int = 1) -> int | None:
    """Bytes of one layer's state as vLLM keeps it beside a model of 16 bits; None for families where it is not known. ValueError, naming
    the field, for a configuration whose states have no sizes."""
    c: Mapping[str, Any] = model.fields
    if model.model_type in GATED_DELTA:
        keys, values = c["linear_num_key_heads"] * c["linear_key_head_dim"], c["linear_num_value_heads"] * c["linear_value_head_dim"]
        row, kernel, state = 2 * keys + values, c["linear_conv_kernel_dim"], values * c["linear_key_head_dim"]
        item = ITEM_BYTES.get(c.get("mamba_ssm_dtype"), 2) if model.model_type != "qwen3_next" else 2
    elif model.model_type in MAMBA_2:
        heads, size, count, width, kernel = (positive(c, name) for name in MAMBA_2[model.model_type])
        count += 0 if count % ranks == 0 else ranks - count  # every rank has its heads' groups
        row, state = heads * size + 2 * count * width, heads * size * width
        item = ITEM_BYTES.get(c.get("mamba_ssm_cache_dtype", "float32"), 2) if model.model_type == "nemotron_h" else 2
    else:
        return None
    return row // ranks * (kernel - 1) * 2 + state // ranks * item


def pool_of(layers: Sequence[PooledLayer], block_size: int, page: int = BLOCK_SIZES[-1]) -> Pool:
    """The pool of layers with keys and values: vLLM's own where that wastes little, else packed in pages of at most `page` tokens."""
    own = unified(layers, block_size)
    if len(own.groups) == 1 or own.density <= WORTH_PACKING:
        return own
    better = packed(layers, block_size, page)
    return better if better.density < own.density else own


def unified(layers: Sequence[PooledLayer], block_size: int) -> Pool:
    """The pool as vLLM makes it of layers with keys and values."""
    if len({layer.kind for layer in layers}) == 1:
        group = Group(tuple(range(len(layers))), layers[0].kind, block_size)
        return Pool(block_size * sum(layer.nbytes for layer in layers), (group,), tuple(layers), block_size)
    largest = max(layer.nbytes for layer in layers)
    buckets: dict[tuple, list[int]] = {}  # layers that vLLM takes for alike
    for number, layer in enumerate(layers):
        whole = largest // layer.nbytes if largest % layer.nbytes == 0 else 0  # 0: the page is padded
        buckets.setdefault((layer.kind, block_size * max(whole, 1), whole, layer.nbytes, layer.alike), []).append(number)
    least, most = min(map(len, buckets.values())), max(map(len, buckets.values()))
    length = most if most < least * LESS_UNEVEN else least
    groups = []
    for (kind, size, *_), numbers in buckets.items():
        parts = -(-len(numbers) // length)
        groups += [Group(tuple(numbers[i::parts]), kind, size) for i in range(parts)]
    longest = max(len(group.layers) for group in groups)
    padded = any(not whole for _, _, whole, *_ in buckets)
    return Pool(longest * largest * block_size, tuple(groups), tuple(layers), block_size, padded=padded)


def packed(layers: Sequence[PooledLayer], block_size: int, page: int = BLOCK_SIZES[-1]) -> Pool:
    """The pool of layers with keys and values in groups whose blocks are nearly equal, by layers and by tokens: multiples of
    `block_size`."""
    kinds: dict[Kind, list[int]] = {}
    for number, layer in enumerate(layers):
        kinds.setdefault(layer.kind, []).append(number)
    most = MOST_GROUPS if len(kinds) < 3 else MOST_GROUPS // 2
    parts = [[_split(layers, numbers, count) for count in range(1, min(len(numbers), most) + 1)] for numbers in kinds.values()]
    best: tuple[float, Pool] | None = None
    for cut in product(*parts):
        widest = [max(sum(layers[n].nbytes for n in numbers) for numbers in groups) for groups in cut]
        for sizes in _block_sizes(widest, block_size):
            pages = {size: size // page_tokens(size, page) for size in sizes}
            groups = tuple(Group(g, kind, size, 1, pages[size]) for kind, size, of_kind in zip(kinds, sizes, cut) for g in of_kind)
            step = RECORD_ALIGNMENT * math.lcm(*pages.values())
            nbytes = -(-max(size * width for size, width in zip(sizes, widest)) // step) * step
            found = Pool(nbytes, groups, tuple(layers), block_size, packed=True)
            cost = found.density + PER_GROUP * len(groups) + PER_SHARED_TOKEN * math.lcm(*sizes) + PER_BLOCK_TOKEN * max(sizes)
            if best is None or cost < best[0]:
                best = cost, found
    return best[1]


def _split(layers: Sequence[PooledLayer], numbers: Sequence[int], count: int) -> tuple[tuple[int, ...], ...]:
    """`numbers` in `count` groups of nearly equal bytes: the largest first, each to the smallest group."""
    groups: list[list[int]] = [[] for _ in range(count)]
    sums = [0] * count
    for number in sorted(numbers, key=lambda n: (-layers[n].nbytes, n)):
        least = sums.index(min(sums))
        groups[least].append(number)
        sums[least] += layers[number].nbytes
    return tuple(tuple(sorted(group)) for group in groups)


def _block_sizes(widest: Sequence[int], step: int) -> Iterator[tuple[int, ...]]:
    """Tokens of a block by kind, with which blocks of so many bytes a token come out nearly equal."""
    for first in range(step, max(LARGEST, step) + 1, step):
        near = [first * widest[0] // width // step * step for width in widest[1:]]
        yield from product([first], *([size for size in (low, low + step) if step <= size <= max(LARGEST, step)] for low in near))


def pool_beside_states(layers: Sequence[PooledLayer], held: int, block_size: int, page: int = BLOCK_SIZES[-1]) -> Pool | None:
    """The pool of states and of layers with keys and values of one kind: as vLLM makes it where these have one size, else packed."""
    rows = [number for number, layer in enumerate(layers) if layer.kind is not None]
    states = [number for number, layer in enumerate(layers) if layer.kind is None]
    if len({layers[n].kind for n in rows}) > 1:
        return None
    if len({layers[n].nbytes for n in rows}) > 1:
        found = packed_beside_states(layers, held, block_size, None, page)
        return found and packed_beside_states(layers, held, block_size, found.groups[0].block_size, page)
    row = layers[rows[0]].nbytes
    size = -(-max(layers[n].nbytes for n in states) // (row * block_size)) * block_size
    least, most = sorted((len(rows), len(states)))
    length = most if most < least * LESS_UNEVEN else least
    groups = []
    for numbers, kind in ((rows, layers[rows[0]].kind), (states, None)):
        parts = -(-len(numbers) // length)
        groups += [Group(tuple(numbers[i::parts]), kind, size, held if kind is None else 1) for i in range(parts)]
    return Pool(length * size * row, tuple(groups), tuple(layers), block_size, padded=True)


def packed_beside_states(
    layers: Sequence[PooledLayer], held: int, step: int, block_size: int | None = None, page: int = BLOCK_SIZES[-1]
) -> Pool | None:
    """The pool of states and of layers with keys and values of one kind: a block holds some states, or nearly as many bytes of tokens.

    held: blocks of a sequence's states in each group. step: of the tokens of a block. block_size: tokens of a block, where they are
    chosen. page: most tokens of a page that the kernels read. None where no such block has `step` tokens.
    """
    states = [number for number, layer in enumerate(layers) if layer.kind is None]
    others = [number for number, layer in enumerate(layers) if layer.kind is not None]
    state, row = max(layers[n].nbytes for n in states), sum(layers[n].nbytes for n in others)
    needed = held * sum(layers[n].nbytes for n in states) + TYPICAL * row
    best: tuple[float, Pool] | None = None
    for parts in range(1, len(states) + 1):
        room = -(-len(states) // parts) * state
        for size in [block_size] if block_size else {room // (row * unit) * unit for unit in (4 * step, 2 * step, step)} - {0}:
            pages = size // page_tokens(size, page)
            align = RECORD_ALIGNMENT * pages
            nbytes = -(-max(size * row, room) // align) * align
            groups = (
                Group(tuple(others), layers[others[0]].kind, size, 1, pages),
                *(Group(tuple(states[i::parts]), None, size, held) for i in range(parts)),
            )
            taken = nbytes * (held * parts + TYPICAL / size + 0.5)  # of its last block a sequence fills one half
            cost = taken / needed + PER_GROUP * parts + PER_PAGE * pages / size
            if best is None or cost < best[0]:
                best = cost, Pool(nbytes, groups, tuple(layers), step, packed=True)
    return best and best[1]
