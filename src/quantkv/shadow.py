"""Deprecated: `copies`."""

from . import deprecated

MOVED = {
    "ExactPages": "CopiedPages",  # old names
    "ExactStep": "FullPrecisionStep",  # old name
    "ShadowedCache": "CacheWithCopies",  # old name
    "shadow_pages": "cache_of_copies",  # old name
    "as_segments": "as_segments",
    "goes_by_position": "goes_by_position",
    "FEW_QUERIES": "FEW_QUERIES",
}
__getattr__ = deprecated.module(__name__, "quantkv.copies", MOVED)
