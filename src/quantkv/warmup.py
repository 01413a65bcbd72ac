"""Everything that a serving configuration will use, compiled before the first request."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import torch

from . import implementations
from .cache import PagedCache
from .calls import AttendCall, WriteCall
from .exact import ExactTokens
from .implementations import Call
from .prepared import prepare_attend
from .shadow import FEW_QUERIES, ExactPages, ExactStep, ShadowedCache, as_segments, goes_by_position, shadow_pages


def warm_up(
    cache: PagedCache,
    num_heads: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    query_lens: Iterable[int] = (1,),
    batch_sizes: Iterable[int] = (1, 64),
    write_sizes: Iterable[int] = (1, 64, 8192),
    max_seq_len: int = 8192,
    progress: Callable[[int, int, str], None] | None = None,
    exact: ExactTokens | None = None,
    **options: object,
) -> dict[str, str]:
    """Serve one call of each kind over `cache`, which is left as it was: {what it is: the implementation that serves it}.

    num_heads: query heads. dtype: of queries, keys and values. query_lens: queries of a sequence: 1 for decode, as many as are verified,
    hundreds for a prompt. batch_sizes: sequences of a call. write_sizes: tokens of a write. max_seq_len: positions that a block table has
    room for. progress: called with (done, all, what) after each. exact: tokens that are read from 16-bit copies, which are then written
    as well. options: of `PagedCache.attend`, as requests will have them.
    What can be compiled without a launch is, by as many threads as there are cores.
    """
    calls = dict(_calls(cache, num_heads, dtype, query_lens, batch_sizes, write_sizes, max_seq_len, exact, options))
    served = {name: implementations.resolve(call)[0] for name, call in calls.items()}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for name, call in calls.items():
            compiled = getattr(implementations.module(served[name], implementations.kind(call)), "compile_for", None)
            if compiled is not None:
                pool.submit(compiled, call)
    for done, (name, call) in enumerate(calls.items(), 1):
        implementations.module(served[name], implementations.kind(call)).run(call)
        if progress is not None:
            progress(done, len(calls), f"{name}: {served[name]}")
    if cache.device.type == "cuda":
        torch.cuda.synchronize(cache.device)
    return served


def who_serves(
    cache: PagedCache,
    num_heads: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    query_lens: Iterable[int] = (1,),
    batch_sizes: Iterable[int] = (1, 64),
    write_sizes: Iterable[int] = (1, 64, 8192),
    max_seq_len: int = 8192,
    **options: object,
) -> dict[str, tuple[str, dict[str, str]]]:
    """What `warm_up` would run, without running or compiling it: {what it is: the implementation that serves it, and why each one that goes
    before it does not}."""
    calls = _calls(cache, num_heads, dtype, query_lens, batch_sizes, write_sizes, max_seq_len, None, options)
    return {name: implementations.resolve(call) for name, call in calls}


def _calls(cache, num_heads, dtype, query_lens, batch_sizes, write_sizes, max_seq_len, exact, options) -> Iterable[tuple[str, Call]]:
    spec, device = cache.spec, cache.device
    read = cache
    if exact is not None:
        read = ShadowedCache(cache, shadow_pages(cache, 1, dtype), ExactPages(exact, spec.block_size, 1, device=device))
    for count in write_sizes:
        key = torch.zeros(count, spec.num_kv_heads, spec.head_size, dtype=dtype, device=device)
        value = torch.zeros(count, spec.num_kv_heads, spec.head_size_v, dtype=dtype, device=device)
        nowhere = torch.full((count,), -1, dtype=torch.int64, device=device)
        positions = torch.zeros_like(nowhere)
        yield f"write of {count} tokens", WriteCall(key, value, cache.k, cache.v, cache.format, nowhere, cache.maps, positions)
        if exact is not None:
            copies, shadow = nowhere.int(), read.shadow
            yield f"copies of {count} tokens", WriteCall(key, value, shadow.k, shadow.v, shadow.format, copies, shadow.maps)
    for queries in query_lens:
        for sequences in batch_sizes:
            q = torch.zeros(queries * sequences, num_heads, spec.head_size, dtype=dtype, device=device)
            attend = prepare_attend(
                block_table=torch.zeros(sequences, spec.num_blocks(max_seq_len), dtype=torch.int32, device=device),
                seq_lens=torch.full((sequences,), queries, dtype=torch.int32, device=device),
                cu_seqlens_q=torch.arange(sequences + 1, dtype=torch.int32, device=device) * queries,
                max_query_len=queries,
                max_seq_len=max_seq_len,
                **options,
            )
            step = None if exact is None else ExactStep(exact, spec.block_size, sequences, 0, device, queries <= FEW_QUERIES)
            segments = as_segments(read, attend.block_table, (), step, goes_by_position(attend.options))
            call = AttendCall(q, segments, attend.batch, attend.scale, attend.options)
            yield f"attend of {sequences} x {queries} queries", call
