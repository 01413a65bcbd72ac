"""Which pages have a 16-bit copy, by a few launches on a GPU. `quantkv.copies` has the specification, in operations of torch."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import torch

try:
    import triton
except ImportError:
    triton = None
else:
    from . import launch
    from .kernels import copies as kernels

MOST_COLUMNS = 64  # pages of interest of a sequence; torch serves more
ELEMENTS = 256  # of a tile of sequences times pages of interest
TOKENS = 16  # of a program that notes rows


class Rows(NamedTuple):
    """K's codes and metadata as bytes, in pages and heads so many bytes apart. meta: None where there is none."""

    codes: torch.Tensor
    meta: torch.Tensor | None
    page: int
    head: int


class Step(NamedTuple):
    """The tensors of a `FullPrecisionStep`; None where it lacks one."""

    slots: torch.Tensor
    between: torch.Tensor
    recent: torch.Tensor
    recent_start: torch.Tensor
    sink: torch.Tensor | None
    sink_range: torch.Tensor | None
    joined: torch.Tensor | None
    joined_start: torch.Tensor | None
    joined_between: torch.Tensor | None


def serves(columns: int) -> bool:
    """Whether there are kernels for so many pages of interest of a sequence."""
    return triton is not None and columns <= MOST_COLUMNS


class Launches:
    """The launches of one `CopiedPages`. What was launched for a step of some shape is launched again for a tenth of the host's time, and
    for less over the same tensors, as those of an engine stay where they are."""

    MOST = 256  # shapes, and steps; then all are forgotten

    def __init__(self) -> None:
        self._known: dict[Hashable, launch.Launch] = {}
        self._steps: dict[Hashable, list[tuple[launch.Launch, list[Any]]]] = {}
        self._made: list[tuple[launch.Launch, list[Any] | None]] = []  # of the call that is being served

    def advance(
        self, given: dict[str, Any], rows: tuple[torch.Tensor, ...], kept: torch.Tensor, step: Step, compiled: dict[str, int]
    ) -> None:
        """`CopiedPages.advance`. given: tensors and counts by the names that kernels have for them. rows: of the watched pages; empty: none
        are watched. kept: the rows beside the copies. compiled: what is compiled for."""
        key = (len(step.slots), *map(_told, given.values()), *map(_told, rows), _told(kept), *map(_told, step))
        if self._again(key, step.slots.device):
            return
        sequences, columns = given["sequences"], compiled["N"]
        given = {**given, "step": step}
        wide = triton.next_power_of_2(columns)
        tile = max(1, ELEMENTS // wide)
        if rows:
            given |= {"rows": _rows(rows), "copies": kept}
            self._launch(kernels.doubt_kernel, (sequences, columns), given, compiled | _row_sizes(rows, compiled["PAGE"]))
        self._launch(kernels.claim_kernel, (1,), given, compiled | {"WATCHED": bool(rows)}, num_warps=8)
        self._launch(kernels.take_kernel, (triton.cdiv(given["num_copies"], kernels.COPIES.value),), given, {})
        blocks = max(triton.cdiv(sequences, tile), triton.cdiv(len(step.slots), kernels.CHUNK.value))
        self._launch(kernels.lay_out_kernel, (blocks,), given, compiled | {"FEW": step.joined is not None, "ROWS": tile, "COLUMNS": wide})
        self._keep(key)

    def note(self, given: dict[str, Any], rows: tuple[torch.Tensor, ...], kept: torch.Tensor, page: int) -> None:
        """`CopiedPages.note`."""
        compiled = {"PAGE": page, "TOKENS": TOKENS} | _row_sizes(rows, page)
        grid = triton.cdiv(given["tokens"], TOKENS), compiled["HEADS"]
        self._launch(kernels.note_kernel, grid, given | {"rows": _rows(rows), "copies": kept}, compiled)
        self._made.clear()

    def _again(self, key: Hashable, device: torch.device) -> bool:
        """Launch what was launched over these tensors, if it was."""
        found = self._steps.get(key)
        if found is None:
            return False
        with launch.on_device(device):
            return all([made.launch(arguments, device.index) for made, arguments in found])

    def _keep(self, key: Hashable) -> None:
        """What was launched, for the next step over the same tensors."""
        if all(arguments is not None for _, arguments in self._made):
            if len(self._steps) >= self.MOST:
                self._steps.clear()
            self._steps[key] = list(self._made)
        self._made.clear()

    def _launch(self, kernel: Any, grid: tuple[int, ...], given: dict[str, Any], compiled: dict[str, Any], **options: int) -> None:
        arguments = {name: compiled[name] if name in compiled else given[name] for name in kernel.arg_names}
        places, tensors, fixed = [], [], []
        for name, value in arguments.items():
            fields = [(f"{name}.{field}", t) for field, t in zip(value._fields, value)] if isinstance(value, tuple) else [(name, value)]
            for place, t in fields:
                if isinstance(t, torch.Tensor):
                    places.append(place), tensors.append(t), fixed.append(t.dtype)
                else:
                    fixed.append(t)
        device, key = tensors[0].device, (kernel.fn.__name__, grid, *fixed)
        made = self._known.get(key)
        with launch.on_device(device):
            if made is None or not made.again(tensors, device.index):
                if len(self._known) >= self.MOST:
                    self._known.clear()
                made = self._known[key] = launch.Launch(kernel, grid, arguments, options, places)
                made()
        self._made.append((made, made.packed(tensors)))


def _told(value: Any) -> Hashable:
    """What tells an argument of a step from that of another."""
    return (value.data_ptr(), value.dtype) if isinstance(value, torch.Tensor) else value


def _rows(rows: tuple[torch.Tensor, ...]) -> Rows:
    return Rows(rows[0], rows[1] if len(rows) > 1 else None, *rows[0].stride()[:2])


def _row_sizes(rows: tuple[torch.Tensor, ...], page: int) -> dict[str, int]:
    """Bytes of a K row, and the powers of two that hold a row, and a page of `page` rows."""
    codes, meta = rows[0].shape[3], rows[1].shape[3] if len(rows) > 1 else 0
    bytes_of = {"CODES_TILE": codes, "META_TILE": meta, "TILE": page * max(codes, meta)}
    tiles = {name: triton.next_power_of_2(size) for name, size in bytes_of.items()}
    return {"HEADS": rows[0].shape[1], "CODES": codes, "META": meta, **tiles}
