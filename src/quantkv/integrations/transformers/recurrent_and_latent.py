"""Layers that keep something else than keys and values, or more."""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import LinearAttentionLayer

from ...cache import PagedCache
from ...calibration import gains_from_key_mean
from ...checks import refuse
from ...copies import CacheWithCopies
from ...format import Format
from ...formats import get_format
from .layers import QuantizedLayer
from .lazy_kv import ATTENTION, LazyLatents, PagedLength

FEW, SAME = 8, 2**-5  # rows that are compared with what the model's own code makes of them, and the relative distance that they may have


class HybridLayer(LinearAttentionLayer, QuantizedLayer):
    """A layer with attention beside a convolution or recurrence: keys and values in pages, the states as transformers keeps them."""

    @property
    def is_compileable(self) -> bool:
        """Never: its states are transformers' own."""
        return False

    def __init__(self, *args: Any, number_of_states: int) -> None:
        QuantizedLayer.__init__(self, *args)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)


class LatentLayer(QuantizedLayer):
    """A layer whose keys and values are computed from one latent vector a token (DeepSeek's MLA): it keeps that vector, in the K half
    of the format, and the key's rotated dimensions, at 16 bits.

    By the attention implementation "quantkv" its queries are absorbed and read the pages; a prompt in one pass reads its own keys and
    values as the model computed them. With another implementation, rows are read back whole in each forward pass, and the model's own
    attention follows, with transformers' mask: padding is stored like any token.

    latent: size of the vector. mean: `[latent]`, which latents are stored without; None: they are stored whole. Softmax does not see what
        all keys of a query have in common, so only outputs and rows that are read back get it.
    """

    is_compileable = False
    mean: torch.Tensor | None = None

    def __init__(self, *args: Any, latent: int) -> None:
        super().__init__(*args)
        self.latent = latent
        self._up: tuple[torch.Tensor, torch.Tensor] | None = None  # of the call under way: see `_projections`
        self._expanded: tuple[torch.Tensor, torch.Tensor] | None = None  # keys and values of its own rows
        self._masked_outside = False  # another attention's masks stand for padding: that of the tokens that are here is not known

    def take_mean(self, mean: torch.Tensor | None) -> None:
        """Store latents without this mean from now on, where the format gains from it. No row may have been stored."""
        self.mean = mean if gains_from_key_mean(get_format(self.requested, torch.bfloat16).k) else None

    def _centred(self, latents: torch.Tensor, sign: int = -1) -> torch.Tensor:
        """Latents without their mean; sign 1: with it again."""
        return latents if self.mean is None else latents + sign * self.mean.to(latents.device, latents.dtype)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the keys of a mask. Transformers asks at the beginning of a pass, and then a mask function; if ours, our
        attention function follows."""
        self.sequences.windows = set()
        # torch.compile cannot follow rows on their way to the attention function. What it does not compile goes on as it began.
        if torch.compiler.is_compiling() or (self._masked_outside and self.seen):
            return self.seen + query_length, 0
        return PagedLength.of(self.seen + query_length, self.sequences.windows, self.made_for), 0

    @torch.compiler.disable
    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Take latents `[S, 1, N, latent]` and rotated dimensions `[S, 1, N, R]`: for the attention function, or, where another follows,
        stored at once; then returns those of all tokens, read back."""
        if key_states.shape[1] != 1 or key_states.shape[3] != self.latent:
            refuse("key_states.shape", tuple(key_states.shape), f"one head of config.kv_lora_rank={self.latent} is needed")
        self._masked_outside = not self.sequences.windows
        if self.sequences.windows:
            self.take(key_states, value_states)
            return LazyLatents.of(key_states, self), LazyLatents.of(value_states, self)
        return self._stored_and_read(key_states, value_states)

    def attend_latents(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        **options: Any,
    ) -> torch.Tensor:
        """Attention of `query [S, HQ, N, D]`, not absorbed, over the pages -> `[S, N, HQ, D_V]`. key, value: what `module` made of the new
        rows. NotImplementedError where these are not its projection of latents beside the rotated dimensions."""
        self._expanded = key.as_subclass(torch.Tensor), value.as_subclass(torch.Tensor)
        self._up = self._projections(module)
        try:
            if self.is_new:
                self._check_projections(module)
            self._new = self._centred(self._new[0]), self._new[1]
            out = self.attend(query, mask, key.update, **options)
            self.is_new = False
            return out
        finally:
            self._up = self._expanded = None

    def _projections(self, module: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
        """What makes keys and values of latents: `[HQ, nope, latent]` and `[HQ, D_V, latent]`, views where the weight is a plain one."""
        (key, value), rope = self._expanded, self._new[1].shape[3]
        sizes = key.shape[3] - rope, value.shape[3]
        projection = module.kv_b_proj
        if type(projection) is torch.nn.Linear and projection.bias is None:
            rows = projection.weight
        else:  # one of other weights, or with an adapter: what it makes of unit vectors
            rows = projection(torch.eye(self.latent, dtype=key.dtype, device=key.device)).mT
        return rows.view(key.shape[1], sum(sizes), self.latent).split(sizes, 1)

    def _check_projections(self, module: torch.nn.Module) -> None:
        latents, rotated = (t[:, :, :FEW] for t in self._new)
        wanted = [torch.einsum("sinl,hdl->shnd", latents, up) for up in self._up]
        wanted[0] = torch.cat([wanted[0], rotated.expand(-1, wanted[0].shape[1], -1, -1)], 3)
        for name, given, own in zip(("keys", "values"), self._expanded, wanted):
            given = given[:, :, :FEW].float()
            if not bool((given - own).norm() <= SAME * given.norm()):
                raise NotImplementedError(
                    f"{type(module).__name__}: its {name} are not kv_b_proj of a latent beside the rotated dimensions, so attention "
                    f"implementation {ATTENTION!r} cannot read them in pages; model.set_attn_implementation('sdpa') reads rows back"
                )

    def _query_size(self, pages: PagedCache) -> int:
        return pages.spec.head_size_v + self._up[0].shape[1]

    def _attend(
        self,
        query: torch.Tensor,
        new: tuple[torch.Tensor, torch.Tensor] | None = None,
        mask: torch.Tensor | None = None,
        *,
        scale: float | None = None,
        **options: Any,
    ) -> torch.Tensor:
        (up_key, up_value), positions = self._up, self.sequences.cache_positions
        if self.prompt == "own" and query.shape[2] > 1 and not positions.seen and not options["softcap"] and options["sinks"] is None:
            self.store(*new)
            return self._of_own_rows(query, mask, scale)
        plain, rotated = query.split([up_key.shape[1], query.shape[3] - up_key.shape[1]], 3)
        absorbed = torch.cat([torch.einsum("shnd,hdl->shnl", plain, up_key), rotated], 3)
        out = super()._attend(absorbed, new, mask, scale=query.shape[3] ** -0.5 if scale is None else scale, **options)
        return torch.einsum("snhl,hvl->snhv", self._centred(out, 1), up_value)

    def _of_own_rows(self, query: torch.Tensor, mask: torch.Tensor | None, scale: float | None) -> torch.Tensor:
        """Attention of a whole prompt over its keys and values as given; 0 for padding."""
        (key, value), count = self._expanded, query.shape[2]
        if mask is None:
            out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
            return out.transpose(1, 2)
        real = mask.view(len(query), -1)[:, -count:].bool()
        seen = torch.ones(count, count, dtype=torch.bool, device=query.device).tril() & real[:, None, None]
        seen = seen | torch.eye(count, dtype=torch.bool, device=query.device)  # padding sees itself: no query is left without a key
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, seen, scale=scale)
        return out.transpose(1, 2).masked_fill(~real[:, :, None, None], 0)

    def _stored_and_read(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """For attention that is not ours."""
        new, (batch_size, _, count, _), before = (key_states, value_states), key_states.shape, self.seen
        own = self.prompt == "own" and count > 1
        with self._under_way(self._new_pages(*new) if self.pages is None else self.pages, batch_size, count, None):
            self.store(self._centred(key_states), value_states)
            if own and not before:
                return new
            read = self._read_back(batch_size, before + count, key_states)
        return tuple(torch.cat([t[:, :, :before], given], 2) for t, given in zip(read, new)) if own else read

    def _read_back(self, batch_size: int, seen: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Latents `[S, 1, seen, latent]` and rotated dimensions of all tokens, in the dtype and on the device of `like`."""
        spec, device = self.pages.spec, like.device
        table = torch.tensor(self.sequences.table.rows, dtype=torch.int32, device=device)
        starts = torch.arange(batch_size + 1, device=device) * seen
        out = tuple(like.new_empty(batch_size * seen, 1, size) for size in (spec.head_size, spec.head_size_v))
        cache, sequences = self.cache, self.sequences
        if isinstance(cache, CacheWithCopies):
            step = sequences.decodings[device] if sequences.loaded else sequences.step(device)
            cache.gather(table, starts, out, None, step.full_precision)
        else:
            cache.gather(table, starts, out)
        out = self._centred(out[0], 1), out[1]
        return tuple(rows.unflatten(0, (batch_size, seen)).transpose(1, 2) for rows in out)

    def _new_pages(self, key: torch.Tensor, value: torch.Tensor) -> PagedCache:
        self.requested = self._format(self.stored_dtype or key.dtype)
        return super()._new_pages(key, value)

    def _format(self, dtype: torch.dtype) -> Format:
        return get_format(self.requested, dtype).latents(dtype)
