"""The model that a cache was made for, and the refusal of any other."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from ...checks import refuse
from ..transformers_model import geometry_of, plan_layers


class MadeFor:
    """The model that a cache was made for, by what its layers keep.

    name: of its configuration's class. layers: what each of them keeps, and its heads.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        self.name, self.layers = type(config).__name__, _kept(config)
        self._known: Any = config.get_text_config(decoder=True)  # the last configuration that was found right

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_known": None}

    def check(self, config: PreTrainedConfig) -> None:
        """ValueError unless the layers of a model with this configuration keep the same."""
        if config is self._known:
            return
        name = type(config).__name__
        if _kept(config) != self.layers:
            refuse(
                "past_key_values",
                f"QuantizedCache of a {self.name}",
                f"the layers of this model, a {name}, keep something else; a cache of its own is needed: QuantizedCache(model.config, ...)",
            )
        self._known = config


def _kept(config: PreTrainedConfig) -> list[tuple[Any, ...]]:
    plans, heads = plan_layers(config), geometry_of(config).heads
    return [(plan.kind, plan.latent, plan.states, heads.get(number)) for number, plan in enumerate(plans)]
