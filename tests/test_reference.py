"""The reference against attention written out key by key in Python floats, for every option, and against itself where order
must not matter."""

import importlib.util

import pytest
import torch

import direct
from oracle import attention
from quantkv import AttentionOptions, PagedCache, get_format, testing
from quantkv.implementations.reference import plan
from quantkv.implementations.reference.attend import combine
from quantkv.maps import LayerMaps, LinearMap

HK, GROUP, D = 2, 3, 16
QUERIES, KEYS = (5, 1, 3, 0), (21, 30, 3, 9)  # chunked prefill, decode, whole prefill, a sequence without queries


def make(fmt="fp32", *, d=D, d_v=24, block_size=8, maps=None, seed=0, keys=KEYS, queries=QUERIES):
    g = torch.Generator().manual_seed(seed)
    spec = get_format(fmt).cache_spec(HK, d, d_v, block_size)
    pages = [spec.num_blocks(n) for n in keys]
    cache = PagedCache(spec, sum(pages) + 3, maps=maps)
    cache.buffer.fill_(0xFF)  # NaN in every float that nothing writes
    order = torch.randperm(cache.num_blocks, generator=g)
    table = torch.full((len(keys), max(pages) + 2), 10**6)
    slots, positions = [], []
    for s, n in enumerate(keys):
        table[s, : pages[s]], order = order[: pages[s]], order[pages[s] :]
        p = torch.arange(n)
        slots.append(table[s, p // block_size] * block_size + p % block_size)
        positions.append(p)
    slots, positions = torch.cat(slots), torch.cat(positions)
    k, v = torch.randn(len(slots), HK, d, generator=g), torch.randn(len(slots), HK, d_v, generator=g)
    cache.write(k, v, slots, positions)
    batch = dict(block_table=table, seq_lens=torch.tensor(keys), cu_seqlens_q=torch.tensor([0, *queries]).cumsum(0))
    q = torch.randn(sum(queries), HK * GROUP, d, generator=g)
    return cache, q, batch, (slots, positions)


def expected(cache, q, batch, where, per_head=lambda h: {}, per_seq=lambda s: {}, **options):
    """Every sequence and head through the oracle, over the dequantized rows in float64."""
    keys, values = cache.dequantize(*where, dtype=torch.float64)
    out, lse = [], []
    start = 0
    for s, n in enumerate(batch["seq_lens"].tolist()):
        a, b = batch["cu_seqlens_q"][s : s + 2].tolist()
        heads = [
            attention(
                q[a:b, h].double(),
                keys[start : start + n, h // GROUP],
                values[start : start + n, h // GROUP],
                context=n - (b - a),
                scale=q.shape[-1] ** -0.5,
                **options,
                **per_head(h),
                **per_seq(s),
            )
            for h in range(q.shape[1])
        ]
        out.append(torch.stack([o for o, _ in heads], 1))
        lse.append(torch.stack([m for _, m in heads], 1))
        start += n
    return torch.cat(out), torch.cat(lse)


RANGES = torch.tensor([[[2, 18], [0, 0]], [[0, 4], [27, 29]], [[0, 2], [5, 5]], [[0, 0], [0, 0]]])
OPTIONS = {
    "causal": {},
    "not causal": {"causal": False},
    "window": {"window": 7},
    "window not causal": {"window": 3, "causal": False},
    "window of one": {"window": 1},
    "chunked": {"window": 12, "chunk_lookback": 1},
    "chunked, no lookback": {"window": 8, "chunk_lookback": 0},
    "softcap": {"softcap": 0.5},
    "softcap and window": {"softcap": 2.0, "window": 9},
    "prefix ranges": {"prefix_ranges": RANGES},
    "prefix ranges and window": {"prefix_ranges": RANGES, "window": 4},
    "prefix ranges in the window": {"prefix_ranges": RANGES, "window": 4, "clamp_prefix_to_window": True},
}


def check(options, per_head=lambda h: {}, per_seq=lambda s: {}, oracle=None, fmt="fp32", **kwargs):
    cache, q, batch, where = make(fmt, **kwargs)
    out, lse = cache.attend(q, **batch, return_lse=True, **options)
    plain = {
        k: v
        for k, v in options.items()
        if k in ("causal", "window", "chunk_lookback", "softcap", "clamp_prefix_to_window", "alibi_sqrt")
        and not isinstance(v, torch.Tensor)
    }
    want, want_lse = expected(cache, q, batch, where, per_head, per_seq, **{**plain, **(oracle or {})})
    assert (out.double() - want).norm() <= 3e-6 * want.norm()
    assert torch.allclose(lse.double(), want_lse, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", OPTIONS)
def test_masks(name):
    options = OPTIONS[name]
    ranges = options.get("prefix_ranges")
    check(options, per_seq=lambda s: {} if ranges is None else {"prefix_ranges": ranges[s].tolist()})


@pytest.mark.parametrize("window,lookback", [(8, 0), (12, 1)])
def test_prefix_ranges_in_chunks(window, lookback):
    """Clamped: a range reaches back as far as the window that the chunks divide, ahead as far as it goes."""
    options = {"prefix_ranges": RANGES, "window": window, "chunk_lookback": lookback, "clamp_prefix_to_window": True}
    check(options, per_seq=lambda s: {"prefix_ranges": RANGES[s].tolist()})
    if importlib.util.find_spec("triton"):
        device = "cuda" if torch.cuda.is_available() else "cpu"
        batch = testing.SampleBatch.make("int8", QUERIES, KEYS, block_size=8, device=device)
        options["prefix_ranges"] = RANGES.int().to(device)
        testing.check(batch, batch.attend(**options, implementation="triton"), **options)


def test_causal_for_each_sequence():
    causal = torch.tensor([False, True, False, True])
    check({"causal": causal}, per_seq=lambda s: {"causal": bool(causal[s])})


@pytest.mark.parametrize("sqrt", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_alibi(sqrt, causal):
    slopes = torch.linspace(0.05, 0.6, HK * GROUP)
    check({"alibi_slopes": slopes, "alibi_sqrt": sqrt, "causal": causal}, lambda h: {"slope": float(slopes[h])})


def test_sinks_count_once():
    sinks = torch.linspace(-2, 3, HK * GROUP)
    check({"sinks": sinks, "window": 6}, lambda h: {"sink": float(sinks[h])})


def test_query_query_bias():
    bias = torch.randn(5, 4)
    check({"qq_bias": bias}, oracle={"qq_bias": bias})
    bias[2, 1] = -torch.inf  # a branch of a tree that is not this query's
    check({"qq_bias": bias}, oracle={"qq_bias": bias})


def test_key_range():
    ranges = torch.tensor([[3, 17], [10, 11], [2, 2], [0, 9]])
    check({"key_range": ranges}, per_seq=lambda s: {"key_range": ranges[s].tolist()})


@pytest.mark.parametrize("keys,queries", [((21, 21), (1, 1)), ((30,), (1,)), ((24, 24, 24), (1, 1, 1))])
def test_key_range_of_decode_with_equal_lengths(keys, queries):
    """One query a sequence and as many keys everywhere: nothing but the range masks."""
    ranges = torch.tensor([[3, 17], [0, 21], [20, 24]])[: len(keys)]
    check({"key_range": ranges}, per_seq=lambda s: {"key_range": ranges[s].tolist()}, keys=keys, queries=queries)


LONG = 700  # queries and keys: with 16 heads too many scores for one tile of the reference, without a change to its limit


@pytest.mark.parametrize("name", ["not causal", "not causal for one", "causal", "prefix range", "window not causal"])
def test_prompts_of_several_tiles(name):
    """A tile of the first queries looks at all the keys that they see, which may stand behind the last of them."""
    g = torch.Generator().manual_seed(1)
    cache = PagedCache(get_format("fp32").cache_spec(16, 8), -(-LONG // 16))
    k, v, q = torch.randn(3, LONG, 16, 8, generator=g)
    cache.write(k, v, torch.arange(LONG))
    at = torch.arange(LONG)
    behind, inside = at[None] <= at[:, None], (at >= 5) & (at <= 690)
    options, seen = {
        "not causal": ({"causal": False}, torch.ones_like(behind)),
        "not causal for one": ({"causal": torch.tensor([False])}, torch.ones_like(behind)),
        "causal": ({}, behind),
        "prefix range": ({"prefix_ranges": torch.tensor([[[5, 690]]])}, behind | (inside & inside[:, None])),
        "window not causal": ({"causal": False, "window": 300}, (at[None] - at[:, None]).abs() < 300),
    }[name]
    out = cache.attend(
        q, block_table=torch.arange(cache.num_blocks)[None], seq_lens=torch.tensor([LONG]), cu_seqlens_q=torch.tensor([0, LONG]), **options
    )
    heads = [t.transpose(0, 1).double() for t in (q, k, v)]
    want = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=seen).transpose(0, 1)
    assert (out.double() - want).norm() <= 3e-6 * want.norm()


def test_options_together():
    slopes, sinks = torch.linspace(0.1, 0.4, HK * GROUP), torch.linspace(-1, 1, HK * GROUP)
    check(
        {"alibi_slopes": slopes, "sinks": sinks, "softcap": 3.0, "window": 9, "prefix_ranges": RANGES},
        lambda h: {"slope": float(slopes[h]), "sink": float(sinks[h])},
        lambda s: {"prefix_ranges": RANGES[s].tolist()},
    )


def test_every_format(format_name):
    fmt = get_format(format_name)
    sizes = [64] if fmt.k.power_of_two or fmt.v.power_of_two else [64, 80]
    for d in sizes:
        check({"window": 20}, fmt=format_name, d=d, d_v=64)


def test_calibrated_map_and_offset():
    """A random well-conditioned map for each head and a key mean for each bucket: exact algebra, with everything that meets the
    score."""
    g = torch.Generator().manual_seed(3)
    maps = []
    for d in (D, 24):
        a = torch.eye(d) + 0.3 * torch.randn(HK, d, d, generator=g) / d**0.5
        maps.append(LinearMap(a, torch.linalg.inv(a)))
    key_mean = torch.randn(2, HK, D, generator=g)
    keyed = LayerMaps(LinearMap(maps[0].forward, maps[0].inverse, key_mean), maps[1])
    sinks = torch.linspace(-1, 1, HK * GROUP)
    check({"softcap": 5.0, "sinks": sinks}, lambda h: {"sink": float(sinks[h])}, maps=keyed, keys=(21, 150, 3, 9))


def test_offset_is_what_dequantize_adds():
    """Every key comes back within half a step of its residual's own int8 grid."""
    key_mean = 3 * torch.randn(3, HK, D, generator=torch.Generator().manual_seed(5))
    eye = torch.eye(D).expand(HK, D, D).contiguous()
    cache, _, _, (slots, positions) = make("int8", d_v=D, maps=LayerMaps(LinearMap(eye, eye, key_mean)), keys=(150,), queries=(1,))
    keys, _ = cache.dequantize(slots, positions)
    plain, _, _, (slots, _) = make("fp32", d_v=D, keys=(150,), queries=(1,))
    exact, _ = plain.dequantize(slots)
    step = (exact - key_mean[positions // 64]).abs().amax(-1, keepdim=True) / 127
    assert ((keys - exact).abs() <= 0.5001 * step).all()


def test_rows_without_keys_are_zero():
    cache, q, batch, _ = make()
    out, lse = cache.attend(q, **batch, key_range=torch.tensor([[0, 0]] * 4), return_lse=True)
    assert out.abs().max() == 0 and (lse == -torch.inf).all()


def test_fp8_output_after_rotating_back():
    cache, q, batch, _ = make("int4", d=64, d_v=64)
    plain = cache.attend(q, **batch)
    out = cache.attend(q, **batch, output_scale=0.01)
    assert out.dtype == torch.float8_e4m3fn
    assert torch.equal(out.float(), (plain / 0.01).clamp(-448, 448).to(torch.float8_e4m3fn).float())


def test_float64_on_request():
    cache, q, batch, where = make("int4", d=64, d_v=64)
    out, _ = direct.attend(q, cache.k, cache.v, cache.format, **batch, scale=64**-0.5, dtype=torch.float64)
    want, _ = expected(cache, q, batch, where)
    assert (out - want).norm() < 2e-8 * want.norm()  # the float32 maps are exact


def test_tiles_do_not_change_the_result(monkeypatch):
    cache, q, batch, _ = make("int4", d=64, d_v=64)
    whole = cache.attend(q, **batch)
    monkeypatch.setattr(plan, "TILE_ELEMENTS", 64)
    assert close(cache.attend(q, **batch), whole)


def close(a, b):
    """Equal up to the order of float32 additions."""
    return (a - b).norm() <= 3e-6 * b.norm()


def test_combine_of_disjoint_keys():
    cache, q, batch, _ = make()
    whole, whole_lse = cache.attend(q, **batch, return_lse=True)
    lens = batch["seq_lens"]
    cut = lens // 3
    parts = [cache.attend(q, **batch, key_range=torch.stack(r, 1), return_lse=True) for r in ((torch.zeros_like(cut), cut), (cut, lens))]
    out, lse = combine(torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts]))
    assert close(out, whole) and torch.allclose(lse, whole_lse, atol=1e-5)


def test_combine_of_nothing_is_nothing():
    """A query without a key in any part: its output is 0, its log-sum-exp -inf, and its neighbour's are untouched."""
    outs, lses = torch.randn(3, 2, 4, 8), torch.randn(3, 2, 4)
    outs[:, 0], lses[:, 0] = 0, -torch.inf
    lses[1, 1] = -torch.inf  # a part without keys
    out, lse = combine(outs, lses)
    assert (out[0] == 0).all() and (lse[0] == -torch.inf).all()
    weight = lses[[0, 2], 1].softmax(0)
    torch.testing.assert_close(out[1], (weight[..., None] * outs[[0, 2], 1]).sum(0))
    torch.testing.assert_close(lse[1], lses[[0, 2], 1].logsumexp(0))


def test_segments_without_keys():
    """Sequences of which one segment, the other, both or neither have keys that are seen."""
    cache, q, batch, where = make()
    table, nothing = batch.pop("block_table"), torch.zeros(4, 2, dtype=torch.int64)
    first, second = nothing.clone(), nothing.clone()
    first[0], first[1] = torch.tensor([0, 9]), torch.tensor([2, 11])
    second[0] = torch.tensor([9, 15])
    parts = [cache.segment(table, None, ranges) for ranges in (first, second)]
    out, lse = direct.attend_segments(q, parts, **batch, scale=D**-0.5)
    either = torch.stack([first[:, 0], torch.maximum(first, second)[:, 1]], 1)
    want, want_lse = expected(cache, q, {**batch, "block_table": table}, where, per_seq=lambda s: {"key_range": either[s].tolist()})
    assert (out[6:] == 0).all() and (lse[6:] == -torch.inf).all()  # sequences 2 and 3
    assert (out.double() - want).norm() <= 3e-6 * want.norm()
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-5, atol=1e-5)


def test_cache_that_starts_later():
    """The exact segment of a sequence: slots hold positions from key_start on."""
    cache, q, batch, _ = make(keys=(30,), queries=(2,))
    tail_only = cache.attend(q, **batch, key_range=torch.tensor([[16, 30]]))
    later = {**batch, "block_table": batch["block_table"][:, 2:]}
    assert close(cache.attend(q, **later, key_start=torch.tensor([16]), key_range=torch.tensor([[16, 30]])), tail_only)


def test_chunked_prefill_gives_what_whole_prefill_gives(format_name):
    cache, q, batch, _ = make(format_name, d=64, d_v=64, keys=(40,), queries=(12,))
    whole = cache.attend(q, **batch)
    one = {**batch, "seq_lens": torch.tensor([33]), "cu_seqlens_q": torch.tensor([0, 5])}
    two = {**batch, "cu_seqlens_q": torch.tensor([0, 7])}
    parts = torch.cat([cache.attend(q[:5], **one), cache.attend(q[5:], **two)])
    assert close(parts, whole)


def test_options_default_is_causal():
    assert AttentionOptions() == AttentionOptions(causal=True, window=0, chunk_lookback=-1, softcap=0.0)
