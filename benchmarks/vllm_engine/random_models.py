"""Models with real geometries and weights at random: their configurations, and how weights are drawn. No engine is imported."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from answers import VOCABULARY

LLAMA_8B = {"num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
LLAMA_70B = {"num_hidden_layers": 20, "hidden_size": 8192, "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672}
SMALL = {"num_hidden_layers": 2, "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 2048}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_hidden_layers": 16,
    "first_k_dense_replace": 16,
    "hidden_size": 7168,
    "intermediate_size": 2304,
    "moe_intermediate_size": 256,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "head_dim": None,
}

GEMMA_4 = {  # 26B, with a dense layer's inner size and no experts
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "num_hidden_layers": 30,
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "head_dim": 256,
    "global_head_dim": 512,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 5,
    "num_kv_shared_layers": 0,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_activation": "gelu_pytorch_tanh",
    "rope_theta": None,
    "tie_word_embeddings": True,
}

QWEN3_NEXT = {  # a quarter of the layers, and an eighth of the experts
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "num_hidden_layers": 12,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "rope_theta": 10000000.0,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 64,
    "num_experts_per_tok": 10,
}


def write_config(folder: Path, **geometry) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    common = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": 128,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    config = {name: value for name, value in (common | geometry).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def draw_weights_of(model: torch.nn.Module, seed: int = 1234) -> None:
    """Weights at random in place of an engine's dummies, which are all within 1e-3, so that attention would do nothing."""
    with torch.no_grad():
        for i, (name, parameter) in enumerate(sorted(model.named_parameters())):
            if parameter.dim() < 2:
                if parameter.is_floating_point():
                    parameter.fill_(1.0)
            else:
                generator = torch.Generator(device=parameter.device).manual_seed(seed + i)
                parameter.normal_(0.0, 1.0 if "embed" in name else 0.02, generator=generator)
