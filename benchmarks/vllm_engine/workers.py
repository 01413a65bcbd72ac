"""What runs inside vLLM's workers, one for each GPU."""

from __future__ import annotations

import torch


def draw_weights(worker, seed: int = 1234) -> None:
    """Weights at random in place of vLLM's dummies, which are all within 1e-3, so that attention would do nothing."""
    with torch.no_grad():
        for i, (name, parameter) in enumerate(sorted(worker.model_runner.model.named_parameters())):
            if parameter.dim() < 2:
                if parameter.is_floating_point():
                    parameter.fill_(1.0)
            else:
                generator = torch.Generator(device=parameter.device).manual_seed(seed + i)
                parameter.normal_(0.0, 1.0 if "embed" in name else 0.02, generator=generator)


def tile(worker, blocks: list[int], num_blocks: int) -> None:
    """Copy the pages of `blocks` over the whole cache of every layer, again and again."""
    for layer in worker.model_runner.vllm_config.compilation_config.static_forward_context.values():
        pages = getattr(layer, "kv_cache", None)
        if not isinstance(pages, torch.Tensor) or pages.numel() == 0:
            continue
        split = pages.shape[0] // num_blocks  # kernel blocks of a block
        source = pages[torch.tensor([i * split + j for i in blocks for j in range(split)], device=pages.device)].clone()
        for first in range(0, pages.shape[0], len(source)):
            count = min(len(source), pages.shape[0] - first)
            pages[first : first + count] = source[:count]


def facts(worker) -> dict:
    """What this worker chose: classes, graphs, layout, who serves."""
    runner, config = worker.model_runner, worker.model_runner.vllm_config
    layers = [layer for layer in config.compilation_config.static_forward_context.values() if hasattr(layer, "impl")]
    found = {
        "implementation": type(layers[0].impl).__name__,
        "backend": layers[0].get_attn_backend().get_name(),
        "graphs": str(config.compilation_config.cudagraph_mode),
        "layout": str(config.cache_config.kv_cache_layout),
        "runner": type(runner).__module__,
    }
    if found["implementation"] == "QuantKVImpl":
        from quantkv.integrations import vllm as plugin

        found["served"] = plugin.served
    return found
