"""A small model with weights on disk, so that one GPU and two load the same numbers; and a policy with a map for each kv head."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from answers import VOCABULARY
from safetensors.torch import save_file

HEAD_SIZE = 128
POSITIONS = 33280


def write_weights(folder: Path, geometry: dict) -> None:
    """Llama weights at random, drawn once."""
    path = folder / "model.safetensors"
    if path.exists():
        return
    hidden, inner = geometry["hidden_size"], geometry["intermediate_size"]
    queries, keys = (geometry[name] * HEAD_SIZE for name in ("num_attention_heads", "num_key_value_heads"))
    shapes = {"self_attn.q_proj": (queries, hidden), "self_attn.k_proj": (keys, hidden), "self_attn.v_proj": (keys, hidden)}
    shapes |= {"self_attn.o_proj": (hidden, queries), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)}
    shapes |= {"mlp.down_proj": (hidden, inner)}
    generator = torch.Generator().manual_seed(5)

    def draw(*shape: int, size: float = 0.02) -> torch.Tensor:
        return (size * torch.randn(shape, generator=generator)).bfloat16()

    weights = {"model.embed_tokens.weight": draw(VOCABULARY, hidden, size=1.0), "lm_head.weight": draw(VOCABULARY, hidden)}
    weights["model.norm.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    for i in range(geometry["num_hidden_layers"]):
        weights |= {f"model.layers.{i}.{name}.weight": draw(*shape) for name, shape in shapes.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{i}.{name}.weight"] = torch.ones(hidden, dtype=torch.bfloat16)
    save_file(weights, path, {"format": "pt"})


def write_policy(folder: Path, geometry: dict) -> str:
    """int8 with another rotation, and other key means, for each kv head: a rank that took another's would answer otherwise."""
    heads, generator = geometry["num_key_value_heads"], torch.Generator().manual_seed(6)
    maps = {}
    for i in range(geometry["num_hidden_layers"]):
        for side in "kv":
            forward = torch.linalg.qr(torch.randn(heads, HEAD_SIZE, HEAD_SIZE, generator=generator))[0].contiguous()
            maps[f"layers.{i}.{side}.forward"], maps[f"layers.{i}.{side}.inverse"] = forward, forward.mT.contiguous()
        maps[f"layers.{i}.k.offset"] = 0.5 * torch.randn(8, heads, HEAD_SIZE, generator=generator)
    folder = folder / "policy"  # vLLM reads every file of weights beside the model's
    folder.mkdir(exist_ok=True)
    save_file(maps, folder / "maps.safetensors")
    path = folder / "policy.json"
    path.write_text(json.dumps({"policy_version": 1, "format": "int8", "maps": "maps.safetensors"}))
    return str(path)


def write_calibrated_policy(folder: Path, geometry: dict, fmt: str) -> str:
    """A format with offsets and metrics at random, and full-precision tokens: what a calibrated cache costs, whatever it was calibrated
    on."""
    from quantkv.calibration import Calibration, LayerMoments
    from quantkv.full_precision import FullPrecisionTokens
    from quantkv.policy import Policy

    heads, generator = geometry["num_key_value_heads"], torch.Generator().manual_seed(8)

    def moments() -> torch.Tensor:
        rows = torch.randn(heads, 2 * HEAD_SIZE, HEAD_SIZE, generator=generator) * torch.logspace(0, -1, HEAD_SIZE)
        return rows.mT @ rows / HEAD_SIZE

    key_mean = 0.1 * torch.randn(-(-POSITIONS // 64), heads, HEAD_SIZE, generator=generator).half()
    layer = LayerMoments(key_mean, moments(), moments())
    calibration = Calibration(geometry["num_hidden_layers"], dict.fromkeys(range(geometry["num_hidden_layers"]), layer))
    folder = folder / "policy"
    folder.mkdir(exist_ok=True)
    path = folder / f"{fmt}.json"
    Policy(fmt, calibration=calibration, full_precision=FullPrecisionTokens(sink=16, recent=24)).save(path)
    return str(path)
