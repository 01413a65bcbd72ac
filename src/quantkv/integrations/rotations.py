"""What the rotary embeddings of an engine's model did in one pass, seen from outside: no layout of rotations is known here.

Rows before rotation are what the module was given, and rotations are what it makes of the identity.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ..engine.observed import LayerSums, Rotate

SAME = 2**-6  # relative distance of rows that differ by a factor each, in bfloat16
TINY = torch.finfo(torch.float32).tiny


class Rotated(NamedTuple):
    """Rows before and after one call of a rotary embedding. dims: of the positions that the module takes."""

    module: torch.nn.Module
    before: torch.Tensor
    after: torch.Tensor
    dims: int


class SeenRotations:
    """Calls of a model's rotary embeddings in one pass.

    package: where the engine's classes of rotary embeddings are. within: names of those that are steps of others, and get parts of rows.
    rotaries: rotary embeddings by their key, with the dimensions of the positions that each takes.
    """

    def __init__(self, package: str, within: tuple[str, ...] = ()) -> None:
        self.package, self.within = package, within
        self.rotaries: dict[tuple[int, int, int], torch.nn.Module] = {}
        self._given: list[tuple[torch.Tensor, ...]] = []
        self._rotated: list[Rotated] = []

    @contextmanager
    def watching(self, model: torch.nn.Module) -> Iterator[None]:
        """A context in which every call is seen."""
        handles = []
        for module in model.modules():
            if type(module).__module__.startswith(self.package) and type(module).__name__ not in self.within:
                handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
                handles.append(module.register_forward_hook(self._after, with_kwargs=True))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        given = [*args, *kwargs.values()]
        self._given.append(tuple(t.clone() for t in given if isinstance(t, torch.Tensor) and t.is_floating_point()))

    def _after(self, module: torch.nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        positions = next(t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor) and not t.is_floating_point())
        made = output if isinstance(output, tuple) else (output,)
        for before, after in zip(self._given.pop(), (t for t in made if t is not None)):
            self._rotated.append(Rotated(module, before, after.clone(), positions.ndim))

    def forget(self) -> None:
        """Leave out the calls since the last layer."""
        self._rotated = []

    def add(self, sums: LayerSums, query: torch.Tensor, key: torch.Tensor) -> None:
        """Add a layer's rows before rotation, from `query [T, HQ, D]` and `key [T, HK, D]` as they are attended to."""
        rotated = self._rotated
        turned = {name: self._find(rows) for name, rows in (("query", query), ("key", key))}
        self.forget()
        if rotated:
            same = turned["query"] is not None and turned["key"] is not None and turned["query"].module is turned["key"].module
            sums.understood = sums.understood and same
            if same:
                found = turned["key"]
                name = id(found.module), key.shape[2], found.dims
                self.rotaries[name], sums.rotation = found.module, name
                query, key = (turned[name].before for name in ("query", "key"))
        sums.add(query, key)

    def _find(self, rows: torch.Tensor) -> Rotated | None:
        """The call of a rotary embedding that made rows `[T, H, D]`; its rows before are scaled as these were afterwards (Llama 4 norms
        rows after their rotation, and scales queries by position)."""
        for call in reversed(self._rotated):
            if call.after.numel() == rows.numel():
                before, after, given = (t.reshape(rows.shape).float() for t in (call.before, call.after, rows))
                scale = (given * after).sum(2, keepdim=True) / after.square().sum(2, keepdim=True).clamp(min=TINY)
                if (given - scale * after).norm() <= SAME * given.norm():
                    return call._replace(before=before * scale)
        return None

    def rotations(self, dtype: torch.dtype) -> dict[Any, Rotate]:
        """Rotations by their key, as `layer_moments` takes them. dtype: what the model computes in."""
        return {name: functools.partial(_rotate, module, *name[1:], dtype) for name, module in self.rotaries.items()}


def _rotate(module: torch.nn.Module, size: int, dims: int, dtype: torch.dtype, positions: torch.Tensor) -> torch.Tensor:
    """`[P, D, D]`: the rotations of a rotary embedding at positions `[P]`, from what it makes of the identity."""
    eye = torch.eye(size, dtype=dtype, device=positions.device).flatten().repeat(len(positions), 1)
    places = positions if dims == 1 else positions.expand(3, -1).contiguous()
    made = module(places, eye, eye[:, :size].clone())
    return (made[0] if isinstance(made, tuple) else made).view(len(positions), size, size)
