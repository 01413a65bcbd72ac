"""The names of SGLang that the adapter relies on, and what breaks without each: the one list to go through for a new version.

`missing()` asks the SGLang that is installed. A version that was not tested gets its answer in the log, in one line.
"""

from __future__ import annotations

from ..contract import Name, lacking, names_of

_name = names_of("sglang")
CONFIGURATOR, SIZES = "srt.mem_cache.kv_cache_configurator.KVCacheConfigurator", "srt.model_executor.pool_configurator"
DRAFTS = "srt.speculative.draft_utils.DraftBackendFactory"
BACKEND = "srt.layers.attention.base_attn_backend.AttentionBackend"
NAMES = (
    # How the plug-in makes itself known.
    _name("__version__", "the check of the version"),
    _name("srt.plugins.hook_registry.HookRegistry.register", "hooks", "target hook hook_type"),
    _name("srt.plugins.hook_registry.HookType", "hooks", has="AROUND BEFORE"),
    _name("srt.arg_groups.choices.ATTENTION_BACKEND_CHOICES", "backends"),
    _name("srt.arg_groups.choices.add_attention_backend_choices", "backends"),
    _name("srt.layers.attention.attention_registry.register_attention_backend", "backends", "name"),
    # What a configuration says.
    _name("srt.server_args.ServerArgs.resolve_once", "arguments"),
    _name(
        "srt.server_args.ServerArgs",
        "arguments",
        has="_resolution_finished attention_backend enable_lora lora_paths max_running_requests page_size",
    ),
    _name("srt.arg_groups.overrides.attention_backends_of", "arguments", "cfg"),
    _name("srt.arg_groups.overrides.resolved_view", "arguments", "server_args"),
    _name("srt.arg_groups.overrides.model_config_of", "arguments"),
    _name("srt.environ.envs", "arguments", has="SGLANG_ENABLE_POST_CAPTURE_KV_SIZING SGLANG_USE_HND_KVCACHE"),
    _name("srt.configs.model_config.AttentionArch", "refusals of models", has="MHA"),
    _name(
        "srt.configs.model_config.ModelConfig",
        "models",
        has="attention_arch context_len dtype get_total_num_kv_heads head_dim hf_config is_encoder_decoder model_path num_hidden_layers "
        "revision v_head_dim",
    ),
    _name("srt.runtime_context.get_parallel", "ranks"),
    # Pools.
    _name(f"{CONFIGURATOR}.configure", "pools", "pre_model_load_memory"),
    _name(f"{CONFIGURATOR}._resolve_kv_pool_class", "pools", "kind default"),
    _name(
        CONFIGURATOR,
        "pools",
        has="attn_dp_size device is_draft_worker is_hybrid_swa kv_cache_dtype layer_info mambaish_config model model_config page_size "
        "pp_size server_args",
    ),
    _name(
        "srt.model_executor.model_runner_components.layer_setup.ModelLayerInfo",
        "pools",
        has="start_layer end_layer full_attention_layer_ids swa_attention_layer_ids",
    ),
    _name(f"{SIZES}.DefaultPoolConfigurator._compute_cell_size", "tokens that fit", "kvc num_layers"),
    _name(f"{SIZES}.HybridSWAPoolConfigurator.__init__", "tokens that fit with windows", "kvc"),
    _name(f"{SIZES}.HybridSWAPoolConfigurator._recompute_cell_size", "tokens that fit with windows"),
    _name(f"{SIZES}.HybridSWAPoolConfigurator", "tokens that fit with windows", has="_full_per_token _swa_per_token"),
    _name(
        "srt.mem_cache.memory_pool.MHATokenToKVPool",
        "pools",
        has="_clear_buffers _create_buffers allocation_label device get_contiguous_buf_infos get_cpu_copy get_key_buffer get_kv_size_bytes "
        "get_value_buffer host_pool_decls k_buffer layer_num load_cpu_copy move_kv_cache page_size set_kv_buffer "
        "set_kv_buffer_prefix_valid size v_buffer",
    ),
    _name("srt.mem_cache.memory_pool.MHATokenToKVPool.__init__", "pools", "size page_size dtype quant_method post_capture_active"),
    _name("srt.mem_cache.swa_memory_pool.SWAKVPool.translate_loc_from_full_to_swa", "windows", "kv_indices"),
    # Layers.
    _name("srt.layers.radix_attention.AttentionType", "layers", has="DECODER"),
    _name(
        "srt.layers.radix_attention.RadixAttention",
        "layers",
        has="attn_type is_cross_attention k_scale_float layer_id logit_cap logit_capping_method pos_encoding_mode qk_head_dim scaling "
        "sliding_window_size tp_k_head_num tp_q_head_num use_irope v_head_dim v_scale_float xai_temperature_len",
    ),
    # Passes.
    _name("srt.model_executor.model_runner.ModelRunner.init_attention_backends", "the check that it serves"),
    _name(
        "srt.model_executor.model_runner.ModelRunner",
        "passes",
        has="attn_backend device max_running_requests model model_config page_size req_to_token_pool server_args token_to_kv_pool",
    ),
    _name("srt.mem_cache.memory_pool.ReqToTokenPool", "block tables", has="req_to_token"),
    _name(
        "srt.model_executor.forward_batch_info.ForwardBatch",
        "passes",
        has="batch_size extend_prefix_lens_cpu extend_seq_lens extend_seq_lens_cpu forward_mode out_cache_loc positions req_pool_indices "
        "seq_lens seq_lens_cpu spec_info",
    ),
    _name(
        "srt.model_executor.forward_batch_info.ForwardMode",
        "passes",
        has="DECODE DRAFT_EXTEND_V2 EXTEND MIXED SPLIT_PREFILL TARGET_VERIFY is_decode is_decode_or_idle is_idle",
    ),
    _name(
        "srt.model_executor.forward_batch_info.ForwardBatch.__init__",
        "statistics",
        "forward_mode batch_size input_ids req_pool_indices seq_lens out_cache_loc seq_lens_sum positions extend_num_tokens "
        "extend_seq_lens extend_prefix_lens extend_start_loc extend_prefix_lens_cpu extend_seq_lens_cpu seq_lens_cpu",
    ),
    _name("srt.model_executor.forward_context.ForwardContext.__init__", "statistics", "attn_backend"),
    _name("srt.model_executor.forward_context.forward_context", "statistics"),
    # Drafts.
    _name(f"{DRAFTS}.create_decode_backend", "drafts"),
    _name(f"{DRAFTS}.create_draft_extend_backend", "drafts"),
    _name(f"{DRAFTS}.__init__", "drafts", "draft_model_runner topk speculative_num_steps"),
    _name("srt.speculative.eagle_info.EagleVerifyInput", "drafts", has="tree_topk"),
    _name("srt.speculative.spec_info.SpecInput", "drafts", has="num_tokens_per_req"),
    _name("srt.model_executor.cuda_graph_config.Backend", "drafts", has="DISABLED"),
    # Attention backends.
    _name(f"{BACKEND}.needs_cpu_seq_lens", "drafts"),
    _name(f"{BACKEND}.forward", "statistics", "q k v layer forward_batch save_kv_cache"),
    _name(f"{BACKEND}.init_forward_metadata", "passes", "forward_batch"),
    _name(f"{BACKEND}.init_forward_metadata_out_graph", "CUDA graphs", "forward_batch in_capture"),
    _name(f"{BACKEND}.init_cuda_graph_state", "CUDA graphs", "max_bs max_num_tokens"),
    _name(f"{BACKEND}.get_cuda_graph_seq_len_fill_value", "CUDA graphs"),
    _name(f"{BACKEND}.forward_decode", "attention", "q k v layer forward_batch save_kv_cache"),
    _name(f"{BACKEND}.forward_extend", "attention", "q k v layer forward_batch save_kv_cache"),
    _name(f"{BACKEND}.support_triton", "attention"),
)


def missing(names: tuple[Name, ...] = NAMES) -> list[str]:
    """What the SGLang that is installed lacks of `names`, each with what breaks: `sglang.a.b (pools)`."""
    return lacking(names)
