"""Drafts in SGLang: chains that a model drafts and the served one verifies, both in quantized pages.

A step of a chain is three passes. The model that drafts decodes, one draft behind another (DECODE). The served model reads all drafts of a
sequence at once, as if each were decoded (TARGET_VERIFY). The model that drafts stores the rows of what was accepted (DRAFT_EXTEND_V2).
Rows of refused drafts stay in slots that the next step writes anew.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.model_executor.cuda_graph_config import Backend

from ...calls import Batch
from ...policy import Policy
from ..asked import check_only
from . import logger

ALGORITHMS = ("EAGLE", "EAGLE3", "STANDALONE")
WHY_NOT = {  # what is most asked for of the others
    "NGRAM": "SGLang moves the rows of accepted drafts after each step, and tokens of a page have no bytes of their own",
    "NEXTN": "layers of a model that draft for it (MTP) were not run",
}
ONLY = {  # with drafts: the argument, and the only value that is served
    "speculative_adaptive": False,
    "enable_multi_layer_eagle": False,
    "speculative_draft_attention_backend": None,
    "speculative_draft_window_size": None,
    "pp_size": 1,
    "attn_dp_size": 1,
}


def check_arguments(view: Any, backend: str, resolved: bool) -> None:
    """Refuse drafts that are not served. resolved: whether SGLang has settled the arguments.

    NotImplementedError or ValueError, naming the argument.
    """
    algorithm = view.speculative_algorithm
    if algorithm is None:
        return
    behind = f" with attention_backend={backend!r}"
    if algorithm.upper() not in ALGORITHMS:
        why = WHY_NOT.get(algorithm.upper(), "it was not run")
        raise NotImplementedError(
            f"quantkv: speculative_algorithm={algorithm!r} is not supported{behind} ({why}); allowed: None, {', '.join(ALGORITHMS)}"
        )
    if view.speculative_eagle_topk != 1:
        raise NotImplementedError(
            f"quantkv: speculative_eagle_topk={view.speculative_eagle_topk!r} is not supported{behind}: trees of drafts need masks; "
            "allowed: 1, a chain, with --speculative-num-steps N"
        )
    check_only(view, ONLY, before=f"speculative_algorithm={algorithm!r}: ", behind=behind)
    if view.speculative_num_steps is None:
        raise ValueError(f"speculative_num_steps=None: speculative_algorithm={algorithm!r} with speculative_eagle_topk=1 needs a number")
    if resolved and view.cuda_graph_config.prefill.backend != Backend.DISABLED:
        raise NotImplementedError(
            f"quantkv: CUDA graphs of prompts with speculative_algorithm={algorithm!r} are not supported; allowed: "
            "--disable-prefill-cuda-graph"
        )


def check_model(configurator: Any) -> None:
    """Refuse models whose drafts are not served."""
    of = {"states of a recurrence": configurator.mambaish_config is not None, "a pool for windows": configurator.is_hybrid_swa}
    for what, has in of.items():
        if has:
            raise NotImplementedError(f"quantkv: speculative_algorithm with {what} is not supported; allowed: None")


def policy_of_drafts(policy: Policy) -> Policy:
    """What a model that drafts is stored by. Its layers have numbers of their own, which are not the policy's, and drafts are verified: it
    has the policy's format, and nothing more."""
    logger.info("quantkv: the model that drafts stores its rows in %s, without what else the policy says", policy.format)
    return Policy(policy.format, prompt=policy.prompt)


def queries_of_a_chain(drafts: Any) -> int:
    """New tokens of each sequence, the first of which was accepted before. drafts: what SGLang says of them. NotImplementedError for
    trees."""
    topk = getattr(drafts, "tree_topk", 1)
    if topk != 1:
        raise NotImplementedError(f"quantkv: trees of drafts, topk={topk}; allowed: 1")
    return drafts.num_tokens_per_req


def chains(forward_batch: Any, device: torch.device, known: bool) -> Batch:
    """The batch of a pass with as many new tokens in each sequence: of drafts that are verified, or of rows that are stored again.

    known: whether lengths count the new tokens. NotImplementedError for trees.
    """
    new, count = queries_of_a_chain(forward_batch.spec_info), forward_batch.batch_size
    if len(forward_batch.out_cache_loc) != new * count:
        raise NotImplementedError(f"quantkv: {len(forward_batch.out_cache_loc)} new tokens in {count} sequences; allowed: {new} in each")
    starts = new * torch.arange(count + 1, dtype=torch.int32, device=device)
    return Batch(starts, forward_batch.seq_lens.int() + (0 if known else new), new)


class DraftSteps:
    """The attention backends of a chain, one for each draft behind the first: what SGLang asks of a model that drafts.

    attn_backends: of the steps, over the pages of `backend`.
    """

    def __init__(self, backend: Any, steps: int) -> None:
        self.steps, self.attn_backends = steps, [backend.over_the_same_pages() for _ in range(steps - 1)]
        self.needs_cpu_seq_lens = backend.needs_cpu_seq_lens

    def _each(self, forward_batch: Any) -> Iterator[tuple[int, Any, torch.Tensor, torch.Tensor]]:
        """Each step's tokens that a sequence then has beyond its length, its backend, slots and positions. SGLang gives the slots of a
        sequence's drafts side by side."""
        slots = forward_batch.out_cache_loc.reshape(-1, self.steps)
        for number, backend in enumerate(self.attn_backends):
            yield number + 1, backend, slots[:, number].contiguous(), forward_batch.positions + number

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare the calls of all steps."""
        starts = torch.arange(forward_batch.batch_size + 1, dtype=torch.int32, device=forward_batch.seq_lens.device)
        for ahead, backend, slots, positions in self._each(forward_batch):
            backend.prepare("decode", Batch(starts, forward_batch.seq_lens.int() + ahead, 1), forward_batch, slots, positions)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make the tensors that captured graphs of all steps read."""
        for backend in self.attn_backends:
            backend.init_cuda_graph_state(max_bs, max_num_tokens)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fill the tensors that a captured graph of all steps reads, outside of the graph."""
        for ahead, backend, slots, positions in self._each(forward_batch):
            backend.fill(forward_batch, 1, ahead, slots, positions, in_capture)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Nothing: a graph reads what was filled outside of it."""
