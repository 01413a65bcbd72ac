"""Full-precision tokens of the layers that share block tables, over tensors that stay where they are from step to step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..cache import PagedCache
from ..copies import CopiedPages, FullPrecisionStep
from ..full_precision import FullPrecisionTokens
from .forward_metadata import ForwardMetadata
from .layer import PagedLayer


class FullPrecisionGroup:
    """Which pages have a 16-bit copy, and what a step reads at full precision. Its tensors are filled before a step and outside of CUDA
    graphs, and captured graphs read the latest numbers.

    layers: those with full-precision tokens and pages of their own. tokens: the most that one of them keeps.
    num_seqs, num_tokens: of the largest step, padding included. pool_seqs: sequences whose copies the pool has room for.
    pool: which pages have a copy; None before the first step over pages.
    """

    def __init__(self, layers: Sequence[PagedLayer], num_seqs: int, num_tokens: int, pool_seqs: int, device: torch.device) -> None:
        given = [layer.config.full_precision for layer in layers]
        self.layers, self.device = list(layers), device
        self.tokens = FullPrecisionTokens(max(tokens.sink for tokens in given), max(tokens.recent for tokens in given))
        self.num_seqs, self.num_tokens, self.pool_seqs = num_seqs, num_tokens, pool_seqs
        self.pool: CopiedPages | None = None
        self._whole: FullPrecisionStep | None = None

    def attach(self, metadata: ForwardMetadata, pages: PagedCache, advance: bool = True) -> None:
        """Say what a step reads at full precision. pages: of the last of the layers, whose rows depend on the whole context.

        advance: whether the step runs now; else it is captured, or has no sequences, and the numbers in its tensors come later: until then
            no row goes to a copy, which pages may still have of an earlier step.
        """
        if self.pool is None:
            size = pages.spec.block_size
            self.pool = CopiedPages(self.tokens, size, self.pool_seqs, pages.num_blocks, self.device)
            self._whole = FullPrecisionStep(self.tokens, size, self.num_seqs, self.num_tokens, self.device)
            for layer in self.layers:
                layer.pool = self.pool
        if pages is not self.pool.watched:
            self.pool.watch(pages)
        metadata.full_precision = self._whole.part(metadata.batch.num_seqs)
        if advance:
            metadata.advance_full_precision(self.pool)
        else:
            self._whole.slots.fill_(-1)
