"""write and attend over paged caches: the reference path only."""

from __future__ import annotations

import torch

from . import checks, reference
from .format import Format
from .maps import LayerMaps
from .reference import AttentionOptions, Side


def write(key: torch.Tensor, value: torch.Tensor, k: Side, v: Side, fmt: Format, slot_mapping: torch.Tensor, *,
          maps: LayerMaps | None = None, positions: torch.Tensor | None = None, implementation: str = "auto") -> None:
    reference.write(key, value, k, v, fmt, slot_mapping, maps, positions)


def attend(q: torch.Tensor, k: Side, v: Side, fmt: Format, *, cu_seqlens_q: torch.Tensor, seq_lens: torch.Tensor,
           block_table: torch.Tensor, scale: float, options: AttentionOptions = AttentionOptions(), maps: LayerMaps | None = None,
           out: torch.Tensor | None = None, max_query_len: int | None = None,
           implementation: str = "auto") -> tuple[torch.Tensor, torch.Tensor]:
    checks.options(options, seq_lens.shape[0], q.shape[1], q.device)
    result, lse = reference.attend(q, k, v, fmt, cu_seqlens_q=cu_seqlens_q, seq_lens=seq_lens, block_table=block_table, scale=scale,
                                   options=options, maps=maps)
    if out is None:
        return (result if options.output_scale is not None else result.to(q.dtype)), lse
    return out.copy_(result), lse
