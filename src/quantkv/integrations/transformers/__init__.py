"""A transformers `Cache` over paged quantized caches, and the attention that reads its pages.

    use_quantkv_attention(model)
    cache = QuantizedCache(model.config, "int4")
    model.generate(**inputs, past_key_values=cache)

`Cache.update` hands the new keys and values, unread, to the attention function, which knows the padding mask: it stores them
and attends to the pages. Tested with transformers 5.17 to 5.24.
"""

from . import calibrate as _calibrate  # noqa: F401 - a module's old name, loaded before the function of that name

# isort: split
from ...model_analysis.calibrate import calibrate
from .attention import quantkv_attention, quantkv_mask, use_quantkv_attention
from .cache import QuantizedCache
from .captured import use_cuda_graphs
from .layers import QuantizedLayer

__all__ = ["QuantizedCache", "QuantizedLayer", "calibrate", "quantkv_attention", "quantkv_mask", "use_cuda_graphs", "use_quantkv_attention"]
