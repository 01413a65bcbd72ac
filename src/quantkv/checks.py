"""Argument checks, and the digest of tensors in files. Each check raises ValueError naming the argument, its value and what is allowed."""

from __future__ import annotations

import hashlib
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from numbers import Integral

import torch

from .refusals import integer as integer
from .refusals import number as number
from .refusals import refuse as refuse

INDEX_DTYPES = (torch.int32, torch.int64)
ROW_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def tensor(
    argument: str, t: torch.Tensor, shape: Sequence[int | None], dtypes: Sequence[torch.dtype], device: torch.device | None = None
) -> None:
    """Check type, shape (None: any size), dtype and device (None: any)."""
    if not isinstance(t, torch.Tensor):
        refuse(argument, type(t).__name__, "a tensor is needed")
    if t.ndim != len(shape) or any(want is not None and want != got for want, got in zip(shape, t.shape)):
        refuse(f"{argument}.shape", tuple(t.shape), f"{tuple('any' if n is None else n for n in shape)} is needed")
    if t.dtype not in dtypes:
        refuse(f"{argument}.dtype", t.dtype, f"one of {', '.join(map(str, dtypes))} is needed")
    if device is not None and t.device != device:
        refuse(f"{argument}.device", t.device, f"the cache is on {device}")


def no_gradient(argument: str, t: torch.Tensor) -> None:
    """Check that nobody asks for the gradient of `t`: kernels have none, and so none of the implementations gives one."""
    if t.requires_grad and torch.is_grad_enabled():
        refuse(f"{argument}.requires_grad", True, "a quantized cache has no gradients; torch.no_grad() or detach() is needed")


def instance(argument: str, value: object, kind: type | tuple[type, ...], allowed: str) -> None:
    """Check the type of a value."""
    if not isinstance(value, kind):
        refuse(argument, type(value).__name__, f"{allowed} is needed")


def place(device: torch.device | str) -> torch.device:
    """The device that a name says."""
    try:
        return torch.device(device)
    except (TypeError, RuntimeError, ValueError):
        refuse("device", repr(device), "a device such as cpu or cuda:0 is needed")


def in_range(argument: str, t: torch.Tensor, low: int, high: int, note: str = "") -> None:
    """Check `low <= t < high`. Reads the tensor: a synchronisation on an accelerator."""
    if t.numel():
        least, most = (int(x) for x in t.aminmax())
        if least < low or most >= high:
            refuse(argument, f"{least}..{most}", f"values lie in {low}..{high - 1}{note}")


def not_negative(argument: str, positions: torch.Tensor) -> None:
    """Check positions. Reads the tensor, as above."""
    if positions.numel() and int(positions.min()) < 0:
        refuse(argument, int(positions.min()), "positions count from 0")


def page_numbers(pages: Iterable[int], num_blocks: int, argument: str = "pages") -> list[int]:
    """Distinct pages of a cache of `num_blocks`, as ints. ValueError for anything else: floats, bools, repeated pages, others."""
    try:
        items = pages.tolist() if isinstance(pages, torch.Tensor) else pages
        numbers = [None if isinstance(page, bool) else operator.index(page) for page in items]
    except TypeError:
        numbers = [None]
    if None in numbers:
        refuse(argument, repr(pages), "a sequence of integers is needed")
    outside = [page for page in numbers if not 0 <= page < num_blocks]
    if outside:
        refuse(argument, outside[0], f"values lie in 0..{num_blocks - 1}")
    repeated = [page for page, count in Counter(numbers).items() if count > 1]
    if repeated:
        refuse(argument, repeated[0], "repeated: a page can be named once")
    return numbers


def bound(argument: str, value: int | None) -> None:
    """Check an upper bound of queries or keys; None: no bound is known."""
    if value is not None:
        integer(argument, value, 0, "None or a number of tokens")


def counts(argument: str, values: Iterable[int]) -> list[int]:
    """Numbers of something, as ints of at least 0. ValueError for anything else: floats, bools, a number alone."""
    try:
        given = list(values)
        numbers = [-1 if isinstance(n, bool) else operator.index(n) for n in given]
    except TypeError:
        given, numbers = values, [-1]
    if min(numbers, default=0) < 0:
        refuse(argument, repr(given), "a sequence of integers of at least 0 is needed")
    return numbers


def pairs(argument: str, lengths: Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """`(queries, keys)` of each sequence of a batch. ValueError for anything else."""
    try:
        found = tuple(map(tuple, lengths))
    except TypeError:
        refuse(argument, repr(lengths), "a pair (queries, keys) for each sequence is needed")
    kinds = {*map(type, chain.from_iterable(found))}
    if not {*map(len, found)} <= {2} or not all(issubclass(kind, Integral) for kind in kinds):
        refuse(argument, list(found), "a pair (queries, keys) of integers for each sequence is needed")
    return found


def digest_of(tensors: Mapping[str, torch.Tensor], text: str = "") -> str:
    """SHA-256, 64 hexadecimal digits, of a text and of every tensor with its name, shape and dtype, in the order of the names: by which a
    file's reader knows that it was not damaged."""
    digest = hashlib.sha256(text.encode())
    for name, t in sorted(tensors.items()):
        digest.update(f"{name} {tuple(t.shape)} {t.dtype}".encode())
        digest.update(t.cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
