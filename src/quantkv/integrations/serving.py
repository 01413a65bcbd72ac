"""A server's steps, and what its log and its readers are told of them: who serves which format, and how often Python was called."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import torch

from ..engine.forward_metadata import ForwardMetadata
from ..engine.warm_up import summary

served: dict[str, dict[str, str]] = {}  # format: what a call is -> the implementation that serves it
calls: Counter[str] = Counter()  # Python calls by kind, "write", "decode" or "mixed"; replays of CUDA graphs make none


def tell(logger: logging.Logger, fmt: str, who: dict[str, str], layers: int) -> None:
    """Keep who serves a format, and say it in the log. layers: that it is said of."""
    served[fmt] = who
    logger.info("quantkv: %d layers of %s: %s", layers, fmt, summary(who))


class Step(ForwardMetadata):
    """One step of a server, whose calls are counted.

    kind: "decode" where each sequence has as many queries as a decode or a verification has, else "mixed".
    blocks: `[S, W]`, the server's own table, of which `block_table` is made; None: it is not asked for.
    """

    blocks: torch.Tensor | None = None

    def __init__(self, kind: str, *of_step: Any, **named: Any) -> None:
        super().__init__(*of_step, **named)
        self.kind = kind

    def write(self, *given: Any, **named: Any) -> None:
        """See `ForwardMetadata.write`."""
        calls["write"] += 1
        super().write(*given, **named)

    def attend(self, *given: Any, **named: Any) -> torch.Tensor:
        """See `ForwardMetadata.attend`."""
        calls[self.kind] += 1
        return super().attend(*given, **named)
