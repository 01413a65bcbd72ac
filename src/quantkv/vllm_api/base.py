"""The contract of a backend: cache write and attention read of one mode."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from ..format import Format
from .attention import Scale, attend
from .modes import KVQuantMode
from .views import ContractError


class QuantKVBackend(ABC):
    """Cache write and attention read of one mode. Call `register` with an instance when the module is imported.

    mode: the mode that it serves.
    packing_factor: elements in a byte of the cache.
    needs_scale_caches: whether it keeps a float32 for each (token, head) beside K and beside V.
    format: the format that the project's attention reads; None for a backend that overrides `unified_attention`.
    """

    mode: KVQuantMode
    packing_factor: int = 1
    needs_scale_caches: bool = False
    format: Format | None = None

    def packed_head_size(self, head_size: int) -> int:
        """Bytes of a cached row: `head_size // packing_factor`. AssertionError (and ValueError) if it does not divide."""
        if head_size % self.packing_factor:
            raise ContractError(
                f"head_size={head_size} is not divisible by packing factor {self.packing_factor} required by {self.mode.name}"
            )
        return head_size // self.packing_factor

    def allocate_scale_caches(
        self, num_blocks: int, block_size: int, num_kv_heads: int, device: torch.device
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Zeros `[num_blocks, block_size, num_kv_heads]` float32 for K and for V; (None, None) where none are needed."""
        if not self.needs_scale_caches:
            return None, None
        k, v = torch.zeros(2, num_blocks, block_size, num_kv_heads, dtype=torch.float32, device=device)
        return k, v

    @abstractmethod
    def reshape_and_cache(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
        *,
        k_scale_cache: torch.Tensor | None = None,
        v_scale_cache: torch.Tensor | None = None,
    ) -> None:
        """Write `key [T, HK, D]` and `value [T, HK, D_V]` to slots `slot_mapping [T]`; a negative slot skips its token."""

    def unified_attention(
        self,
        q: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        out: torch.Tensor,
        *,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_q: int,
        seqused_k: torch.Tensor,
        max_seqlen_k: int,
        softmax_scale: float,
        window_size: tuple[int, int],
        block_table: torch.Tensor,
        softcap: float,
        sinks: torch.Tensor | None,
        alibi_slopes: torch.Tensor | None,
        use_alibi_sqrt: bool,
        qq_bias: torch.Tensor | None,
        output_scale: Scale | None,
        mm_prefix_range: torch.Tensor | None,
        k_scale_cache: torch.Tensor | None = None,
        v_scale_cache: torch.Tensor | None = None,
        seq_threshold_3D: int | None = None,
        num_par_softmax_segments: int | None = None,
        softmax_segm_output: torch.Tensor | None = None,
        softmax_segm_max: torch.Tensor | None = None,
        softmax_segm_expsum: torch.Tensor | None = None,
    ) -> None:
        """Causal attention over this mode's caches, written into `out`; arguments as in the function of the same name. max_seqlen_k and
        what follows v_scale_cache are for a backend with its own attention."""
        if self.format is None:
            raise NotImplementedError(
                f"{type(self).__name__} does not implement a bespoke attention kernel and has no format that the core kernel reads"
            )
        attend(
            self.format,
            q,
            k_cache,
            v_cache,
            out,
            cu_seqlens_q=cu_seqlens_q,
            max_seqlen_q=max_seqlen_q,
            seqused_k=seqused_k,
            softmax_scale=softmax_scale,
            window_size=window_size,
            block_table=block_table,
            softcap=softcap,
            sinks=sinks,
            alibi_slopes=alibi_slopes,
            use_alibi_sqrt=use_alibi_sqrt,
            qq_bias=qq_bias,
            output_scale=output_scale,
            mm_prefix_range=mm_prefix_range,
            k_scale_cache=k_scale_cache,
            v_scale_cache=v_scale_cache,
        )
