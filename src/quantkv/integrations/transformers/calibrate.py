"""Deprecated: `model_analysis`."""

from ... import deprecated

MOVED = ("calibrate", "Observer", "Repeated", "SeenCache", "SeenLayer")
__getattr__ = deprecated.module(__name__, "quantkv.model_analysis.calibrate", MOVED)
