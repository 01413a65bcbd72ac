"""Dense kernels that need a GPU, played on a CPU: their names, signatures, layouts and restrictions, by float64 arithmetic.

They take any floating dtype, which the real ones do not; `choose` is tested for that. What they are called with is in `calls`.
"""

import inspect
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import torch

from quantkv.implementations.hopper import prefill
from quantkv.implementations.prefill import backends, cudnn_graph, flash3
from quantkv.implementations.prefill.plan import Mask

# As the library that vLLM ships registers it.
FLASH3 = """fwd(Tensor! q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor!? out, Tensor? cu_seqlens_q,
Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k,
Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary,
Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left,
int window_size_right, float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa,
int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]""".replace("\n", " ")
TILE = 192  # keys that a kernel reads at once: what lies behind a sequence is multiplied by a probability of 0
calls = []


def ragged(q, k, v, queries, keys, used, longest, scale, mask, softcap=0.0):
    """Rows `[T, HQ, D_V]`, log-sum-exp `[HQ, T]`; masks aligned to the bottom right."""
    for ends, total in ((queries, len(q)), (keys, len(k))):
        assert ends.dtype == torch.int32 and ends.is_contiguous() and ends.device == q.device
        assert ends[0] == 0 and ends[-1] == total
    counts = keys.diff() if used is None else used
    assert counts.dtype == torch.int32 and len(counts) == len(queries) - 1 == len(keys) - 1
    assert (counts <= keys.diff()).all()
    assert longest == (int(queries.diff().max()), int(counts.max())), "the longest are what a grid is made for"
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1 and q.shape[1] % k.shape[1] == 0 and q.shape[2] == k.shape[2]
    mask = Mask(-1 if mask[0] >= longest[1] - 1 else mask[0], -1 if mask[1] >= longest[0] - 1 and mask[1] > 0 else mask[1])
    rows, lses = [], []
    for s, count in enumerate(counts.tolist()):
        own, first = q[queries[s] : queries[s + 1]], int(keys[s])
        part = (t[first : first + count].transpose(0, 1) for t in (k, v))
        out, lse = backends.math_attention(own, *part, scale, mask, softcap, torch.float64)
        rows.append(out + 0 * v[first + count : first + count + TILE - 1].double().sum())
        lses.append(lse.T)
    return torch.cat(rows).to(q.dtype), torch.cat(lses, 1).float()


def flash3_operator(q, k, v, *rest):
    """The signature of `FLASH3`."""
    names = [a.strip().split()[-1] for a in FLASH3[4 : FLASH3.index(")")].split(",")]
    given = dict(zip(names[3:], rest, strict=True))
    fixed = {"is_rotary_interleaved", "num_splits", "pack_gqa", "sm_margin", "cp_world_size", "cp_rank"}
    used = {
        "out",
        "cu_seqlens_q",
        "cu_seqlens_k",
        "seqused_k",
        "max_seqlen_q",
        "max_seqlen_k",
        "softmax_scale",
        "is_causal",
        "softcap",
        "s_aux",
    }
    assert all(given[n] is None for n in names[3:] if n not in used | fixed | {"window_size_left", "window_size_right"})
    assert given["num_splits"] == 1 and given["cp_world_size"] == 1 and given["sm_margin"] == given["cp_rank"] == 0
    causal, mask = given["is_causal"], (given["window_size_left"], given["window_size_right"])
    assert q.shape[2] == v.shape[2] and (not causal or mask == (-1, -1))
    calls.append(("flash3", tuple(q.shape), tuple(k.shape), (-1, 0) if causal else mask))
    rows, lse = ragged(
        *(q, k, v, given["cu_seqlens_q"], given["cu_seqlens_k"], given["seqused_k"], (given["max_seqlen_q"], given["max_seqlen_k"])),
        *(given["softmax_scale"], (-1, 0) if causal else mask, given["softcap"]),
    )
    if given["s_aux"] is not None:
        sinks = given["s_aux"]
        assert sinks.dtype == torch.bfloat16 and sinks.shape == (q.shape[1],) and len(sinks) <= 64 and sinks.is_contiguous()
        rows = rows * torch.sigmoid(lse.T - sinks.float())[..., None].to(rows.dtype)
        lse = torch.full_like(lse, torch.nan)  # whatever it is, nobody may use it
    if given["out"] is not None:
        assert given["out"].shape == rows.shape and given["out"].dtype == rows.dtype and given["out"].stride(-1) == 1
        rows = given["out"].copy_(rows)
    return [rows, lse]


def flash_attn_func(q, k, v, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, return_attn_probs=False):
    """FlashAttention-3's package, dense batches."""
    mask = (window_size[0], 0) if causal else tuple(window_size)
    calls.append(("flash3", tuple(q.shape), tuple(k.shape), mask))
    sequences = ((a, b.transpose(0, 1), c.transpose(0, 1)) for a, b, c in zip(q, k, v))
    found = [backends.math_attention(*sequence, softmax_scale, Mask(*mask), softcap, torch.float64) for sequence in sequences]
    out, lse = torch.stack([rows for rows, _ in found]).to(q.dtype), torch.stack([lse.T for _, lse in found]).float()
    return (out, lse) if return_attn_probs else out


def flash_attn_varlen_func(
    q,
    k,
    v,
    cu_seqlens_q,
    cu_seqlens_k,
    max_seqlen_q,
    max_seqlen_k,
    seqused_q=None,
    seqused_k=None,
    softmax_scale=None,
    causal=False,
    window_size=(-1, -1),
    softcap=0.0,
    return_attn_probs=False,
):
    """FlashAttention-3's package, ragged batches."""
    mask = (window_size[0], 0) if causal else tuple(window_size)
    calls.append(("flash3", tuple(q.shape), tuple(k.shape), mask))
    out, lse = ragged(q, k, v, cu_seqlens_q, cu_seqlens_k, seqused_k, (max_seqlen_q, max_seqlen_k), softmax_scale, mask, softcap)
    return (out, lse) if return_attn_probs else out


def cudnn(query, key, value, attn_bias, compute_log_sumexp, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    """`[B, HQ, M, D]`; the causal mask is aligned to the top left."""
    assert attn_bias is None and compute_log_sumexp and not dropout_p and not return_debug_mask
    assert query.ndim == key.ndim == value.ndim == 4 and len(query) == len(key) == len(value) and query.shape[1] % key.shape[1] == 0
    calls.append(("cudnn", tuple(query.shape), tuple(key.shape), is_causal))
    mask = Mask(right=query.shape[2] - key.shape[2]) if is_causal else Mask()
    assert not is_causal or key.shape[2] == query.shape[2], "what follows is right for a square alone"
    found = [backends.math_attention(q.transpose(0, 1), k, v, scale, mask, 0.0, torch.float64) for q, k, v in zip(query, key, value)]
    rows = torch.stack([out.transpose(0, 1) for out, _ in found]).to(query.dtype)
    return rows, torch.stack([lse.T[..., None] for _, lse in found]).float(), *nothing(7)


def flash2(query, key, value, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    """torch's flash kernel over `[B, HQ, M, D]`; the log-sum-exp may have more rows than there are queries."""
    assert not dropout_p and len(query) == 1 and query.shape[3] == value.shape[3]
    calls.append(("flash", tuple(query.shape), tuple(key.shape), (-1, 0) if is_causal else (-1, -1)))
    out, lse = backends.math_attention(
        query[0].transpose(0, 1), key[0], value[0], scale, Mask(right=0 if is_causal else -1), 0.0, torch.float64
    )
    return out.transpose(0, 1)[None].to(query.dtype), torch.nn.functional.pad(lse.T, (0, 3))[None].float(), *nothing(7)


def flash2_ragged(
    query,
    key,
    value,
    cum_seq_q,
    cum_seq_k,
    max_q,
    max_k,
    dropout_p,
    is_causal,
    return_debug_mask,
    *,
    scale=None,
    window_size_left=None,
    window_size_right=None,
    seqused_k=None,
    alibi_slopes=None,
):
    """torch's flash kernel over `[T, HQ, D]`."""
    assert not dropout_p and not return_debug_mask and alibi_slopes is None and not is_causal
    mask = tuple(-1 if n is None else n for n in (window_size_left, window_size_right))
    calls.append(("flash", tuple(query.shape), tuple(key.shape), mask))
    return *ragged(query, key, value, cum_seq_q, cum_seq_k, seqused_k, (max_q, max_k), scale, mask), *nothing(3)


def hopper(q, k, v, scale, longest, mask, ends, softcap, out, sinks=None, eight=None):
    """Our own kernel for Hopper: `[M, HQ, D]`, and of keys and values `[HK, N, D]`; sinks are in the log-sum-exp too."""
    queries, keys, used = ends
    assert eight is None and scale > 0 and longest == int(queries.diff().max())
    calls.append(("hopper", tuple(q.shape), tuple(k.shape), tuple(mask)))
    rows, lse = ragged(q, k.transpose(0, 1), v.transpose(0, 1), queries, keys, used, (longest, int(used.max())), scale, mask, softcap)
    lse = lse.mT
    if sinks is not None:
        rows = rows * torch.sigmoid(lse - sinks.float())[..., None].to(rows.dtype)
        lse = torch.logaddexp(lse, sinks.float())
    return rows if out is None else out.copy_(rows), lse


class Named:
    """A tensor of a graph of cuDNN's frontend: what is set of it."""

    def __init__(self, **given):
        self.__dict__.update(given)
        self.ragged = None

    def set_ragged_offset(self, offsets):
        self.ragged = offsets
        return self

    def __getattr__(self, name):
        if not name.startswith("set_"):
            raise AttributeError(name)
        return lambda value: self.__dict__.update({name[4:]: value}) or self


class Graph:
    """A graph of one attention, executed as cuDNN reads it: every tensor by its strides and ragged offsets, lengths from the device."""

    def __init__(self, **types):
        assert types.pop("handle") == "handle" and types["compute_data_type"] == types["intermediate_data_type"] == "float"

    def tensor(self, name, dim, stride, data_type):
        return Named(name=name, dim=dim, stride=stride, data_type=data_type)

    def sdpa(
        self,
        name,
        q,
        k,
        v,
        attn_scale,
        generate_stats,
        use_padding_mask,
        seq_len_q,
        seq_len_kv,
        diagonal_alignment,
        diagonal_band_left_bound=None,
        diagonal_band_right_bound=None,
    ):
        assert generate_stats and use_padding_mask and diagonal_alignment == "bottom right"
        self.names, self.scale = (q, k, v, seq_len_q, seq_len_kv), attn_scale
        self.mask = Mask(*(-1 if bound is None else bound for bound in (diagonal_band_left_bound, diagonal_band_right_bound)))
        self.mask = self.mask._replace(left=self.mask.left - 1 if self.mask.left > 0 else -1)
        self.results = Named(), Named()
        return self.results

    def nothing(self, *args):
        return 0

    validate = build_operation_graph = create_execution_plans = check_support = build_plans = get_workspace_size = nothing

    def execute(self, pack, workspace, handle):
        q, k, v, seq_q, seq_k = self.names
        out, lse = self.results
        assert {*pack} == {*self.names, *self.results, *(t.ragged for t in (q, k, v, out, lse))} and workspace.numel()
        assert all(pack[t.ragged].dtype == pack[seq_q].dtype == pack[seq_k].dtype == torch.int32 for t in (q, k, v, out, lse))
        calls.append(("cudnn graph", tuple(q.dim), tuple(k.dim), tuple(self.mask)))
        for s, (m, n) in enumerate(zip(pack[seq_q].tolist(), pack[seq_k].tolist())):
            view = lambda t, rows, s=s: pack[t].as_strided(
                (t.dim[1], rows, t.dim[3]), t.stride[1:], pack[t].storage_offset() + int(pack[t.ragged][s])
            )
            assert 0 < m <= q.dim[2] and 0 < n <= k.dim[2] and q.dim[2] == out.dim[2] == lse.dim[2]
            rows, sums = backends.math_attention(
                view(q, m).transpose(0, 1), view(k, n), view(v, n), self.scale, self.mask, 0.0, torch.float64
            )
            view(out, m).copy_(rows.transpose(0, 1))
            view(lse, m).copy_(sums.T[..., None])


def frontend():
    """cuDNN's frontend package."""
    types = {"BFLOAT16": "bf16", "HALF": "half", "FLOAT": "float", "INT32": "int"}
    space = SimpleNamespace
    return space(
        __version__="1.13.0",
        pygraph=Graph, data_type=space(**types), diagonal_alignment=space(BOTTOM_RIGHT="bottom right"), heur_mode=space(A=0),
        build_plan_policy=space(HEURISTICS_CHOICE=0),
    )  # fmt: skip


def nothing(count):
    return [torch.empty(0)] * count


TORCH = {
    "_scaled_dot_product_cudnn_attention": cudnn,
    "_scaled_dot_product_flash_attention": flash2,
    "_flash_attention_forward": flash2_ragged,
}


def checked(name, stand_in):
    """The stand-in behind the schema of torch's operator: what that does not take is refused."""
    schema = getattr(torch.ops.aten, name).default._schema
    positional = [a.name for a in schema.arguments if not a.kwarg_only]
    keywords = {a.name for a in schema.arguments if a.kwarg_only}
    assert [*inspect.signature(stand_in).parameters] == [a.name for a in schema.arguments][: len(inspect.signature(stand_in).parameters)]

    def call(*args, **kwargs):
        assert len(args) <= len(positional) and kwargs.keys() <= keywords | set(positional)
        return stand_in(*args, **kwargs)

    return call


@contextmanager
def installed(monkeypatch, kind):
    """Stand-ins in the place of a backend: "operator" and "package" of FlashAttention-3, "graph" of cuDNN's frontend, "hopper" for our own,
    "torch" for cuDNN's and the flash kernel that torch calls."""
    calls.clear()
    flash3._package.cache_clear()
    flash3._parameters.cache_clear()
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    monkeypatch.setattr(flash3, "_operators", lambda: False)
    monkeypatch.setattr(cudnn_graph, "package", lambda: None)
    monkeypatch.setattr(prefill, "takes", lambda *sizes: False)
    library = None
    if kind == "operator":
        if not hasattr(torch.ops._vllm_fa3_C, "fwd"):
            library = torch.library.Library("_vllm_fa3_C", "DEF")
            library.define(FLASH3)
            library.impl("fwd", flash3_operator, "CPU")
        monkeypatch.setattr(flash3, "_operators", lambda: True)
    elif kind == "package":
        package = SimpleNamespace(flash_attn_func=flash_attn_func, flash_attn_varlen_func=flash_attn_varlen_func)
        monkeypatch.setitem(sys.modules, "flash_attn_interface", package)
    elif kind == "graph":
        found = frontend()
        monkeypatch.setattr(cudnn_graph, "package", lambda: found)
        monkeypatch.setattr(cudnn_graph._Kept, "on_stream", lambda self, device: "handle")
        monkeypatch.setattr(cudnn_graph, "KINDS", {**cudnn_graph.KINDS, torch.float32: "FLOAT"})
        cudnn_graph._kept.cache_clear()
    elif kind == "hopper":
        monkeypatch.setattr(prefill, "takes", lambda *sizes: {*sizes} <= {*prefill.SIZES})
        monkeypatch.setattr(prefill, "attend", hopper)
    elif kind == "torch":
        monkeypatch.setattr(backends, "aten", SimpleNamespace(**{name: checked(name, f) for name, f in TORCH.items()}))
    try:
        yield calls
    finally:
        flash3._package.cache_clear()
        flash3._parameters.cache_clear()
        if library is not None:
            library._destroy()
