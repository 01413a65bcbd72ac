"""Writes on Hopper where V is stored as given, whatever its size: what their kernel is compiled for, and what else it is told."""

from __future__ import annotations

from ctypes import Structure, sizeof
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ....calls import WriteCall
from ..host import launch
from ..host.records import pages_of, unsuitable
from .of_rows import OfRows

if TYPE_CHECKING:
    from . import WriteConfig

SOURCE = Path(__file__).with_name("write_given.cu")
STRUCT = "GivenArguments"


@dataclass(frozen=True)
class GivenConfig(OfRows):
    """What one compiled kernel is made for. rows: of K. wide_copy_slots: slots of copies are int64, not int32."""

    rows: WriteConfig
    wide_copy_slots: bool = False
    source = SOURCE
    shared_bytes = 0

    def macros(self) -> dict[str, object]:
        """What the kernel is compiled with: the numbers that host and device share."""
        rows, slot = self.rows, "long long" if self.wide_copy_slots else "int"
        few = int(rows.warps == 1)  # a warp encodes its rows and is done
        return rows.macros() | dict(COPY_SLOT=slot, LESS_MEAN=1, ROLLED=few, ARGUMENT_BYTES=sizeof(launch.arguments(STRUCT)))


def serves(call: WriteCall, plainly: bool) -> bool:
    """Whether the kernel writes these rows: V of another size than K, and as it is. plainly: both sides are written by `write.cu`, else."""
    key, value, maps = call.key, call.value, call.maps
    as_given = call.fmt.v.code_dtype == value.dtype and maps.v is None and call.v.scale == 1.0
    return plainly and as_given and key.shape[2] != value.shape[2] and not maps.by_position


def copied(call: WriteCall) -> bool:
    """Whether it writes the copies of such a call too, which are as V is in the pages, and K under the same map; true without copies."""
    copies, maps = call.copies, call.maps
    if copies is None:
        return True
    fmt, pages, block_size = copies.fmt, pages_of(copies.k, copies.v), call.k.codes.shape[1]
    alike = fmt.k == fmt.v == call.fmt.v and not fmt.k.round_mapped and copies.maps.k is maps.k and copies.maps.v is None
    alike = alike and copies.k.scale == call.k.scale and copies.v.scale == 1.0 and copies.k.codes.shape[1] == block_size
    sizes = call.key.shape[2], call.value.shape[2]
    lie = pages is not None and copies.slot_mapping.is_contiguous() and unsuitable(pages, fmt.k, fmt.v, *sizes, block_size) is None
    return alike and lie


def fill(a: Structure, call: WriteCall) -> None:
    """Say where the mean and the copies of a call are."""
    copies, mean = call.copies, call.mean
    a.mean = None if mean is None else mean.data_ptr()
    if mean is not None and mean.data_ptr() % 16:
        raise ValueError(f"mean at address {mean.data_ptr()}: a multiple of 16 is needed")
    if copies is None:
        a.copies, a.copy_slots = None, None
        return
    pages = copies.k.base
    a.copies, a.copy_slots = pages.data_ptr(), copies.slot_mapping.data_ptr()
    a.copy_page_stride, a.copy_head_stride = pages.stride(0), pages.stride(1)
