"""What a pass over a server's own model shows of its layers on one rank, and the calibration that this makes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Set
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from ..calibration import Calibration
from ..engine.layer import LayerAttention
from ..engine.observed import LatentSums, LayerSums, calibration_of, causal_attention, latent_moments, layer_moments, value_moments
from .at_start import contexts, release
from .rotations import SeenRotations


class ServedModel(NamedTuple):
    """A server's model as the pass needs it.

    num_layers: of the whole model. positions: that its key means cover. pass_tokens: the most that a pass may have. tokenizer: its name;
    None: the server has none.
    """

    model: torch.nn.Module
    device: torch.device
    dtype: torch.dtype
    num_layers: int
    positions: int
    pass_tokens: int
    vocab_size: int
    tokenizer: str | None


class SeenLayers:
    """Sums over the rows of layers, by their number, as they are attended to in a pass.

    package, within: see `SeenRotations`. rows: keys and values of the sequence that the pass is at, by the layer that made them.
    """

    def __init__(self, package: str, within: tuple[str, ...] = ()) -> None:
        self.rotations = SeenRotations(package, within)
        self.layers: dict[int, LayerSums] = {}
        self.latents: dict[int, LatentSums] = {}
        self.rows: dict[Hashable, tuple[torch.Tensor, torch.Tensor]] = {}

    def attend(
        self,
        number: int | None,
        owner: Hashable,
        attention: LayerAttention,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of a layer over the pass's own rows, which are added: `query [T, HQ, D]` -> `[T, HQ, D_V]`.

        number: None for one whose rows do not count. owner: the layer whose keys and values are read. key, value: these; None: the owner
        has shown them."""
        if key is not None:
            self.rows[owner] = key.clone(), value.clone()
        key, value = self.rows[owner]
        self.add(number, query, key)
        return causal_attention(attention, query, key, value)

    def add(self, number: int | None, query: torch.Tensor, key: torch.Tensor) -> None:
        """`query [T, HQ, D]` and `key [T, HK, D]` of a layer; number: None for one whose rows do not count."""
        if number is None:
            self.rotations.forget()
        else:
            self.rotations.add(self.layers.setdefault(number, LayerSums()), query, key)

    def add_latents(self, number: int | None, latents: torch.Tensor) -> None:
        """Latents `[T, latent]` of a layer, number as above. Their rotated dimensions are stored as they are."""
        self.rotations.forget()
        if number is not None:
            self.latents.setdefault(number, LatentSums()).add(latents)

    def measure(
        self,
        of: ServedModel,
        numbers: Set[int],
        modules: Iterable[tuple[int, torch.nn.Module, tuple[int, int, int]]],
        forward: Callable[[torch.Tensor], None],
        watching: AbstractContextManager = nullcontext(),
    ) -> tuple[Calibration, str]:
        """The calibration of this rank's heads, and what its tokens were.

        numbers: of the layers that it is for. modules: see `value_moments`. forward: one eager pass over tokens `[T]` at the first
        positions. watching: a context in which every layer shows its rows to this. NotImplementedError where one did not.
        """
        parts, source = contexts(of.tokenizer, of.vocab_size, of.pass_tokens, of.device)
        try:
            with torch.inference_mode(), watching, self.rotations.watching(of.model):
                for part in parts:
                    forward(part)
        finally:
            self.rows.clear()
        if missing := numbers - self.layers.keys() - self.latents.keys():
            raise NotImplementedError(f"the pass did not reach layers {sorted(missing)}")
        with torch.inference_mode():
            moments = layer_moments(self.layers, value_moments(of.model, modules), self.rotations.rotations(of.dtype), of.positions)
            moments |= {number: latent_moments(sums.mean) for number, sums in self.latents.items()}
        self.layers, self.latents = {}, {}
        release(of.device)
        return calibration_of({number: moments[number] for number in sorted(numbers)}, of.num_layers, source), source
