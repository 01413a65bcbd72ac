"""vLLM's name for each cache mode."""

from enum import IntEnum


class KVQuantMode(IntEnum):
    """How a layer's cache stores keys and values. The numbers are vLLM's where it gives the mode one.

    NVFP4 is a name that engines know and that has no backend here: `get_backend` refuses it until one is registered.
    """

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4
    NVFP4 = 5
    INT2_PER_TOKEN_HEAD = 6

    @property
    def is_per_token_head(self) -> bool:
        """Whether each (token, head) has a scale of its own."""
        return self.name.endswith("PER_TOKEN_HEAD")
