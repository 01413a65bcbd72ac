"""Who takes part: quantkv's own implementations, and the list of all."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..cache import PagedCache
from ..calls import AttendCall
from ..formats import get_format
from ..implementations import refusal
from ..implementations.cpu.compiling import missing
from ..implementations.prefill import backends
from ..maps import KEY_MEAN_BUCKET, LayerMaps, LinearMap, block_hadamard
from ..prepared import prepare_attend, prepare_write
from .problem import Entry, Problem, RowsOf, Unavailable
from .shapes import KINDS

# Largest relative error of a right kernel, by the numbers that it computes with. The inputs give scores near 1 and up to
# log(L) / 2, so a relative error e of the rows changes probabilities by up to 6 e.
TOLERANCE = {
    "16 bit": 1e-2,  # 6 x 2^-9
    "8 bit": 2e-1,  # e4m3 queries and probabilities: 6 x 2^-4, half of it where errors are random
    "uncentred": 2e-1,  # 4-bit codes with the zero point left in: tensor cores truncate a sum that drifts with its length
    "write": 3e-2,  # a code may differ by one level where the rotation rounds differently: in 0.1 % of 2-bit codes
}
FILLED_AT_ONCE = 1 << 15  # tokens: the reference maps rows in float64


@dataclass(frozen=True)
class Contestant:
    """One implementation over one kind of cache.

    name: of the implementation. stores: what its cache holds: a format's name, "bf16", "fp8". ours: quantkv's, not a rival.
    kinds: of shapes that it serves. prepare: makes it ready; raises `Unavailable`, or ValueError for what it refuses.
    arithmetic: the tolerance it is held to.
    """

    name: str
    stores: str
    prepare: Callable[[Problem], Entry]
    ours: bool = False
    kinds: tuple[str, ...] = KINDS
    arithmetic: str = "16 bit"


def quantkv(implementation: str, format_name: str) -> Contestant:
    """One of quantkv's implementations: what `ops` takes as `implementation`, over the calls that it is made for. format_name: with
    "+maps" the format under maps and a table of key means of the layer's own, as calibration gives them: `layer_maps`."""
    few = ("decode", "verify", "write", "step")
    kinds = {"prefill": ("prefill",), "hopper": few, "cpu": few}.get(implementation, KINDS)
    prepare = lambda problem: _prepare(problem, implementation, format_name)
    return Contestant(f"quantkv {implementation}", format_name, prepare, ours=True, kinds=kinds)


def _prepare(problem: Problem, implementation: str, format_name: str) -> Entry:
    s = problem.shape
    if s.kind == "write":
        cache, rows = empty(problem, format_name)
    elif s.kind == "step":
        cache, rows = filled(problem, format_name)
    else:  # the implementations of a format read the same pages
        cache, rows = problem.kept(format_name, lambda: filled(problem, format_name))
    key, value, slots, positions = (t[problem.new] for t in (problem.key, problem.value, problem.slots, problem.positions))
    written_bytes = len(slots) * (s.HK * (s.D + s.head_size_v) * key.element_size() + int(cache.spec.bytes_per_token))
    # In a step, maps and formats may be what these do not write.
    writer = "auto" if implementation in ("hopper", "cpu") and s.kind == "step" else implementation
    prepared = prepare_write(slots, positions, implementation=writer)
    write = lambda: prepared(cache, key, value)
    if s.kind == "write":
        cache.buffer.fill_(0xFF)  # a row that is not written stays NaN, or full codes
        return Entry(write, rows, written_bytes, implementation != "reference")

    entry = _reader(problem, implementation, cache, rows, (prepared, key, value) if s.kind == "step" else None)
    if s.kind != "step":
        return entry
    cache.write(-key, -value, slots, positions, implementation="reference")  # what is not written before it is read shows
    return entry._replace(nbytes=entry.nbytes + written_bytes)


def _reader(problem: Problem, implementation: str, cache: PagedCache, rows: RowsOf, new: tuple | None = None) -> Entry:
    """Attention over a filled cache. new: of `PreparedAttend`, in a step."""
    s = problem.shape
    batch = {n: getattr(problem, n) for n in ("cu_seqlens_q", "seq_lens", "block_table", "scale")}
    nbytes = int(s.tokens_read * cache.spec.bytes_per_token)
    lengths = [(s.Q, s.L)] * s.B  # as an engine knows them
    attend = prepare_attend(**batch, lengths=lengths, window=s.W, implementation=implementation)
    out, note = problem.q.new_empty(*problem.q.shape[:2], s.head_size_v), ""
    if implementation == "prefill":
        call = AttendCall(problem.q, (cache.segment(problem.block_table),), attend.batch, problem.scale, attend.options, out)
        if why := refusal("prefill", call):
            raise Unavailable(why)
        note = backends.choose(problem.device, problem.q.dtype, s.D, s.head_size_v)
    return Entry(lambda: attend(cache, problem.q, out=out, new=new), rows, nbytes, implementation != "reference", note=note)


def empty(problem: Problem, format_name: str) -> tuple[PagedCache, RowsOf]:
    """A cache with room for the problem, and how its rows are read."""
    s, (name, *own) = problem.shape, format_name.split("+")
    if own not in ([], ["maps"], ["steps"]):
        raise ValueError(f"format {format_name!r}: only '+maps' or '+steps' may follow a name")
    maps = layer_maps(problem, stepped if own == ["steps"] else turned) if own else None
    cache = PagedCache(get_format(name).cache_spec(s.HK, s.D, s.head_size_v, s.P), problem.num_blocks, problem.device, maps=maps)
    position = problem.positions.new_zeros(problem.num_blocks * s.P)
    position[problem.slots] = problem.positions
    return cache, lambda slots: cache.dequantize(slots, position[slots], torch.float64)


def layer_maps(problem: Problem, make: Callable[[int, int, torch.Generator], torch.Tensor]) -> LayerMaps:
    """Matrices `[HK, D, D]` of K and V, by `turned` or `stepped`, and a key mean of the keys for every 64 positions."""
    s = problem.shape
    generator = torch.Generator("cpu").manual_seed(1)
    k, v = (make(s.HK, size, generator) for size in (s.D, s.head_size_v))
    key_mean = torch.randn(-(-problem.length // KEY_MEAN_BUCKET), s.HK, s.D, generator=generator, device="cpu")
    return maps_of(k, v, key_mean)


def maps_of(k: torch.Tensor, v: torch.Tensor, key_mean: torch.Tensor | None = None) -> LayerMaps:
    """Maps by matrices `[HK, D, D]` float64 of K and V, and a key mean."""
    return LayerMaps(*(LinearMap(a.float(), torch.linalg.inv(a).float(), off) for a, off in ((k, key_mean), (v, None))))


def turned(heads: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """Random rotations `[heads, size, size]` float64: as costly as any matrix."""
    return torch.linalg.qr(torch.randn(heads, size, size, generator=generator, dtype=torch.float64, device="cpu"))[0]


def stepped(heads: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """Hadamard matrices in blocks behind powers of two, `[heads, size, size]` float64: what a calibration makes of uneven keys."""
    return block_hadamard(size) * 2.0 ** -torch.randint(0, 4, (heads, 1, size), generator=generator, device="cpu")


def filled(problem: Problem, format_name: str) -> tuple[PagedCache, RowsOf]:
    """`empty`, then all tokens that a query sees by the reference: reading is measured and checked on bytes that no kernel wrote."""
    cache, rows = empty(problem, format_name)
    for part in problem.seen.split(FILLED_AT_ONCE):
        cache.write(problem.key[part], problem.value[part], problem.slots[part], problem.positions[part], implementation="reference")
    return cache, rows


def rightly_written(problem: Problem, stores: str):
    """The rows that a right writer leaves: those of the reference, in that format."""
    if stores in ("bf16", "fp16"):
        return problem.plain_rows(get_format(stores).k.code_dtype)
    return filled(problem, stores)[1]


def implementations(device: torch.device) -> list[str]:
    """What of quantkv's can run on the device."""
    found = ["reference"]
    if device.type == "cpu" and missing() is None:
        found.append("cpu")
    if device.type == "cuda":
        if importlib.util.find_spec("quantkv.ops"):
            found += ["triton", "hopper"] if torch.cuda.get_device_capability(device)[0] == 9 else ["triton"]
        found.append("prefill")
    return found
