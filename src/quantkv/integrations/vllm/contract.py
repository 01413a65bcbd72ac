"""The names of vLLM that the adapter relies on, and what breaks without each: the one list to go through for a new version.

`missing()` asks the vLLM that is installed, in seconds. A version that was not tested gets its answer in the log, in one line.
"""

from __future__ import annotations

from ..contract import Name, lacking, names_of

_name = names_of("vllm")
BACKEND, LAYERS = "v1.attention.backend", "model_executor.layers.attention"
MLA = f"{LAYERS}.mla_attention"
NAMES = (
    # How the plug-in makes itself known.
    _name("__version__", "the check of the version"),
    _name("config.cache.is_known_kv_cache_dtype", "types", "name"),
    _name("config.cache.register_kv_cache_dtype", "types", "name"),
    _name("v1.kv_cache_interface.KVQuantMode", "types", has="CUSTOM"),
    _name("platforms.current_platform", "devices", has="is_cpu device_type"),
    _name("platforms.interface.Platform.get_attn_backend_cls", "latents", "selected_backend attn_selector_config num_heads"),
    _name("platforms.interface.Platform.check_and_update_config", "latents", "vllm_config"),
    _name("v1.attention.backends.registry.AttentionBackendEnum", "backends", has="CUSTOM get_class get_path"),
    _name("v1.attention.backends.registry.AttentionBackendEnum", "K and V of two sizes", has="FLASH_ATTN_DIFFKV TRITON_ATTN_DIFFKV"),
    _name("v1.attention.backends.registry.register_backend", "backends", "backend class_path"),
    _name("logger.init_logger", "the log", "name"),
    # What a configuration says.
    _name("config.get_current_vllm_config", "configurations"),
    _name("config.set_current_vllm_config", "statistics", "vllm_config"),
    _name("config.VllmConfig.try_verify_and_update_config", "a backend by its type"),
    _name(
        "config.VllmConfig",
        "configurations",
        has="additional_config attention_config cache_config compilation_config kv_transfer_config lora_config max_in_flight_tokens "
        "model_config parallel_config scheduler_config speculative_config",
    ),
    _name(
        "config.CacheConfig",
        "configurations",
        has="block_size cache_dtype enable_prefix_caching get_resolved_kv_cache_layout kv_cache_dtype_skip_layers kv_sharing_fast_prefill "
        "mamba_block_size mamba_cache_mode mamba_page_size_padded",
    ),
    _name("config.AttentionConfig", "latents", has="backend hisparse_config use_prefill_query_quantization"),
    _name(
        "config.ModelConfig",
        "configurations",
        has="architecture dtype get_total_num_hidden_layers get_total_num_kv_heads get_vocab_size hf_config hf_text_config "
        "is_encoder_decoder is_hybrid is_mm_prefix_lm max_model_len model revision skip_tokenizer_init tokenizer use_mla uses_mrope",
    ),
    _name(
        "config.ParallelConfig",
        "ranks",
        has="decode_context_parallel_size prefill_context_parallel_size pipeline_parallel_size tensor_parallel_size use_ubatching "
        "worker_cls",
    ),
    _name(
        "config.SchedulerConfig",
        "warm-up",
        has="disable_hybrid_kv_cache_manager enable_chunked_prefill max_num_batched_tokens max_num_seqs",
    ),
    _name("config.SpeculativeConfig", "drafts", has="attention_backend kv_cache_dtype"),
    _name("config.CompilationConfig", "layers", has="cudagraph_capture_sizes pass_config static_forward_context"),
    _name("config.PassConfig", "writes of latents", has="fuse_rope_kvcache_cat_mla"),
    _name(
        "config.KVTransferConfig",
        "connectors",
        has="enable_permute_local_kv get_from_extra_config is_kv_consumer kv_connector kv_connector_extra_config",
    ),
    _name("compilation.backends.model_tag", "drafts"),
    _name("distributed.get_tensor_model_parallel_rank", "ranks"),
    _name("envs.VLLM_BATCH_INVARIANT", "VLLM_BATCH_INVARIANT"),
    # Backends.
    _name(
        f"{BACKEND}.AttentionBackend",
        "backends",
        has="customize_spec forward_includes_kv_cache_update get_builder_cls get_impl_cls get_name get_supported_kernel_block_sizes "
        "supported_dtypes supported_kv_cache_layouts supports_alibi_sqrt supports_batch_invariance "
        "supports_device_cpu_query_lens_mismatch supports_kv_cache_dtype supports_mm_prefix supports_sink supports_sliding_window",
    ),
    _name(
        f"{BACKEND}.AttentionBackend.supports_combination",
        "refusals of head sizes",
        "head_size dtype kv_cache_dtype block_size use_mla has_sink use_sparse use_mm_prefix device_capability",
    ),
    _name(f"{BACKEND}.AttentionBackend.validate_configuration", "backends on a CPU", "device_capability"),
    _name("v1.attention.selector.AttentionSelectorConfig", "latents", has="_asdict use_mla"),
    _name("v1.kv_cache_layout.KVCacheLayout", "layouts", has="LBHNC BLHNC BHLNC LHBNC"),
    _name("v1.kv_cache_interface.AttentionSpec", "bytes of a page", has="block_size dtype head_size head_size_v state_content_bytes"),
    # Packed blocks.
    _name("platforms.interface.Platform.get_kv_cache_config_builder_cls", "packed blocks", "vllm_config"),
    _name("platforms.interface.Platform.update_block_size_for_backend", "packed blocks beside states", "vllm_config"),
    _name("v1.worker.worker_base.WorkerBase", "packed blocks", has="get_kv_cache_spec get_supported_kv_cache_layouts vllm_config"),
    _name("v1.core.kv_cache_planning.DefaultKVCacheConfigBuilder.get_kv_cache_groups", "packed blocks", "vllm_config kv_cache_spec"),
    _name("v1.core.kv_cache_planning.DefaultKVCacheConfigBuilder", "packed blocks"),
    _name("v1.kv_cache_interface.KVCacheGroupSpec", "packed blocks", has="layer_names kv_cache_spec"),
    _name("v1.kv_cache_interface.UniformTypeKVCacheSpecs", "packed blocks", has="from_specs"),
    _name("v1.kv_cache_interface.iter_layer_specs", "packed blocks"),
    _name("v1.kv_cache_interface.FullAttentionSpec", "packed blocks", has="merge num_heads state_content_size_bytes tokens_per_state"),
    _name("v1.kv_cache_interface.SlidingWindowSpec", "packed blocks", has="sliding_window"),
    _name("v1.kv_cache_interface.ChunkedLocalAttentionSpec", "packed blocks", has="attention_chunk_size"),
    _name("v1.kv_cache_interface.MambaSpec", "packed blocks beside states", has="max_memory_usage_bytes page_size_bytes tp_replicated"),
    _name("v1.kv_cache_interface.AttentionSpec", "packed blocks", has="block_stride_alignment page_size_padded unpadded_page_size_bytes"),
    _name("v1.worker.utils.customize_attention_spec", "packed blocks beside states"),
    _name("model_executor.layers.attention_layer_base.AttentionLayerBase", "packed blocks", has="get_attn_backend get_kv_cache_spec"),
    _name("model_executor.layers.mamba.abstract.MambaBase", "packed blocks beside states"),
    _name("model_executor.layers.mamba.abstract.get_mamba_prefill_checkpoint_alignment", "packed blocks beside states"),
    _name("distributed.kv_transfer.kv_connector.utils.get_kv_connector_cache_layout", "packed blocks"),
    _name("v1.attention.backends.utils.get_kv_connector_cache_layout", "offloaded blocks", "vllm_config"),
    _name("envs.VLLM_KV_CACHE_LAYOUT", "packed blocks"),
    # Layers.
    _name(f"{BACKEND}.AttentionType", "layers", has="DECODER"),
    _name(
        f"{BACKEND}.AttentionImpl.__init__",
        "layers",
        "num_heads head_size scale num_kv_heads alibi_slopes sliding_window kv_cache_dtype logits_soft_cap attn_type "
        "kv_sharing_target_layer_name",
    ),
    _name(
        f"{BACKEND}.AttentionImpl.forward",
        "attention",
        "layer query key value kv_cache attn_metadata output output_scale output_block_scale",
    ),
    _name(f"{BACKEND}.AttentionImpl.process_weights_after_loading", "layers", "act_dtype"),
    _name(f"{BACKEND}.AttentionImpl", "context parallelism", has="total_cp_world_size"),
    _name(
        f"{LAYERS}.Attention",
        "layers",
        has="attn_backend bind_kv_cache head_size_v impl kv_cache layer_name mm_prefix_clamp_sliding_window sliding_window",
    ),
    _name(f"{LAYERS}.chunked_local_attention.ChunkedLocalAttention", "chunks", has="attention_chunk_size"),
    _name("model_executor.models.utils.extract_layer_index", "policies", "layer_name"),
    # Steps.
    _name("forward_context.get_forward_context", "writes"),
    _name("forward_context.ForwardContext", "writes", has="attn_metadata"),
    _name(
        f"{BACKEND}.CommonAttentionMetadata",
        "steps",
        has="block_table_tensor causal max_query_len max_seq_len mm_req_doc_ranges num_actual_tokens num_reqs positions query_start_loc "
        "query_start_loc_cpu seq_lens seq_lens_cpu_upper_bound slot_mapping",
    ),
    _name(
        f"{BACKEND}.AttentionMetadataBuilder",
        "steps",
        has="_cudagraph_support _init_reorder_batch_threshold reorder_batch_threshold requires_block_table_width",
    ),
    _name(f"{BACKEND}.AttentionMetadataBuilder.build", "steps", "common_prefix_len common_attn_metadata fast_build"),
    _name(f"{BACKEND}.AttentionMetadataBuilder.build_for_cudagraph_capture", "CUDA graphs", "common_attn_metadata"),
    _name(f"{BACKEND}.AttentionMetadataBuilder.build_for_drafting", "drafts", "common_attn_metadata draft_index"),
    _name(f"{BACKEND}.AttentionMetadataBuilder.get_cudagraph_support", "CUDA graphs", "vllm_config kv_cache_spec"),
    _name(f"{BACKEND}.AttentionMetadataBuilder.get_varlen_cudagraph_max_query_len", "CUDA graphs", "vllm_config kv_cache_spec"),
    _name(f"{BACKEND}.AttentionCGSupport", "CUDA graphs", has="NEVER UNIFORM_BATCH UNIFORM_SINGLE_TOKEN_DECODE"),
    _name(f"{BACKEND}.max_decode_query_len", "drafts", "vllm_config"),
    _name("v1.attention.backends.utils.compute_mm_prefix_range_tensor", "images"),
    # Latents.
    _name(f"{MLA}.MLACommonBackend", "latents", has="get_supported_head_sizes is_mla"),
    _name(f"{MLA}.get_mla_dims", "bytes of a page of latents", "model_config"),
    _name(f"{MLA}.MLADims", "bytes of a page of latents", has="kv_lora_rank qk_rope_head_dim"),
    _name(
        f"{MLA}.MLACommonImpl",
        "latents",
        has="_concat_k_nope_k_pe kv_b_proj kv_lora_rank qk_nope_head_dim qk_rope_head_dim reserve_workspace supports_pcp "
        "supports_quant_query_input v_head_dim",
    ),
    _name(
        f"{MLA}.MLACommonImpl.__init__",
        "latents",
        "num_heads head_size scale num_kv_heads alibi_slopes sliding_window kv_cache_dtype logits_soft_cap attn_type "
        "kv_sharing_target_layer_name indexer q_pad_num_heads",
    ),
    _name(
        f"{MLA}.MLACommonImpl.do_kv_cache_update",
        "writes of latents",
        "kv_c_normed k_pe kv_cache slot_mapping kv_cache_dtype k_scale skip_scale",
    ),
    _name(f"{MLA}.MLACommonImpl.forward_mqa", "decode of latents", "q kv_c_and_k_pe_cache attn_metadata layer"),
    _name(
        f"{MLA}.MLACommonImpl.forward_mha",
        "prompts of latents",
        "q kv_c_normed k_pe kv_c_and_k_pe_cache attn_metadata k_scale output output_scale",
    ),
    _name(f"{MLA}.MLACommonImpl._compute_prefill_context", "prompts of latents", "q kv_c_and_k_pe_cache attn_metadata k_scale"),
    _name(f"{MLA}.init_mla_context_partial", "prompts of latents", "chunked_context attn_output attn_softmax_lse num_tokens"),
    _name(f"{MLA}.accumulate_mla_context_chunk", "prompts of latents", "chunk attn_output attn_softmax_lse output output_lse"),
    _name("v1.attention.backends.mla.prefill.MLAPrefillBackend.run_prefill_context_chunk", "prompts of latents", "chunk q k v"),
    _name(
        f"{MLA}.MLACommonMetadata", "steps of latents", has="decode num_actual_tokens num_decode_tokens num_decodes prefill slot_mapping"
    ),
    _name(f"{MLA}.MLACommonPrefillMetadata", "prompts of latents", has="block_table chunked_context prefill_backend query_start_loc"),
    _name(f"{MLA}.MLACommonPrefillMetadata.ChunkedContextMetadata", "prompts of latents", has="chunks workspace"),
    _name(
        f"{MLA}.MLACommonPrefillMetadata.ContextChunk",
        "prompts of latents",
        has="cu_seq_lens num_context_tokens request_slice starts token_slice",
    ),
    _name(f"{MLA}.MLACommonMetadataBuilder.__init__", "steps of latents", "kv_cache_spec layer_names vllm_config device metadata_cls"),
    _name(f"{MLA}.MLACommonMetadataBuilder", "steps of latents", has="query_len_support"),
    _name(f"{MLA}.QueryLenSupport", "drafts", has="VARLEN"),
    _name(f"{MLA}.MLAAttention.process_weights_after_loading", "rotations of latents", "act_dtype"),
    _name(f"{MLA}.MLAAttention.forward_impl", "statistics of latents", "q k_c_normed k_pe kv_cache attn_metadata output"),
    _name(f"{MLA}.MLAAttention", "latents", has="attn_backend bind_kv_cache impl kv_cache layer_name"),
    # Connectors and statistics.
    _name("distributed.kv_transfer.kv_connector.factory.KVConnectorFactory.create_connector", "connectors", "config role kv_cache_config"),
    _name("distributed.kv_transfer.kv_connector.factory.KVConnectorFactory", "connectors", has="_registry get_connector_class_by_name"),
    _name("distributed.kv_transfer.kv_connector.v1.nixl.base_worker", "digests in NIXL's handshake", has="compute_nixl_compatibility_hash"),
    _name("v1.kv_cache_interface.KVCacheConfig", "connectors", has="kv_cache_groups"),
    _name("v1.kv_cache_interface.KVCacheGroupSpec", "connectors", has="kv_cache_spec"),
    _name("forward_context.set_forward_context", "statistics", "attn_metadata vllm_config num_tokens skip_compiled"),
    _name("utils.import_utils.resolve_obj_by_qualname", "statistics", "qualname"),
    _name("v1.worker.gpu_worker.Worker", "statistics", has="determine_available_memory model_runner"),
    _name("v1.worker.gpu_model_runner.GPUModelRunner", "statistics", has="device get_model"),
    _name("v1.worker.gpu.model_runner.GPUModelRunner", "statistics", has="device get_model"),
)


def missing(names: tuple[Name, ...] = NAMES) -> list[str]:
    """What the vLLM that is installed lacks of `names`, each with what breaks: `vllm.a.b (types)`, `vllm.a.b: parameter c (drafts)`."""
    return lacking(names)
