"""Tiny random decoders of every family of transformers that people name."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import transformers
from packaging.version import Version
from transformers import PreTrainedModel

VOCABULARY = 96
WINDOW = 12  # prompts and continuations are longer

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WINDOWS = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2, "mamba_chunk_size": 16}
VISION = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16, "patch_size": 8}


def before(version: str) -> bool:
    """Whether the transformers that is installed is older. pyproject.toml's range holds some that know less of a model."""
    return Version(transformers.__version__) < Version(version)


class Architecture(NamedTuple):
    """name: as people say it. family: prefix of transformers' classes. sizes: beside SIZES. config, model: endings of the classes;
    model may be a class of another family.
    text: what a model of images and text names its decoder's configuration; its own go beside it."""

    name: str
    family: str
    sizes: Mapping[str, Any] = MappingProxyType({})
    config: str = "Config"
    model: str = "ForCausalLM"
    text: str = ""
    beside: Mapping[str, Any] = MappingProxyType({})

    @property
    def is_known(self) -> bool:
        """Whether the transformers that is installed has it. pyproject.toml's range holds some that do not have all."""
        return hasattr(transformers, self.family + self.config)

    def build(self) -> PreTrainedModel:
        """A random model in float32."""
        kind = getattr(transformers, self.family + self.config)
        sizes = {**SIZES, **self.sizes}
        config = kind(**{self.text: sizes}, **copy.deepcopy(dict(self.beside))) if self.text else kind(**copy.deepcopy(sizes))
        torch.manual_seed(0)
        name = self.model if hasattr(transformers, self.model) else self.family + self.model
        model = getattr(transformers, name)(config).eval().float()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(0, 0.15)
                elif not parameter.any():
                    parameter.normal_(0, 0.1)  # biases and sinks start at zero
        return model


A = Architecture
ARCHITECTURES = [
    A("Llama", "Llama"),
    A("Mistral", "Mistral", {"sliding_window": WINDOW}),
    A("Ministral 3", "Ministral3", {"head_dim": 16}),
    A("Mixtral", "Mixtral", EXPERTS),
    A(
        "Llama 4",
        "Llama4",
        {**EXPERTS, "attention_chunk_size": WINDOW, "intermediate_size_mlp": 64, "no_rope_layers": [1, 0], "head_dim": 16},
        "TextConfig",
    ),
    A("Qwen2", "Qwen2"),
    A("Qwen2-MoE", "Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 32}),
    A("Qwen3", "Qwen3", {"head_dim": 16}),
    A("Qwen3-MoE", "Qwen3Moe", {**EXPERTS, "head_dim": 16}),
    A("Qwen3-Next", "Qwen3Next", {**EXPERTS, **LINEAR, "head_dim": 16, "shared_expert_intermediate_size": 32}),
    A("Qwen3.5", "Qwen3_5", {**LINEAR, "head_dim": 16}, "TextConfig"),
    A("Qwen3.5-MoE", "Qwen3_5Moe", {**EXPERTS, **LINEAR, "head_dim": 16, "shared_expert_intermediate_size": 32}, "TextConfig"),
    A("Gemma", "Gemma", {"head_dim": 16}),
    A("Gemma 2", "Gemma2", {"head_dim": 16, "sliding_window": WINDOW, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 16}),
    A("Gemma 3", "Gemma3", {"head_dim": 16, "query_pre_attn_scalar": 16, **WINDOWS}, "TextConfig"),
    A(
        "Gemma 3n",
        "Gemma3n",
        {
            "head_dim": 16,
            "sliding_window": WINDOW,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 16,
            "laurel_rank": 8,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0] * 4,
            "intermediate_size": [64] * 4,
        },
        "TextConfig",
    ),
    A(
        "Gemma 4",
        "Gemma4",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "sliding_window": WINDOW,
            "layer_types": ["sliding_attention", "full_attention"],
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 16,
            "num_kv_shared_layers": 0,
        },
        "TextConfig",
    ),
    A(
        "Gemma 4, shared keys",
        "Gemma4",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": WINDOW,
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 16,
            "num_kv_shared_layers": 2,
        },
        "TextConfig",
    ),
    A("VaultGemma", "VaultGemma", {"head_dim": 16, "query_pre_attn_scalar": 16, **WINDOWS}),
    A("RecurrentGemma", "RecurrentGemma", {"num_hidden_layers": 3, "head_dim": 16, "attention_window_size": WINDOW, "lru_width": 64}),
    A("Phi", "Phi"),
    A("Phi-3", "Phi3", {"sliding_window": WINDOW}),
    A("Phi-MoE", "Phimoe", {**EXPERTS, "sliding_window": WINDOW}),
    A("GPT-2", "GPT2", {"n_embd": 64, "n_layer": 2, "n_head": 4}, model="LMHeadModel"),
    A("GPTBigCode", "GPTBigCode", {"n_embd": 64, "n_layer": 2, "n_head": 4}),
    A("GPT-NeoX", "GPTNeoX"),
    A("GPT-OSS", "GptOss", {**EXPERTS, **WINDOWS, "head_dim": 16}),
    A("OLMo", "Olmo"),
    A("OLMo 2", "Olmo2"),
    A("OLMo 3", "Olmo3", WINDOWS),
    A("OLMoE", "Olmoe", EXPERTS),
    A("OLMo hybrid", "OlmoHybrid", LINEAR),
    A("Cohere", "Cohere"),
    A("Cohere 2", "Cohere2", WINDOWS),
    A("GLM", "Glm", {"head_dim": 16}),
    A("GLM-4", "Glm4", {"head_dim": 16}),
    A("GLM-4-MoE", "Glm4Moe", {**EXPERTS, "n_routed_experts": 4, "first_k_dense_replace": 1, "head_dim": 16}),
    A("GLM-4.7-Flash", "Glm4MoeLite", LATENT),
    A("Granite", "Granite"),
    A("Granite-MoE", "GraniteMoe", EXPERTS),
    A(
        "Granite hybrid",
        "GraniteMoeHybrid",
        {**EXPERTS, **MAMBA, "layer_types": ["linear_attention", "full_attention"], "shared_intermediate_size": 64},
    ),
    A("SmolLM3", "SmolLM3"),
    A("StarCoder2", "Starcoder2", {"sliding_window": WINDOW}),
    A("StableLM", "StableLm"),
    A("Falcon-H1", "FalconH1", {**MAMBA, "mamba_d_ssm": 128, "head_dim": 16}),
    A("DeepSeek V2", "DeepseekV2", LATENT),
    A("DeepSeek V3", "DeepseekV3", LATENT),
    A("Kimi Linear", "KimiLinear", {**LATENT, **LINEAR, "num_experts": 4, "linear_num_heads": 4, "linear_head_dim": 16}),
    A("MiniCPM3", "MiniCPM3", LATENT),
    A(
        "LongCat-Flash",
        "LongcatFlash",
        {
            **LATENT,
            "head_dim": 16,
            "num_layers": 1,
            "ffn_hidden_size": 64,
            "expert_ffn_hidden_size": 32,
            "zero_expert_num": 2,
            "moe_topk": 2,
        },
    ),
    A("Youtu", "Youtu", LATENT),
    A(
        "Jamba",
        "Jamba",
        {**EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8, "mamba_dt_rank": 8, "use_mamba_kernels": False},
    ),
    A("Bamba", "Bamba", {**MAMBA, "attn_layer_indices": [1]}),
    A(
        "Zamba2",
        "Zamba2",
        {
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
            "num_hidden_layers": 4,
            "mamba_d_state": 16,
            "mamba_ngroups": 1,
            "n_mamba_heads": 4,
            "num_mem_blocks": 1,
            "attention_head_dim": 32,
            "mamba_headdim": 32,
            "chunk_size": 16,
            "adapter_rank": 8,
        },
    ),
    A("Nemotron", "Nemotron", {"head_dim": 16}),
    A(
        "Nemotron-H",
        "NemotronH",
        {
            "layers_block_type": ["mamba", "attention", "moe"],
            "num_hidden_layers": 3,
            "head_dim": 16,
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 1,
            "chunk_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    A("Exaone 4", "Exaone4", WINDOWS),
    A("Ernie 4.5", "Ernie4_5", {"head_dim": 16}),
    A("Ernie 4.5 MoE", "Ernie4_5_Moe", {**EXPERTS, "moe_num_experts": 4, "moe_k": 2}),
    A("Hunyuan", "HunYuanDenseV1", {"head_dim": 16}),
    A("Hunyuan MoE", "HunYuanMoEV1", {**EXPERTS, "head_dim": 16, "moe_topk": 2}),
    A("MiniMax-M2", "MiniMaxM2", {**EXPERTS, "head_dim": 16}),
    A("LFM2", "Lfm2", {"layer_types": ["conv", "full_attention"]}),
    A("LFM3", "Lfm3", {"layer_types": ["conv", "full_attention"]}),
    A("Arcee", "Arcee", {"head_dim": 16}),
    A("Seed-OSS", "SeedOss", {"head_dim": 16}),
    A("Apertus", "Apertus"),
    A("Apertus 1.5", "Apertus1p5", {}, "TextConfig", "TextForCausalLM"),
    A("EXAONE", "Exaone", model="LlamaForCausalLM"),
    A("Sarvam-MoE", "SarvamMoE", {**EXPERTS, "head_dim": 16, "n_routed_experts": 4}, model="Glm4MoeForCausalLM"),
    A("Sarvam-MLA", "SarvamMLA", LATENT, model="DeepseekV3ForCausalLM"),
    A("Lara Mini", "LaraMini", {**EXPERTS, **LINEAR, "head_dim": 16, "shared_expert_intermediate_size": 32}),
    A(
        "Dory",
        "Dory",
        {
            **WINDOWS,
            "layer_types": WINDOWS["layer_types"] * 2,
            "num_hidden_layers": 4,
            "head_dim": 16,
            "n_input_layers": 1,
            "n_output_layers": 1,
        },
    ),
    A("Inkling 2 Loop", "Inkling2Loop", {"head_dim": 16}, "TextConfig"),
    A("BitNet", "BitNet"),
    A("Persimmon", "Persimmon"),
    A("OPT", "OPT", {"ffn_dim": 64, "word_embed_proj_dim": 64}),
    A("BioGPT", "BioGpt"),
    A("Afmoe (Trinity)", "Afmoe", {**EXPERTS, **WINDOWS, "head_dim": 16, "num_dense_layers": 1}),
    A("MiMo-V2-Flash", "MiMoV2Flash", {**EXPERTS, **WINDOWS, "head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4}),
    A(
        "Dots 1",
        "Dots1",
        {
            **EXPERTS,
            "n_routed_experts": 4,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "n_shared_experts": 1,
            "head_dim": 16,
        },
    ),
    A(
        "Llava",
        "Llava",
        {"model_type": "llama"},
        model="ForConditionalGeneration",
        text="text_config",
        beside={"vision_config": {"model_type": "clip_vision_model", **VISION}, "image_token_index": 90},
    ),
    A(
        "Qwen2-VL",
        "Qwen2VL",
        {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 1e4}},
        model="ForConditionalGeneration",
        text="text_config",
        beside={
            "vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4, "mlp_ratio": 2},
            "image_token_id": 90,
            "video_token_id": 91,
            "vision_start_token_id": 92,
            "vision_end_token_id": 93,
        },
    ),
    A(
        "Gemma 3 with images",
        "Gemma3",
        {"head_dim": 16, "query_pre_attn_scalar": 16, **WINDOWS},
        model="ForConditionalGeneration",
        text="text_config",
        beside={"vision_config": VISION, "mm_tokens_per_image": 4, "image_token_index": 90, "boi_token_index": 91, "eoi_token_index": 92},
    ),
    A("MiniMax-M1", "MiniMax", {**EXPERTS, "head_dim": 16, "layer_types": ["linear_attention", "full_attention"], "block_size": 16}),
    A("Falcon", "Falcon"),
    A("Bloom", "Bloom", {"n_head": 4}),
    A("MPT", "Mpt", {"d_model": 64, "n_heads": 4, "n_layers": 2, "max_seq_len": 256}),
    A("GPT-J", "GPTJ", {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8}),
    A("CodeGen", "CodeGen", {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8}),
    A("GPT-Neo", "GPTNeo", {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": WINDOW}),
    A("XGLM", "XGLM", {"d_model": 64, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64}),
    A(
        "Zamba",
        "Zamba",
        {
            "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
            "num_hidden_layers": 4,
            "mamba_d_state": 8,
            "mamba_dt_rank": 8,
            "n_mamba_heads": 2,
            "use_mamba_kernels": False,
        },
    ),
    A("Mamba", "Mamba", {"state_size": 8}),
    A("DiffLlama", "DiffLlama"),
    A("JetMoe", "JetMoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "kv_channels": 16}),
    A("Doge", "Doge"),
    A("DeepSeek V3.2", "DeepseekV32", {**LATENT, "index_n_heads": 2, "index_head_dim": 32, "index_topk": 8}),
    A("DeepSeek V4", "DeepseekV4"),
    A("Moshi", "Moshi", {"sliding_window": WINDOW, "ffn_dim": 64}),
    A("T5", "T5", {"d_model": 64, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 16}, model="ForConditionalGeneration"),
]
