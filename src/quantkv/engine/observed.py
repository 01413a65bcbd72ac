"""Statistics of one layer from rows that an engine shows: second moments of its queries and the mean of its keys, before rotation.

Rotations are given as matrices, so an engine's own rotary embedding says what they are: its image of the identity at each position.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from ..calibration import Calibration, LayerMoments
from ..maps import KEY_MEAN_BUCKET
from ..options import AttentionOptions
from ..reads import window_size
from .layer import LayerAttention

PROJECTIONS = ("o_proj", "out_proj", "dense", "c_proj", "wo")  # names of what reads an attention's output
SKIPPED = 8  # tokens at the beginning of a context: their keys are not like others'
BUCKETS_AT_ONCE = 4  # of positions, whose rotations are matrices in memory
POSITIONS = 256  # over which second moments are averaged: more change them by less than the text does
GOLDEN = (math.sqrt(5) - 1) / 2  # multiples of it, modulo 1, are spread evenly and have no period that a frequency could meet
LARGEST_HALF = torch.finfo(torch.float16).max

Rotate = Callable[[torch.Tensor], torch.Tensor]  # positions [P] int64 -> [P, D, D]: row i is the rotated unit vector i


class LayerSums:
    """Sums over the rows of one layer on one rank.

    understood: whether the rotation of every key was found. rotation: by which callers know the rotation of its rows; None: none.
    """

    def __init__(self) -> None:
        self.count, self.keys, self.moments, self.squares = 0, 0.0, 0.0, 0.0
        self.understood, self.rotation = True, None

    def add(self, query: torch.Tensor, key: torch.Tensor) -> None:
        """Rows of contexts of T tokens before rotation: `query [.., T, HQ, D]`, `key [.., T, HK, D]`."""
        query, key = query[..., SKIPPED:, :, :].float(), key[..., SKIPPED:, :, :].flatten(0, -3)
        rows = query.unflatten(-2, (key.shape[1], -1)).flatten(0, -4).transpose(0, 1).flatten(1, 2)  # [HK, .., D]
        self.moments = self.moments + (rows.mT @ rows).double() / (rows.shape[1] // len(key))
        wide = key.transpose(0, 1).double()
        self.keys, self.squares = self.keys + wide.sum(1), self.squares + wide.mT @ wide
        self.count += len(key)

    @property
    def mean(self) -> torch.Tensor:
        """Mean key `[HK, D]` float32."""
        return (self.keys / self.count).float()

    @property
    def hessian(self) -> torch.Tensor:
        """Second moments of the queries `[HK, D, D]` float32."""
        return (self.moments / self.count).float()

    @property
    def key_moments(self) -> torch.Tensor:
        """Second moments of the keys `[HK, D, D]` float64."""
        return self.squares / self.count

    @property
    def covariance(self) -> torch.Tensor:
        """Covariance of the keys, `[HK, D, D]` float32."""
        mean = self.keys / self.count
        return (self.key_moments - mean[:, :, None] * mean[:, None]).float()


class LatentSums:
    """Sums over the latents of one layer."""

    def __init__(self) -> None:
        self.count, self.total = 0, 0.0

    def add(self, latents: torch.Tensor) -> None:
        """Latents `[.., T, latent]` of contexts of T tokens."""
        rows = latents[..., SKIPPED:, :].flatten(0, -2).double()
        self.count, self.total = self.count + len(rows), self.total + rows.sum(0)

    @property
    def mean(self) -> torch.Tensor:
        """Mean latent `[latent]` float64."""
        return self.total / self.count


def layer_moments(layers: dict[int, LayerSums], values: dict[int, torch.Tensor], rotations: dict, limit: int) -> dict[int, LayerMoments]:
    """`LayerMoments` of layers by number. values: `[HK, D_V, D_V]` of each. rotations: `Rotate` by `LayerSums.rotation`. limit: positions
    that key means cover and moments are averaged over."""
    key_means: dict[int, torch.Tensor | None] = {}
    hessians = {number: sums.hessian for number, sums in layers.items()}
    spreads = {number: sums.covariance.diagonal(dim1=1, dim2=2) for number, sums in layers.items()}
    for rotation in {sums.rotation for sums in layers.values()}:
        own = [number for number, sums in layers.items() if sums.rotation == rotation]
        means = [layers[number].mean for number in own]
        if rotation is None:
            key_means |= {number: mean[None] for number, mean in zip(own, means)}
            continue
        covariances = [layers[number].covariance for number in own]
        moments = rotated_moments([hessians[number] for number in own] + covariances, rotations[rotation], limit)
        hessians |= dict(zip(own, moments))
        for number, covariance, (key_mean, strays) in zip(own, moments[len(own) :], rotated_means(means, rotations[rotation], limit)):
            key_means[number], spreads[number] = key_mean, covariance.diagonal(dim1=1, dim2=2) + strays
    made = {}
    for number, sums in layers.items():
        key_mean, spread = (key_means[number], spreads[number]) if sums.understood else (None, None)
        made[number] = moments_of(key_mean, hessians[number], values[number], spread)
    return made


def moments_of(
    key_mean: torch.Tensor | None,
    key_hessian: torch.Tensor,
    value_hessian: torch.Tensor,
    spread: torch.Tensor | None = None,
    weights: torch.Tensor | None = None,
) -> LayerMoments:
    """`LayerMoments` of what was measured, in whatever dtypes and on whatever device; see there for the shapes."""
    key_mean = None if key_mean is None else key_mean.clamp(-LARGEST_HALF, LARGEST_HALF).half().cpu()
    spread = None if spread is None else spread.clamp(min=0).float().cpu().contiguous()
    return LayerMoments(key_mean, key_hessian.float().cpu(), value_hessian.float().cpu(), weights, spread)


def latent_moments(mean: torch.Tensor) -> LayerMoments:
    """`LayerMoments` of a layer of latents whose mean is `[latent]`: it is one bucket, since latents are not rotated. All errors cost the
    same: no kernel rounds rows so long by a Hessian as fast as a step needs."""
    return moments_of(mean[None, None], torch.eye(len(mean), device="cpu")[None], torch.ones(1, 1, 1, device="cpu"))


def calibration_of(moments: dict[int, LayerMoments], layers: int, source: str) -> Calibration:
    """What a pass measured, as a calibration of a model of `layers` layers, in tensors that are no inference tensors. source: of tokens."""
    kept = {}
    for number, found in moments.items():
        kept[number] = replace(found, **{name: t.clone() for name, t in vars(found).items() if t is not None})
    return Calibration(max(max(kept) + 1, layers), kept, {"text": source})


def rotated_means(means: list[torch.Tensor], rotate: Rotate, limit: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Means `[HK, D]` at every position below limit, averaged over buckets: `[buckets, HK, D]` of each, and how far they are from these
    averages: the mean square over all positions `[HK, D]`."""
    parts, strays, step, device = [], 0.0, BUCKETS_AT_ONCE * KEY_MEAN_BUCKET, means[0].device
    stacked, heads = torch.cat(means), [len(mean) for mean in means]
    for start in range(0, limit, step):
        positions = torch.arange(start, min(start + step, -(-limit // KEY_MEAN_BUCKET) * KEY_MEAN_BUCKET), device=device)
        matrices = rotate(positions.clamp(max=limit - 1)).float().unflatten(0, (-1, KEY_MEAN_BUCKET))
        rows = torch.einsum("hd,bpde->bphe", stacked, matrices)
        parts.append(rows.mean(1))
        strays = strays + (rows - parts[-1][:, None]).square().sum((0, 1)) / KEY_MEAN_BUCKET
    averages = torch.cat(parts)
    return list(zip(averages.split(heads, 1), (strays / len(averages)).split(heads)))


def rotated_moments(hessians: list[torch.Tensor], rotate: Rotate, limit: int) -> list[torch.Tensor]:
    """Second moments `[HK, D, D]`, averaged over positions below limit: over all of them, or over 256 that are spread evenly."""
    device = hessians[0].device
    places = torch.arange(min(limit, POSITIONS), device=device)
    if limit > POSITIONS:
        places = ((places.double() + 0.5) * GOLDEN % 1 * limit).long()
    matrices = rotate(places).float()
    flat, made = matrices.flatten(0, 1), []
    for hessian in hessians:
        heads = [flat.mT @ (head @ matrices).flatten(0, 1) / len(places) for head in hessian]
        made.append(torch.stack(heads))
    return made


def unseen(options: AttentionOptions, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Which keys causal queries do not see, by the positions of both, bool: later ones, and those before a window or chunks."""
    hidden, (window, chunk) = keys > queries, window_size(options)
    if chunk:
        return hidden | (queries // chunk - keys // chunk > options.chunk_lookback)
    return hidden | (queries - keys >= window) if window else hidden


def causal_attention(attention: LayerAttention, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention of one whole sequence over its own rows, in float32: `query [T, HQ, D]`, `key [T, HK, D]`, `value [T, HK, D_V]` ->
    `[T, HQ, D_V]`. Windows, chunks, softcap, sinks and ALiBi slopes are as `attention` says."""
    options, tokens, heads = attention.options, len(query), key.shape[1]
    at = torch.arange(tokens, device=query.device)
    hidden, behind = unseen(options, at[:, None], at), (at[:, None] - at).clamp(min=0).float()
    extra = {name: t.float().view(heads, -1, 1, 1) for name, t in attention.tensors(query.device).items()}
    scale = attention.scale or query.shape[2] ** -0.5
    out = []
    for head, rows in enumerate(query.float().unflatten(1, (heads, -1)).unbind(1)):  # [T, G, D]
        score = rows.transpose(0, 1) @ key[:, head].float().mT * scale  # [G, T, T]
        if options.softcap:
            score = torch.tanh(score / options.softcap) * options.softcap
        if "alibi_slopes" in extra:
            score = score - extra["alibi_slopes"][head] * (behind.sqrt() if options.alibi_sqrt else behind)
        score = score.masked_fill(hidden, -math.inf)
        if "sinks" in extra:
            score = torch.cat([score, extra["sinks"][head].expand(-1, tokens, 1)], 2)
        out.append((score.softmax(2)[..., :tokens] @ value[:, head].float()).transpose(0, 1))
    return torch.cat(out, 1).to(query.dtype)


def value_moments(model: torch.nn.Module, layers: Iterable[tuple[int, torch.nn.Module, tuple[int, int, int]]]) -> dict[int, torch.Tensor]:
    """Second moments `[HK, D_V, D_V]` of the output projection behind each layer of a model, by its number; without one the errors of all
    values count the same.

    layers: number, module and (HK, D_V, HQ) of each. Of several with one number the first counts.
    """
    parents = {id(child): parent for parent in model.modules() for child in parent.children()}
    made: dict[int, torch.Tensor] = {}
    for number, module, (heads, size, num_heads) in layers:
        if number not in made:
            parent = parents.get(id(module))
            named = [] if parent is None else [getattr(getattr(parent, name, None), "weight", None) for name in PROJECTIONS]
            found = projection_moments(named, heads, size, num_heads)
            made[number] = torch.eye(size, device="cpu").repeat(heads, 1, 1) if found is None else found
    return made


def projection_moments(weights: Iterable[torch.Tensor], heads: int, size: int, num_heads: int) -> torch.Tensor | None:
    """`[HK, D_V, D_V]`: second moments of the columns of the first weight `[hidden, HQ * D_V]` that has them; None where none does."""
    for weight in weights:
        plain = isinstance(weight, torch.Tensor) and weight.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
        if plain and weight.ndim == 2 and weight.shape[1] == num_heads * size:
            columns = weight.detach().float().unflatten(1, (heads, -1, size))
            return torch.einsum("ohgd,ohge->hde", columns, columns)
    return None
