"""TurboQuant by vLLM's names: one slot `key bytes | value bytes` for each (token, head)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from .. import checks, ops
from ..calls import AttendCall, Batch, PagedTensor, Segment
from ..format import Format
from ..formats import get_format
from ..formats.turboquant import LEVELS, centroids
from ..maps import LayerMaps, LinearMap, named_map
from .views import ReadOnce, need_tensors, row_bytes, slot_sides, store

# (key bits, value bits) -> format; 8 bits are e4m3
_FORMATS = {(8, 4): "tq_k8v4", (4, 4): "tq4", (3, 4): "tq_k3v4", (3, 3): "tq3", (4, 3): "tq4/tq3", (8, 3): "tq_k8v4/tq3"}
PRESETS = {"turboquant_k8v4": (8, 4), "turboquant_4bit_nc": (4, 4), "turboquant_k3v4_nc": (3, 4), "turboquant_3bit_nc": (3, 3)}


@lru_cache(maxsize=32)
def get_centroids(d: int, bits: int) -> torch.Tensor:
    """Sorted Lloyd-Max levels `[2**bits]` float32 of N(0, 1 / d): the same tensor each time. bits: 2, 3 or 4, else ValueError."""
    if bits not in LEVELS:
        checks.refuse("bits", bits, f"one of {sorted(LEVELS)}")
    return centroids(bits, d)


@dataclass(frozen=True)
class TurboQuantConfig:
    """Bytes of a slot. key_quant_bits: 3, 4 or 8 (e4m3); value_quant_bits: 3 or 4; norm_correction: keys' unit vectors are
    scaled back to length 1 when they are read. seed: vLLM's; nothing is drawn, in vLLM 0.33 neither."""

    head_dim: int = 128
    key_quant_bits: int = 3
    value_quant_bits: int = 4
    seed: int = 42
    norm_correction: bool = False

    @classmethod
    def from_cache_dtype(cls, cache_dtype: str, head_dim: int) -> TurboQuantConfig:
        """The preset of that name. ValueError for an unknown one."""
        if cache_dtype not in PRESETS:
            checks.refuse("Unknown TurboQuant cache dtype: cache_dtype", repr(cache_dtype), f"one of {', '.join(PRESETS)}")
        return cls(head_dim, *PRESETS[cache_dtype], norm_correction=cache_dtype.endswith("_nc"))

    @staticmethod
    def get_boundary_skip_layers(model_config: Any, n: int = 2) -> list[str]:
        """The first and the last n layers, which vLLM leaves at 16 bits, as strings; none of a hybrid model, which has few with keys.

        model_config: vLLM's, of which `is_hybrid` and `hf_text_config.num_hidden_layers` are read."""
        if model_config.is_hybrid:
            return []
        layers = range(model_config.hf_text_config.num_hidden_layers)
        n = min(max(n, 0), len(layers) // 2)
        return [str(i) for i in (*layers[:n], *layers[len(layers) - n :])]

    @property
    def key_fp8(self) -> bool:
        """Whether keys are 8-bit floats."""
        return self.key_quant_bits == 8

    @property
    def key_mse_bits(self) -> int:
        """Bits of a key's code; 0 for e4m3 keys."""
        return 0 if self.key_fp8 else self.key_quant_bits

    @property
    def mse_bits(self) -> int:
        """Bits of the table that callers prepare; with e4m3 keys, which need none, that of the values' width."""
        return self.key_mse_bits or self.value_quant_bits

    @property
    def centroid_bits(self) -> int:
        """vLLM's other name for `mse_bits`."""
        return self.mse_bits

    @property
    def n_centroids(self) -> int:
        """Levels of that table."""
        return 2**self.mse_bits

    @property
    def effective_value_quant_bits(self) -> int:
        """Bits of a value; vLLM's name."""
        return self.value_quant_bits

    @property
    def format(self) -> Format:
        """The format of these bits."""
        return _format(self.key_mse_bits, self.value_quant_bits, self.key_fp8)

    @property
    def key_packed_size(self) -> int:
        """Bytes of a key with its norm."""
        return row_bytes(self.format.k, self.head_dim)

    @property
    def value_packed_size(self) -> int:
        """Bytes of a value with its scale and minimum."""
        return row_bytes(self.format.v, self.head_dim)

    @property
    def slot_size(self) -> int:
        """Bytes of one token and kv head, K and V."""
        return self.key_packed_size + self.value_packed_size

    @property
    def slot_size_aligned(self) -> int:
        """Bytes of a slot, even, so that its 16-bit fields are aligned."""
        return self.slot_size + self.slot_size % 2


def _format(mse_bits: int, value_quant_bits: int, key_fp8: bool) -> Format:
    bits = (8 if key_fp8 else mse_bits, value_quant_bits)
    if bits not in _FORMATS:
        checks.refuse("mse_bits, value_quant_bits", bits, "keys of 3 or 4 bits or key_fp8, values of 3 or 4 bits")
    return get_format(_FORMATS[bits])


def _sides(kv_cache: torch.Tensor, fmt: Format, head_size: int, key_packed_size: int) -> tuple[PagedTensor, PagedTensor]:
    """Views of the slots. Keys start at byte 0, values at `key_packed_size`."""
    key_bytes = row_bytes(fmt.k, head_size)
    if key_packed_size < key_bytes or key_packed_size % 2:
        checks.refuse("key_packed_size", key_packed_size, f"an even number of at least {key_bytes} bytes")
    return slot_sides(kv_cache, fmt, (head_size, head_size), key_packed_size)


class _Rotation(NamedTuple):
    matrix: torch.Tensor  # [D, D] float64 on the host: keys are stored as codes of `key @ matrix`
    maps: LayerMaps | None  # None: the format's own


@ReadOnce
def _rotation(matrix: torch.Tensor, argument: str, head_size: int, device: torch.device) -> _Rotation:
    """What PiT, or Pi = PiT^T, stands for. ValueError unless orthogonal: the norm is taken after the rotation."""
    checks.tensor(argument, matrix, (head_size, head_size), checks.ROW_DTYPES, device)
    matrix = (matrix.mT if argument == "Pi" else matrix).detach().float().clone(memory_format=torch.contiguous_format)
    host = matrix.double().cpu()
    if not torch.allclose(host @ host.mT, torch.eye(head_size, dtype=host.dtype, device=host.device), atol=1e-3):
        checks.refuse(argument, f"{tuple(host.shape)} numbers", "an orthogonal matrix is needed")
    if torch.allclose(host, named_map("hadamard_unit", head_size)[0], rtol=0, atol=1e-6):
        return _Rotation(host, None)
    return _Rotation(host, LayerMaps(k=LinearMap(matrix.mT.contiguous()[None], matrix[None])))


@ReadOnce
def _check_table(table: torch.Tensor, argument: str, bits: int, head_size: int, device: torch.device) -> None:
    """ValueError unless `table` holds the levels, or the midpoints, of the built-in quantizer: its codes mean nothing else."""
    levels = get_centroids(head_size, bits).double()
    expected = (levels[:-1] + levels[1:]) / 2 if argument == "midpoints" else levels
    checks.tensor(argument, table, tuple(expected.shape), (torch.float32,), device)
    host = table.detach().double().cpu()
    if not torch.allclose(host, expected, rtol=1e-5, atol=1e-7):
        checks.refuse(argument, host.tolist(), f"{expected.tolist()} is needed, as `get_centroids` gives")


def triton_turboquant_store(
    key: torch.Tensor,
    value: torch.Tensor,
    kv_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    PiT: torch.Tensor,
    midpoints: torch.Tensor,
    mse_bits: int,
    key_packed_size: int,
    value_quant_bits: int,
    key_fp8: bool = False,
) -> None:
    """Write `key [T, HK, D]` and `value [T, HK, D]` to slots `slot_mapping [T]`; a negative slot skips its token.

    kv_cache: uint8 `[num_blocks, block_size, HK, slot bytes]`, slots of consecutive bytes, other strides even.
    PiT: `[D, D]` orthogonal, keys are stored as codes of `key @ PiT`. midpoints: `[2**mse_bits - 1]` float32, between the
    levels of `get_centroids`; other tables are refused. Neither is read with key_fp8.
    mse_bits: 3 or 4. key_packed_size: offset of the value in the slot. value_quant_bits: 3 or 4.
    """
    need_tensors(key=key, value=value, kv_cache=kv_cache)
    fmt, head_size = _format(mse_bits, value_quant_bits, key_fp8), key.shape[-1]
    if value.shape[-1] != head_size:
        checks.refuse("value.shape[-1]", value.shape[-1], f"a slot holds a key and a value of one head size, {head_size}")
    k, v = _sides(kv_cache, fmt, head_size, key_packed_size)
    maps = None
    if not key_fp8:
        _check_table(midpoints, "midpoints", mse_bits, head_size, kv_cache.device)
        maps = _rotation(PiT, "PiT", head_size, kv_cache.device).maps
    store(key, value, k, v, fmt, slot_mapping, maps)


def triton_turboquant_decode_attention(
    query: torch.Tensor,
    kv_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    Pi: torch.Tensor,
    centroids: torch.Tensor,
    scale: float,
    mse_bits: int,
    key_packed_size: int,
    value_quant_bits: int,
    key_fp8: bool = False,
    norm_correction: bool = False,
    PiT: torch.Tensor | None = None,
    mid_o_buf: torch.Tensor | None = None,
    output_buf: torch.Tensor | None = None,
    lse_buf: torch.Tensor | None = None,
    buf_holder: object = None,
    max_num_kv_splits: int = 32,
) -> torch.Tensor:
    """Attention of one query for each sequence, `query [S, HQ, D]`, over its slots -> `[S, HQ, D]` of query's dtype.

    block_table: int `[S, pages]`; seq_lens: int `[S]`. The other arguments as in `triton_turboquant_store`, and
    Pi: transpose of PiT, which may be left out. centroids: `get_centroids(D, mse_bits)`.
    norm_correction: keys of 3 or 4 bits are always read with it; False is refused for them.
    mid_o_buf, output_buf, lse_buf, buf_holder: scratch of vLLM's kernels; the ops bring their own, and choose the number
    of splits.
    """
    need_tensors(query=query, kv_cache=kv_cache, block_table=block_table, seq_lens=seq_lens)
    fmt, num_seqs, device = _format(mse_bits, value_quant_bits, key_fp8), seq_lens.shape[0], kv_cache.device
    checks.tensor("query", query, (num_seqs, None, None), checks.ROW_DTYPES, device)
    checks.tensor("seq_lens", seq_lens, (num_seqs,), checks.INDEX_DTYPES, device)
    checks.tensor("block_table", block_table, (num_seqs, None), checks.INDEX_DTYPES, device)
    head_size = query.shape[2]
    k, v = _sides(kv_cache, fmt, head_size, key_packed_size)
    maps = None
    if not key_fp8:
        if not norm_correction:
            checks.refuse("norm_correction", norm_correction, "True: codes of 3 and 4 bits are read with it")
        _check_table(centroids, "centroids", mse_bits, head_size, device)
        matrix, maps = _rotation(Pi, "Pi", head_size, device)
        transpose = (matrix, maps) if PiT is None else _rotation(PiT, "PiT", head_size, device)
        if transpose[1] is not maps and not torch.allclose(transpose[0], matrix, atol=1e-5):
            checks.refuse("PiT", f"{tuple(PiT.shape)} numbers", "the transpose of Pi is needed")
    one_each = torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
    maps = LayerMaps.of(fmt, head_size, head_size, device) if maps is None else maps
    return ops.attend(AttendCall(query, (Segment(k, v, fmt, block_table, maps),), Batch(one_each, seq_lens, 1), scale))[0]
