"""A transformers `Cache` over paged quantized caches."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import Cache

from ...checks import integer, refuse
from ...format import Format
from ...formats import get_format
from ...spec import CacheSpec
from ..progress import Progress
from ..sequences import Sequences
from .config import layer_kinds
from .layers import QuantizedLayer


class QuantizedCache(Cache):
    """KV cache of a decoder in quantized pages, for `generate(past_key_values=...)` or `model(past_key_values=...)`.

    config: the model's; its layer types say which layers have a sliding window or chunks. Their pages that no query sees any more
        are given back.
    format: name of a format, or one for each layer; "none" keeps rows as they are.
    block_size: tokens of a page.
    dtype: what "none" stores; the model's dtype if None.
    fresh_prefill: False: a prompt attends to what was stored, so that the answer does not depend on how the prompt was cut into
        chunks. True: the first forward pass attends to its own exact keys and values, as engines commonly do: closer to the
        16-bit answer where the prompt comes whole, another answer where it comes in chunks.
    num_tokens: tokens a sequence to allocate pages for at once; pages beyond are added as they are needed.
    Errors: ValueError or NotImplementedError naming what is not supported: encoder-decoders, layers other than full, sliding and
        chunked attention, layers that share keys and values, latent attention, custom masks, gradients.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        format: str | Format | Sequence[str | Format] = "int4",
        *,
        block_size: int = 16,
        dtype: torch.dtype | None = None,
        fresh_prefill: bool = False,
        num_tokens: int = 0,
    ) -> None:
        kinds = layer_kinds(config)
        formats = [format] * len(kinds) if isinstance(format, str | Format) else list(format)
        if len(formats) != len(kinds):
            refuse("format", f"{len(formats)} formats", f"the model has {len(kinds)} layers")
        for name in formats:
            get_format(name, dtype or torch.bfloat16)
        self.progress = Progress()
        self.sequences = {kind: Sequences(kind, block_size, self.progress) for kind in dict.fromkeys(kinds)}
        super().__init__(
            layers=[QuantizedLayer(name, self.sequences[kind], dtype, fresh_prefill, num_tokens) for name, kind in zip(formats, kinds)]
        )

    @property
    def specs(self) -> list[CacheSpec]:
        """Geometry of each layer. ValueError before the first forward pass, which tells the sizes."""
        if not all(layer.is_initialized for layer in self.layers):
            raise ValueError("specs: the sizes of heads are known after the first forward pass")
        return [layer.pages.spec for layer in self.layers]

    @property
    def spec(self) -> CacheSpec:
        """Geometry that all layers share. ValueError where they differ."""
        if len(specs := set(self.specs)) > 1:
            raise ValueError("spec: the layers differ; see specs")
        return specs.pop()

    @property
    def nbytes(self) -> int:
        """Bytes of the pages that hold tokens, over all layers."""
        return sum(
            layer.pages.spec.nbytes(layer.sequences.table.used_pages)
            for layer in self.layers
            if layer.is_initialized and layer.sequences.table is not None
        )

    @property
    def allocated_nbytes(self) -> int:
        """Bytes of all pages, used or not."""
        return sum(layer.pages.nbytes for layer in self.layers if layer.is_initialized)

    @property
    def batch_size(self) -> int:
        """Sequences in the cache, -1 before the first forward pass."""
        return self.progress.batch_size

    def reset(self) -> None:
        self.progress.reset()
        self._sync()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last `-tokens_to_remove` tokens (a negative number, as in transformers; 0 removes none)."""
        try:
            count = -operator.index(tokens_to_remove)  # assisted decoding passes a tensor in some versions
        except TypeError:
            count = -1
        if count < 0:
            refuse("tokens_to_remove", tokens_to_remove, "a negative integer is needed, -n removes n tokens")
        self.progress.crop(count)
        self._sync()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Sequence i becomes a copy of sequence `beam_idx[i]`. Pages are shared, and copied when one of them is written to."""
        self.progress.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        integer("repeats", repeats, 1, "a positive integer")
        self.progress.select([i for i in range(self.batch_size) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        try:
            chosen = torch.arange(max(self.batch_size, 0))[indices.cpu()].tolist()
        except IndexError as error:
            raise ValueError(f"indices={indices.tolist()}: the cache holds {self.batch_size} sequences ({error})") from error
        self.progress.select(chosen)

    def _sync(self) -> None:
        for layer in self.layers:
            layer.seen, layer._new = self.progress.seen, None
