"""Statistics of a model without a file: one pass over a short text, once for its weights."""

from __future__ import annotations

import hashlib
import logging
import time
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel

from .. import weights, whole_file
from ..calibration import Calibration
from ..engine.observed import LatentSums
from ..integrations.sample_tokens import pass_tokens, sample_tokens
from ..integrations.transformers_model import CACHE, geometry_of, max_positions, plan_layers
from ..policy import Policy
from .calibrate import calibrate

VERSION = 2  # part of a kept file's name: raise it when the text or what is measured changes
SLOW = 2.0  # seconds: a pass that takes longer is worth a line that everyone sees

log = logging.getLogger("quantkv")
_known: weakref.WeakKeyDictionary[torch.nn.Module, Calibration] = weakref.WeakKeyDictionary()
_means: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, torch.Tensor]] = weakref.WeakKeyDictionary()


def with_statistics(policy: Policy, model: PreTrainedModel) -> Policy:
    """The policy with the statistics of `model` as its calibration, where it asks for them and has none.

    Where the model cannot be measured: a warning, and the policy as it is; ValueError or NotImplementedError where they are required.
    """
    if not policy.wants_statistics:
        return policy
    try:
        return replace(policy, calibration=statistics_of(model))
    except (ValueError, NotImplementedError) as error:
        _unmeasured(policy, model, "keys and values are stored without", error)
        return policy


def _unmeasured(policy: Policy, model: PreTrainedModel, stored: str, error: Exception) -> None:
    """A model cannot be measured: a warning, or the error where the policy requires that it is. stored: how rows are then, in words."""
    if policy.statistics == "require":
        raise error
    log.warning("quantkv: no statistics of %s, %s: %s", type(model).__name__, stored, error)


def statistics_of(model: PreTrainedModel) -> Calibration:
    """Calibration of a model by one pass over the text that comes with the package; kept in memory, and on disk by its weights.

    Errors: as of `calibrate`, for models that cannot be measured.
    """
    if model not in _known:
        began = time.perf_counter()
        file = _file(model)
        made, source = _kept(file, model), f"kept in {file}"
        if made is None:
            ids, source = _ids(model)
            with torch.inference_mode(False), torch.autocast(model.device.type, enabled=False):
                made = calibrate(model, ids, made_of={"text": source})
            _keep(made, file)
        took = time.perf_counter() - began
        log.log(
            logging.WARNING if took > SLOW else logging.INFO,
            "quantkv: key means and Hessians of %s (%s): %.1f s, once for these weights",
            type(model).__name__,
            source,
            took,
        )
        _known[model] = made
    return _known[model]


class SeenLatents(DynamicCache):
    """A cache that takes sums of the latents of some layers, and keeps none.

    sums: by the number of the layer.
    """

    def __init__(self, config: Any, layers: set[int]) -> None:
        super().__init__(config=config)
        self.of: set[int] = layers
        self.sums: dict[int, LatentSums] = {}

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Count latents `[S, 1, N, latent]`; layers of another kind go on as they do."""
        if layer_idx not in self.of:
            return super().update(key_states, value_states, layer_idx, *args, **kwargs)
        self.sums.setdefault(layer_idx, LatentSums()).add(key_states[:, 0])
        return key_states, value_states


def latent_means(policy: Policy, model: PreTrainedModel) -> dict[int, torch.Tensor]:
    """Means `[latent]` float32 of the latents of a model's layers, by their number, by one pass over the package's text; kept in memory.

    Where the model cannot be measured: a warning, and none; ValueError or NotImplementedError where the policy requires them."""
    if model not in _means:
        began, layers = time.perf_counter(), {number for number, plan in enumerate(plan_layers(model.config)) if plan.latent}
        ids, source = _ids(model)
        seen = SeenLatents(model.config.get_text_config(decoder=True), layers)
        try:
            with torch.no_grad(), torch.autocast(model.device.type, enabled=False):
                model(ids[:1].to(model.device), **{CACHE: seen}, use_cache=True)
            if missing := sorted(layers - seen.sums.keys()):
                raise NotImplementedError(f"layers {missing} store no latents in transformers' cache")
        except (ValueError, NotImplementedError) as error:
            _unmeasured(policy, model, "latents are stored with their mean", error)
            return {}
        log.info("quantkv: means of latents of %s (%s): %.1f s", type(model).__name__, source, time.perf_counter() - began)
        _means[model] = {number: sums.mean.float() for number, sums in seen.sums.items()}
    return _means[model]


def _ids(model: PreTrainedModel) -> tuple[torch.Tensor, str]:
    """Tokens `[N, tokens]` of the pass, and what they are: of the package's text, or at random where the model has no tokenizer here."""
    config = model.config.get_text_config(decoder=True)
    count = pass_tokens(model.device)
    context = min(max_positions(model.config) or count, count)
    ids, source = sample_tokens(model.config.name_or_path or config.name_or_path, config.vocab_size, count)
    contexts = max(ids.shape[1] // context, 1)
    return ids[:, : contexts * context].view(contexts, -1), source


def _file(model: PreTrainedModel) -> Path | None:
    """Where the statistics of a model with these weights are kept; None where its weights have no samples."""
    samples = [weights.of_module(part) for part in model.modules() if isinstance(getattr(part, "layer_idx", None), int)]
    samples = [sample for sample in samples if sample is not None]
    if not samples:
        return None
    digest = hashlib.sha256(f"{VERSION} {type(model).__name__} {max_positions(model.config)}".encode())
    for sample in samples:
        digest.update(sample.numpy().tobytes())
    return whole_file.cache_folder() / "statistics" / f"{digest.hexdigest()[:32]}.safetensors"


def _kept(file: Path | None, model: PreTrainedModel) -> Calibration | None:
    """The statistics of a file; None where there is none, or none of this model."""
    if file is None or not file.is_file():
        return None
    try:
        made = Calibration.load(file)
        made.check(geometry_of(model.config))
    except ValueError as error:
        log.info("quantkv: measured again: %s", error)
        return None
    return made


def _keep(made: Calibration, file: Path | None) -> None:
    try:
        if file is not None:
            file.parent.mkdir(parents=True, exist_ok=True)
            made.save(file)
    except OSError as error:  # it is measured again next time
        log.info("quantkv: %s is not kept: %s", file, error)
