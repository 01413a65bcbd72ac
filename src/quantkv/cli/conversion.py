"""GGUF files to transformers directories."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .common import duration, gigabytes
from .reading import from_pretrained, reading

READ_AGAIN = 5  # what transformers does with a header (configuration, tokenizer, weights), in times that reading it once takes
SAMPLE = 1 << 22  # numbers whose conversion is timed


def convert(gguf: Path, target: Path, announce: Callable[[str], None] = lambda line: None) -> None:
    """Write the model and the tokenizer of a GGUF file to the folder `target`, weights dequantized to float32.

    announce: told what it will write and how long that may take. ValueError for a file that is damaged, or too large for the disk.
    """
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"--model {gguf}: reading GGUF needs the package {package}: pip install gguf accelerate")
    from gguf import GGUFReader
    from safetensors.torch import save_file

    begun = time.perf_counter()
    with reading(f"--model {gguf}", gguf):
        reader = GGUFReader(gguf)  # refuses a file that ends before what its header announces
        size, seconds = cost(reader, time.perf_counter() - begun, target)
    if (free := shutil.disk_usage(target).free) < size:
        raise ValueError(
            f"--model {gguf}: converted, it takes {gigabytes(size)} in {target.parent}, where {gigabytes(free)} are free; "
            "allowed: another folder, named by QUANTKV_CACHE"
        )
    announce(f"converting {gguf.name} once, to {gigabytes(size)} in {target.parent}: about {duration(seconds)}")
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bars have no switch
        model, tokenizer = from_pretrained(f"--model {gguf}", gguf.parent, torch.float32, gguf_file=gguf.name)
    tokenizer.save_pretrained(target)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are plain now
    model.config.save_pretrained(target)
    if model.can_generate():
        model.generation_config.save_pretrained(target)
    weights, seen = {}, set()
    for name, tensor in model.state_dict().items():  # not save_pretrained, which refuses a model that was quantized
        if (address := tensor.data_ptr()) not in seen:  # tied weights are stored once
            weights[name] = tensor.contiguous()
        seen.add(address)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def cost(reader: Any, header_seconds: float, target: Path) -> tuple[int, float]:
    """Bytes that a conversion to the folder `target` writes, and about how many seconds it takes: by how long reading the header took, and
    part of the largest tensor, which is converted and written here for it."""
    from gguf.quants import dequantize

    elements = sum(int(tensor.n_elements) for tensor in reader.tensors)
    largest = max(reader.tensors, key=lambda tensor: tensor.n_elements)
    rows = max(1, len(largest.data) * SAMPLE // int(largest.n_elements))
    begun, file = time.perf_counter(), target / "sample"
    sample = dequantize(largest.data[:rows], largest.tensor_type)
    sample.tofile(file)
    seconds = time.perf_counter() - begun
    file.unlink()
    return 4 * elements, READ_AGAIN * header_seconds + seconds * elements / sample.size
