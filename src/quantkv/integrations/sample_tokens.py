"""Tokens for the pass that measures a model: of the package's text, or at random."""

from __future__ import annotations

import logging
from importlib import resources

import torch
from transformers import AutoTokenizer

from ..calibration import MIN_TOKENS

TOKENS, TOKENS_ON_CPU = 1024, 512  # of the pass

log = logging.getLogger("quantkv")


def pass_tokens(device: torch.device) -> int:
    """How many tokens the pass has on a device."""
    return TOKENS_ON_CPU if device.type == "cpu" else TOKENS


def sample_tokens(tokenizer: str | None, vocab_size: int, count: int) -> tuple[torch.Tensor, str]:
    """Tokens `[1, N]` int64, N at most `count`, and the words that say what they are.

    They are of the package's text where a tokenizer of this name is on this machine and its tokens are in the vocabulary. Else they are at
    random, the same every time: statistics of random tokens serve nearly as well.
    """
    if tokenizer:
        try:
            loaded = AutoTokenizer.from_pretrained(tokenizer, local_files_only=True, trust_remote_code=False)
            text = resources.files("quantkv").joinpath("sample_text.txt").read_text("utf-8")
            ids = loaded(text, return_tensors="pt").input_ids[:, :count]
            if ids.numel() >= MIN_TOKENS and int(ids.max()) < vocab_size:
                return ids, f"{ids.numel()} tokens of text"
        except Exception as error:  # whatever a tokenizer's files do
            log.info("quantkv: no tokenizer of %s: %s", tokenizer, error)
    ids = torch.randint(vocab_size, (1, count), generator=torch.Generator().manual_seed(0), device="cpu")
    return ids, f"{count} tokens at random: no tokenizer of it is here"
