"""Before the first request: which implementation serves a layer's calls, what they compile, and what scratch memory they take."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from .. import implementations, warmup
from ..assumed import Gpu, assumed, assuming
from ..cache import PagedCache
from ..calls import AttendCall, Batch
from ..checks import refuse
from ..formats import get_format
from ..geometry import Heads
from ..options import PRECISIONS, PROMPT_QUERIES, AttentionOptions
from ..warmup import together
from .layer import LayerAttention, PagedLayer

COMPILED_FOR = (
    "window",
    "chunk_lookback",
    "softcap",
    "alibi_sqrt",
    "batch_invariant",
    "prompt_precision",
)  # options that are in every call of a layer


@dataclass(frozen=True)
class StepLimits:
    """The largest steps that an engine makes.

    num_seqs: sequences. num_tokens: new tokens. max_seq_len: keys of a sequence. verified: queries of a sequence that verifies drafts; 1:
    none does. table_width: pages of a row of the block tables.
    """

    num_seqs: int
    num_tokens: int
    max_seq_len: int
    verified: int = 1
    table_width: int | None = None


def who_serves(layer: PagedLayer, attention: LayerAttention, limits: StepLimits, device: torch.device, block_size: int) -> dict[str, str]:
    """Which implementation serves what, of a layer's calls, without compiling it. block_size: of the kernels."""
    calls = _calls(layer, attention, limits, device)
    if attention.options.prompt_precision != PRECISIONS[0] and limits.max_seq_len >= PROMPT_QUERIES:
        calls["mixed"] = [[(PROMPT_QUERIES,) * 2]]
    found = warmup.who_serves(layer.allocate(1, block_size, device), attention.num_heads, **calls)
    return {what: name for what, (name, _) in found.items()}


def warm_up(layer: PagedLayer, attention: LayerAttention, limits: StepLimits, pages: PagedCache) -> dict[str, str]:
    """Compile what a layer's calls need over `pages`, which are left as they were; what is compiled depends on how these lie."""
    calls = _calls(layer, attention, limits, pages.device)
    largest = calls["batch_sizes"][-1], calls["write_sizes"][-1], limits.max_seq_len
    mixed = warmup.mixed_batches(attention.num_heads, *largest, attention.own_rows)
    return warmup.warm_up(pages, attention.num_heads, mixed=mixed, full_precision=layer.config.full_precision, **calls)


def _calls(layer: PagedLayer, attention: LayerAttention, limits: StepLimits, device: torch.device) -> dict[str, Any]:
    """What `quantkv.warm_up` takes."""
    return {
        "dtype": layer.dtype,
        "query_lens": sorted({1, limits.verified}),
        "batch_sizes": sorted({1, limits.num_seqs}),
        "write_sizes": sorted({1, limits.num_seqs, limits.num_tokens}),
        "max_seq_len": limits.max_seq_len,
        "table_width": limits.table_width,
        "own": attention.own_rows,
        "chunks": limits.verified == 1,
        "scale": attention.scale,
        **{name: getattr(attention.options, name) for name in COMPILED_FOR},
        **attention.tensors(device),
    }


class WarmUps:
    """What the kinds of an engine's layers have compiled before its first step: all at once, when every layer has its pages.

    An engine may give its layers pages several times, a few to measure memory and then all; a kind that was asked for is known."""

    def __init__(self) -> None:
        self.known: set[Hashable] = set()
        self.without_pages: set[str] = set()
        self.waiting: list[Callable[[], None]] = []

    def is_new(self, kind: Hashable) -> bool:
        """Whether nobody asked for this kind before; now somebody has."""
        new = kind not in self.known
        self.known.add(kind)
        return new

    def expect(self, layers: Iterable[str]) -> None:
        """Layers with these names will get pages: none compiles before the last of them."""
        self.without_pages.update(layers)

    def has_pages(self, layer: str, kind: Hashable = None, ask: Callable[[], None] | None = None) -> None:
        """A layer has its pages. kind: what the same kernels serve, over pages that lie like these. ask: calls `warm_up`; None: it has no
        room for a token."""
        self.without_pages.discard(layer)
        if ask is not None and self.is_new(kind):
            self.waiting.append(ask)
        if not self.without_pages:
            self.finish()

    def finish(self) -> None:
        """Compile what waits, whether or not every layer has pages: before a step."""
        if not self.waiting:
            return
        waiting, self.waiting = self.waiting, []
        with together():
            for ask in waiting:
                ask()


def check_prompts(attention: LayerAttention, heads: Heads, dtype: torch.dtype, device: torch.device) -> None:
    """ValueError where a layer's prompts are to have 8-bit scores, and no kernel for this GPU serves that. heads: of keys and values.

    An engine asks before it loads weights, and maybe in a process that uses no GPU: nothing is allocated on it. On a CPU the reference
    serves them."""
    gpu = None if attention.options.prompt_precision == PRECISIONS[0] else assumed() or _gpu_of(device)
    if gpu is None:
        return
    count, size, cpu = PROMPT_QUERIES, 16, torch.device("cpu")
    with assuming(gpu):
        pages = PagedCache(get_format("none", dtype).cache_spec(*heads, size), 1, cpu)
        starts, table = (torch.tensor(n, dtype=torch.int32, device=cpu) for n in ([0, count], [[0] * (count // size)]))
        q = torch.zeros(count, attention.num_heads, heads.head_size, dtype=dtype, device=cpu)
        options = replace(attention.options, **attention.tensors(cpu))
        batch = Batch(starts, starts[1:], lengths=((count, count),))
        reason = implementations.refusal("prefill", AttendCall(q, (pages.segment(table),), batch, attention.scale, options))
    if reason is not None:
        allowed = f"{reason}: {PRECISIONS[0]} is needed, or what Hopper's prefill kernels (quantkv[hopper]) serve: docs/attention.md"
        refuse("prompt_precision", attention.options.prompt_precision, allowed)


def _gpu_of(device: torch.device) -> Gpu | None:
    """A device as what decides who serves prompts on it; None: a CPU."""
    if device.type == "cpu":
        return None
    nvidia = device.type == "cuda" and not torch.version.hip
    return Gpu(str(device), torch.cuda.get_device_capability(device) if nvidia else (0, 0), 0, 0)


def summary(who: dict[str, str]) -> str:
    """Who serves what, in a line: of batches of several kinds one of each number of queries."""
    pattern = r"^attend of \d+ x (\d+) queries of \d+ keys(.*)"
    short = {re.sub(pattern, r"\1 queries among others\2", what): name for what, name in who.items()}
    return "; ".join(f"{what} by {name}" for what, name in short.items())


def claim_scratch(query: torch.Tensor, options: AttentionOptions = AttentionOptions()) -> None:
    """Allocate, and free, the scratch memory that attention of `query [T, HQ, D]` will take on a GPU, so that an engine that measures
    what a step takes leaves it free."""
    if query.is_cuda:
        sizes, eight_bit = (query.shape[2],) * 2, options.prompt_precision == "8bit"
        nbytes = implementations.scratch_bytes(query.shape[0], query.shape[1], sizes, query.element_size(), eight_bit)
        torch.empty(nbytes, dtype=torch.uint8, device=query.device)
