"""vLLM's name for each cache mode."""

from enum import Enum, IntEnum

from .. import checks


class KVQuantMode(IntEnum):
    """How a layer's cache stores keys and values.

    The names are vLLM's. Its versions do not agree on the number 6, so an engine's own enum is read by its members' names (`mode_name`).
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


AGREED = range(KVQuantMode.NVFP4 + 1)  # numbers that mean the same in every version of vLLM: 6 is TURBOQUANT_K8V4 in 0.33


def mode_name(mode: Enum | int) -> str:
    """The name of a mode: that of an enum's member, whichever enum it is of; of a bare number only where all versions of vLLM agree."""
    if isinstance(mode, Enum):
        return mode.name
    if isinstance(mode, bool) or not isinstance(mode, int) or mode not in AGREED:
        allowed = ", ".join(KVQuantMode.__members__)
        checks.refuse(
            "kv_quant_mode", repr(mode), f"a member of KVQuantMode, of vLLM's or of this package's ({allowed}), or a number below 6"
        )
    return KVQuantMode(mode).name
