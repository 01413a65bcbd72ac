"""Safetensors files, which may be damaged in any way, as metadata and tensors."""

from __future__ import annotations

import os

import torch
from safetensors import SafetensorError, safe_open

from . import whole_file

UNREADABLE = (OSError, SafetensorError, ValueError, TypeError, AttributeError, KeyError, RuntimeError)  # of files and types of any kind


def read(argument: str, path: str | os.PathLike[str]) -> tuple[dict[str, str], dict[str, torch.Tensor]]:
    """Metadata and tensors, by name. ValueError naming the argument, the file and the cause for one that is absent, no regular file, cut
    or damaged."""
    try:
        whole_file.reading(path).close()
        with safe_open(path, "pt") as file:
            return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except UNREADABLE as error:
        raise ValueError(f"{argument}={str(path)!r}: {error}") from error
