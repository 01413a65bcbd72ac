"""Attention over latents (DeepSeek's MLA: 512 + 64 numbers a token) by Triton and by the Hopper kernel, beside attention over 16 bits:

    python benchmarks/latent.py [--peers DIR] [--shapes B64xL8192 ..] [--heads 16 128] [--formats int4 ..] [--by hopper ..] [--tiles]
        [--brief] [--device cpu]

On a Hopper GPU both are checked and timed; the rows of Hopper's say so.

Every result is compared with float64 attention over what the cache holds, also for several queries, ragged lengths and all numbers of
heads, before anything is timed. Times are microseconds of CUDA-graph replays of a whole call: attention, combine, and but for those that
say "absorbed" the rotation of queries and output. Rivals, where they can be loaded: FlashMLA (of vLLM), FlashAttention-3 (`fa3.xz` in
--peers, or vLLM's), and our own kernel over bf16 latents. --tiles: what tiling.py could choose instead for Triton, and
hopper/decode/latents.py for Hopper. --brief: only what is timed is compared. No
group is begun after --seconds. Exit code 1 where a result is wrong.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from quantkv import PagedCache, get_format, implementations, prepare_attend
from quantkv.bench.problem import Unavailable
from quantkv.bench.rivals import load_flash3
from quantkv.bench.timing import measure
from quantkv.implementations.hopper.decode import latents
from quantkv.implementations.hopper.decode.latents import LatentConfig
from quantkv.implementations.triton import tiling
from quantkv.testing import OUTPUT_BUDGET, relative_error

LATENT, ROPE, PAGE = 512, 64, 64
SCALE = (128 + ROPE) ** -0.5
FORMATS = ("int4", "levels4", "int8", "fp8_token", "none")
TILES = {  # rows of a tile: keys, warps, stages, programs of a multiprocessor at once
    16: [(64, 4, 5, 2), (64, 4, 3, 2), (64, 4, 7, 2), (32, 4, 5, 2), (32, 4, 7, 2), (64, 8, 5, 1), (128, 8, 5, 1), (32, 2, 5, 3)],
    32: [(64, 8, 5, 1), (64, 8, 7, 1), (32, 8, 5, 1), (64, 4, 5, 1), (128, 8, 5, 1)],
    64: [(32, 8, 5, 1), (32, 8, 2, 1), (64, 8, 2, 1), (64, 8, 5, 1), (16, 8, 5, 1)],
}
HOPPER_CHOICES = [  # products of keys and of values that are begun together, warps of a block
    (keys, values, warps) for warps in (8, 12, 4) for keys, values in ((8, 8), (4, 4), (8, 4), (4, 8), (2, 2))
]
Call = Callable[[], torch.Tensor]


class Rows:
    """Latents and rotated dimensions of every token of a batch, in pages in random order, and queries to them."""

    def __init__(self, lens: list[int], heads: int, queries: int, device: torch.device) -> None:
        g = torch.Generator(device).manual_seed(0)
        self.lens, self.queries, self.device = lens, queries, device
        width = -(-max(lens) // PAGE)
        self.pages = len(lens) * width
        self.table = torch.randperm(self.pages, generator=g, device=device).int().view(len(lens), width)
        position = torch.arange(width * PAGE, device=device)
        self.slots = (self.table.long()[:, position // PAGE] * PAGE + position % PAGE).flatten()
        self.rows = [torch.randn(len(self.slots), 1, n, generator=g, device=device, dtype=torch.bfloat16) for n in (LATENT, ROPE)]
        self.q = torch.randn(len(lens) * queries, heads, LATENT + ROPE, generator=g, device=device).to(torch.bfloat16)
        self.seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
        self.starts = torch.arange(len(lens) + 1, dtype=torch.int32, device=device) * queries

    def cache(self, name: str) -> PagedCache:
        cache = PagedCache(get_format(name).latent_spec(LATENT, ROPE, PAGE), self.pages, self.device)
        cache.write(*self.rows, self.slots)
        return cache

    def attend(self, cache: PagedCache, q: torch.Tensor | None = None, implementation: str = "triton") -> Call:
        attend = prepare_attend(
            block_table=self.table,
            seq_lens=self.seq_lens,
            cu_seqlens_q=self.starts,
            scale=SCALE,
            max_query_len=self.queries,
            max_seq_len=max(self.lens),
            implementation=implementation,
        )
        q, out = self.q if q is None else q, torch.empty(*self.q.shape[:2], LATENT, dtype=self.q.dtype, device=self.device)
        return lambda: attend(cache, q, out=out)

    def expected(self, cache: PagedCache | None, count: int = 4) -> Iterator[tuple[slice, torch.Tensor]]:
        """Tokens of some sequences, and float64 attention over what the cache holds; None: over the rows as given."""
        width = self.table.shape[1] * PAGE
        for s in {0, len(self.lens) - 1, *range(0, len(self.lens), max(len(self.lens) // count, 1))}:
            n, own = self.lens[s], slice(s * width, s * width + self.lens[s])
            kept = [t[own] for t in self.rows] if cache is None else cache.dequantize(self.slots[own], dtype=torch.float64)
            latents, rotated = (t[:, 0].double() for t in kept)
            tokens = slice(s * self.queries, (s + 1) * self.queries)
            score = self.q[tokens].double() @ torch.cat([latents, rotated], 1).T * SCALE  # [queries, heads, keys]
            past = torch.arange(n, device=self.device) <= torch.arange(n - self.queries, n, device=self.device)[:, None]
            yield tokens, score.masked_fill(~past[:, None], -torch.inf).softmax(-1) @ latents

    def error(self, cache: PagedCache | None, out: torch.Tensor) -> float:
        return max(relative_error(out[tokens], want) for tokens, want in self.expected(cache))


def flash_mla(rows: Rows) -> Call:
    """FlashMLA over bf16, as vLLM ships it."""
    try:
        from vllm.v1.attention.ops.flashmla import flash_mla_with_kvcache, get_mla_metadata, is_flashmla_dense_supported
    except Exception as error:
        raise Unavailable(f"FlashMLA: {type(error).__name__}: {error}") from error
    good, reason = is_flashmla_dense_supported()
    if not good:
        raise Unavailable(f"FlashMLA: {reason}")
    pages = as_given(rows)
    q = rows.q.view(len(rows.lens), rows.queries, *rows.q.shape[1:])
    metadata, *others = get_mla_metadata(rows.seq_lens, rows.queries * rows.q.shape[1], 1)

    def call():
        out, _ = flash_mla_with_kvcache(
            q, pages[:, :, None], rows.table, rows.seq_lens, LATENT, metadata, *others, softmax_scale=SCALE, causal=True
        )
        return out.flatten(0, 1)

    return call


def flash3(rows: Rows, peers: Path | None) -> Call:
    """FlashAttention-3 over bf16: q_v of latents beside the rotated dimensions, as vLLM calls it."""
    if peers is not None:
        load_flash3(peers)
    elif not hasattr(torch.ops._vllm_fa3_C, "fwd"):
        try:
            importlib.import_module("vllm.vllm_flash_attn._vllm_fa3_C")
        except Exception as error:
            raise Unavailable(f"FlashAttention-3: {type(error).__name__}: {error}") from error
    pages, q = as_given(rows)[:, :, None], rows.q
    out = torch.empty(*q.shape[:2], LATENT, dtype=q.dtype, device=q.device)
    none = None

    def call():  # as `quantkv.bench.rivals.flash3_over_pages`, with q_v
        torch.ops._vllm_fa3_C.fwd(
            q[..., LATENT:], pages[..., LATENT:], pages[..., :LATENT], none, none, q[..., :LATENT], out,
            rows.starts, none, none, none, rows.seq_lens, rows.queries, max(rows.lens), rows.table, none, none,
            none, none, none, none, none, none, SCALE, True, -1, -1, 0.0, True, none, 0, none, 0, none, 1, 0, none,
        )  # fmt: skip
        return out

    return call


def as_given(rows: Rows) -> torch.Tensor:
    """Pages `[num_blocks, 64, 576]` of the rows as given."""
    pages = torch.empty(rows.pages * PAGE, LATENT + ROPE, dtype=torch.bfloat16, device=rows.device)
    pages[rows.slots] = torch.cat([t[:, 0] for t in rows.rows], 1)
    return pages.view(rows.pages, PAGE, -1)


def timed(rows: Rows, name: str, make: Callable[[], Call], cache: PagedCache | None, wrong: list[str], check: bool = True) -> float | None:
    """Microseconds of what `make` makes, once it was compared; None where it is wrong or cannot be made."""
    try:
        call = make()
        error = rows.error(cache, call().clone()) if check else 0.0
        if not error <= 2 * OUTPUT_BUDGET[torch.bfloat16]:
            wrong.append(f"{name}: differs by {error:.1e}")
            print(f"  {name:<28} WRONG: {error:.1e}", flush=True)
            return None
        us, how = measure(call, rows.device)
        print(f"  {name:<28} {us:9.1f} us ({how})   error {error:.1e}", flush=True)
        return us
    except Exception as error:
        print(f"  {name:<28} {type(error).__name__}: {str(error)[:160]}", flush=True)
        if not isinstance(error, Unavailable) and name.startswith("ours"):
            wrong.append(f"{name}: {error}")
        return None


def served_by(name: str, device: torch.device) -> tuple[str, ...]:
    """Who attends over latents in a format here."""
    hopper = implementations.can_serve("hopper", get_format(get_format(name).latent_spec(LATENT, ROPE).format), "attend")
    hopper = hopper and device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    return ("triton", "hopper") if hopper else ("triton",)


def check_all(device: torch.device, wrong: list[str]) -> None:
    """All numbers of heads, one to four queries, ragged lengths."""
    small = device.type == "cpu"
    for heads in (16,) if small else (8, 16, 32, 64, 128):
        for queries in (1, 2) if small else (1, 2, 4):
            rows = Rows([70, 4, 33] if small else [1500, 4, 777, 64], heads, queries, device)
            for name in ("int4",) if small else ("int4", "int8") if (heads, queries) != (16, 1) else FORMATS:
                cache = rows.cache(name)
                for implementation in served_by(name, device):
                    error = rows.error(cache, rows.attend(cache, implementation=implementation)())
                    if not error <= 2 * OUTPUT_BUDGET[torch.bfloat16]:
                        wrong.append(f"{implementation}, {name}, {heads} heads, {queries} queries: differs by {error:.1e}")
    print("correct" if not wrong else "\n".join(wrong), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=("B64xL8192", "B8xL32768"))
    parser.add_argument("--heads", nargs="+", type=int, default=(16, 128))
    parser.add_argument("--formats", nargs="+", default=FORMATS)
    parser.add_argument("--queries", type=int, default=1)
    parser.add_argument("--peers", type=Path, help="a folder with fa3.xz")
    parser.add_argument("--by", nargs="+", default=("triton", "hopper"), help="implementations")
    parser.add_argument("--tiles", action="store_true")
    parser.add_argument("--brief", action="store_true")
    parser.add_argument("--device", default="cuda", help="cpu: where Triton is interpreted, to see that all is right")
    parser.add_argument("--seconds", type=float, default=170)
    given = parser.parse_args()
    device, wrong, begun = torch.device(given.device), [], time.perf_counter()
    if device.type == "cuda":
        print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    if not given.brief:
        check_all(device, wrong)
    for shape in given.shapes if device.type == "cuda" else ():
        batch, length = (int(n) for n in shape.removeprefix("B").split("xL"))
        for heads in given.heads:
            if time.perf_counter() - begun > given.seconds:
                print(f"{shape}, {heads} heads: not begun after {given.seconds:.0f} s")
                continue
            print(f"{shape}, {heads} heads, {given.queries} queries", flush=True)
            of_shape(Rows([length] * batch, heads, given.queries, device), given, wrong)
            torch.cuda.empty_cache()
    print(f"{time.perf_counter() - begun:.0f} s")
    sys.exit("\n".join(wrong) if wrong else 0)


def chosen_for_hopper(stock: Callable, chosen: dict[str, int], *given) -> LatentConfig:
    """The configuration that `stock` makes of `given`, with other numbers; of fewer warps where shared memory has no room for all."""
    config = replace(stock(*given), **chosen)
    while config.stages < 2:
        config = replace(config, warps=config.warps - 4)
    return config


def hopper_choices(rows: Rows, cache: PagedCache) -> None:
    """Times and errors of configurations that hopper/decode/latents.py could choose."""
    stock = latents.choose
    for keys, values, warps in HOPPER_CHOICES:
        latents.choose = partial(chosen_for_hopper, stock, dict(keys_at_once=keys, values_at_once=values, warps=warps))
        timed(rows, f"  hopper {keys}, {values}, {warps} warps", lambda: rows.attend(cache, implementation="hopper"), cache, [])
    latents.choose = stock


def of_shape(rows: Rows, given: argparse.Namespace, wrong: list[str]) -> None:
    times = {}
    for name, make in (("FlashMLA bf16", lambda: flash_mla(rows)), ("FlashAttention-3 bf16", lambda: flash3(rows, given.peers))):
        times[name] = timed(rows, name, make, None, wrong)
    for name in given.formats:
        cache = rows.cache(name)
        for who in [who for who in served_by(name, rows.device) if who in given.by]:
            label = f"ours {name}" + (", hopper" if who == "hopper" else "")
            times[label] = timed(rows, label, lambda cache=cache, who=who: rows.attend(cache, implementation=who), cache, wrong)
            if cache.maps.k is None:
                continue
            inverse = cache.maps.k.inverse[0]
            q = torch.cat([(rows.q[..., :LATENT].float() @ inverse).to(rows.q.dtype), rows.q[..., LATENT:]], -1)
            times[f"{label}, absorbed"] = timed(
                rows,
                f"{label}, absorbed",
                lambda cache=cache, q=q, who=who: rows.attend(cache.as_stored(), q, who),
                cache,
                wrong,
                check=False,
            )
        if given.tiles and "hopper" in served_by(name, rows.device):
            hopper_choices(rows, cache)
        if given.tiles and name == "int4":
            stock = tiling.LATENT_TILES
            for most, tiles in TILES.items():
                for tile in tiles if most <= max(rows.q.shape[1] * rows.queries, 16) and (most >= 32 or rows.q.shape[1] <= 16) else ():
                    tiling.LATENT_TILES, tiling.ROWS_OF_LATENTS = {**stock, most: tile}, most
                    timed(rows, f"  {most} rows {tile}", lambda cache=cache: rows.attend(cache.as_stored(), rows.q), cache, [], check=False)
            tiling.LATENT_TILES, tiling.ROWS_OF_LATENTS = stock, 64
    best = min((us for name, us in times.items() if us and "bf16" in name), default=None)
    for name, us in times.items():
        if us and best:
            print(f"    {name:<28} {best / us:5.2f}x of the fastest bf16")


if __name__ == "__main__":
    main()
