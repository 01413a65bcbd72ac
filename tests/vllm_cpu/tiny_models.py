"""Tiny random models in float32, written as transformers writes them: each for something that attention has to support."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

SIZES = {
    "vocab_size": 128,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "initializer_range": 0.15,  # so that attention, and what is cut from it, moves the probabilities
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
WINDOW = 20
LARGE_BIAS = 30.0  # as Qwen2.5's: what 4 bits leave of a key then says nothing
CHUNK = 32  # tokens that see each other and nothing before them, in some layers of Llama 4
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "biases": ("Qwen2", {"hidden_size": 256}),  # of its keys, which are large
    "window": ("Mistral", {"sliding_window": WINDOW}),
    "softcap": ("Gemma2", {"sliding_window": WINDOW, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 64}),
    "six_layers": (
        "Gemma2",
        {"num_hidden_layers": 6, "sliding_window": WINDOW, "attn_logit_softcapping": 5.0, "query_pre_attn_scalar": 64},
    ),
    "sinks": ("GptOss", {"sliding_window": WINDOW, "num_local_experts": 2, "num_experts_per_tok": 1}),
    "alibi": ("Bloom", {"n_layer": 2, "n_head": 2}),
    "scales": ("Llama", {}),  # of its keys and values, as llm-compressor leaves them in a checkpoint
    "heads_of_80": ("Llama", {"head_dim": 80}),
    "latents": (  # two layers without experts; vLLM takes rows of 320, 512 and 576 numbers
        "DeepseekV3",
        {
            "num_key_value_heads": 4,
            "q_lora_rank": None,
            "kv_lora_rank": 256,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 32,
            "v_head_dim": 48,
            "first_k_dense_replace": 2,
        },
    ),
    "two_sizes": (  # of keys and values, as MiMo's; vLLM reads the names of its checkpoints, transformers its own
        "MiMoV2Flash",
        {
            "v_head_dim": 32,
            "sliding_window_size": WINDOW,
            "layer_types": ["full_attention", "sliding_attention"],
            "mlp_layer_types": ["dense", "dense"],
            "attention_value_scale": 0.707,
            "hybrid_layer_pattern": [0, 1],
            "moe_layer_freq": [0, 0],
            "layernorm_epsilon": 1e-5,
            "rope_theta": 5e6,
            "swa_rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "rope_parameters": {
                "full_attention": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            },
            "add_swa_attention_sink_bias": True,
            "swa_head_dim": 64,
            "swa_v_head_dim": 32,
            "swa_num_attention_heads": 4,
            "swa_num_key_value_heads": 4,
        },
    ),
    "linear": (  # a layer of linear attention, and one that keeps keys and values, both with experts
        "Qwen3Next",
        {
            "layer_types": ["linear_attention", "full_attention"],
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16},
            **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
        },
    ),
    "hybrid": (  # layers 1 and 3 keep keys and values; its states are larger than 128 tokens of them
        "Jamba",
        {
            "num_hidden_layers": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 1,
            "num_experts_per_tok": 1,
            "mamba_d_state": 64,
            "mamba_dt_rank": 8,
            "hidden_size": 256,  # its heads have 64 numbers
        },
    ),
    "chunks": (
        "Llama4",
        {
            "attention_chunk_size": CHUNK,
            "layer_types": ["chunked_attention", "full_attention"],
            "no_rope_layers": [1, 0],
            "intermediate_size_mlp": 128,
            "interleave_moe_layer_step": 4,  # no layer has experts
            "attn_temperature_tuning": False,
        },
    ),
}
CONFIGURATIONS = {"Llama4": "Llama4TextConfig"}  # where they are not called as the model is


SCALES = {"k_scale": 0.25, "v_scale": 0.125}
FP8_CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}


def write(family: str, folder: Path) -> str:
    """Make the model, and return its folder."""
    import transformers

    name, changes = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, CONFIGURATIONS.get(name, f"{name}Config"))(**{**SIZES, **changes})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("sinks"):
                parameter.normal_(0, 2)
            if key.endswith("k_proj.bias"):
                parameter.zero_().view(-1, 2, 32)[:, :, -8:].normal_(0, LARGE_BIAS)  # [head, half, frequency]: where rotations are slow
    model.save_pretrained(folder)
    if family == "scales":
        _add_scales(folder)
    return str(folder)


def _add_scales(folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    for number in range(SIZES["num_hidden_layers"]):
        weights |= {f"model.layers.{number}.self_attn.{name}": torch.tensor([scale]) for name, scale in SCALES.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "config_groups": {},
        "kv_cache_scheme": FP8_CACHE,
    }
    (folder / "config.json").write_text(json.dumps(config))


def write_eagle(folder: Path, target: Path) -> str:
    """A head that drafts (EAGLE) for a llama: a layer with random weights behind its hidden states and tokens."""
    torch.manual_seed(2)
    held = load_file(target / "model.safetensors")
    size = SIZES["hidden_size"]
    drawn = {name.removeprefix("model."): t + torch.randn_like(t) * 0.02 for name, t in held.items() if name.startswith("model.layers.0.")}
    del drawn["layers.0.input_layernorm.weight"]  # it has none
    drawn |= {"fc.weight": torch.cat([torch.zeros(size, size), torch.eye(size)], 1)}
    folder.mkdir()
    save_file(drawn, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text()) | {"architectures": ["EagleLlamaForCausalLM"], "num_hidden_layers": 1}
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


def follow_tokens(folder: Path, layers: float = 0.1, head: float = 1.0) -> None:
    """Let a model's next token mostly follow from the latest one, so that drafts can be right. layers: what is left of what they add to its
    embedding. head: of the differences between tokens."""
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        if name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight")):
            weights[name] *= layers
    weights["lm_head.weight"] = head * weights["model.embed_tokens.weight"].roll(7, 0)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def write_eagle3(folder: Path, target: Path) -> str:
    """A head that drafts (EAGLE-3) for a llama whose tokens follow each other: it sees the latest token's embedding and a little of what
    three layers made, and it says three tokens of four."""
    torch.manual_seed(2)
    held, size, half = load_file(target / "model.safetensors"), SIZES["hidden_size"], SIZES["head_dim"]
    drawn = {name.replace("model.layers.1", "midlayer"): t.clone() for name, t in held.items() if "model.layers.1." in name}
    head, rows = torch.eye(size), torch.zeros(size, size)  # of two kv heads, each of which stores half of an embedding, and of rows of fc
    attends = {"q_proj": 2 * head.view(2, half, size).repeat_interleave(2, 0).flatten(0, 1), "k_proj": head, "v_proj": head}  # to itself
    drawn |= {f"midlayer.self_attn.{name}.weight": torch.cat([t, torch.zeros_like(t)], 1) for name, t in attends.items()}
    drawn["midlayer.self_attn.o_proj.weight"] = head.view(size, 2, half).repeat_interleave(2, 1).flatten(1) / 2
    drawn |= {f"{name}.weight": torch.ones(size) for name in ("midlayer.hidden_norm", "norm")}
    drawn["fc.weight"] = torch.cat([rows, rows, 0.1 * torch.randn(size, size)], 1)
    said = torch.arange(SIZES["vocab_size"])
    said = said[said % 4 < 3]
    drawn |= {"d2t": said - torch.arange(len(said)), "lm_head.weight": held["lm_head.weight"][said]}
    folder.mkdir()
    save_file({name: t.contiguous() for name, t in drawn.items()}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((target / "config.json").read_text())
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": len(said)}
    (folder / "config.json").write_text(json.dumps(config | {"eagle_aux_hidden_state_layer_ids": [0, 1, 2]}))
    return str(folder)


def add_mtp(folder: Path) -> None:
    """Give a model with latents a layer that drafts (MTP), as DeepSeek's checkpoints have it behind the others: of random weights."""
    torch.manual_seed(2)
    held, config, size = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text()), SIZES["hidden_size"]
    layer = config["num_hidden_layers"]
    drawn = {name.replace(".1.", f".{layer}."): t + torch.randn_like(t) * 0.02 for name, t in held.items() if ".layers.1." in name}
    drawn |= {f"model.layers.{layer}.{name}.weight": torch.ones(size) for name in ("enorm", "hnorm", "shared_head.norm")}
    shared = {"embed_tokens": "model.embed_tokens", "shared_head.head": "lm_head"}
    drawn |= {f"model.layers.{layer}.{name}.weight": held[f"{of}.weight"].clone() for name, of in shared.items()}
    drawn |= {f"model.layers.{layer}.eh_proj.weight": torch.cat([torch.zeros(size, size), torch.eye(size)], 1)}
    save_file(held | drawn, folder / "model.safetensors", metadata={"format": "pt"})
    config |= {"num_nextn_predict_layers": 1, "first_k_dense_replace": layer + 1}
    (folder / "config.json").write_text(json.dumps(config))


def add_mtp_of_qwen3_next(folder: Path) -> None:
    """Give a Qwen3-Next a layer that drafts (MTP), as its checkpoints have it: nearly its last one, which sees the latest token alone."""
    torch.manual_seed(2)
    weights, size = load_file(folder / "model.safetensors"), SIZES["hidden_size"]
    last = {name.replace("model.layers.1.", "mtp.layers.0."): t for name, t in weights.items() if ".layers.1." in name}
    weights |= {name: t + torch.randn_like(t) * 0.02 for name, t in last.items()}
    weights |= {f"mtp.{name}.weight": torch.zeros(size) for name in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")}  # + 1
    weights["mtp.fc.weight"] = torch.cat([torch.eye(size), torch.zeros(size, size)], 1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(3, SIZES["vocab_size"], (length,), generator=torch.Generator().manual_seed(seed)).tolist()
