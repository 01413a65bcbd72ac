"""How many parameters a model has: counted in its safetensors files where they are there, else worked out from its configuration."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from . import whole_file
from .geometry import MOST, SIZES
from .refusals import refuse

ITEM_BITS = {"F64": 64, "I64": 64, "U64": 64, "F32": 32, "I32": 32, "U32": 32, "F16": 16, "BF16": 16, "I16": 16, "U16": 16}
SIXTEEN_BITS = 16
MXFP4_BITS = 4.25  # of a weight: 4, and an 8-bit exponent for each 32
MOST_BYTES = 1 << 60
LARGEST_HEADER = 100 << 20  # bytes, as the safetensors library allows
LEAST_BITS = 4  # of an element in a safetensors file
LLAMA_LIKE = ("llama", "mistral", "ministral3", "mixtral", "smollm3", "granite", "gemma", "gemma2", "gemma3_text", "phi3")
COUNTED = (*LLAMA_LIKE, "qwen2", "qwen3", "qwen3_moe", "qwen3_next", "gpt_oss", "deepseek_v2", "deepseek_v3")


class Weights(NamedTuple):
    """What a model's weights take. parameters: None: not counted. source: how both are known, in words."""

    parameters: int | None
    nbytes: int
    source: str


def of_files(folder: Path) -> Weights | None:
    """From the safetensors files of a transformers directory: of their headers, or of their index alone. None where there are none.
    ValueError, naming the file, for one that is cut short or damaged."""
    index = folder / "model.safetensors.index.json"
    files = sorted(folder.glob("*.safetensors"))
    if index.is_file():
        try:
            held = json.loads(index.read_text(encoding="utf-8"))
            total, names = int(held["metadata"]["total_size"]), sorted(set(held["weight_map"].values()))
            if not 0 < total <= MOST_BYTES:
                refuse("total_size", total, f"a number of bytes is needed, of at most {MOST_BYTES:,}")
            there = all((folder / name).is_file() for name in names)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ValueError(f"{index}: no index of safetensors files ({error or type(error).__name__})") from error
        if not there:
            return Weights(None, total, index.name)
        files = [folder / name for name in names]
    if not files:
        return None
    counts = [_header(file) for file in files]
    return Weights(sum(count for count, _ in counts), sum(size for _, size in counts), f"{len(files)} safetensors files")


def _header(file: Path) -> tuple[int, int]:
    """Elements and bytes of the tensors in a file."""
    try:
        with whole_file.reading(file) as opened:
            (length,) = struct.unpack("<Q", opened.read(8))
            if length > LARGEST_HEADER:
                raise ValueError(f"a header of {length:,} bytes")
            tensors = {name: given for name, given in json.loads(opened.read(length)).items() if name != "__metadata__"}
        counts = [_extent(name, t["shape"], *t["data_offsets"]) for name, t in tensors.items()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, struct.error) as error:
        raise ValueError(f"{file}: cut short or damaged; allowed: a complete safetensors file ({error})") from error
    size = sum(count for _, count in counts)
    if file.stat().st_size != 8 + length + size:
        raise ValueError(f"{file}: {file.stat().st_size:,} bytes; its header announces {8 + length + size:,}: it is cut short or damaged")
    return sum(count for count, _ in counts), size


def _extent(name: str, shape: list[int], start: int, end: int) -> tuple[int, int]:
    """Elements and bytes of a tensor. ValueError for a shape that its bytes cannot hold."""
    if not all(type(n) is int and n >= 0 for n in (*shape, start, end)) or math.prod(shape) * LEAST_BITS > 8 * (end - start):
        raise ValueError(f"{name}: {end - start} bytes are none of shape {shape}")
    return math.prod(shape), end - start


def of_config(fields: Mapping[str, Any]) -> Weights | None:
    """From completed fields of `geometry.text_fields`, for the families in `COUNTED`; at 16 bits, but for experts that are stored as mxfp4.
    None for other families, and for other quantized weights."""
    if fields["model_type"] not in COUNTED:
        return None
    method = fields.get("quantization_config") or {}
    if not isinstance(method, Mapping):
        refuse("config.quantization_config", repr(method), "an object with a quant_method is needed")
    method = method.get("quant_method")
    for name in (*SIZES, "v_head_dim"):
        value = fields.get(name)
        if isinstance(value, (int, float)) and not 0 <= value <= MOST:
            refuse(f"config.{name}", repr(value), f"a number is needed, of at most {MOST:,}")
    try:
        total, experts = _count(fields)
    except (ArithmeticError, LookupError, TypeError):  # a field that the family has, which this file gives another form
        return None
    if method == "mxfp4":
        bits, source = experts * MXFP4_BITS + (total - experts) * SIXTEEN_BITS, "its config: experts at 4.25 bits (mxfp4), all else at 16"
        return Weights(total, math.ceil(bits / 8), source)
    return Weights(total, total * SIXTEEN_BITS // 8, "its config, at 16 bits") if method is None else None


def _count(c: Mapping[str, Any]) -> tuple[int, int]:
    """Parameters, and how many of them are matrices of experts."""
    hidden, layers, kind = c["hidden_size"], c["num_hidden_layers"], c["model_type"]
    embedding = c["vocab_size"] * hidden
    total = embedding if c.get("tie_word_embeddings") else 2 * embedding
    experts = 0
    norms = 4 if kind in ("gemma2", "gemma3_text") else 2
    for number in range(layers):
        linear = kind == "qwen3_next" and (number + 1) % c.get("full_attention_interval", 4)
        linear = c["layer_types"][number] != "full_attention" if kind == "qwen3_next" and c.get("layer_types") else linear
        mlp, of_experts = _mlp(c, number)
        total += norms * hidden + (_linear_attention(c) if linear else _attention(c)) + mlp + of_experts
        experts += of_experts
    return total + hidden, experts


def key_biases(fields: Mapping[str, Any]) -> bool | None:
    """Whether a bias is added to keys, from completed fields; None for families where it is not known."""
    kind, given = fields.get("model_type"), fields.get("attention_bias")
    if kind in COUNTED:
        return kind in ("qwen2", "gpt_oss") or bool(given)
    return given if isinstance(given, bool) else None


def _attention(c: Mapping[str, Any]) -> int:
    hidden, heads, kind = c["hidden_size"], c["num_attention_heads"], c["model_type"]
    if c.get("kv_lora_rank"):
        latent, rope, nope, value = c["kv_lora_rank"], c["qk_rope_head_dim"], c["qk_nope_head_dim"], c["v_head_dim"]
        rank = c.get("q_lora_rank")
        query = hidden * heads * (nope + rope) if not rank else hidden * rank + rank + rank * heads * (nope + rope)
        biases = (rank or 0) + latent + rope + hidden if c.get("attention_bias") else 0
        return query + hidden * (latent + rope) + latent + latent * heads * (nope + value) + heads * value * hidden + biases
    size, kv_heads = c.get("head_dim") or hidden // heads, c["num_key_value_heads"]
    gates = 2 if kind == "qwen3_next" else 1  # of the output, beside the queries
    total = hidden * size * (gates * heads + 2 * kv_heads) + heads * size * hidden
    if key_biases(c):
        total += size * (gates * heads + 2 * kv_heads) + (0 if kind == "qwen2" else hidden)
    if kind in ("qwen3", "qwen3_moe", "qwen3_next", "gemma3_text"):
        total += 2 * size  # norms of queries and keys
    return total + (heads if kind == "gpt_oss" else 0)  # sinks


def _linear_attention(c: Mapping[str, Any]) -> int:
    """A gated delta net."""
    hidden, values = c["hidden_size"], c["linear_num_value_heads"]
    key_size, value_size = c["linear_num_key_heads"] * c["linear_key_head_dim"], values * c["linear_value_head_dim"]
    projections = hidden * (2 * key_size + 2 * value_size) + hidden * 2 * values + value_size * hidden
    return projections + (2 * key_size + value_size) * c["linear_conv_kernel_dim"] + 2 * values + c["linear_value_head_dim"]


def _mlp(c: Mapping[str, Any], number: int) -> tuple[int, int]:
    """Parameters of a layer's MLP: all but the matrices of experts, and these."""
    hidden, kind = c["hidden_size"], c["model_type"]
    dense = 3 * hidden * c["intermediate_size"]
    if kind == "mixtral":
        return c["num_local_experts"] * hidden, c["num_local_experts"] * dense
    if kind == "gpt_oss":
        count, inner = c["num_local_experts"], c["intermediate_size"]
        return count * (hidden + 1) + count * (2 * inner + hidden), count * dense
    if kind in ("qwen3_moe", "qwen3_next"):
        if number in (c.get("mlp_only_layers") or ()) or (number + 1) % (c.get("decoder_sparse_step") or 1):
            return dense, 0
        shared = 3 * hidden * c["shared_expert_intermediate_size"] + hidden if kind == "qwen3_next" else 0
        return c["num_experts"] * hidden + shared, c["num_experts"] * 3 * hidden * c["moe_intermediate_size"]
    if kind in ("deepseek_v2", "deepseek_v3") and number >= c["first_k_dense_replace"]:
        count, shared = c["n_routed_experts"], c["moe_intermediate_size"] * (c.get("n_shared_experts") or 0)
        biases = 2 * shared + hidden if c.get("mlp_bias") else 0
        corrected = count if kind == "deepseek_v3" else 0
        return 3 * hidden * shared + biases + count * hidden + corrected, count * 3 * hidden * c["moe_intermediate_size"]
    return dense + (2 * c["intermediate_size"] + hidden if c.get("mlp_bias") else 0), 0
