"""Key means and Hessians that a server measures of its own model at start, without a file.

Each rank makes one pass of the loaded model, for its own heads, right before SGLang measures how much memory is left for pages. The pass is
eager and needs no pages: an attention backend of its own attends over the rows of the pass itself.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from ...calibration import Calibration
from ..at_start import LORA, RECURRENCE, SOME_LAYERS, measured
from ..seen_layers import SeenLayers, ServedModel
from . import logger
from .layers import Layers

ROTARIES = "sglang.srt.layers.rotary_embedding"
BODIES = ("model", "language_model.model")  # where a model has its layers, in front of its output's weights


class Observer(AttentionBackend):
    """Attention of the pass that measures a model, over its own rows.

    seen: what it shows. token_to_kv_pool: what models ask before they store rows themselves.
    """

    token_to_kv_pool = SimpleNamespace(dtype=torch.uint8)

    def __init__(self, layers: Layers) -> None:
        super().__init__()
        self.layers, self.seen = layers, SeenLayers(ROTARIES)

    def forward(self, q, k, v, layer, forward_batch, save_kv_cache=True, **given):
        """Attention of a layer's rows, as `QuantKVBackend` takes them."""
        q = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if k is not None:
            k, v = k.reshape(-1, layer.tp_k_head_num, layer.qk_head_dim), v.reshape(-1, layer.tp_v_head_num, layer.v_head_dim)
        attention = self.layers.attention[id(layer)].with_sinks(given.get("sinks"))
        number = None if k is None else layer.layer_id
        return self.seen.attend(number, layer.layer_id, attention, q, k, v).flatten(1)


def reason_against(configurator: Any) -> str | None:
    """Why no pass over this model shows its keys, in words; None where one does."""
    if configurator.pp_size > 1:
        return SOME_LAYERS.format("pp_size")
    if configurator.attn_dp_size > 1:
        return "attn_dp_size is above 1: ranks have requests of their own"
    if configurator.mambaish_config is not None:
        return RECURRENCE
    if configurator.server_args.enable_lora or configurator.server_args.lora_paths:
        return LORA
    return None


def take_statistics(configurator: Any, layers: Layers) -> None:
    """Measure a model where its policy asks for that. Where it cannot be measured: one line says so, and rows are stored without;
    NotImplementedError where the policy requires it."""
    if layers.policy.wants_statistics:
        made = measured(layers.policy.statistics, reason_against(configurator), lambda: _measured(configurator, layers), logger)
        if made is not None:
            layers.take_statistics(made)


def _measured(configurator: Any, layers: Layers) -> tuple[Calibration, str]:
    """The calibration of this rank's heads, and what it was made of."""
    args, config, device = configurator.server_args, configurator.model_config, torch.device(configurator.device)
    tokenizer = None if args.skip_tokenizer_init else args.tokenizer_path or args.model_path
    sizes = config.num_hidden_layers, config.context_len, config.context_len, config.vocab_size
    served, observer = ServedModel(configurator.model, device, layers.dtype, *sizes, tokenizer), Observer(layers)
    modules = ((m.layer_id, m, (m.tp_k_head_num, m.v_head_dim, m.tp_q_head_num)) for m in layers.modules)
    forward = partial(_forward, _body(configurator.model), observer)
    return observer.seen.measure(served, layers.of.keys(), modules, forward)


def _body(model: torch.nn.Module) -> torch.nn.Module:
    """What holds a model's layers."""
    for path in BODIES:
        found: Any = model
        for name in path.split("."):
            found = getattr(found, name, None)
        if isinstance(found, torch.nn.Module):
            return found
    raise NotImplementedError(f"{type(model).__name__} has none of {', '.join(BODIES)}")


def _forward(body: torch.nn.Module, observer: Observer, ids: torch.Tensor) -> None:
    """One eager pass over tokens `[T]` that stand at the first positions."""
    count, device = len(ids), ids.device
    one, none = torch.tensor([count], device=device), torch.zeros(1, dtype=torch.int64, device=device)
    places = torch.arange(count, device=device)
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=ids,
        req_pool_indices=none,
        seq_lens=one,
        out_cache_loc=places,
        seq_lens_sum=count,
        positions=places,
        extend_num_tokens=count,
        extend_seq_lens=one,
        extend_prefix_lens=none,
        extend_start_loc=none,
        extend_prefix_lens_cpu=[0],
        extend_seq_lens_cpu=[count],
        seq_lens_cpu=torch.tensor([count], device="cpu"),
    )
    with forward_context(ForwardContext(attn_backend=observer)):
        body(ids, places, batch)
