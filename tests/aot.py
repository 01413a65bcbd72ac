"""Compiles the launches of one format ahead of time, for a GPU that need not be there. In a process where Triton compiles."""

import tempfile
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget

import five_bits  # noqa: F401  a format outside the package
import rounded
from quantkv import PagedCache, copies, get_format
from quantkv.calls import AttendCall, AttentionOptions, Batch, WriteCall
from quantkv.full_precision import FullPrecisionTokens
from quantkv.implementations.hopper.host.sass import step
from quantkv.implementations.prefill import eight_bit
from quantkv.implementations.prefill import triton_steps as prefill
from quantkv.implementations.prefill.plan import CAUSAL, KeySlice, Round
from quantkv.implementations.prefill.steps import Partial
from quantkv.implementations.triton import attend, gather, latents, launch, own, write
from quantkv.implementations.triton import copies as copies_by_triton

TARGETS = {
    "sm80": (GPUTarget("cuda", 80, 32), launch.Target(80, "tf32x3", 108, 164 << 10)),
    "sm89": (GPUTarget("cuda", 89, 32), launch.Target(89, "tf32x3", 142)),
    "sm90": (GPUTarget("cuda", 90, 32), launch.Target(90, "tf32x3", 132, 228 << 10)),
    "sm100": (GPUTarget("cuda", 100, 32), launch.Target(100, "tf32x3", 148, 228 << 10)),
    "sm120": (GPUTarget("cuda", 120, 32), launch.Target(120, "tf32x3", 188)),
    "gfx942": (GPUTarget("hip", "gfx942", 64), launch.Target(0, "ieee", 304)),
    "gfx950": (GPUTarget("hip", "gfx950", 64), launch.Target(0, "ieee", 256)),
}
KERNELS = {write: ("write_kernel",), attend: ("attend_kernel", "combine_kernel"), prefill: ("gather_kernel", "patch_kernel", "fold_kernel")}
COPIES = ("doubt_kernel", "claim_kernel", "take_kernel", "lay_out_kernel", "note_kernel")
ROUNDING = ("sample_mean_kernel", "round_keys_kernel", "round_queries_kernel")
KERNELS |= {own: ("own_rows_kernel",)}
OF_LATENTS = {latents: ("attend_latents_kernel", "map_rows_kernel"), attend: ("combine_kernel",), gather: ("gather_rows_kernel",)}


class Compiler:
    """Stands in for a kernel: a launch compiles it."""

    def __init__(self, kernel, target, compiled):
        self.kernel, self.compiled = kernel, compiled
        self.driver = launch.AssumedDriver(str(target.arch), target)
        self.arg_names, self.fn, self.__name__ = kernel.arg_names, kernel.fn, kernel.__name__

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, **kwargs):
        triton.runtime.driver.set_active(self.driver)
        self.compiled.append((self.kernel.__name__, self.kernel.warmup(*args, grid=(1,), **kwargs)))


@contextmanager
def compiling(arch, kernels):
    """Inside the block launches of `kernels`, {module: names}, compile them for a GPU: the list takes (name, what Triton made of it)."""
    compiled, stock = [], {(module, name): getattr(module, name) for module, names in kernels.items() for name in names}
    triton_target, launch.Target.of = TARGETS[arch][0], staticmethod(lambda device: TARGETS[arch][1])
    for (module, name), function in stock.items():
        setattr(module, name, Compiler(function, triton_target, compiled))
    try:
        yield compiled
    finally:
        for (module, name), function in stock.items():
            setattr(module, name, function)


def every_option(num_seqs, heads, queries):
    sinks = torch.zeros(heads)
    return {
        "causal": torch.zeros(num_seqs, dtype=torch.bool),
        "window": 100,
        "softcap": 10.0,
        "sinks": sinks,
        "alibi_slopes": sinks,
        "qq_bias": torch.zeros(queries, 8),
        "prefix_ranges": torch.zeros(num_seqs, 2, 2, dtype=torch.int32),
        "output_scale": 0.5,
    }


def compile_steps(cache, rows, widest, every_way):
    """What prefill launches around a dense kernel: keys and values gathered, up to a head size mapped back, copies put in their places,
    queries mapped, outputs combined and mapped back. every_way: also not mapped back, and into another layout of the scratch, which no
    codec knows of."""
    kept = PagedCache(get_format("none", rows.dtype).cache_spec(8, rows.shape[2]), 4)
    latest = kept.segment(torch.zeros(2, 2, dtype=torch.int32), torch.zeros(2, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32))
    scratch = [torch.empty(8, 256, rows.shape[2], dtype=rows.dtype) for _ in "kv"]
    alone, several = (
        Round((KeySlice(0, 200, 0, 200, 0, room), *more), CAUSAL, 256)
        for room, more in ((256, ()), (240, (KeySlice(1, 9, 0, 9, 240, 16),)))
    )
    narrow = rows.shape[2] <= widest
    for back in (True, False) if narrow and every_way else (narrow,):
        steps = prefill.TritonSteps((cache.k, cache.v), cache.format, cache.maps, 8, back)
        steps.gather(torch.zeros(2, 16, dtype=torch.int32), alone, scratch)
        steps.patch(latest, alone.reads[0], 200, scratch)
        if every_way:
            steps.gather(torch.zeros(2, 16, dtype=torch.int32), several, [t.view(256, 8, -1).transpose(0, 1) for t in scratch])
    steps = prefill.TritonSteps((cache.k, cache.v), cache.format, cache.maps, 8, False)
    steps.map_query(rows, 0, 0)
    part, out = Partial(rows, torch.empty(rows.shape[:2])), torch.empty_like(rows)
    steps.finish(steps.combine(part, part), part, out, torch.empty(rows.shape[:2]))
    steps.finish(None, part, out, torch.empty(rows.shape[:2]), torch.zeros(rows.shape[1]))


def compile_kernels(name, arch, head_size=128, query_lens=(1, 512), options=False, steps=True, dtype=torch.bfloat16):
    """Compile write, attend for decode and for a long prompt, combine, and with `steps` those around a dense kernel. Returns (kernel, what
    Triton made of it) of each. options: with all of them at once, and an output in 8-bit floats."""
    with compiling(arch, KERNELS) as compiled:
        fmt = get_format(name)
        cache = PagedCache(fmt.cache_spec(8, head_size), 64)
        rows = torch.zeros(64, 8, head_size, dtype=dtype)
        slots = torch.zeros(64, dtype=torch.int64)
        if all(codec.triton().encode is not None for codec in (fmt.k, fmt.v)):
            write.run(WriteCall(rows, rows, cache.k, cache.v, fmt, slots, cache.maps, slots))
        for length in query_lens:
            q = torch.zeros(4 * length, 32, head_size, dtype=dtype)
            batch = Batch(torch.arange(5, dtype=torch.int32) * length, torch.full((4,), 1024, dtype=torch.int32), length)
            table = torch.zeros(4, 64, dtype=torch.int32)
            chosen = AttentionOptions(**(every_option(4, 32, length) if options else {}))
            lse = torch.empty(q.shape[:2]) if options else None
            attend.run(AttendCall(q, (cache.segment(table),), batch, 1.0, chosen, None, lse))
        if options:
            for size, ranges in ((1, (None,)), (16, (None, torch.zeros(4, 2, dtype=torch.int32), None))):
                filled = (torch.zeros(4, 70), torch.zeros(4), torch.zeros(len(ranges) + 1, 4, 2), torch.zeros(64))
                own.Places(*(t.int() for t in filled), size, 63).fill(batch.cu_seqlens_q, batch.seq_lens, ranges)
        if steps:
            compile_steps(cache, rows, 256 if arch == "sm90" and dtype == torch.bfloat16 else 128, name in ("int4", "bf16"))
    return compiled


def compile_latents(name, arch, heads, queries):
    """Compile attention over latents of 512 numbers and 64 rotated ones, and their gathering. Returns (kernel, what Triton made of it)."""
    with compiling(arch, OF_LATENTS) as compiled:
        cache, table = PagedCache(get_format(name).latent_spec(512, 64, 64), 64), torch.zeros(4, 64, dtype=torch.int32)
        batch = Batch(torch.arange(5, dtype=torch.int32) * queries, torch.full((4,), 4096, dtype=torch.int32), queries)
        q = torch.zeros(4 * queries, heads, 576, dtype=torch.bfloat16)
        attend.run(AttendCall(q, (cache.segment(table),), batch, 1.0, AttentionOptions(), None, None))
        rows = [torch.zeros(64, 1, size, dtype=torch.bfloat16) for size in (512, 64)]
        gather.run(cache.segment(table), torch.zeros(5, dtype=torch.int32), None, rows, (1.0, 1.0))
    return compiled


def compile_format(*given):
    """(kernel, bytes of shared memory) of each that `compile_kernels` compiles, or `compile_latents` where the first of `given` says so."""
    compiled = compile_latents(*given[1:]) if given[0] == "latents" else compile_kernels(*given)
    return [(kernel, result.metadata.shared) for kernel, result in compiled]


def compile_calibrated_write(name, arch, head_size):
    """Bytes of shared memory of the kernel that writes rows which are rounded by a Hessian."""
    cache = PagedCache(get_format(name).cache_spec(2, head_size), 64, maps=rounded.layer(name, head_size, key_mean=True))
    rows, slots = torch.zeros(64, 2, head_size, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int64)
    with compiling(arch, {write: KERNELS[write]}) as compiled:
        write.run(WriteCall(rows, rows, cache.k, cache.v, cache.format, slots, cache.maps, slots))
    ((_, result),) = compiled
    return result.metadata.shared


def compile_rounding(size):
    """PTX of the kernels that round queries and keys of `size` numbers to 8 bits, by their names."""
    with compiling("sm90", {eight_bit: ROUNDING}) as compiled:
        round = Round((KeySlice(0, 200, 0, 300, 0, 300),), CAUSAL, 300)
        q, k = torch.zeros(200, 8, size, dtype=torch.bfloat16), torch.zeros(2, 300, size, dtype=torch.bfloat16)
        eight_bit.rounded(q, k, round, [torch.tensor(ends, dtype=torch.int32) for ends in round.ends()], 80)
    return {name: result.asm["ptx"] for name, result in compiled}


def decode_loop(name, arch, head_size=128):
    """(instructions that attend's loop issues for 16 keys of a kv head, those of them that go through shared memory or local memory to
    write), of decode: 4 query heads share a kv head."""
    with compiling(arch, {attend: KERNELS[attend]}) as compiled:
        cache = PagedCache(get_format(name).cache_spec(8, head_size), 64)
        batch = Batch(torch.arange(5, dtype=torch.int32), torch.full((4,), 1024, dtype=torch.int32), 1)
        q = torch.zeros(4, 32, head_size, dtype=torch.bfloat16)
        call = AttendCall(q, (cache.segment(torch.zeros(4, 64, dtype=torch.int32)),), batch, 1.0, AttentionOptions(), None, None)
        attend.run(call)
        tiling = attend.AttendPlan.of(call).tiling
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "attend.cubin"
        cubin.write_bytes(compiled[0][1].asm["cubin"])
        names = step(cubin)
    return len(names) * tiling.num_warps * 16 / tiling.block_n, sum(name.startswith(("STS", "STSM", "STL")) for name in names)


def compile_copies(arch, name):
    """Names of the kernels that say which pages of a format have 16-bit copies, compiled."""
    by_triton = patch.object(copies, "kernels_of", lambda device, columns: copies_by_triton)
    with by_triton, compiling(arch, {copies_by_triton.kernels: COPIES}) as compiled:
        pages = PagedCache(get_format(name, torch.bfloat16).cache_spec(8, 128), 64)
        for tokens in (FullPrecisionTokens(16, 24), FullPrecisionTokens(0, 24)):
            copied = copies.CopiedPages(tokens, 16, 4, 64)
            copied.watch(pages)
            step = copies.FullPrecisionStep(tokens, 16, 4, 4, pages.device)
            numbers = torch.zeros(4, 4, dtype=torch.int32), torch.ones(4, dtype=torch.int32), torch.arange(5, dtype=torch.int32)
            copied.advance(*numbers, torch.zeros(4, dtype=torch.int64), step)
            copied.note(torch.zeros(4, dtype=torch.int64), step)
    return {kernel for kernel, _ in compiled}
