"""The pass that measures a server's own model at start: what is around it in every engine."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable

import torch

from ..calibration import Calibration
from ..engine.observed import SKIPPED
from .sample_tokens import pass_tokens, sample_tokens

# Why no pass over a model shows its keys, in words.
SOME_LAYERS = "{} is above 1: a rank has some of the layers alone"
RECURRENCE = "the model keeps states of a recurrence, which a pass without pages leaves out"
LORA = "the model takes LoRA adapters"
Measure = Callable[[], tuple[Calibration, str]]  # the calibration of this rank's heads, and what its tokens were


def unmeasured(why: object) -> NotImplementedError:
    """What a server raises of a model that cannot be measured where a policy requires it."""
    return NotImplementedError(f"quantkv: policy.statistics='require': the model cannot be measured: {why}")


def measured(
    statistics: str | None, reason: str | None, measure: Measure, logger: logging.Logger, what: str = "key means and Hessians"
) -> Calibration | None:
    """The calibration that a pass makes, which the log tells; None where the model cannot be measured: a line says so.

    statistics: of the policy; with "require" a model that cannot be measured is a NotImplementedError. reason: why no pass over this model
    shows its keys, in words; None: one does. what: is measured, in words.
    """
    began = time.perf_counter()
    try:
        if reason is not None:
            raise NotImplementedError(reason)
        made, source = measure()
    except Exception as error:  # of whatever a model does when it is called so
        if statistics == "require":
            raise unmeasured(error) from error
        logger.warning("quantkv: no statistics of this model, keys and values are stored without key means and Hessians: %s", error)
        return None
    logger.info("quantkv: %s of %d layers (%s): %.1f s", what, len(made.layers), source, time.perf_counter() - began)
    return made


def contexts(tokenizer: str | None, vocab_size: int, limit: int, device: torch.device) -> tuple[list[torch.Tensor], str]:
    """Tokens `[T]` int64 of each pass, on a device, and what they are; see `sample_tokens`. limit: of the tokens that a pass may have.

    NotImplementedError where it may have too few.
    """
    count = pass_tokens(device)
    context = min(count, limit)
    if context <= 2 * SKIPPED:
        raise NotImplementedError(f"steps of {context} tokens are too short")
    ids, source = sample_tokens(tokenizer, vocab_size, count)
    return [part for part in ids[0].to(device).split(context) if len(part) > 2 * SKIPPED], source


def release(device: torch.device) -> None:
    """Give back what the pass took, before an engine measures how much memory is left."""
    gc.collect()
    if device.type != "cpu":
        torch.accelerator.empty_cache()
