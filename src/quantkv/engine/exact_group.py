"""Full-precision tokens of the layers that share block tables, over tensors that stay where they are from step to step."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..cache import PagedCache
from ..exact import ExactTokens
from ..shadow import ExactPages, ExactStep
from .forward_metadata import ForwardMetadata
from .layer import PagedLayer


class ExactGroup:
    """Which pages have a 16-bit copy, and what a step reads at full precision. Its tensors are filled before a step and outside of CUDA
    graphs, and captured graphs read the latest numbers.

    layers: those with full-precision tokens and pages of their own. tokens: the most that one of them keeps.
    num_seqs, num_tokens: of the largest step, padding included. pool_seqs: sequences whose copies the pool has room for.
    pool: which pages have a copy; None before the first step over pages.
    """

    def __init__(self, layers: Sequence[PagedLayer], num_seqs: int, num_tokens: int, pool_seqs: int, device: torch.device) -> None:
        given = [layer.config.exact for layer in layers]
        self.layers, self.device = list(layers), device
        self.tokens = ExactTokens(max(tokens.first for tokens in given), max(tokens.latest for tokens in given))
        self.num_seqs, self.num_tokens, self.pool_seqs = num_seqs, num_tokens, pool_seqs
        self.pool: ExactPages | None = None
        self._whole: ExactStep | None = None

    def attach(self, metadata: ForwardMetadata, pages: PagedCache, advance: bool = True) -> None:
        """Say what a step reads at full precision. pages: of the last of the layers, whose rows depend on the whole context.

        advance: whether the step runs now; else it is captured, and the numbers in its tensors come later.
        """
        if self.pool is None:
            size = pages.spec.block_size
            self.pool = ExactPages(self.tokens, size, self.pool_seqs, pages.num_blocks, self.device)
            self._whole = ExactStep(self.tokens, size, self.num_seqs, self.num_tokens, self.device, few=True)
            for layer in self.layers:
                layer.pool = self.pool
        if pages is not self.pool.watched:
            self.pool.watch(pages)
        metadata.exact = self._whole.part(metadata.batch.num_seqs, metadata.few_queries)
        if advance:
            metadata.advance_exact(self.pool)
