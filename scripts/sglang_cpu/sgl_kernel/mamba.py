"""SGLang's compiled operators for gated delta networks (linear attention) on a CPU, in PyTorch, token by token; none for drafts.

Names and arguments are SGLang's. States are `[slots, HV, V, K]`, those of convolutions `[slots, D, W - 1]`.
"""

import torch
import torch.nn.functional as F


def causal_conv1d_fn_cpu(x, weight, bias, *, activation, conv_states, has_initial_state, cache_indices, query_start_loc, **named):
    """Convolutions along prompts `[D, T]` that stand one behind another."""
    width, parts, bounds = weight.shape[1] - 1, [], query_start_loc.tolist()
    for slot, known, first, last in zip(cache_indices.tolist(), has_initial_state.tolist(), bounds, bounds[1:]):
        held = conv_states[slot] if known else torch.zeros_like(conv_states[slot])
        parts.append(_convolved(torch.cat([held.to(x.dtype), x[:, first:last]], 1), weight, bias, activation))
        conv_states[slot] = torch.cat([held, x[:, first:last].to(held.dtype)], 1)[:, -width:]
    return torch.cat(parts, 1)


def causal_conv1d_update_cpu(x, conv_states, weight, bias, activation, conv_state_indices, **named):
    """Convolutions of one new token of each sequence, `[S, D]`."""
    slots = conv_state_indices.long()
    rows = torch.cat([conv_states[slots].to(x.dtype), x[..., None]], 2)
    conv_states[slots] = rows[..., 1:].to(conv_states.dtype)
    return _convolved(rows, weight, bias, activation)[..., 0]


def _convolved(rows, weight, bias, activation):
    out = F.conv1d(rows, weight[:, None].to(rows.dtype), bias, groups=len(weight))
    return F.silu(out) if activation in ("silu", "swish", True) else out


def fused_gdn_gating_cpu(A_log, a, b, dt_bias):
    """The logarithm of each token's decay, and how much of it is written: `[1, T, HV]` float32."""
    decay = -A_log.float().exp() * F.softplus(a.float() + dt_bias.float())
    return decay[None], b.float().sigmoid()[None]


def chunk_gated_delta_rule_cpu(q, k, v, g, beta, *, initial_state, initial_state_indices, cu_seqlens, **named):
    """Linear attention of prompts that stand one behind another."""
    return _delta_rule(q, k, v, g, beta, initial_state, initial_state_indices, cu_seqlens), None, None


def fused_sigmoid_gating_delta_rule_update_cpu(
    A_log, dt_bias, q, k, v, a, b, initial_state_source, initial_state_indices, cu_seqlens, **named
):
    """Linear attention of one new token of each sequence."""
    g, beta = fused_gdn_gating_cpu(A_log, a, b, dt_bias)
    return _delta_rule(q, k, v, g, beta, initial_state_source, initial_state_indices, cu_seqlens)


def _delta_rule(q, k, v, g, beta, states, slots, bounds):
    """Rows are `[1, T, H, D]`; keys have fewer heads than values."""
    times, out, bounds = v.shape[2] // k.shape[2], torch.empty_like(v), bounds.tolist()
    q, k = (F.normalize(t[0].float(), dim=-1).repeat_interleave(times, 1) for t in (q, k))
    for slot, first, last in zip(slots.tolist(), bounds, bounds[1:]):
        state = states[slot].float()
        for i in range(first, last):
            state = state * g[0, i].exp()[:, None, None]
            change = beta[0, i][:, None] * (v[0, i].float() - (state @ k[i][..., None])[..., 0])
            state = state + change[..., None] * k[i][:, None]
            out[0, i] = (state @ q[i][..., None])[..., 0] * k.shape[-1] ** -0.5
        states[slot] = state
    return out


for _made in (fused_gdn_gating_cpu, fused_sigmoid_gating_delta_rule_update_cpu):
    setattr(torch.ops.sgl_kernel, _made.__name__, _made)
