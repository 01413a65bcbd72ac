"""Files of models, which may be damaged in any way."""

from __future__ import annotations

import contextlib
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

# How transformers reads a folder. Where `trust_remote_code` is left out, it asks on standard input whether to run the folder's code.
FILES_ALONE = {"local_files_only": True, "trust_remote_code": False}
LONGEST_REASON = 300  # characters of another library's message: some list all that they know


@contextlib.contextmanager
def reading(argument: str, file: Path | None = None) -> Iterator[None]:
    """What fails inside is the argument's fault: ValueError that names it, and the file if that cannot be whole.

    Readers of damaged files fail with errors of any type: an index, a struct, tokenizers' bare Exception.
    """
    try:
        yield
    except ImportError:
        raise
    except Exception as error:
        reason = str(error) or type(error).__name__
        if file is not None:
            reason = f"{file.name}, {file.stat().st_size:,} bytes, is cut short or damaged; allowed: a complete file ({reason})"
        reason = textwrap.shorten(reason, LONGEST_REASON, placeholder=" ...")
        raise ValueError(f"{argument}: {reason}") from error


def from_pretrained(argument: str, folder: Path, dtype: torch.dtype, **source: str) -> tuple[Any, Any]:
    """The model and the tokenizer in a folder. ValueError if they cannot be read, or if weights are missing."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with reading(argument):
        model, found = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, output_loading_info=True, ignore_mismatched_sizes=True, **FILES_ALONE, **source
        )
    with reading(f"{argument}: its tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder, **FILES_ALONE, **source)
    if missing := sorted(found["missing_keys"]):  # transformers would take random numbers for them
        raise ValueError(f"{argument}: {len(missing)} of the model's tensors are not in its files, the first is {missing[0]}")
    for name, stored, needed in sorted(found["mismatched_keys"]):  # nor here; its own error has no names
        raise ValueError(f"{argument}: {name} is {list(stored)} in its files, {list(needed)} after its config")
    return model, tokenizer
