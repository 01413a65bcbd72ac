"""What an engine's start compiles for a model, compiled before, on a machine that needs no GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from .. import assumed, warmup
from ..calibration import Calibration, LayerMoments
from ..forked import ForkedExecutor
from ..geometry import Heads, Layer, Model
from ..options import AttentionOptions
from ..policy import Policy
from .layer import LayerAttention, PagedLayer
from .layer_config import UNQUANTIZED, LayerConfig
from .warm_up import StepLimits, _calls, check_prompts


@dataclass(frozen=True)
class Compiled:
    """What one kind of layer took. layers: their numbers. kernels: that it needs, by compiler. seconds: until all were there."""

    layers: tuple[int, ...]
    format: str
    kernels: dict[str, int]
    seconds: float


def compile_ahead(
    model: Model,
    policy: Policy,
    gpu: assumed.Gpu,
    limits: StepLimits,
    *,
    ranks: int = 1,
    block_size: int = 16,
    dtype: torch.dtype = torch.bfloat16,
    progress: Callable[[int, int], None] | None = None,
    executor: ForkedExecutor | None = None,
) -> Iterator[Compiled]:
    """Fill the caches of compiled kernels with what layers of a model need on a GPU: NVRTC's, and Triton's.

    policy: how rows are stored; statistics that an engine takes at its start are stood in for. ranks: of a tensor-parallel group.
    block_size: tokens of a page. executor: as of `warmup.compile_ahead`. Kernels for softcaps and sinks, which a model's code decides, are
    compiled at the start.
    """
    kinds: dict[Hashable, list[int]] = {}
    made: dict[Hashable, tuple[PagedLayer, LayerAttention]] = {}
    for number, layer in model.attention.items():
        if layer.kind in ("latent", "shared"):
            continue
        paged, attention = _layer(model, policy, number, layer, ranks, dtype)
        kind = paged.kind(attention), paged.config.full_precision
        kinds.setdefault(kind, []).append(number)
        made.setdefault(kind, (paged, attention))
    for done, (kind, (paged, attention)) in enumerate(made.items()):
        if progress is not None:
            progress(done, len(made))
        begun, pages = time.monotonic(), paged.allocate(1, block_size, torch.device("cpu"))
        with assumed.assuming(gpu):
            check_prompts(attention, paged.heads, dtype, pages.device)
            calls = _calls(paged, attention, limits, pages.device)
            mixed = warmup.mixed_batches(
                attention.num_heads, calls["batch_sizes"][-1], calls["write_sizes"][-1], limits.max_seq_len, attention.own_rows
            )
            given = calls | {"mixed": mixed, "full_precision": paged.config.full_precision, "executor": executor}
            kernels = warmup.compile_ahead(pages, attention.num_heads, **given)
        yield Compiled(tuple(kinds[kind]), paged.config.format.name, kernels, time.monotonic() - begun)


def _layer(model: Model, policy: Policy, number: int, layer: Layer, ranks: int, dtype: torch.dtype) -> tuple[PagedLayer, LayerAttention]:
    """A layer of one rank, and what its calls have in common."""
    total, size, size_v = layer.heads
    heads = Heads(max(total // ranks, 1), size, size_v)
    options: dict[str, Any] = {"window": layer.window, "prompt_precision": policy.prompt_precision}
    if layer.kind == "chunked":
        options["chunk_lookback"] = 0
    config = LayerConfig.of(policy, number, dtype, heads, heads.num_kv_heads, by_position=layer.window > 0)
    if policy.wants_statistics:
        eye = [torch.eye(n, device="cpu").expand(heads.num_kv_heads, n, n).contiguous() for n in (size, size_v)]
        moments = LayerMoments(torch.zeros(2, heads.num_kv_heads, size, dtype=torch.float16, device="cpu"), *eye)
        config = config.with_calibration(Calibration(number + 1, {number: moments}), number)
    own = policy.prompt == "own" and config.format.name not in UNQUANTIZED
    return PagedLayer(config, heads, dtype), LayerAttention(
        max(model.num_heads // ranks, 1), None, AttentionOptions(**options), own_rows=own
    )
