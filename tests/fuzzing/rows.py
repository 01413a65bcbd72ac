"""Rows that are stored and read back, against docs/formats.md: what the bytes of a record mean, and which bytes a row becomes.

Only tables come from the package: the levels that TurboQuant's bytes need, the cubics of `levels2` to `levels8`, the trellis's pairs."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from hypothesis import strategies as st

from quantkv import LayerMaps, LinearMap, PagedCache, available_formats, get_format
from quantkv.formats.levels import CUBICS
from quantkv.formats.trellis.pairs import PAIRS
from quantkv.formats.turboquant import LEVELS

from .attention import DTYPES, sizes_of

SHARE = 4

PLAIN = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
EIGHT = {"fp8_e4m3": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2, "tq8": torch.float8_e4m3fn, "fp8_token": torch.float8_e4m3fn}
TOKENS, SIZE, SEED = 6, 8, 0x9E3779B9
LARGEST_ROW = 1e38  # for a row that is not to overflow


@dataclass(frozen=True)
class Case:
    seed: int
    format: str
    head_size: int
    head_size_v: int
    heads: int
    dtype: str
    scale: float
    key_mean: bool
    extreme: bool


@st.composite
def cases(draw) -> Case:
    names = available_formats()
    name = f"{draw(st.sampled_from(names))}/{draw(st.sampled_from(names))}"
    size, size_v = draw(sizes_of([name]))
    return Case(
        draw(st.integers(0, 2**16)),
        name,
        size,
        size_v,
        draw(st.integers(1, 2)),
        draw(st.sampled_from(list(DTYPES))),
        draw(st.sampled_from([1.0, 1.0, 0.5, 3.0])),
        draw(st.booleans()),
        draw(st.integers(0, 4)) == 0,
    )


@cache
def hadamard(size: int) -> np.ndarray:
    h = np.ones((1, 1))
    while len(h) < size:
        h = np.block([[h, h], [h, -h]])
    return h


@cache
def matrix(codec: str, size: int) -> np.ndarray:
    """A of the map that a codec asks for."""
    if codec == "int2":
        return hadamard(size)
    if codec in ("tq3", "tq4"):
        return hadamard(size) / size**0.5
    if codec == "int4" or codec.startswith(("levels", "trellis")):
        block = size & -size
        signs = torch.bernoulli(torch.full((block,), 0.5), generator=torch.Generator().manual_seed(SEED)).numpy() * 2.0 - 1
        return np.kron(np.eye(size // block), hadamard(block) * signs)
    return np.eye(size)


def fields(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes of a row's bytes: code i at bits `bits * i`, little-endian."""
    return np.packbits(np.unpackbits(codes, axis=-1, bitorder="little").reshape(*codes.shape[:-1], -1, bits), axis=-1, bitorder="little")[
        ..., 0
    ]


def table_of(codec: str, size: int) -> np.ndarray:
    """The numbers that codes stand for, times a scale."""
    if codec == "int2":
        return np.array([-1.5104, -0.4528, 0.4528, 1.5104])
    if codec in ("tq3", "tq4"):
        half = np.array(LEVELS[int(codec[2])]) / size**0.5
        return np.concatenate([-half[::-1], half]).astype(np.float32).astype(float)
    bits = int(codec[6:])
    a, b = CUBICS[bits]
    t = np.arange(2**bits) - (2**bits - 1) / 2
    return (t * (a + b * t * t)).astype(np.float16).astype(float)


def decoded(codec: str, codes: np.ndarray, meta: np.ndarray, size: int) -> np.ndarray:
    """`y^ [.., D]` of a row's bytes `codes [.., n]` and `meta [.., m]`, both uint8."""
    if codec in PLAIN or codec in EIGHT:
        numbers = torch.from_numpy(codes.copy()).view(PLAIN.get(codec) or EIGHT[codec]).double().numpy()
        return numbers * meta.view(np.float32) if codec == "fp8_token" else numbers
    if codec == "int8":
        return codes.view(np.int8) * meta.view(np.float32).astype(float)
    if codec == "int4":
        word = meta.view(np.uint32)
        scale = (word & ~np.uint32(15)).view(np.float32).astype(float)
        return (fields(codes, 4).astype(float) - (word & 15)) * scale
    if codec == "int2":
        return size * meta.view(np.float32).astype(float) * table_of(codec, size)[fields(codes, 2)]
    numbers = meta.view(np.float16).astype(float)
    if codec in ("u3", "u4"):
        return fields(codes, int(codec[1])) * numbers[..., :1] + numbers[..., 1:]
    if codec in ("tq3", "tq4"):
        levels = table_of(codec, size)[fields(codes, int(codec[2]))]
        return levels / np.sqrt((levels**2).sum(-1, keepdims=True)) * numbers
    if codec == "trellis2":
        pairs = np.frombuffer(bytes.fromhex(PAIRS), np.float16).astype(float).reshape(16, 16, 2)
        code = fields(codes, 4)
        before = np.roll(code, 1, -1)
        before[..., ::32] = 0  # 64 dimensions are 32 codes
        return pairs[before, code].reshape(*code.shape[:-1], size) * numbers
    return table_of(codec, size)[fields(codes, int(codec[6:]))] * numbers


def check_codes(codec: str, y: np.ndarray, codes: np.ndarray, meta: np.ndarray, rounding: float) -> None:
    """The bytes are those of the mapped rows `y [.., D]`, but where a number lies, within `rounding` of it, between two codes."""
    size, wrong = y.shape[-1], None
    low, high, largest = y.min(-1, keepdims=True), y.max(-1, keepdims=True), abs(y).max(-1, keepdims=True)
    if codec in PLAIN:
        kind = torch.finfo(PLAIN[codec])
        wrong = abs(decoded(codec, codes, meta, size) - y) > abs(y) * (kind.eps / 2 + 2.0**-23) + kind.smallest_normal * kind.eps
    elif codec in EIGHT:
        e5m2 = codec == "fp8_e5m2"
        bits, least, most = (2, -14, 57344) if e5m2 else (3, -6, 448)
        scale = np.maximum(largest / 448, 1e-6) if codec == "fp8_token" else 1.0
        if codec == "fp8_token":
            assert np.allclose(meta.view(np.float32), scale, rtol=1e-6), "the scale"
        at = np.clip(y / scale, -most, most)
        step = 2.0 ** (np.floor(np.log2(np.maximum(abs(at), 2.0**least))) - bits)
        wrong = abs(decoded("tq8" if codec == "fp8_token" else codec, codes, meta, size) - at) > step / 2 + abs(at) * 1e-6
    elif codec == "int8":
        scale = np.maximum(largest / 127, 1e-6)
        assert np.allclose(meta.view(np.float32), scale, rtol=1e-6), "the scale"
        wrong = abs(codes.view(np.int8) - y / scale) > 0.5 + 1e-4
    elif codec == "int4":
        word = meta.view(np.uint32)
        scale, zero = (word & ~np.uint32(15)).view(np.float32).astype(float), (word & 15).astype(float)
        assert np.allclose(scale, np.maximum((high - low) / 15, 1e-6), rtol=4 * rounding + 4e-6, atol=1e-30), "the scale"
        slack = 0.5 + 64 * rounding
        assert (abs(np.clip(-low / scale, 0, 15) - zero) <= slack).all(), "the zero point"
        wrong = abs(np.clip(y / scale + zero, 0, 15) - fields(codes, 4)) > slack
    elif codec in ("u3", "u4"):
        bits = int(codec[1])
        scale = np.maximum((high - low) / (2**bits - 1), 1e-8)
        assert np.allclose(meta.view(np.float16)[..., :1], scale, rtol=1e-3, atol=1e-7), "the scale"
        assert np.allclose(meta.view(np.float16)[..., 1:], low, rtol=1e-3, atol=1e-7), "the minimum"
        wrong = abs((y - low) / scale - fields(codes, bits)) > 0.5 + 1e-3
    elif codec == "trellis2":
        scale = meta.view(np.float16).astype(float)
        unit, root = decoded(codec, codes, np.ones_like(scale, np.float16).view(np.uint8), size), np.sqrt((y**2).mean(-1, keepdims=True))
        expected = (y**2).sum(-1, keepdims=True) / np.maximum((y * unit).sum(-1, keepdims=True), 1e-30)
        expected = np.maximum(np.clip(expected, root / 2, 2 * root), 2.0**-24)
        assert np.allclose(abs(scale), expected, rtol=2e-3, atol=1e-7), "the scale"
    else:
        bits = {"int2": 2, "tq3": 3, "tq4": 4}.get(codec) or int(codec[6:])
        numbers = table_of(codec, size)
        norm = np.sqrt((y**2).sum(-1, keepdims=True))
        unit = y / (norm + 1e-8) if codec[0] == "t" else y * size**0.5 / np.maximum(norm, 1e-30)
        code = fields(codes, bits)
        slack = (8 * rounding + 1e-6) * abs(numbers).max() * size**0.5
        wrong = abs(unit - numbers[code]) > abs(unit[..., None] - numbers).min(-1) + slack
        stored = meta.view(np.float32 if codec == "int2" else np.float16).astype(float)
        if codec == "int2":
            expected = np.sqrt(norm**2 + 1e-12) / size**1.5
        elif codec[0] == "t":
            expected = norm
        else:
            products = ((unit**2).sum(-1, keepdims=True), (unit * numbers[code]).sum(-1, keepdims=True))
            expected = norm / size**0.5 * np.clip(products[0] / np.maximum(products[1], 1e-30), 0.5, 2.0)
            expected = np.maximum(expected, 2.0**-24)
        assert np.allclose(abs(stored), expected, rtol=2e-3, atol=1e-7), "the scale"
    assert wrong is None or not wrong.any(), f"{codec}: codes at {np.argwhere(wrong)[:3].tolist()}"


def rows_of(case: Case, size: int, rng: np.random.Generator) -> torch.Tensor:
    rows = rng.standard_normal((TOKENS, case.heads, size)) * 2.0 ** rng.uniform(-3, 3, (TOKENS, case.heads, 1))
    rows[..., 1] *= 6
    rows[0], rows[1], rows[2] = 0, 0.75, abs(rows[2]) + 3
    if case.extreme:
        rows = rows * 10.0 ** rng.uniform(-44, 38, (TOKENS, case.heads, 1))
    dtype = DTYPES[case.dtype]
    return torch.from_numpy(rows).clamp(-LARGEST_ROW, LARGEST_ROW).clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype)


def check(case: Case) -> None:
    """The target: what is stored reads back as the document says, and is what the document says of the rows."""
    rng = np.random.default_rng(case.seed)
    fmt, table = get_format(case.format), None
    if case.key_mean:
        a = torch.from_numpy(matrix(fmt.k.name, case.head_size)).float()[None]
        table = torch.from_numpy(rng.standard_normal((2, case.heads, case.head_size))).float()
        maps = LayerMaps(LinearMap(a, torch.linalg.inv(a.double()).float().contiguous(), table))
    cache = PagedCache(
        fmt.cache_spec(case.heads, case.head_size, case.head_size_v, SIZE),
        2,
        maps=maps if case.key_mean else None,
        k_scale=case.scale,
        v_scale=case.scale,
    )
    key, value = rows_of(case, case.head_size, rng), rows_of(case, case.head_size_v, rng)
    positions = torch.from_numpy(rng.integers(0, 200, TOKENS))
    slots = torch.from_numpy(rng.permutation(2 * SIZE)[:TOKENS].copy())
    cache.write(key, value, slots, positions)
    read = cache.dequantize(slots, positions, torch.float64)
    spec, page, within = cache.spec, slots.numpy() // SIZE, slots.numpy() % SIZE
    records = cache.buffer.numpy()
    sections = [
        records[page][:, :, at : at + n].reshape(TOKENS, case.heads, SIZE, -1)[np.arange(TOKENS), :, within] for at, n in spec.sections
    ]
    for side, rows, back, codes, meta in zip("kv", (key, value), read, sections[:2], sections[2:]):
        codec, size = getattr(fmt, side), rows.shape[2]
        codes, meta, turn = codes.copy(), meta.copy(), matrix(codec.name, size)
        with np.errstate(over="ignore"):
            mapped = decoded(codec.name, codes, meta, size) * case.scale
        x, added = rows.double().numpy(), np.zeros_like(back)
        either_way = codec.name.startswith(("levels", "trellis"))
        signed = meta.view(np.float16)[..., :1] < 0 if either_way else np.zeros((TOKENS, case.heads, 1), bool)
        if side == "k" and case.key_mean:
            key_mean = table[np.minimum(positions.numpy() // 64, 1)].double().numpy()
            added = np.where(signed, 0.0, key_mean)
            if either_way and not case.extreme:
                with_it, alone = (np.linalg.norm(t @ turn.T, axis=-1, keepdims=True) for t in (x - key_mean, x))
                assert (np.where(signed, alone, with_it) <= np.minimum(alone, with_it) * (1 + 1e-5)).all(), "the shorter row is stored"
        else:
            assert not signed.any()
        with np.errstate(invalid="ignore"):  # of rows at the limit of float32, times a scale: they are left out below
            expected = mapped @ np.linalg.inv(turn).T + added
        size_of = abs(mapped).max(-1, keepdims=True) * size**0.5 + abs(added)
        if case.extreme:
            finite = abs(mapped).max() < 1e37
            assert not (codec.name not in PLAIN) or np.isfinite(back.numpy()).all(), "what is stored of finite rows is finite"
            assert not finite or np.allclose(back, expected, rtol=0, atol=1e-5 * size_of.max() + 1e-30)
            continue
        assert (abs(back.numpy() - expected) <= 1e-6 * size_of + 1e-30).all(), f"{side}: dequantized rows"
        y = np.where(signed, -1.0, 1.0) * ((x - added) @ turn.T)
        rounding = 2.0**-24
        if codec.round_mapped:
            rounding = torch.finfo(rows.dtype).eps
            y = torch.from_numpy(y).to(rows.dtype).double().numpy()
        check_codes(codec.name, y / case.scale, codes, meta, rounding)
