"""How many tokens of a model fit into memory in a format: pages as caches allocate them, to the byte. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from . import names
from .format_table import layout_of
from .full_precision import FullPrecisionTokens
from .geometry import Heads, Kind, Layer, Model
from .spec import CacheSpec

PLAIN = "bf16"  # what "none", latents' rotated dimensions and full-precision tokens are stored in
MOST_TOKENS = 1 << 40
RECURRENT_BYTES, CONVOLUTION_BYTES = 4, 2  # of a number of a state, as transformers keeps them beside a model of 16 bits
GATED_DELTA = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")


class Stored(Protocol):
    """What is asked of a policy: a `Policy`, or its file's `PolicyFile`."""

    @property
    def full_precision(self) -> FullPrecisionTokens | None:
        """Tokens with 16-bit copies."""

    def name_of(self, layer: int) -> str:
        """Name of a layer's format."""

    def of_latents(self) -> Stored:
        """The same for a model whose layers keep latents."""


@dataclass(frozen=True)
class LayerCache:
    """The cache of one layer on one rank.

    spec: its pages. kind: which of its keys are seen; pages that no query sees any more are given back.
    full_precision_bytes: of the 16-bit copies of full-precision tokens, for each sequence however long it is.
    """

    spec: CacheSpec
    kind: Kind
    full_precision_bytes: int = 0

    def pages(self, tokens: int) -> int:
        """Most pages that a sequence holds until it has so many tokens, added one by one."""
        size, window = self.spec.block_size, self.kind.window
        held = self.spec.num_blocks(tokens)
        if not window:
            return held
        if not self.kind.chunked:
            return min(held, -(-(window + size - 1) // size))
        chunks = range(min(-(-tokens // window), size + 1))  # beyond, chunks begin within pages as these do
        return max(-(-min((c + 1) * window, tokens) // size) - c * window // size for c in chunks)

    def nbytes(self, tokens: int) -> int:
        """Bytes of a sequence of so many tokens."""
        return self.pages(tokens) * self.spec.block_bytes + self.full_precision_bytes


@dataclass(frozen=True)
class Capacity:
    """The cache of a model on one rank.

    layers: by number. state_bytes: what recurrences keep of a sequence; None: not known for this family.
    """

    layers: Mapping[int, LayerCache]
    state_bytes: int | None = 0

    @property
    def bytes_per_token(self) -> float:
        """That each further token of a long sequence takes: layers with a window take none."""
        return sum(layer.spec.bytes_per_token for layer in self.layers.values() if not layer.kind.window)

    @property
    def bits_per_element(self) -> float:
        """Stored bits for each number of K and V, with metadata and without full-precision tokens, over all layers."""
        specs = [layer.spec for layer in self.layers.values()]
        return 8 * sum(spec.bytes_per_token for spec in specs) / sum(spec.elements_per_token for spec in specs)

    def sequence_bytes(self, tokens: int) -> int:
        """Bytes of one sequence of so many tokens, states and 16-bit copies included."""
        return sum(layer.nbytes(tokens) for layer in self.layers.values()) + (self.state_bytes or 0)

    def sequences(self, free: int, tokens: int) -> int:
        """Sequences of so many tokens that fit into `free` bytes."""
        return max(free, 0) // self.sequence_bytes(tokens)

    def longest(self, free: int) -> int:
        """Most tokens of one sequence that fits into `free` bytes, in whole pages."""
        size = next(iter(self.layers.values())).spec.block_size
        if self.sequence_bytes(size) > free:
            return 0
        low, high = 1, MOST_TOKENS // size  # pages
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.sequence_bytes(middle * size) <= free else (low, middle - 1)
        return low * size


def capacity(model: Model, policy: Stored, ranks: int = 1, block_size: int = 16) -> Capacity:
    """A model's cache on each of `ranks` ranks, tensor-parallel, as `check_ranks` takes them. ValueError, naming the argument, for a format
    that cannot take the model's heads, or is of latents where it has none."""
    check_ranks(model, ranks)
    if any(layer.kind == "latent" for layer in model.attention.values()):
        policy = policy.of_latents()
    layers = {number: _layer_cache(layer, number, policy, ranks, block_size) for number, layer in model.attention.items()}
    return Capacity(layers, state_bytes(model, ranks))


def check_ranks(model: Model, ranks: int) -> None:
    """ValueError unless so many ranks can share the model's heads."""
    if ranks < 1 or model.num_heads % ranks:
        raise ValueError(f"--tp {ranks}: a divisor of the model's {model.num_heads} query heads is needed")
    for layer in model.attention.values():
        heads = layer.heads.num_kv_heads
        if layer.kind != "latent" and heads % ranks and ranks % heads:
            raise ValueError(f"--tp {ranks}: a divisor or a multiple of the model's {heads} kv heads is needed")


def rank_heads(layer: Layer, ranks: int) -> Heads:
    """The kv heads of one rank: with more ranks than heads several ranks hold the same one, and all hold a latent."""
    if layer.kind == "latent":
        return layer.heads
    return layer.heads._replace(num_kv_heads=max(layer.heads.num_kv_heads // ranks, 1))


def _layer_cache(layer: Layer, number: int, policy: Stored, ranks: int, block_size: int) -> LayerCache:
    name, full_precision = policy.name_of(number), policy.full_precision
    plain = layout_of(PLAIN)
    layout = asked = layout_of(name, PLAIN)
    if layer.kind == "latent":
        layout = layout_of(names.of_latent(asked.name, PLAIN))
    else:
        names.of_keys_and_values(layout.name)
    heads = rank_heads(layer, ranks)
    kind = Kind(layer.window, layer.kind == "chunked")
    if full_precision is not None and kind.window:
        full_precision = full_precision.without_sink()
    copies = 0
    if full_precision is not None and asked.name not in ("bf16", "fp16", "fp32"):
        copies = full_precision.copies_needed(block_size, 1) * plain.cache_spec(*heads, block_size).block_bytes
    return LayerCache(layout.cache_spec(*heads, block_size), kind, copies)


def state_bytes(model: Model, ranks: int = 1) -> int | None:
    """Bytes that recurrences keep of each sequence on a rank; None for families where it is not known."""
    count = sum(layer.states for layer in model.layers)
    if not count:
        return 0
    if model.model_type not in GATED_DELTA:
        return None
    c: Mapping[str, Any] = model.fields
    keys, values = c["linear_num_key_heads"] * c["linear_key_head_dim"], c["linear_num_value_heads"] * c["linear_value_head_dim"]
    convolution = (2 * keys + values) * c["linear_conv_kernel_dim"] * CONVOLUTION_BYTES
    recurrent = values * c["linear_key_head_dim"] * RECURRENT_BYTES
    return -(-count * (convolution + recurrent) // ranks)
