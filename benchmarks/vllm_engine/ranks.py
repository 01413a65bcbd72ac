"""Statistics that each rank measured of its kv heads at start, compared with the same heads of one rank."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

# Dimension of kv heads, of those parts of `quantkv.calibration.LayerMoments` that have one.
HEADS_AT = {"k.offset": 1, "k.metric": 0, "v.metric": 0, "k.spread": 0}


def measured(llm, out: Path, job: str, kv_type: str) -> dict:
    """Statistics of all ranks, kept in `out`. For the job two_ranks: how far they are from those of the job one_rank, if it ran before."""
    import workers

    ranks = llm.collective_rpc(workers.measured)
    parts = {name: torch.cat([rank[name] for rank in ranks], HEADS_AT[part]) for name, part in _by_heads(ranks[0])}
    save_file({name: t.contiguous() for name, t in parts.items()}, out / f"measured-{job}-{kv_type}.safetensors")
    found = {"ranks": len(ranks), "heads": [rank[name].shape[HEADS_AT[part]] for rank in ranks for name, part in _by_heads(rank)[:1]]}
    one = out / f"measured-one_rank-{kv_type}.safetensors"
    if job == "two_ranks" and one.exists():
        found["difference"] = difference(load_file(one), parts)
    return found


def difference(one: dict[str, torch.Tensor], two: dict[str, torch.Tensor]) -> dict[str, float]:
    """Largest relative difference of a kv head's statistics, by layer and part: norm of the difference over the norm."""
    found = {}
    for name, part in _by_heads(one):
        a, b = (t[name].double().movedim(HEADS_AT[part], 0).flatten(1) for t in (one, two))
        found[name] = float(((a - b).norm(dim=1) / a.norm(dim=1).clamp_min(1e-30)).max())
    return found


def _by_heads(tensors: dict[str, torch.Tensor]) -> list[tuple[str, str]]:
    """Names of tensors that have a dimension of kv heads, each with its part."""
    parts = ((name, name.partition(".")[2]) for name in sorted(tensors))
    return [(name, part) for name, part in parts if part in HEADS_AT]
