"""Calibration of a transformers model: one forward pass over text in which queries, keys and the output projection are seen."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from .. import weights
from ..calibration import MIN_TOKENS, Calibration, LayerMoments
from ..checks import integer, refuse, tensor
from ..engine.observed import PROJECTIONS, SKIPPED, LayerSums, moments_of, projection_moments
from ..integrations.transformers_model import CACHE, decoder_of, geometry_of, max_positions, plain_attention, plan_layers, shares_keys
from ..maps import KEY_MEAN_BUCKET
from .rotation import Average, Layout, Rotary, Turn, form_of, table_of, unturned

ATTENTION = "quantkv_calibrate"
TOKENS_AT_ONCE = 2048  # of a forward pass

log = logging.getLogger(__name__)


@torch.no_grad()
def calibrate(
    model: PreTrainedModel,
    ids: torch.Tensor,
    positions: torch.Tensor | None = None,
    *,
    limit: int | None = None,
    made_of: dict[str, Any] | None = None,
    on_step: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:
    """One forward pass of `model` over contexts `ids [N, tokens]` int64.

    positions: int64 like ids, where the tokens stand; None: from 0. They need not cover those in use: what is seen is turned back by the
        model's rotary embedding, and from there to every position.
    limit: key means for so many positions, and averages over them; None: the model's own limit, or the contexts' length where it has none.
    made_of: what is written beside the numbers, for people. on_step: told how many contexts are done, of how many.
    Memory: a batch of contexts with at most some 2,048 tokens, as in any forward pass. Gradients, the model's mode and its attention
    implementation stay as they are.
    Errors: ValueError for fewer than 256 tokens; NotImplementedError for models whose cache cannot be quantized or that keep latents
    (DeepSeek's MLA), and for those that do not ask transformers for their attention function. A layer whose rotation of keys fits no
    known one gets no key means and the moments at the positions seen; the log says so.
    """
    config, decoder = model.config.get_text_config(decoder=True), decoder_of(model)
    plans = plan_layers(model.config)
    if any(plan.latent for plan in plans):
        raise NotImplementedError(f"model: {type(model).__name__} keeps latents in place of keys and values, which are not calibrated")
    tensor("ids", ids, (None, None), (torch.int64,))
    if ids.numel() < MIN_TOKENS:
        refuse("ids", f"{ids.numel()} tokens", f"at least {MIN_TOKENS} are needed")
    if ids.shape[1] <= SKIPPED:
        refuse("ids.shape[1]", ids.shape[1], f"contexts of more than {SKIPPED} tokens are needed, as the first ones are left out")
    if positions is not None:
        tensor("positions", positions, tuple(ids.shape), (torch.int64,), ids.device)
    limit = limit if limit is not None else max_positions(model.config) or ids.shape[1]
    integer("limit", limit, 1, "a number of positions")
    observer, batch = Observer(config), max(TOKENS_AT_ONCE // ids.shape[1], 1)
    options: dict[str, Any] = {"use_cache": True}
    if "logits_to_keep" in inspect.signature(model.forward).parameters and not shares_keys(model.config):
        options["logits_to_keep"] = 1  # where keys are shared, the last layers would be left out for the other tokens
    with observer.watching(model, decoder):
        for start in range(0, len(ids), batch):
            on_step(start, len(ids))
            part = slice(start, start + batch)
            if positions is not None:
                options["position_ids"] = positions[part].to(model.device)
            model(ids[part].to(model.device), **{CACHE: observer.cache(config)}, **options)
    on_step(len(ids), len(ids))
    needed = {number for number, plan in enumerate(plans) if plan.kind is not None}
    if observer.layers.keys() != needed:
        apart = sorted(needed ^ observer.layers.keys())
        raise NotImplementedError(f"model: {type(model).__name__} does not attend to the keys of layers {apart} through transformers")
    moments = observer.moments(-(-limit // KEY_MEAN_BUCKET) * KEY_MEAN_BUCKET)
    told = {"model": type(model).__name__, "contexts": len(ids), "tokens": ids.numel(), **(made_of or {})}
    return Calibration(geometry_of(model.config).num_layers, moments, told)


class SeenCache(DynamicCache):
    """A cache that keeps no keys and values for later: it tells which layer's they are.

    keys: those of this forward pass by their address, with the layer.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config=config)
        self.keys: dict[int, tuple[int, torch.Tensor]] = {}

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Note which layer these keys are of; nothing is stored."""
        self.keys.setdefault(key_states.data_ptr(), (layer_idx, key_states))
        return key_states, value_states


class Repeated(Exception):
    """The queries and keys of a call of an attention module that was repeated, so as to see them."""


class SeenLayer(LayerSums):
    """What forward passes showed of one layer: sums over its tokens, and how it turns them."""

    def __init__(self) -> None:
        super().__init__()
        self.rotary: Rotary | None = None
        self.layout: Layout | None = None
        self.weights: torch.Tensor | None = None  # the sample of its key projection
        self.value_moments: dict[torch.nn.Module, torch.Tensor] = {}  # by the module whose output projection it is


class Observer:
    """What a forward pass shows: registered as the model's attention function, with hooks that see how modules were called.

    config: the decoder's. layers: what is known of each, by its number in the cache.
    """

    def __init__(self, config: Any) -> None:
        self._turns = bool(getattr(config, "rope_parameters", None))
        self.layers: dict[int, SeenLayer] = {}
        self._cache: SeenCache | None = None
        self._calls: dict[torch.nn.Module, tuple[tuple, dict]] = {}
        self._rotaries: list[tuple[Rotary, Any]] = []  # of this forward pass, the latest last
        self._layouts: dict[torch.nn.Module, Layout | None] = {}
        self._repeating = False

    def cache(self, config: Any) -> SeenCache:
        """For the next forward pass."""
        self._cache, self._rotaries = SeenCache(config), []
        return self._cache

    @contextmanager
    def watching(self, model: PreTrainedModel, decoder: PreTrainedModel) -> Iterator[None]:
        """A context in which every pass of `model` is seen; afterwards the model is as it was."""
        own, mode, handles = decoder.config._attn_implementation, model.training, []
        for module in decoder.modules():
            if "rotary" in type(module).__name__.lower():
                handles.append(module.register_forward_hook(self._see_rotary, with_kwargs=True))
            elif {"position_embeddings", CACHE} & inspect.signature(module.forward).parameters.keys():
                handles.append(module.register_forward_pre_hook(self._see_call, with_kwargs=True))
        WATCHING.append(self)
        try:
            decoder.set_attn_implementation({"": ATTENTION})
            model.eval()
            yield
        finally:
            WATCHING.remove(self)
            for handle in handles:
                handle.remove()
            decoder.set_attn_implementation({"": own})
            model.train(mode)

    def _see_call(self, module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        self._calls[module] = args, kwargs

    def _see_rotary(self, module: torch.nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        if self._repeating:
            return unturned(output)
        form = form_of(output)
        if form is not None:
            self._rotaries.append((Rotary(module, args, kwargs, form), output))
        return output

    def see(self, module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
        """Queries `[B, HQ, N, D]`, keys and values `[B, HK, N, ..]` of an attention module."""
        if self._repeating:
            raise Repeated(query, key)
        if key.data_ptr() not in self._cache.keys:  # of no cache
            return
        number, _ = self._cache.keys[key.data_ptr()]
        layer = self.layers.setdefault(number, SeenLayer())
        if module not in layer.value_moments:
            layer.weights = weights.of_module(module) if layer.weights is None else layer.weights
            layer.value_moments[module] = _value_moments(module, query.shape[1], value)
        turn = self._turn(module, layer, query, key)
        self._calls.clear()  # they hold hidden states
        if turn is not None:
            back = turn.inverse()
            query, key = (_by_context(back, t.float()) for t in (query, key))
        layer.add(query.transpose(1, 2), key.transpose(1, 2))

    def _turn(self, module: torch.nn.Module, layer: SeenLayer, query: torch.Tensor, key: torch.Tensor) -> Turn | None:
        """The rotations of the rows of this call, one after the other; None where they are not turned, or it is not known how."""
        rotary, embedding = self._rotary_of(module)
        if module not in self._layouts:
            layout, understood = self._layout(module, rotary, embedding, query, key)
            self._layouts[module], layer.understood = layout, layer.understood and understood
        layout = self._layouts[module]
        if layout is None:
            return None
        if layer.rotary is not None and (layer.layout, layer.rotary.key) != (layout, rotary.key):
            layer.understood = False  # the queries of layers that share keys turn in different ways
        layer.layout, layer.rotary = layout, rotary
        return layout.turn(table_of(embedding, rotary.form), key.shape[-1])

    def _rotary_of(self, module: torch.nn.Module) -> tuple[Rotary | None, Any]:
        """The rotary call whose angles the module was given, or else made, and these."""
        _, kwargs = self._bound(module)
        given = kwargs.get("position_embeddings")
        if given is None:
            return (None, None) if "position_embeddings" in kwargs or not self._rotaries else self._rotaries[-1]
        for rotary, output in reversed(self._rotaries):
            if output is given or all(a is b or torch.equal(a, b) for a, b in zip(_parts(output), _parts(given), strict=False)):
                return rotary, given
        return None, given

    def _bound(self, module: torch.nn.Module) -> tuple[tuple, dict]:
        """The last call of a module: everything by name that has one."""
        args, kwargs = self._calls.get(module, ((), {}))
        bound = inspect.signature(module.forward).bind_partial(*args, **kwargs)
        bound.apply_defaults()
        return args, {**bound.arguments, **bound.arguments.get("kwargs", {})}

    def _layout(
        self, module: torch.nn.Module, rotary: Rotary | None, embedding: Any, query: torch.Tensor, key: torch.Tensor
    ) -> tuple[Layout | None, bool]:
        """How the module turns its rows, None where it does not; and whether that is known."""
        if embedding is None:
            _, kwargs = self._bound(module)
            return None, "position_embeddings" in kwargs or not (self._rotaries or self._turns)  # told not to turn, or nothing turns
        before = self._repeat(module, unturned(embedding))
        if before is None or any(a.shape != b.shape for a, b in zip(before, (query, key))):
            return None, False
        if torch.equal(before[0], query) and torch.equal(before[1], key):
            return None, True  # it is given angles and does not use them
        form = form_of(embedding)
        if rotary is None or form is None:
            return None, False
        table, shape = table_of(embedding, form), key.shape
        table = type(table)(*(t.view(-1, shape[2], t.shape[1]) for t in table))
        if len(table.cos) not in (1, shape[0]):
            return None, False
        one = type(table)(*(t[0] for t in table))
        shared = torch.equal(before[1], key)  # another layer has turned them
        rows = zip(before[:1], (query,)) if shared else zip(before, (query, key))
        found = {Layout.found(old[:1], new[:1], one, new.dtype) for old, new in rows}
        return (found.pop(), True) if len(found) == 1 and None not in found else (None, False)

    def _repeat(self, module: torch.nn.Module, unturned_embedding: Any) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Queries and keys of the module's last call, had they not been turned; None where it cannot be repeated."""
        args, kwargs = self._calls[module]
        args, kwargs = tuple(map(_own, args)), {name: _own(v) for name, v in kwargs.items()}
        signature = inspect.signature(module.forward)
        bound = signature.bind_partial(*args, **kwargs)
        if "position_embeddings" in bound.arguments:
            bound.arguments["position_embeddings"] = unturned_embedding
        elif "position_embeddings" in kwargs:
            bound.arguments[_rest(signature)]["position_embeddings"] = unturned_embedding
        self._repeating = True
        try:
            module.forward(*bound.args, **bound.kwargs)
        except Repeated as seen:
            return seen.args
        except Exception as error:
            log.info("calibrate: %s cannot be called again: %s", type(module).__name__, error)
        finally:
            self._repeating = False
        return None

    def moments(self, count: int) -> dict[int, LayerMoments]:
        """Those of all layers, with key means and averages for positions below `count`."""
        averages: dict[Any, Average] = {}
        return {number: self._moments(number, layer, count, averages) for number, layer in sorted(self.layers.items())}

    def _moments(self, number: int, layer: SeenLayer, count: int, averages: dict[Any, Average]) -> LayerMoments:
        queries, mean, key_mean, spread = layer.hessian, layer.mean, None, None
        if not layer.understood:
            log.warning("calibrate: layer %d: how keys turn with their position is not understood: no key means", number)
        elif layer.layout is None:
            key_mean, spread = mean[None], layer.covariance.diagonal(dim1=1, dim2=2)
        else:
            key = layer.rotary.key, layer.layout, mean.shape[-1]
            if key not in averages:
                tables = layer.rotary.tables(count, KEY_MEAN_BUCKET)
                averages[key] = Average.of(tables, layer.layout, mean.shape[-1], KEY_MEAN_BUCKET)
            key_mean, queries = averages[key].turned_mean(mean), averages[key].turned_moments(queries)
            spread = averages[key].turned_moments(layer.key_moments).diagonal(dim1=1, dim2=2) - key_mean.double().square().mean(0)
        return moments_of(key_mean, queries, sum(layer.value_moments.values()), spread, layer.weights)


WATCHING: list[Observer] = []


def _rest(signature: inspect.Signature) -> str:
    """Name of `**kwargs`."""
    return next(name for name, parameter in signature.parameters.items() if parameter.kind is parameter.VAR_KEYWORD)


def _own(value: Any) -> Any:
    """A copy of what modules put the keys into that they share."""
    return copy.copy(value) if isinstance(value, MutableMapping) else value


def _parts(embedding: Any) -> tuple:
    return (embedding,) if isinstance(embedding, torch.Tensor) else tuple(embedding)


def _by_context(turn: Turn, rows: torch.Tensor) -> torch.Tensor:
    """Turn rows `[B, H, N, D]` by the rotations of N tokens, or of B times N."""
    cos, sin = (t.view(-1, 1, rows.shape[2], rows.shape[3]) for t in (turn.cos, turn.sin))
    return Turn(cos, sin, turn.partner).apply(rows)


def _value_moments(module: torch.nn.Module, num_heads: int, value: torch.Tensor) -> torch.Tensor:
    """`[HK, D_V, D_V]` float64: second moments of the columns of the module's output projection that read each kv head; the identity
    where it is not found."""
    heads, size = value.shape[1], value.shape[3]
    parts = [part for name, part in module.named_modules() if set(name.split(".")) & set(PROJECTIONS)]
    weights = ((part, getattr(part, "weight", None)) for part in parts)
    # transformers' Conv1D is transposed
    columns = (w if isinstance(part, torch.nn.Linear) or not isinstance(w, torch.Tensor) else w.mT for part, w in weights)
    found = projection_moments(columns, heads, size, num_heads)
    return torch.eye(size, dtype=torch.float64, device=value.device).repeat(heads, 1, 1) if found is None else found.double()


def _observed_attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any):
    for observer in WATCHING:
        observer.see(module, query, key, value)
    return plain_attention(module, query, key, value, *args, **kwargs)


AttentionInterface.register(ATTENTION, _observed_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)
