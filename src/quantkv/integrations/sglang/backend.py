"""Attention in SGLang: rows into quantized pages, and attention over them."""

from __future__ import annotations

from copy import copy
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from ...calls import Batch
from ...engine.full_precision_group import FullPrecisionGroup
from ...engine.warm_up import StepLimits, together, warm_up, who_serves
from ..serving import Step, tell
from . import logger
from .drafts import chains, queries_of_a_chain
from .layers import Layers

PER_LAYER = ("sinks",)  # what a model gives with a call of attention, and calls take
CHAINS = (ForwardMode.TARGET_VERIFY, ForwardMode.DRAFT_EXTEND_V2)  # as many new tokens in each sequence
SERVED_MODES = (ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED, ForwardMode.SPLIT_PREFILL, *CHAINS)


@dataclass
class Static:
    """Tensors that a captured graph reads, for one pool: block table `[S, pages]`, slots `[T]`."""

    table: torch.Tensor
    slots: torch.Tensor


class QuantKVBackend(AttentionBackend):
    """Prepared calls of a pass over each of a model's pools, and a launch of them for each layer.

    layers: of the model. token_to_kv_pool, req_to_token_pool: SGLang's pools, which it looks for here.
    """

    def __init__(self, runner: Any, layers: Layers) -> None:
        super().__init__()
        self.layers, self.device = layers, torch.device(runner.device)
        self.req_to_token_pool, self.token_to_kv_pool = runner.req_to_token_pool, runner.token_to_kv_pool
        self.page_size, self.table = runner.page_size, runner.req_to_token_pool.req_to_token[:, :: runner.page_size]
        self.windows = self.token_to_kv_pool if isinstance(self.token_to_kv_pool, SWAKVPool) else None
        limits = self._limits(runner)
        self.full_precision = {windowed: self._group(windowed, limits) for windowed in self._pools}
        self.forward_metadata: dict[bool, Step] = {}
        self._static: dict[bool, Static] = {}
        self._graphs: dict[int, dict[bool, Step]] = {}
        self._tell(limits)

    @property
    def _pools(self) -> list[bool]:
        """Whether the layers of each pool have windows."""
        return sorted({layer.windowed for layer in self.layers.of.values()})

    def _limits(self, runner: Any) -> StepLimits:
        """The largest steps that SGLang makes."""
        from sglang.srt.arg_groups.overrides import resolved_view

        view = resolved_view(runner.server_args)
        sequences = max(runner.max_running_requests, *(view.cuda_graph_config.decode.bs or [0]))
        verified = 1 if view.speculative_algorithm is None else view.speculative_num_draft_tokens
        tokens = max(view.chunked_prefill_size or 0, view.max_prefill_tokens or 0, runner.model_config.context_len) + sequences * verified
        return StepLimits(sequences, tokens, runner.model_config.context_len, verified, self.table.shape[1])

    def _group(self, windowed: bool, limits: StepLimits) -> FullPrecisionGroup | None:
        """Full-precision tokens of the layers of one pool; None where they have none."""
        found = [layer.paged for layer in self.layers.full_precision(windowed)]
        return FullPrecisionGroup(found, limits.num_seqs, limits.num_tokens, self.layers.requests, self.device) if found else None

    def _tell(self, limits: StepLimits) -> None:
        """Have compiled what the layers need, on a GPU, and tell the log who serves them."""
        with together():
            for layer, attention in self.layers.kinds():
                fmt = layer.paged.config.format.name
                if self.device.type == "cuda":
                    who = warm_up(layer.paged, attention, limits, layer.cache)
                else:
                    who = who_serves(layer.paged, attention, limits, self.device, self.page_size)
                tell(logger, fmt, who, sum(other.paged.config.format.name == fmt for other in self.layers.of.values()))

    # What SGLang asks before a pass.

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Prepare the calls of a pass."""
        mode = forward_batch.forward_mode
        if mode.is_idle():
            return
        if mode not in SERVED_MODES:
            raise NotImplementedError(f"quantkv: passes of kind {mode.name}; allowed: {', '.join(m.name for m in SERVED_MODES)}")
        seq_lens, kind = forward_batch.seq_lens.int(), "decode"
        if mode.is_decode():
            starts = torch.arange(len(seq_lens) + 1, dtype=torch.int32, device=self.device)
            batch = Batch(starts, seq_lens, 1, self._longest(forward_batch))
        elif mode in CHAINS:
            batch = chains(forward_batch, self.device, known=mode == ForwardMode.DRAFT_EXTEND_V2)
        else:
            batch, kind = self._mixed(forward_batch, seq_lens), "mixed"
        self.prepare(kind, batch, forward_batch, forward_batch.out_cache_loc, forward_batch.positions)

    def prepare(self, kind: str, batch: Batch, forward_batch: Any, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Prepare the calls of a pass over each pool, whose new rows go to `slots` and stand at `positions`."""
        first = self.table[forward_batch.req_pool_indices.long()]
        self.forward_metadata = {windowed: self._step(kind, windowed, batch, slots, first, positions) for windowed in self._pools}

    def _longest(self, forward_batch: Any) -> int | None:
        """Keys of the longest sequence, where the host knows them."""
        known = forward_batch.seq_lens_cpu
        return None if known is None or not len(known) else int(known.max())

    def _mixed(self, forward_batch: Any, seq_lens: torch.Tensor) -> Batch:
        """Sequences with several new tokens each."""
        new = forward_batch.extend_seq_lens_cpu
        starts = torch.zeros(len(seq_lens) + 1, dtype=torch.int32, device=self.device)
        torch.cumsum(forward_batch.extend_seq_lens, 0, out=starts[1:])
        lengths = None
        if self.device.type == "cuda" and forward_batch.extend_prefix_lens_cpu is not None:
            lengths = tuple((n, before + n) for n, before in zip(new, forward_batch.extend_prefix_lens_cpu))
        return Batch(starts, seq_lens, max(new), self._longest(forward_batch), lengths, chunks=True)

    def _step(self, kind: str, windowed: bool, batch: Batch, slots: torch.Tensor, first: torch.Tensor, positions: torch.Tensor) -> Step:
        """The calls over one pool. first: the first slot of each sequence's pages."""
        if windowed:
            slots, first = self._in_windows(slots), self._in_windows(first)
        step = Step(kind, batch, (first // self.page_size).int(), slots, positions)
        self._attach(step, windowed)
        return step

    def _in_windows(self, slots: torch.Tensor) -> torch.Tensor:
        """Slots of SGLang's pool for windows; those that left the window are 0."""
        return self.windows.translate_loc_from_full_to_swa(slots.long())

    def _attach(self, step: Step, windowed: bool, advance: bool = True) -> None:
        """Say what the pass reads at full precision."""
        group = self.full_precision[windowed]
        if group is not None:
            group.attach(step, self.layers.full_precision(windowed)[-1].cache, advance)

    # CUDA graphs of decode and of drafts that are verified: written from SGLang's contract.

    def over_the_same_pages(self) -> QuantKVBackend:
        """Another one, whose passes and graphs are its own."""
        made = copy(self)
        made.forward_metadata, made._static, made._graphs = {}, {}, {}
        return made

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make the tensors that captured graphs read."""
        width = self.table.shape[1]
        self._graphs.clear()
        self._seq_lens = torch.ones(max_bs, dtype=torch.int32, device=self.device)
        self._counting = torch.arange(max_bs + 1, dtype=torch.int32, device=self.device)
        self._starts = self._counting.clone()
        self._positions = torch.zeros(max_num_tokens, dtype=torch.int64, device=self.device)
        for windowed in self._pools:
            table = torch.zeros(max_bs, width, dtype=torch.int32, device=self.device)
            self._static[windowed] = Static(table, torch.full((max_num_tokens,), -1, dtype=torch.int64, device=self.device))

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Keys of a row of padding."""
        return 1

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Fill the tensors that a captured graph reads, outside of the graph."""
        mode = forward_batch.forward_mode
        if not mode.is_decode_or_idle() and mode != ForwardMode.TARGET_VERIFY:
            raise NotImplementedError(f"quantkv: CUDA graphs of {mode.name}; allowed: DECODE, TARGET_VERIFY")
        new, ahead = 1, 0  # SGLang's lengths of decode count the new token
        if mode == ForwardMode.TARGET_VERIFY:
            new = ahead = queries_of_a_chain(forward_batch.spec_info)  # those of drafts do not
        self.fill(forward_batch, new, ahead, forward_batch.out_cache_loc, forward_batch.positions, in_capture)

    def fill(
        self, forward_batch: Any, new: int, ahead: int, slots: torch.Tensor, positions: torch.Tensor, in_capture: bool = False
    ) -> None:
        """Fill the tensors that a captured graph with `new` tokens in each sequence reads. ahead: tokens that lengths do not count.

        A replayed batch has as many slots as tokens; the rows beyond, to the size of the graph, are padding: sequences without queries and
        without keys. Rows of a batch that is captured have slot 0: they write nothing, and read page 0.
        """
        count = forward_batch.batch_size
        slots = slots[: count * new]
        given, real = len(slots) // new, slots > 0
        table = self.table[forward_batch.req_pool_indices[:given].long()]
        self._seq_lens[:given].copy_(forward_batch.seq_lens[:given] + ahead)
        self._seq_lens[given:count].fill_(0)
        torch.clamp(self._counting[: count + 1], max=given, out=self._starts[: count + 1]).mul_(new)
        self._positions[: count * new].copy_(positions[: count * new])
        for windowed, static in self._static.items():
            own, first = (self._in_windows(slots), self._in_windows(table)) if windowed else (slots, table)
            static.slots[: given * new].copy_(torch.where(real, own, -1))
            static.table[:given].copy_(torch.where(real[::new, None], first // self.page_size, 0))
            static.slots[given * new : count * new].fill_(-1)
            static.table[given:count].fill_(0)
        steps = self._graphs.get(count)
        if steps is None:
            batch = Batch(self._starts[: count + 1], self._seq_lens[:count], new)  # no bound: a graph is replayed with longer sequences
            steps = self._graphs[count] = {
                windowed: Step("decode", batch, static.table[:count], static.slots[: count * new], self._positions[: count * new])
                for windowed, static in self._static.items()
            }
        for windowed, step in steps.items():
            self._attach(step, windowed, advance=not in_capture)
        self.forward_metadata = steps

    # Layers.

    def forward_decode(self, q, k, v, layer, forward_batch, save_kv_cache=True, **given):
        """Attention of one token of each sequence."""
        return self._forward(q, k, v, layer, save_kv_cache, given)

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True, **given):
        """Attention of several tokens of a sequence."""
        return self._forward(q, k, v, layer, save_kv_cache, given)

    def _forward(self, q: torch.Tensor, k: Any, v: Any, module: Any, save: bool, given: dict[str, Any]) -> torch.Tensor:
        """Store a layer's rows and attend: `q [T, HQ * D]` -> `[T, HQ * D_V]`. k, v: None for a module that reads another's pages."""
        found, attention = self.layers.of[module.layer_id], self.layers.attention[id(module)]
        unknown = [name for name, value in given.items() if value is not None and name not in PER_LAYER]
        if unknown or (k is not None and not save):
            raise NotImplementedError(f"quantkv: layer {found.number}: attention with {unknown or 'save_kv_cache=False'} is not supported")
        step = self.forward_metadata[found.windowed]
        pages = found.pages
        q = q.view(-1, module.tp_q_head_num, module.qk_head_dim)
        if k is not None:
            k, v = k.view(-1, *found.paged.heads[:2]), v.view(-1, found.paged.heads.num_kv_heads, module.v_head_dim)
            step.write(pages, k, v)
        out = q.new_empty(q.shape[0], module.tp_q_head_num, module.v_head_dim)
        reads_own = attention.own_rows and step.kind == "mixed"  # drafts read what decode would: pages alone
        own = step.own_rows(found.number, k, v, found.lends) if reads_own else {}
        step.attend(pages, q, attention.scale, attention.options, out=out, **own, **self._tensors(module, given))
        return out.view(q.shape[0], -1)

    def _tensors(self, module: Any, given: dict[str, Any]) -> dict[str, torch.Tensor]:
        """Sinks of a layer, as calls take them."""
        return {name: given[name].float() for name in PER_LAYER if given.get(name) is not None}

    def support_triton(self) -> bool:
        """Whether SGLang may run kernels of its own by Triton around attention."""
        return self.device.type == "cuda"
