"""The calls of vLLM 0.33's decoder: its enum of modes, its layout of rows with their scales, and every argument that it passes."""

import importlib.util
from enum import IntEnum
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from quantkv import ops
from quantkv import vllm_api as backend
from quantkv.vllm_api import KVQuantMode as Mode
from quantkv.vllm_api import get_backend, has_backend, registry
from vllm_api_calls import (
    BLOCK_SIZE,
    BLOCKS,
    CODE_DTYPES,
    DEVICE,
    HEADS,
    PER_TOKEN_HEAD,
    as_bytes,
    empty_cache,
    golden,
    read,
    relative_error,
    write,
)

pytestmark = pytest.mark.usefixtures("on_device")
FP8 = torch.float8_e4m3fn
attend = ops.attend
BOUND = 1e-6 if DEVICE.type == "cpu" else 1e-5


class TheirMode(IntEnum):
    """The members of vLLM 0.33's enum: 6 is no INT2 there, and CUSTOM is another name of OCTAVE_K3V4."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3
    INT4_PER_TOKEN_HEAD = 4
    NVFP4 = 5
    TURBOQUANT_K8V4 = 6
    TURBOQUANT_4BIT_NC = 7
    OCTAVE_K3V4 = 12
    CUSTOM = 12


class OtherNumbers(IntEnum):
    """An engine that numbers the modes otherwise."""

    INT2_PER_TOKEN_HEAD = 2
    INT8_PER_TOKEN_HEAD = 6


@pytest.mark.parametrize("mode", [*TheirMode, *OtherNumbers], ids=lambda m: f"{type(m).__name__}.{m.name}")
def test_an_engines_enum_is_read_by_name(mode):
    if mode.name.endswith("PER_TOKEN_HEAD"):
        assert has_backend(mode) and get_backend(mode) is get_backend(Mode[mode.name])
        expected = write(Mode[mode.name], 64)
        caches = [empty_cache(Mode[mode.name], 64) for _ in "kv"]
        assert all(torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(write(mode, 64, *caches), expected))
        assert torch.equal(read(64, *expected, mode=mode), read(64, *expected, mode=Mode[mode.name]))
        return
    assert not has_backend(mode)
    with pytest.raises(ValueError, match=mode.name):
        get_backend(mode)
    if mode.name not in ("NONE", "FP8_PER_TENSOR"):
        stored = write(Mode.INT2_PER_TOKEN_HEAD, 64)
        before = [t.clone() for t in stored]
        with pytest.raises(ValueError, match=mode.name):
            read(64, *stored, mode=mode)
        with pytest.raises(ValueError, match=mode.name):
            write(mode, 64, *stored[:2], stored[2:])
        assert all(torch.equal(a, b) for a, b in zip(stored, before))


@pytest.mark.parametrize("number", [6, 7, 99, -1, 1.5, True, "INT2_PER_TOKEN_HEAD"])
def test_numbers_that_versions_of_vllm_give_to_different_modes_are_refused(number):
    stored = write(Mode.INT2_PER_TOKEN_HEAD, 64)
    for call in (get_backend, has_backend, lambda n: read(64, *stored, mode=n)):
        with pytest.raises(ValueError, match=f"kv_quant_mode={number!r}"):
            call(number)
    assert get_backend(4) is get_backend(Mode.INT4_PER_TOKEN_HEAD)


def test_a_backend_may_be_registered_for_a_mode_of_the_engines_enum(monkeypatch):
    of_int2, owner = get_backend(Mode.INT2_PER_TOKEN_HEAD), SimpleNamespace(mode=TheirMode.TURBOQUANT_K8V4)
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    backend.register(owner)
    assert get_backend(TheirMode.TURBOQUANT_K8V4) is owner and get_backend(Mode.INT2_PER_TOKEN_HEAD) is of_int2


@pytest.mark.parametrize("strides", ["heads first", "tokens first"])
@pytest.mark.parametrize("mode", PER_TOKEN_HEAD, ids=lambda m: m.name)
def test_rows_with_their_scale_behind_them(mode, strides):
    """One tensor `[num_blocks, HK, block_size, K, scale, V, scale]`, of which vLLM passes the halves, scales included."""
    head_size, g = 64, golden(64)
    codes = get_backend(mode).packed_head_size(head_size)
    row = codes + 4
    shape = (BLOCKS, HEADS, BLOCK_SIZE, 2 * row) if strides == "heads first" else (BLOCKS, BLOCK_SIZE, HEADS, 2 * row)
    kv_cache = torch.full(shape, 0xFF, dtype=torch.uint8, device=DEVICE)
    tokens_first = kv_cache.transpose(1, 2) if strides == "heads first" else kv_cache
    halves = [half.view(CODE_DTYPES.get(mode, torch.uint8)) for half in tokens_first.split(row, dim=-1)]
    scales = [half[..., codes:].view(torch.float32)[..., 0] for half in tokens_first.split(row, dim=-1)]
    expected = write(mode, head_size)
    write(mode, head_size, *halves, scales)
    slots = g["slot_mapping"]
    slots = slots[slots >= 0]
    for got, want in zip((*(half[..., :codes] for half in halves), *scales), expected):
        assert torch.equal(*(as_bytes(t).flatten(0, 1)[slots] for t in (got, want)))
    assert torch.equal(read(head_size, *halves, *scales, mode=mode), read(head_size, *expected, mode=mode))
    with pytest.raises(ValueError, match="k_cache"):
        read(head_size, halves[0][..., :-1], *halves[1:], *scales, mode=mode)


def masked_attention(q, k, v, seen, scale, g, sinks=None, softcap=0.0):
    """float64 attention of each query to the keys that `seen(sequence, position, key)` names. k, v: `[slots, HK, D]`."""
    out, group = torch.zeros(*q.shape[:2], v.shape[2], dtype=torch.float64), q.shape[1] // k.shape[1]
    starts, lens, table = (g[name].tolist() for name in ("cu_seqlens_q", "seq_lens", "block_table"))
    for s, length in enumerate(lens):
        slots = [table[s][j // BLOCK_SIZE] * BLOCK_SIZE + j % BLOCK_SIZE for j in range(length)]
        count = starts[s + 1] - starts[s]
        for i in range(count):
            keys = [slots[j] for j in range(length) if seen(s, length - count + i, j)]
            for h in range(q.shape[1]):
                score = scale * k[keys, h // group].double() @ q[starts[s] + i, h].double()
                score = softcap * torch.tanh(score / softcap) if softcap else score
                terms = score if sinks is None else torch.cat([score, sinks[h : h + 1].double()])
                out[starts[s] + i, h] = torch.softmax(terms, 0)[: len(keys)] @ v[keys, h // group].double()
    return out


def int8_rows(stored):
    """The rows that an int8 cache holds, `[slots, HK, D]` each."""
    return [(c.double() * s.double()[..., None]).flatten(0, 1) for c, s in zip(stored[:2], stored[2:])]


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}, {"sinks": True}, {"ranges": True}], ids=str)
@pytest.mark.parametrize("prefix, window", [((9, 4), 5), ((0, 30), 1), ((40, 0), 3), ((1, 19), 64)])
def test_a_prefix_and_a_window(prefix, window, options):
    """R-SWA: the keys of the prefix, and those of the window; as ranges allow, both ways."""
    g, stored = golden(64), write(Mode.INT8_PER_TOKEN_HEAD, 64)
    ranges = torch.tensor([[[20, 34]], [[0, 0]]], dtype=torch.int32)
    sinks = g["sinks"] if options.get("sinks") else None

    def seen(s, p, j):
        both = "ranges" in options and s == 0 and 20 <= p <= 34 and 20 <= j <= 34
        return both or (j <= p and (j < prefix[s] or p - j < window))

    rows, softcap = int8_rows(stored), options.get("softcap", 0.0)
    expected = masked_attention(g["query"], *rows, seen, 0.125, g, sinks, softcap)
    call = {"softcap": softcap, "sinks": sinks, "mm_prefix_range": ranges if "ranges" in options else None}
    lens = torch.tensor(prefix, dtype=torch.int32)
    out = read(64, *stored, mode=Mode.INT8_PER_TOKEN_HEAD, rswa_prefix_lens=lens, rswa_window=window, **call)
    assert relative_error(out, expected) < BOUND
    eighths = torch.empty(out.shape, dtype=FP8)
    read(64, *stored, mode=Mode.INT8_PER_TOKEN_HEAD, rswa_prefix_lens=lens, rswa_window=window, out=eighths, output_scale=0.01, **call)
    assert relative_error(eighths.float(), (out / 0.01).clamp(-448, 448).to(FP8).float()) < 1e-2


def test_pages_between_prefix_and_window_may_be_anything():
    g, stored = golden(64), write(Mode.INT4_PER_TOKEN_HEAD, 64)
    call = dict(mode=Mode.INT4_PER_TOKEN_HEAD, rswa_prefix_lens=torch.tensor([3, 16]), rswa_window=1)
    expected, table = read(64, *stored, **call), g["block_table"].clone()
    table[0, 1] = -9  # sequence 0 has queries at 32 to 36
    assert torch.equal(read(64, *stored, **call, block_table=table), expected)


def test_what_a_prefix_and_a_window_cannot_go_with_is_refused():
    stored = write(Mode.INT8_PER_TOKEN_HEAD, 64)
    good = {"rswa_prefix_lens": torch.tensor([3, 4]), "rswa_window": 5}
    for name, change in {
        "rswa_window=None": {"rswa_window": None},
        "rswa_prefix_lens=None": {"rswa_prefix_lens": None},
        "rswa_window=0": {"rswa_window": 0},
        "rswa_prefix_lens=list": {"rswa_prefix_lens": [3, 4]},
        r"rswa_prefix_lens\.shape": {"rswa_prefix_lens": torch.tensor([3])},
        r"rswa_prefix_lens\.dtype": {"rswa_prefix_lens": torch.tensor([3.0, 4.0])},
        "window_size": {"window_size": (7, 0)},
        "causal=False": {"causal": False},
        "causal=a tensor": {"causal": torch.tensor([True, True])},
    }.items():
        out = torch.full((6, 6, 64), 7.0)
        with pytest.raises(ValueError, match=name):
            read(64, *stored, mode=Mode.INT8_PER_TOKEN_HEAD, out=out, **{**good, **change})
        assert (out == 7).all()


def fp8_caches():
    g = golden(64)
    return [(g[f"none.{side}_cache"].view(torch.bfloat16) / 0.5).to(FP8) for side in ("key", "value")]


@pytest.mark.parametrize("descale", [0.75, torch.tensor(0.75), torch.tensor([0.75])], ids=str)
@pytest.mark.parametrize("mode", [Mode.FP8_PER_TENSOR, TheirMode.FP8_PER_TENSOR, Mode.NONE, Mode.INT4_PER_TOKEN_HEAD], ids=str)
def test_queries_of_8_bit_floats(mode, descale):
    """The queries that vLLM sends with an fp8 cache: those numbers times the scale, in every mode."""
    g = golden(64)
    per_row = mode == Mode.INT4_PER_TOKEN_HEAD
    stored, scales = (write(mode, 64), {}) if per_row else (fp8_caches(), {"k_descale": 0.5, "v_descale": 0.25})
    q = (g["query"] / 0.75).to(FP8)
    expected = read(64, *stored, mode=mode, q=q.float() * 0.75, **scales)
    call = dict(mode=mode, q=q, q_descale=descale, **scales)
    assert relative_error(read(64, *stored, out=torch.empty(6, 6, 64), **call), expected) < BOUND
    for out in (torch.empty(6, 6, 64, dtype=torch.bfloat16), torch.empty(6, 6, 64, dtype=torch.float16)):
        assert relative_error(read(64, *stored, out=out, **call).float(), expected) < 4e-3
    eighths = torch.empty(6, 6, 64, dtype=FP8)
    read(64, *stored, out=eighths, output_scale=0.01, **call)
    assert relative_error(eighths.float() * 0.01, expected) < 0.04


def test_queries_of_8_bit_floats_without_a_scale_have_1():
    q, stored = golden(64)["query"].to(FP8), fp8_caches()
    assert torch.equal(read(64, *stored, q=q, out=torch.empty(6, 6, 64)), read(64, *stored, q=q.float(), out=torch.empty(6, 6, 64)))
    for bad in (torch.tensor([1.0, 2.0]), 0.0, -1.0):
        with pytest.raises(ValueError, match="q_descale"):
            read(64, *stored, q=q, out=torch.empty(6, 6, 64), q_descale=bad)


@pytest.mark.parametrize("options", [{}, {"sinks": True, "softcap": 2.0}, {"rswa": True}, {"output_scale": 0.01}], ids=str)
def test_a_scale_for_each_sequence_and_kv_head(options):
    """Numbers that differ: each sequence and head reads as it would with its own alone."""
    g, stored = golden(64), fp8_caches()
    k_descale, v_descale = torch.tensor([[0.5, 0.25], [1.5, 0.125]]), torch.tensor([[0.75, 2.0], [0.0625, 1.0]])
    call = {"softcap": options.get("softcap", 0.0), "sinks": g["sinks"] if options.get("sinks") else None}
    if "rswa" in options:
        call.update(rswa_prefix_lens=torch.tensor([4, 5]), rswa_window=6)
    expected, starts = torch.empty(6, 6, 64), g["cu_seqlens_q"].tolist()
    for s in range(2):
        for h in range(HEADS):
            one = read(64, *stored, mode=Mode.FP8_PER_TENSOR, k_descale=k_descale[s, h].item(), v_descale=v_descale[s, h].item(), **call)
            where = slice(starts[s], starts[s + 1]), slice(3 * h, 3 * h + 3)
            expected[where] = one[where].float()
    call.update(mode=Mode.FP8_PER_TENSOR, k_descale=k_descale, v_descale=v_descale)
    if "output_scale" not in options:
        assert relative_error(read(64, *stored, **call), expected) < BOUND
        assert relative_error(read(64, *stored, **{**call, "k_descale": 0.5}), expected) > 1e-2
        return
    out = torch.empty(6, 6, 64, dtype=FP8)
    read(64, *stored, out=out, output_scale=0.01, **call)
    assert relative_error(out.float(), (expected / 0.01).clamp(-448, 448).to(FP8).float()) < 1e-2


def test_scales_that_are_neither_one_nor_one_a_sequence_and_head_are_refused():
    stored, several = fp8_caches(), torch.tensor([[0.5, 0.25], [1.5, 0.125]])
    for name in ("k_descale", "v_descale"):
        for bad in (several[:1], several[0], several[None], several - 0.125, several * torch.inf):
            with pytest.raises(ValueError, match=name):
                read(64, *stored, mode=Mode.FP8_PER_TENSOR, **{name: bad})


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="the kernels need Triton")
@pytest.mark.parametrize(
    "call",
    [
        {"rswa_prefix_lens": torch.tensor([9, 4]), "rswa_window": 5},
        {"k_descale": torch.tensor([[0.5, 0.25], [1.5, 0.125]]), "v_descale": torch.tensor([[0.75, 2.0], [0.5, 1.0]])},
        {"q": True, "q_descale": 0.75, "k_descale": 0.5},
    ],
    ids=lambda call: next(iter(call)),
)
def test_triton_gives_the_same(call, monkeypatch):
    """On a CPU the kernel is interpreted."""
    stored = fp8_caches()
    call = {name: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for name, t in call.items()}
    if "q" in call:
        call.update(q=(golden(64)["query"] / 0.75).to(FP8), out=torch.empty(6, 6, 64))
    found = []
    for implementation in ("reference", "triton"):
        monkeypatch.setattr(ops, "attend", partial(attend, implementation=implementation))
        found.append(read(64, *stored, mode=Mode.FP8_PER_TENSOR, **call).clone())
    assert relative_error(found[1], found[0]) < 1e-5


@pytest.mark.parametrize("lookback", [-1, 0, 1])
@pytest.mark.parametrize("clamped", [False, True])
def test_ranges_reach_back_as_far_as_the_window_or_further(clamped, lookback):
    """Clamped, by the window itself, also where chunks stand in its place."""
    g, stored = golden(64), write(Mode.INT8_PER_TOKEN_HEAD, 64)
    ranges, window = torch.tensor([[[18, 36]], [[2, 30]]], dtype=torch.int32), 8

    def seen(s, p, j):
        (low, high), size = ranges[s, 0].tolist(), window // (lookback + 1) if lookback >= 0 else 0
        both = low <= p <= high and low <= j <= high and (p - j < window or not clamped)
        return both or (j <= p and (p // size - j // size <= lookback if size else p - j < window))

    expected = masked_attention(g["query"], *int8_rows(stored), seen, 0.125, g)
    call = dict(mm_prefix_range=ranges, window_size=(window - 1, 0), chunk_lookback=lookback, mm_prefix_clamp_sliding_window=clamped)
    assert relative_error(read(64, *stored, mode=Mode.INT8_PER_TOKEN_HEAD, **call), expected) < BOUND


def test_arguments_that_change_no_result():
    """use_td, an order of loads; chunks and clamping without a window; scratch; flags as numbers, as vLLM makes them."""
    g, stored = golden(64), write(Mode.INT8_PER_TOKEN_HEAD, 64)
    ranges = {"mm_prefix_range": torch.tensor([[[18, 36]], [[2, 30]]], dtype=torch.int32)}
    for plain, same in (
        ({}, {"use_td": True}),
        ({}, {"chunk_lookback": 1}),
        ({}, {"rswa_prefix_lens": None, "rswa_window": None}),
        ({}, {"seq_threshold_3D": 8, "num_par_softmax_segments": 16, "softmax_segm_max": torch.empty(0)}),
        (ranges, {**ranges, "mm_prefix_clamp_sliding_window": True}),
        ({"causal": torch.tensor([False, True])}, {"causal": torch.tensor([0, 1], dtype=torch.int32)}),
    ):
        expected = read(64, *stored, mode=Mode.INT8_PER_TOKEN_HEAD, **plain)
        assert torch.equal(read(64, *stored, mode=Mode.INT8_PER_TOKEN_HEAD, **same), expected)
    with pytest.raises(ValueError, match="use_td=1"):
        read(64, *stored, mode=Mode.INT8_PER_TOKEN_HEAD, use_td=1)
    with pytest.raises(ValueError, match="interleaved_v_pack_factor=8"):
        cache = torch.zeros(BLOCKS, BLOCK_SIZE, HEADS, 64)
        backend.triton_reshape_and_cache_flash(g["key"], g["value"], cache, cache, g["slot_mapping"], "auto", 1.0, 1.0, 8)


def test_one_cache_of_keys_and_values_is_read_as_its_halves():
    torch.manual_seed(0)
    g, kv_cache = golden(64), torch.randn(BLOCKS, BLOCK_SIZE, HEADS, 192 + 128).to(FP8)
    q, halves = torch.randn(6, 4, 192), kv_cache.split([192, 128], dim=-1)
    further = dict(softcap=2.0, k_descale=torch.tensor(0.3), v_descale=torch.tensor([0.7]))
    expected = read(64, *halves, q=q, out=torch.empty(6, 4, 128), window_size=(6, 0), **further)
    got = torch.empty(6, 4, 128)
    backend.unified_attention_diffkv(
        q,
        *halves,
        got,
        g["cu_seqlens_q"],
        g["seq_lens"],
        0.125,
        True,
        (6, 0),
        g["block_table"],
        max_seqlen_q=5,
        seq_threshold_3D=8,
        **further,
    )
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "preset, bits", [("turboquant_k8v4", 4), ("turboquant_4bit_nc", 4), ("turboquant_k3v4_nc", 3), ("turboquant_3bit_nc", 3)]
)
def test_turboquant_config_has_what_vllm_reads(preset, bits):
    config = backend.TurboQuantConfig.from_cache_dtype(preset, 128)
    assert (config.mse_bits, config.centroid_bits, config.n_centroids) == (bits, bits, 2**bits)
    assert len(backend.get_centroids(128, config.mse_bits)) == config.n_centroids
    default = backend.TurboQuantConfig()
    assert (default.head_dim, default.key_quant_bits, default.value_quant_bits, default.norm_correction) == (128, 3, 4, False)
    with pytest.raises(ValueError, match=r"Unknown TurboQuant cache dtype: .*turboquant_9bit"):
        backend.TurboQuantConfig.from_cache_dtype("turboquant_9bit", 128)


@pytest.mark.parametrize("layers, n, expected", [(32, 2, "0 1 30 31"), (4, 2, "0 1 2 3"), (3, 2, "0 2"), (8, 0, ""), (2, 10, "0 1")])
def test_layers_that_vllm_leaves_at_16_bits(layers, n, expected):
    config = SimpleNamespace(is_hybrid=False, hf_text_config=SimpleNamespace(num_hidden_layers=layers))
    assert backend.TurboQuantConfig.get_boundary_skip_layers(config, n) == expected.split()
    config.is_hybrid = True
    assert backend.TurboQuantConfig.get_boundary_skip_layers(config, n) == []


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_tables_of_levels_are_made_once(bits):
    levels = backend.get_centroids(128, bits)
    assert levels is backend.get_centroids(128, bits) and levels.shape == (2**bits,)
    assert torch.equal(levels, -levels.flip(0)) and bool((levels.diff() > 0).all())


def test_the_script_that_runs_vllms_tests_names_what_there_is(tmp_path):
    """scripts/vllm_kernel_tests.py points vLLM's names at these; without vLLM's tests it says what is missing."""
    path = Path(__file__).parent.parent / "scripts" / "vllm_kernel_tests.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert {name for names in script.POINTED.values() for name in names} <= set(backend.__all__)
    with pytest.raises(SystemExit, match=r"the folder tests of vLLM 0\.33's source release is needed"):
        script.main([str(tmp_path)])
