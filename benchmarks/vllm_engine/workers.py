"""What runs inside vLLM's workers, one for each GPU."""

from __future__ import annotations

import torch
from random_models import draw_weights_of


def draw_weights(worker) -> None:
    """`draw_weights_of` this worker's model."""
    draw_weights_of(worker.model_runner.model)


def draw_weights_at_load() -> None:
    """Let vLLM's loader of dummy weights draw them as `draw_weights` does, in this process: an engine measures these at start."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    DummyModelLoader.load_weights = lambda self, model, model_config: draw_weights_of(model)


def keep_flash_attention_3() -> None:
    """Let engines of this process prompt by FlashAttention 3, where vLLM asks for 2 by a note in the log (TurboQuant)."""
    from vllm.engine.arg_utils import EngineArgs

    create = EngineArgs.create_engine_config

    def created(self, *args, **options):
        config = create(self, *args, **options)
        config.attention_config.flash_attn_version = 3
        return config

    EngineArgs.create_engine_config = created


def no_multicast() -> None:
    """Let engines of this process, and ranks that they fork, take no buffers for NVLink multicast beside vLLM's own all-reduce."""
    from vllm.distributed.device_communicators import custom_all_reduce

    custom_all_reduce.torch_symm_mem = None


def note_loads() -> list[tuple[int, float]]:
    """Bytes and seconds of what `OffloadingConnector` copies from the host in this process from now on, by events of its own stream."""
    from vllm.v1.kv_offload.cpu.gpu_worker import SingleDirectionOffloadingHandler as Handler

    loads, finished = [], Handler.get_finished

    def noted(self):
        results = finished(self)
        if not self.gpu_to_cpu:
            loads.extend((result.transfer_size, result.transfer_time) for result in results)
        return results

    Handler.get_finished = noted
    return loads


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


def draft_twice(worker) -> None:
    """From now on the model that drafts drafts each step again from the same state, a draft at a time and without a graph of drafts.
    `drafted` says how often both are one."""
    speculator, worker.drafted = worker.model_runner.speculator, []
    propose, manager = speculator.propose, speculator.decode_cudagraph_manager

    def twice(*given, **named):
        kept = [[t.clone() for t in value] if isinstance(value, list) else value for value in given]
        kept[3] = given[3].clone()  # hidden states lie in the memory of graphs, as aux_hidden_states in the list do
        first = propose(*given, **named).clone()
        fused, captured = speculator.supports_decode_metadata_update, manager._graphs_captured
        speculator.supports_decode_metadata_update = manager._graphs_captured = False
        again = propose(*kept, **named)
        speculator.supports_decode_metadata_update, manager._graphs_captured = fused, captured
        worker.drafted.append((fused, first, again.clone()))
        return again

    speculator.propose = twice


def drafted(worker) -> dict:
    """Of the drafts behind the first of each step, how many were the same twice; whether they were made in one graph."""
    pairs = [(first[:, 1:], again[:, 1:]) for _, first, again in worker.drafted]
    return {
        "fused": all(fused for fused, *_ in worker.drafted),
        "drafts": sum(again.numel() for _, again in pairs),
        "equal": sum(int((first == again).sum()) for first, again in pairs),
        "different_tokens": len(torch.cat([again for _, again in pairs]).unique()),
    }


def facts(worker) -> dict:
    """Choices of this worker: classes, graphs, layout, who serves; of several ranks, whether vLLM's own all-reduce and multicast run."""
    runner, config = worker.model_runner, worker.model_runner.vllm_config
    layers = [layer for layer in config.compilation_config.static_forward_context.values() if hasattr(layer, "impl")]
    found = {
        "implementation": type(layers[0].impl).__name__,
        "backend": layers[0].get_attn_backend().get_name(),
        "graphs": str(config.compilation_config.cudagraph_mode),
        "layout": str(config.cache_config.kv_cache_layout),
        "runner": type(runner).__module__,
    }
    if found["implementation"].startswith("QuantKV"):
        from quantkv.integrations import vllm as plugin

        found["served"] = plugin.served
    if config.parallel_config.tensor_parallel_size > 1:
        from vllm.distributed import get_tp_group

        reduce = getattr(get_tp_group().device_communicator, "ca_comm", None)
        found["all_reduce_by_vllm"] = reduce is not None and not reduce.disabled
        found["multicast"] = bool(getattr(reduce, "mnnvl_multicast_ptr", 0))
    return found


def measured(worker) -> dict[str, torch.Tensor]:
    """Statistics that this rank measured of its kv heads at start, by layer and part."""
    layers = worker.model_runner.vllm_config.compilation_config.static_forward_context.values()
    found = next(layer.impl.measured for layer in layers if hasattr(layer, "impl"))
    return {f"{number}.{part}": t.cpu() for number, layer in found.layers.items() for part, t in layer.tensors().items()}
