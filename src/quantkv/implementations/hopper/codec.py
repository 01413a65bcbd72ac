"""The half of a codec in CUDA C++: where it is, and what the host must know of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from ctypes import c_float
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class HopperCodec:
    """A codec for the Hopper kernels. The snippet is included after `encode.cuh`, which says, with `unpack.cuh`, what the struct has.

    source: file of the snippet. type: name of the struct in it.
    keys, values, written: what it has code for. writer: loads the class of the configurations of a kernel
    of its own that writes its rows, where `write.cu` and `round.cu` have no code: as `write.round.RoundConfig`.
    half: the two dimensions of a key that share a register are so far apart (`HALF`).
    odd_unit: odd registers of a key are worth so much more than even ones (`ODD_UNIT`).
    table_bytes: of the table in shared memory that keys are read by. values_by_table: so are values.
    warps: of a block that reads its keys, at most: fewer have more registers.
    per_tensor: its rows have the scale of the whole layer, and none of their own.
    integers: its keys are read as integers of 8 bits too (`INTEGERS`).
    latents: its rows are read as keys and values at once (`decode/latents.cuh`). rotated: as rotated dimensions of latents there.
    step: head sizes of rows that it reads are multiples of it.
    numbers: head size -> numbers that the snippet reads as a list, by the macro's name: floats, or words as int.
    `half`, `odd_unit`, `table_bytes` and `values_by_table` stand in the snippet too: kernels compile only where both say the same.
    """

    source: Path
    type: str
    keys: bool = True
    values: bool = True
    written: bool = True
    writer: Callable[[], Any] | None = None
    half: int = 1
    odd_unit: float = 1.0
    table_bytes: int = 0
    values_by_table: bool = False
    warps: int = 12
    per_tensor: bool = False
    integers: bool = False
    latents: bool = False
    rotated: bool = False
    step: int = 16
    numbers: Callable[[int], Mapping[str, Sequence[float | int]]] | None = None

    def dimensions(self, head_size: int) -> int:
        """Dimensions of a key as it is unpacked: whole registers of four lanes; those beyond `head_size` are none (`DK` in lanes.cuh)."""
        whole = 8 * self.half
        return -(-head_size // whole) * whole

    def macros(self, head_size: int) -> dict[str, str]:
        """The snippet's numbers as macros."""
        numbers = {} if self.numbers is None else self.numbers(head_size)
        return {name: ", ".join(f"{x:#x}u" if isinstance(x, int) else literal(x) for x in values) for name, values in numbers.items()}


def literal(x: float) -> str:
    """x as a C++ float, to the bit. It is rounded here: the last bits of a double may differ each time, and a kept kernel is found by its
    text."""
    return f"{c_float(x).value.hex()}f"
