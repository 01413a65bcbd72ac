"""What vLLM asks of an attention backend: which types, head sizes and layouts it takes, and how many bytes a token has."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.kv_cache_layout import KVCacheLayout

from ... import vllm_pages
from ...format import Format
from ...spec import CacheSpec
from ..asked import POLICY, named_format
from . import PREFIX, asked_type
from .blocks import is_packed

UNQUANTIZED = ("auto", "bfloat16", "float16")  # layers that vLLM leaves at 16 bits: one backend serves all layers
BLOCK_SIZES = list(vllm_pages.BLOCK_SIZES)  # of those that the Hopper kernels read
CHUNKS = "ChunkedLocalAttention_"  # how vLLM names the class that it derives from a backend for layers that attend within chunks


def format_of(kv_cache_dtype: str, dtype: torch.dtype, latent: bool = False) -> Format:
    """The format that a vLLM type name or a preset stores; dtype: what the model computes in. latent: whether layers keep latents.
    ValueError for one that is none."""
    name = "none" if kv_cache_dtype in UNQUANTIZED else asked_type(kv_cache_dtype).removeprefix(PREFIX)
    return named_format(name, dtype, latent)


def token_bytes(spec: CacheSpec) -> int:
    """Bytes of a token of one kv head, K and V and metadata. ValueError where a page is not that many bytes a token."""
    size, rest = divmod(spec.page_bytes, spec.block_size)
    if rest:
        raise ValueError(f"block_size={spec.block_size}: a page of {spec.page_bytes} bytes is no whole number of bytes a token")
    return size


def always(cls: type) -> bool:
    """What a backend answers vLLM: it serves that."""
    return True


def never(cls: type) -> bool:
    """What a backend answers vLLM: it does not serve that."""
    return False


class QuantKVBackend(AttentionBackend):
    """Pages of quantkv as vLLM's logical view `[B, H, N, C]`: C is the bytes of one token of one kv head, so that N * C bytes are one
    page record, and B and H keep whatever strides the layout has."""

    forward_includes_kv_cache_update = False  # vLLM calls do_kv_cache_update before forward
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.bfloat16, torch.float16, torch.float32]
    format: ClassVar[Format | None] = None  # of a layer's own backend, see `of`
    sizes: ClassVar[tuple[int, ...]] = ()  # likewise, where a layer has latents
    supports_sink = supports_sliding_window = supports_alibi_sqrt = classmethod(always)
    supports_mm_prefix = classmethod(always)  # tokens of an image that see each other
    supports_batch_invariance = classmethod(always)  # docs/vllm.md
    supports_device_cpu_query_lens_mismatch = classmethod(never)  # a mixed batch is cut by the lengths that the host knows

    def __init_subclass__(cls, **arguments) -> None:
        """NotImplementedError for a class that vLLM derives for another kind of attention. vLLM derives it with the layer, before the
        weights are loaded. Chunks are the one kind that a layer serves itself (`QuantKVImpl`), of the whole batch."""
        super().__init_subclass__(**arguments)
        if "format" not in vars(cls) and not cls.__name__.startswith(CHUNKS):
            kind = cls.__name__.replace(QuantKVBackend.__name__, "").strip("_")
            raise NotImplementedError(f"quantkv: attention backend {kind!r}, derived from CUSTOM, is not supported; allowed: {CHUNKS}N")

    @staticmethod
    def get_name() -> str:
        """The name that `--attention-backend` takes."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls():
        """What serves a layer."""
        from .implementation import QuantKVImpl

        return QuantKVImpl

    @staticmethod
    def get_builder_cls():
        """What makes a step's metadata."""
        from .metadata import QuantKVBuilder

        return QuantKVBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        """Tokens of a block: those of a page that the kernels read. A packed block stays whole: `blocks.kernel_pages` cuts it."""
        return [kv_cache_spec.block_size] if kv_cache_spec is not None and is_packed(kv_cache_spec) else BLOCK_SIZES

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype) -> bool:
        """Whether `--kv-cache-dtype` names one of our types, or none."""
        return kv_cache_dtype is None or kv_cache_dtype in UNQUANTIZED or kv_cache_dtype.startswith(PREFIX)

    @classmethod
    def supports_combination(
        cls, head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, use_mm_prefix, device_capability
    ) -> str | None:
        """Why a type's format cannot store the rows of this model, in words; None where it can. Formats of a policy are checked when the
        first layer is made."""
        if kv_cache_dtype is not None and asked_type(kv_cache_dtype) == POLICY:
            return None
        try:
            cls.token_bytes(format_of(kv_cache_dtype or "auto", dtype, use_mla), head_size, block_size or BLOCK_SIZES[0], dtype)
        except ValueError as error:
            return str(error)
        return None

    @classmethod
    def token_bytes(cls, fmt: Format, head_size: int, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of a token of one kv head in a format. ValueError for one that the model's rows cannot have."""
        return token_bytes(fmt.of_keys_and_values().cache_spec(1, head_size, block_size=block_size))

    @classmethod
    def is_supported_on_current_device(cls, head_size, head_size_v, has_sinks) -> bool:
        """Always: a model whose keys and values have two sizes asks."""
        return True

    @classmethod
    def set_head_size_v(cls, head_size_v) -> None:
        """Nothing: each layer knows its own."""

    @classmethod
    def supported_kv_cache_layouts(cls):
        """Those in which the N * C bytes of a head's page are one run."""
        return KVCacheLayout.LBHNC, KVCacheLayout.BLHNC, KVCacheLayout.BHLNC, KVCacheLayout.LHBNC

    @classmethod
    def customize_spec(cls, spec):
        """The bytes of a token where a layer's are quantkv's; a layer at 16 bits has just those of its record."""
        if spec.dtype != torch.uint8 or spec.state_content_bytes is not None:
            return spec
        return replace(spec, state_content_bytes=cls.content_bytes(spec))

    @classmethod
    def content_bytes(cls, spec) -> int:
        """Bytes of a token of one kv head of a layer."""
        fmt = cls.format
        if fmt is None:  # before the layers have theirs
            fmt = format_of(get_current_vllm_config().cache_config.cache_dtype, torch.bfloat16)
        return token_bytes(fmt.cache_spec(1, spec.head_size, spec.head_size_v))

    @classmethod
    @cache
    def of(cls, fmt: Format, *sizes: int) -> type[QuantKVBackend]:
        """The backend of layers in one format: what vLLM asks for a layer's bytes says neither which layer nor which type it is. sizes: of
        latents and of their rotated dimensions."""
        name = f"{cls.__name__}[{fmt.name}]"
        return type(name, (cls,), {"format": fmt, "sizes": sizes, "__module__": cls.__module__, "__qualname__": name})
