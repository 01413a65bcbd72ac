"""In PyTorch, CPU operators that vLLM's wheel on the package index, built for CUDA, lacks: those of attention, experts, drafts, and of
Qwen3-Next's linear attention. Other recurrences have none here.

vLLM loads it as it loads any plug-in, in every process. Where an operator exists, as in vLLM's own CPU builds, that one stays.
Nothing in quantkv uses this: it is for trying, and testing, the plug-in on a machine without a GPU.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch

_library = None  # operators live as long as it does


def fused_gumbel_argmax(logits: torch.Tensor, seeds: torch.Tensor) -> torch.Tensor:
    """A token of each row of `logits`, drawn by their softmax: the largest of logits plus Gumbel noise."""
    drawn = []
    for row, seed in zip(logits, seeds.tolist()):
        noise = torch.empty_like(row).exponential_(generator=torch.Generator().manual_seed(seed))
        drawn.append((row - noise.log()).argmax())
    return torch.stack(drawn)


def compute_slot_mapping_kernel_impl(
    query_start_loc: torch.Tensor, positions: torch.Tensor, block_table: torch.Tensor, slot_mapping: torch.Tensor, block_size: int
) -> None:
    starts = query_start_loc.tolist()
    for request, (start, stop) in enumerate(pairwise(starts)):
        position = positions[start:stop].long()
        slot_mapping[start:stop] = block_table[request, position // block_size].long() * block_size + position % block_size
    slot_mapping[starts[-1] :] = -1


def rejection_greedy_sample_kernel_impl(
    output: torch.Tensor,
    ends: torch.Tensor,
    drafted: torch.Tensor,
    wanted: torch.Tensor,
    bonus: torch.Tensor,
    is_greedy: torch.Tensor | None,
    longest: int,
) -> None:
    """Of each request the drafted tokens up to the first that the model would not have taken, then the model's own."""
    start = 0
    for request, stop in enumerate(ends.tolist()):
        if is_greedy is None or bool(is_greedy[request]):
            taken = int((drafted[start:stop] == wanted[start:stop]).long().cumprod(0).sum())
            tokens = wanted[start : min(start + taken + 1, stop)]
            output[request, : len(tokens)] = tokens
            if taken == stop - start:
                output[request, taken] = bonus.view(-1)[request]
        start = stop


def eagle_prepare_next_token_padded_kernel_impl(
    sampled: torch.Tensor,
    discarded: torch.Tensor,
    otherwise: torch.Tensor,
    following: torch.Tensor,
    counts: torch.Tensor,
    vocabulary: int,
    longest: int,
    requests: int,
) -> None:
    """Of each request the last token that was taken, and how many were; -1 stands for those that were not."""
    for request in range(requests):
        taken = [token for token in sampled[request].tolist() if 0 <= token < vocabulary and not bool(discarded[request])]
        following[request], counts[request] = taken[-1] if taken else otherwise[request], len(taken)


def eagle_prepare_inputs_padded_kernel_impl(
    ends: torch.Tensor, counts: torch.Tensor, starts: torch.Tensor, sampled_at: torch.Tensor, rejected: torch.Tensor, requests: int
) -> None:
    """Where each request's last token that was taken stands, and how many drafts were rejected. ends: of the drafts of each request."""
    drafted = ends[:requests].diff(prepend=ends.new_zeros(1))
    rejected[:requests] = torch.where(drafted > 0, drafted + 1 - counts[:requests], 0)
    sampled_at[:requests] = starts[1 : requests + 1] - 1 - rejected[:requests]


def eagle_step_slot_mapping_metadata_kernel_impl(
    positions: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    following: torch.Tensor,
    slots: torch.Tensor,
    block_size: int,
    longest: int,
    padding: int,
) -> None:
    """Each request goes on by one drafted token; one that is too long has none."""
    count, ahead = len(positions), positions + 1
    over = ahead >= longest
    ahead = torch.where(over, 0, ahead)
    page = block_table[:count].gather(1, (ahead // block_size).clamp_max(block_table.shape[1] - 1).long()[:, None])[:, 0]
    slots.fill_(padding)
    slots[:count] = torch.where(over, padding, page * block_size + ahead % block_size)
    seq_lens[:count] = torch.where(over, 1, seq_lens[:count] + 1).clamp_max(longest)
    following[:count] = ahead


def copy_and_expand_eagle_inputs_kernel_impl(
    tokens: torch.Tensor,
    positions: torch.Tensor,
    following: torch.Tensor,
    out_tokens: torch.Tensor,
    out_positions: torch.Tensor,
    rejected: torch.Tensor,
    masked: torch.Tensor,
    new_at: torch.Tensor,
    moved_to: torch.Tensor,
    starts: torch.Tensor,
    lasts: torch.Tensor,
    padding_token: int,
    drafting_token: int,
    total: int,
    slots: int,
    shift: bool,
) -> None:
    """Each request's tokens up to the last that was taken, the next one, tokens to draft at once, and padding for rejected ones.
    lasts: of the last token that was taken. slots: tokens that are added to each request."""
    for request, last in enumerate(lasts.tolist()):
        start, stop = starts[request : request + 2].tolist()
        first = start + request * (slots - shift)
        kept = tokens[start + shift : last + 1]
        held, count = len(kept), len(kept) + slots + stop - last - 1
        where = slice(first, first + count)
        drawn = [*kept.tolist(), int(following[request]), *[drafting_token] * (slots - 1), *[padding_token] * (stop - last - 1)]
        out_tokens[where] = torch.tensor(drawn)
        out_positions[where] = int(positions[start]) + torch.arange(count)
        out_positions[first + held + slots : first + count] = 0
        rejected[where], masked[where] = False, False
        rejected[first + held + slots : first + count] = True
        masked[first + held + 1 : first + held + slots] = True
        new_at[request * slots : (request + 1) * slots] = first + held + torch.arange(slots)
        if shift:
            moved_to[start:stop] = first + torch.arange(stop - start)


def prepack_moe_weight(weight: torch.Tensor, output: torch.Tensor, isa: str) -> None:
    output.copy_(weight)


def cpu_fused_moe(
    output: torch.Tensor,
    rows: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    weights: torch.Tensor,
    experts: torch.Tensor,
    skip_weighted: bool,
    activation: str,
    isa: str,
) -> None:
    """Experts of feed-forward layers: w13 holds gate and up projections, alternating in GPT-OSS's and one behind the other elsewhere."""
    if activation not in GATES:
        raise NotImplementedError(f"activation={activation!r}: {', '.join(GATES)} have a stand-in")
    for number, row in enumerate(rows):
        total = torch.zeros_like(row)
        for weight, expert in zip(weights[number].tolist(), experts[number].tolist()):
            inner = torch.nn.functional.linear(row, w13[expert], None if w13_bias is None else w13_bias[expert])
            outer = torch.nn.functional.linear(GATES[activation](inner), w2[expert], None if w2_bias is None else w2_bias[expert])
            total += outer if skip_weighted else weight * outer
        output[number] = total


def gated_alternating(inner: torch.Tensor) -> torch.Tensor:
    """GPT-OSS's: both are clamped."""
    gate, up = inner[::2].clamp(max=7.0), inner[1::2].clamp(-7.0, 7.0)
    return (up + 1) * gate * torch.sigmoid(1.702 * gate)


def gated_halves(activation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def gated(inner: torch.Tensor) -> torch.Tensor:
        gate, up = inner.chunk(2, -1)
        return activation(gate) * up

    return gated


GATES = {
    "swigluoai": gated_alternating,
    "silu": gated_halves(torch.nn.functional.silu),
    "gelu": gated_halves(torch.nn.functional.gelu),
    "gelu_tanh": gated_halves(partial(torch.nn.functional.gelu, approximate="tanh")),
}


def gelu_by_tanh(output: torch.Tensor, rows: torch.Tensor) -> None:
    output.copy_(torch.nn.functional.gelu(rows, approximate="tanh"))


def gelu_quick(output: torch.Tensor, rows: torch.Tensor) -> None:
    output.copy_(rows * torch.sigmoid(1.702 * rows))


def causal_conv1d_update(
    rows: torch.Tensor,
    states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    slots: torch.Tensor,
    starts: torch.Tensor | None,
    padding: int,
) -> torch.Tensor:
    """One row of each request, behind the rows in its state. rows `[N, C]`, states `[slots, C, width - 1]`, weight `[C, width]`."""
    seen = torch.cat([states[slots.long()], rows.to(states.dtype)[:, :, None]], -1)
    states[slots.long()] = seen[:, :, 1:]
    output = (seen.float() * weight.float()).sum(-1) + (0 if bias is None else bias.float())
    return (torch.nn.functional.silu(output) if activation in ("silu", "swish") else output).to(rows.dtype)


def gdn_gating(a_log: torch.Tensor, a: torch.Tensor, b: torch.Tensor, dt_bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each token and head: the logarithm of what a state keeps, and the share of a new row that goes into it."""
    return -a_log.float().exp() * torch.nn.functional.softplus(a.float() + dt_bias.float()), b.float().sigmoid()


def delta_rule(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kept: torch.Tensor, share: torch.Tensor, state: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """The gated delta rule of one request -> what each token reads, and the state behind it. query, key `[T, HK, D]`, value `[T, H, E]`,
    kept and share `[T, H]`, state `[H, D, E]`."""
    found, groups = [], value.shape[1] // key.shape[1]
    query, key = (torch.nn.functional.normalize(t.float(), dim=-1, eps=1e-6).repeat_interleave(groups, 1) for t in (query, key))
    for q, k, v, g, beta in zip(query * query.shape[-1] ** -0.5, key, value.float(), kept, share):
        state = state * g.exp()[:, None, None]
        change = (v - torch.einsum("hd,hde->he", k, state)) * beta[:, None]
        state = state + torch.einsum("hd,he->hde", k, change)
        found.append((torch.einsum("hd,hde->he", q, state), state))
    return found


def chunk_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    kept: torch.Tensor,
    share: torch.Tensor,
    states: torch.Tensor,
    output_final_state: bool,
    starts: torch.Tensor,
    head_first: bool,
    normalized: bool,
    slots: torch.Tensor,
    epsilon: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Prompts, each of whose states stays behind its last token."""
    output = torch.empty_like(value)
    for slot, (start, stop) in zip(slots.tolist(), pairwise(starts.tolist())):
        rows = slice(start, stop)
        read = delta_rule(query[0, rows], key[0, rows], value[0, rows], kept[rows], share[rows], states[slot].float())
        output[0, rows] = torch.stack([row for row, _ in read]).to(output.dtype)
        states[slot] = read[-1][1]
    return output, states.new_empty(0)  # which nobody reads


def delta_rule_update(
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    normalized: bool,
    beta: float,
    threshold: float,
) -> torch.Tensor:
    """One token of each request."""
    output = chunk_gated_delta_rule(
        query, key, value, *gdn_gating(a_log, a, b, dt_bias), states, True, starts, False, normalized, slots, 0.0
    )[0]
    return output.transpose(0, 1)


def delta_rule_update_drafts(
    a_log: torch.Tensor,
    dt_bias: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    states: torch.Tensor,
    slots: torch.Tensor,
    taken: torch.Tensor,
    starts: torch.Tensor,
    normalized: bool,
    beta: float,
    threshold: float,
) -> torch.Tensor:
    """Drafted tokens of each request, behind the last one that was taken; the state behind each has a slot of its own."""
    kept, share = gdn_gating(a_log, a, b, dt_bias)
    output = torch.empty_like(value)
    for own, count, (start, stop) in zip(slots.tolist(), taken.tolist(), pairwise(starts.tolist())):
        rows = slice(start, stop)
        read = delta_rule(query[rows], key[rows], value[rows], kept[rows], share[rows], states[own[count - 1]].float())
        for token, (slot, (row, state)) in enumerate(zip(own, read), start):
            output[token], states[slot] = row.to(output.dtype), state
    return output


OPERATORS = {
    "init_cpu_memory_env(int[] nodes) -> ()": lambda nodes: None,
    "greedy_argmax(Tensor logits) -> Tensor": lambda logits: logits.argmax(-1).view(-1),
    "fused_gumbel_argmax(Tensor logits, Tensor seeds) -> Tensor": fused_gumbel_argmax,
    "compute_slot_mapping_kernel_impl(Tensor query_start_loc, Tensor positions, Tensor block_table, "
    "Tensor(a!) slot_mapping, int block_size) -> ()": compute_slot_mapping_kernel_impl,
    "rejection_greedy_sample_kernel_impl(Tensor(a!) output, Tensor ends, Tensor drafted, Tensor wanted, Tensor bonus, "
    "Tensor? is_greedy, int longest) -> ()": rejection_greedy_sample_kernel_impl,
    "eagle_prepare_next_token_padded_kernel_impl(Tensor sampled, Tensor discarded, Tensor otherwise, Tensor(a!) following, "
    "Tensor(b!) counts, int vocabulary, int longest, int requests) -> ()": eagle_prepare_next_token_padded_kernel_impl,
    "eagle_prepare_inputs_padded_kernel_impl(Tensor ends, Tensor counts, Tensor starts, Tensor(a!) sampled_at, Tensor(b!) rejected, "
    "int requests) -> ()": eagle_prepare_inputs_padded_kernel_impl,
    "eagle_step_slot_mapping_metadata_kernel_impl(Tensor positions, Tensor block_table, Tensor(a!) seq_lens, Tensor(b!) following, "
    "Tensor(c!) slots, int block_size, int longest, int padding) -> ()": eagle_step_slot_mapping_metadata_kernel_impl,
    "copy_and_expand_eagle_inputs_kernel_impl(Tensor tokens, Tensor positions, Tensor following, Tensor(a!) out_tokens, "
    "Tensor(b!) out_positions, Tensor(c!) rejected, Tensor(d!) masked, Tensor(e!) new_at, Tensor(f!) moved_to, Tensor starts, "
    "Tensor lasts, int padding_token, int drafting_token, int all, int slots, bool shift) -> ()": copy_and_expand_eagle_inputs_kernel_impl,
    "causal_conv1d_update_cpu_vec(Tensor rows, Tensor(a!) states, Tensor weight, Tensor? bias, str? activation, Tensor slots, "
    "Tensor? starts, int padding) -> Tensor": causal_conv1d_update,
    "fused_gdn_gating_cpu(Tensor a_log, Tensor a, Tensor b, Tensor dt_bias) -> (Tensor, Tensor)": gdn_gating,
    "chunk_gated_delta_rule_cpu(Tensor query, Tensor key, Tensor value, Tensor kept, Tensor share, Tensor(a!) states, bool final, "
    "Tensor starts, bool head_first, bool normalized, Tensor slots, float epsilon) -> (Tensor, Tensor)": chunk_gated_delta_rule,
    "fused_sigmoid_gating_delta_rule_update_cpu(Tensor a_log, Tensor dt_bias, Tensor query, Tensor key, Tensor value, Tensor a, Tensor b, "
    "Tensor(a!) states, Tensor slots, Tensor starts, bool normalized, float beta, float threshold) -> Tensor": delta_rule_update,
    "fused_sigmoid_gating_delta_rule_update_spec_cpu(Tensor a_log, Tensor dt_bias, Tensor query, Tensor key, Tensor value, Tensor a, "
    "Tensor b, Tensor(a!) states, Tensor slots, Tensor taken, Tensor starts, bool normalized, float beta, float threshold) "
    "-> Tensor": delta_rule_update_drafts,
    "gelu_new(Tensor(a!) output, Tensor rows) -> ()": gelu_by_tanh,
    "gelu_fast(Tensor(a!) output, Tensor rows) -> ()": gelu_by_tanh,
    "gelu_quick(Tensor(a!) output, Tensor rows) -> ()": gelu_quick,
    "prepack_moe_weight(Tensor weight, Tensor(a!) output, str isa) -> ()": prepack_moe_weight,
    "cpu_fused_moe(Tensor(a!) output, Tensor rows, Tensor w13, Tensor w2, Tensor? w13_bias, Tensor? w2_bias, Tensor weights, "
    "Tensor experts, bool skip_weighted, str activation, str isa) -> ()": cpu_fused_moe,
}


def register() -> None:
    global _library
    from vllm.platforms import current_platform

    if _library is not None or not current_platform.is_cpu():
        return
    _library = torch.library.Library("_C", "FRAGMENT")
    if not hasattr(torch.ops._C, "causal_conv1d_fwd_cpu"):  # convolutions by this CPU's own instructions
        torch.cpu._is_avx512_bf16_supported = torch.cpu._is_amx_tile_supported = lambda: False
    for schema, function in OPERATORS.items():
        name = schema.split("(")[0]
        if not hasattr(torch.ops._C, name):
            _library.define(schema)
            _library.impl(name, function, "CompositeExplicitAutograd")
    if not hasattr(torch.ops._C, "convert_weight_packed"):  # by which a CPU with AMX multiplies small weights at bfloat16
        from vllm.model_executor.layers import utils

        utils.check_cpu_sgl_kernel = lambda *of_weight: False
