"""What a layer hands to transformers in place of lengths and rows: only our mask and attention functions know what to do with them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .layers import QuantizedLayer
    from .made_for import MadeFor

ATTENTION = "quantkv"


class PagedLength(int):
    """A number of keys that are in pages: tells the mask function that a `QuantizedLayer` asks, which knows causality and windows.

    windows: those that its model asked masks for; the mask function adds to them.
    made_for: the model that its cache was made for; None: it is not known.
    """

    windows: set[int | None]
    made_for: MadeFor | None

    @classmethod
    def of(cls, length: int, windows: set[int | None], made_for: MadeFor | None = None) -> PagedLength:
        """A length, with the windows that masks may have."""
        paged = cls(length)
        paged.windows, paged.made_for = windows, made_for
        return paged


class LazyKV(torch.Tensor):
    """New keys or values between `Cache.update` and the attention function: any use by another attention is an error.

    layer: where they are to be stored. update: which of its updates brought them.
    """

    layer: QuantizedLayer
    update: int

    @classmethod
    def of(cls, states: torch.Tensor, layer: QuantizedLayer) -> LazyKV:
        """Rows as they are, with the layer that they are for."""
        pending = states.as_subclass(cls)
        pending.layer, pending.update = layer, layer.updates
        return pending

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func.__name__ == "__get__":  # shape, dtype, device and the like
            return super().__torch_function__(func, types, args, kwargs or {})
        if func.__name__ == "to" and super().__torch_function__(func, types, args, kwargs or {}) is args[0]:  # to where they are
            return args[0]
        raise RuntimeError(
            f"{func.__name__}: a QuantizedCache is read by the attention implementation {ATTENTION!r} only, as the "
            "rows are in quantized pages; call quantkv.integrations.transformers.use_quantkv_attention(model)"
        )


class LazyLatents(LazyKV):
    """New latents or their rotated dimensions, and what a model's own code makes of them on the way to the attention function: its new
    keys and values. Another attention would take these for all keys there are: that is an error."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func.__name__ in ("scaled_dot_product_attention", "softmax"):
            return super().__torch_function__(func, types, args, kwargs)
        made = torch.Tensor.__torch_function__.__func__(cls, func, types, args, kwargs or {})
        source = next((t for t in (*args, *(kwargs or {}).values()) if isinstance(t, cls)), None)
        for t in made if isinstance(made, tuple | list) else (made,):
            if isinstance(t, cls) and source is not None:
                t.layer, t.update = source.layer, source.update
        return made
