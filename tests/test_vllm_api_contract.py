"""vLLM's contract: modes, registry, signatures, errors and warnings."""

import inspect
import sys
import types
import warnings

import pytest
import torch

import quantkv.vllm_api.per_token_head  # noqa: F401  registers its backends before a test puts another registry in place
from quantkv import vllm_api as backend
from quantkv.vllm_api import KVQuantMode as Mode
from quantkv.vllm_api import QuantKVBackend, get_backend, has_backend, registry
from vllm_api_calls import BLOCK_SIZE, BLOCKS, DEVICE, HEADS, OUTPUT_BOUND, as_bytes, golden, read, relative_error, write

pytestmark = pytest.mark.usefixtures("on_device")


def test_modes_are_numbered_as_in_vllm():
    assert [m.name for m in sorted(Mode)] == [
        "NONE",
        "FP8_PER_TENSOR",
        "INT8_PER_TOKEN_HEAD",
        "FP8_PER_TOKEN_HEAD",
        "INT4_PER_TOKEN_HEAD",
        "NVFP4",
        "INT2_PER_TOKEN_HEAD",
    ]


@pytest.mark.parametrize(
    "mode, factor",
    [(Mode.INT8_PER_TOKEN_HEAD, 1), (Mode.FP8_PER_TOKEN_HEAD, 1), (Mode.INT4_PER_TOKEN_HEAD, 2), (Mode.INT2_PER_TOKEN_HEAD, 4)],
)
def test_backend_geometry(mode, factor):
    owner = get_backend(mode)
    assert isinstance(owner, QuantKVBackend) and owner is get_backend(mode) and has_backend(mode)
    assert (owner.mode, owner.packing_factor, owner.needs_scale_caches) == (mode, factor, True)
    assert owner.packed_head_size(128) == 128 // factor
    for scales in owner.allocate_scale_caches(3, 16, 5, torch.device("cpu")):
        assert scales.shape == (3, 16, 5) and scales.dtype == torch.float32 and not scales.any()
    if factor > 1:
        for error in (AssertionError, ValueError):
            with pytest.raises(error, match=f"head_size=127 is not divisible by packing factor {factor} required by {mode.name}"):
                owner.packed_head_size(127)


def test_modes_without_a_backend_are_refused():
    assert not has_backend(Mode.NONE) and not has_backend(Mode.NVFP4)
    with pytest.raises(ValueError, match=r"KVQuantMode\.NONE is the unquantized path and has no backend"):
        get_backend(Mode.NONE)
    for mode in (Mode.NVFP4, Mode.FP8_PER_TENSOR):
        with pytest.raises(ValueError, match=f"No QuantKVBackend module configured for {mode.name}"):
            get_backend(mode)


class CopyBackend(QuantKVBackend):
    """An engine's own backend, with no format of the project's."""

    mode = Mode.NVFP4

    def reshape_and_cache(self, key, value, key_cache, value_cache, slot_mapping, *, k_scale_cache=None, v_scale_cache=None):
        key_cache.view(-1, *key.shape[1:])[slot_mapping] = key


def test_a_registered_backend_serves_both_entry_points(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTRY", {})
    seen = {}

    class Own(CopyBackend):
        def unified_attention(self, q, k_cache, v_cache, out, **options):
            seen.update(options)

    backend.register(Own())
    assert has_backend(Mode.NVFP4)
    key = torch.randn(3, HEADS, 64)
    cache_ = torch.zeros(1, BLOCK_SIZE, HEADS, 64)
    backend.triton_reshape_and_cache_flash_per_token_head_quant(key, key, cache_, cache_, None, None, torch.arange(3), Mode.NVFP4)
    assert torch.equal(cache_[0, :3], key)
    read(64, cache_, cache_, mode=Mode.NVFP4, softcap=3.0)
    assert seen["softcap"] == 3.0 and set(seen) <= set(inspect.signature(QuantKVBackend.unified_attention).parameters)
    for refused in (
        {"causal": False},
        {"causal": torch.ones(2, dtype=torch.bool)},
        {"chunk_lookback": 1},
        {"q_descale": 0.5},
        {"rswa_prefix_lens": torch.ones(2, dtype=torch.int32)},
        {"rswa_window": 4},
        {"mm_prefix_clamp_sliding_window": True},
    ):
        with pytest.raises(ValueError, match=next(iter(refused))):
            read(64, cache_, cache_, mode=Mode.NVFP4, **refused)


def test_a_backend_without_attention_says_so():
    with pytest.raises(TypeError):
        QuantKVBackend()
    owner = CopyBackend()
    assert owner.allocate_scale_caches(2, 16, 2, torch.device("cpu")) == (None, None) and owner.packed_head_size(96) == 96
    options = dict.fromkeys((name for name, p in inspect.signature(owner.unified_attention).parameters.items() if p.kind == p.KEYWORD_ONLY))
    with pytest.raises(NotImplementedError, match="CopyBackend does not implement"):
        owner.unified_attention(None, None, None, None, **options)


def test_backends_are_imported_on_first_use(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTRY", {})
    monkeypatch.setitem(registry.MODULES, Mode.NVFP4, "silent_backend_module")
    monkeypatch.setitem(sys.modules, "silent_backend_module", types.ModuleType("silent_backend_module"))
    assert has_backend(Mode.NVFP4)
    with pytest.raises(RuntimeError, match="silent_backend_module did not register a backend for NVFP4"):
        get_backend(Mode.NVFP4)
    monkeypatch.delitem(sys.modules, "quantkv.vllm_api.per_token_head", raising=False)
    assert not registry._REGISTRY
    assert get_backend(Mode.INT8_PER_TOKEN_HEAD).mode == Mode.INT8_PER_TOKEN_HEAD


SCRATCH = "seq_threshold_3D num_par_softmax_segments softmax_segm_output softmax_segm_max softmax_segm_expsum"
SIGNATURES = {
    "triton_reshape_and_cache_flash": "key value key_cache value_cache slot_mapping kv_cache_dtype k_scale v_scale "
    "interleaved_v_pack_factor",
    "triton_reshape_and_cache_flash_diffkv": "key value kv_cache slot_mapping kv_cache_dtype k_scale v_scale",
    "triton_reshape_and_cache_flash_per_token_head_quant": "key value key_cache value_cache k_scale_cache "
    "v_scale_cache slot_mapping kv_quant_mode",
    "reshape_and_cache_int4": "key value key_cache value_cache slot_mapping k_scale_cache v_scale_cache",
    "unified_attention": "q k v out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale causal window_size block_table softcap "
    f"q_descale k_descale v_descale {SCRATCH} alibi_slopes output_scale qq_bias sinks mm_prefix_range use_alibi_sqrt "
    "kv_quant_mode k_scale_cache v_scale_cache chunk_lookback rswa_prefix_lens rswa_window use_td mm_prefix_clamp_sliding_window",
    "unified_attention_diffkv": "q k v out cu_seqlens_q seqused_k softmax_scale causal window_size block_table softcap max_seqlen_q "
    f"alibi_slopes sinks use_alibi_sqrt {SCRATCH} k_descale v_descale q_descale",
    "unified_attention_int4": "q k_cache v_cache out cu_seqlens_q max_seqlen_q seqused_k max_seqlen_k softmax_scale "
    f"window_size block_table softcap sinks alibi_slopes use_alibi_sqrt qq_bias output_scale mm_prefix_range "
    f"k_scale_cache v_scale_cache {SCRATCH}",
    "triton_turboquant_store": "key value kv_cache slot_mapping PiT midpoints mse_bits key_packed_size value_quant_bits key_fp8",
    "fast_hadamard_transform": "x",
    "single_rht": "x inverse",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_have_the_names_of_vllm_and_order(name):
    """Engines pass the leading ones by position."""
    assert list(inspect.signature(getattr(backend, name)).parameters) == SIGNATURES[name].split()


def test_every_public_name_exists():
    for name in backend.__all__:
        assert getattr(backend, name) is not None
    with pytest.raises(AttributeError):
        backend.no_such_name  # noqa: B018


@pytest.mark.parametrize(
    "dtype, mode",
    [(torch.float8_e4m3fn, Mode.FP8_PER_TOKEN_HEAD), (torch.int8, Mode.INT8_PER_TOKEN_HEAD), (torch.uint8, Mode.INT8_PER_TOKEN_HEAD)],
)
def test_a_write_without_a_mode_warns_and_goes_by_the_dtype(dtype, mode):
    g, caches = golden(64), [torch.zeros(BLOCKS, BLOCK_SIZE, HEADS, 64, dtype=torch.uint8).view(dtype) for _ in "kv"]
    scales = get_backend(mode).allocate_scale_caches(BLOCKS, BLOCK_SIZE, HEADS, DEVICE)
    with pytest.warns(DeprecationWarning, match="without `kv_quant_mode` is deprecated") as caught:
        backend.triton_reshape_and_cache_flash_per_token_head_quant(g["key"], g["value"], *caches, *scales, g["slot_mapping"])
    assert caught[0].filename == __file__
    for got, expected in zip((*caches, *scales), write(mode, 64)):
        assert torch.equal(as_bytes(got), as_bytes(expected))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write(mode, 64)


def test_int4_entry_points_are_the_int4_mode():
    g, mode = golden(64), Mode.INT4_PER_TOKEN_HEAD
    expected = write(mode, 64)
    got = [torch.zeros_like(t) for t in expected]
    backend.reshape_and_cache_int4(g["key"], g["value"], got[0], got[1], g["slot_mapping"], k_scale_cache=got[2], v_scale_cache=got[3])
    assert all(torch.equal(as_bytes(a), as_bytes(b)) for a, b in zip(got, expected))
    out = torch.zeros(6, 6, 64)
    backend.unified_attention_int4(
        g["query"],
        *got[:2],
        out,
        cu_seqlens_q=g["cu_seqlens_q"],
        max_seqlen_q=5,
        seqused_k=g["seq_lens"],
        max_seqlen_k=37,
        softmax_scale=0.125,
        window_size=(7, 0),
        block_table=g["block_table"],
        softcap=0.0,
        sinks=None,
        alibi_slopes=None,
        use_alibi_sqrt=False,
        qq_bias=None,
        output_scale=None,
        mm_prefix_range=None,
        k_scale_cache=got[2],
        v_scale_cache=got[3],
    )
    assert relative_error(out, g["int4_per_token_head.out.window8"]) <= OUTPUT_BOUND["per_token_head"]


@pytest.mark.parametrize("kv_cache_dtype, dtype", [("auto", torch.float16), ("fp8", torch.uint8), ("fp8_e5m2", torch.float8_e5m2)])
def test_diffkv_puts_keys_and_values_of_different_size_into_one_cache(kv_cache_dtype, dtype):
    torch.manual_seed(0)
    key, value = torch.randn(40, HEADS, 192), torch.randn(40, HEADS, 128)
    slots = torch.randperm(BLOCKS * BLOCK_SIZE)[:32]  # the last 8 rows are padding
    kv_cache = torch.zeros(BLOCKS, BLOCK_SIZE, HEADS, 320).to(dtype)
    scales = (torch.tensor(0.25), torch.tensor([0.5]))
    backend.triton_reshape_and_cache_flash_diffkv(key, value, kv_cache, slots, kv_cache_dtype, *scales)
    float_dtype = torch.float8_e4m3fn if dtype == torch.uint8 else dtype
    rows = kv_cache.view(float_dtype).float().view(-1, HEADS, 320)
    by = (1.0, 1.0) if kv_cache_dtype == "auto" else (0.25, 0.5)
    assert torch.equal(rows[slots, :, :192], (key[:32] / by[0]).to(float_dtype).float())
    assert torch.equal(rows[slots, :, 192:], (value[:32] / by[1]).to(float_dtype).float())
    assert torch.count_nonzero(rows.any(-1)) == 32 * HEADS

    mode = Mode.NONE if kv_cache_dtype == "auto" else Mode.FP8_PER_TENSOR
    out = read(
        64,
        kv_cache[..., :192],
        kv_cache[..., 192:],
        mode=mode,
        q=torch.randn(2, 4, 192),
        out=torch.empty(2, 4, 128),
        cu_seqlens_q=torch.tensor([0, 2]),
        seqused_k=torch.tensor([32]),
        block_table=torch.arange(8)[None],
        k_descale=scales[0],
        v_descale=scales[1],
    )
    assert out.isfinite().all() and out.any()


def test_what_cannot_be_supported_is_refused_by_name():
    head_size, mode = 64, Mode.INT4_PER_TOKEN_HEAD
    caches = write(mode, head_size)
    cases = {
        "q_descale": torch.ones(1),
        "window_size": (7, 3),
        "causal": torch.ones(3, dtype=torch.bool),
        "softcap": -1.0,
        "output_scale": 0.5,
        "out": torch.empty(6, 6, 65),
        "q.shape": {"q": torch.zeros(6, 5, 64), "out": torch.zeros(6, 5, 64)},
        "block_table": torch.zeros(3, 2).int(),
        "alibi_sqrt": {"use_alibi_sqrt": True},
        "mm_prefix_range": torch.zeros(2, 2).int(),
        "sinks": torch.zeros(5),
        "cu_seqlens_q": torch.tensor([0, 6]),
        "kv_quant_mode": 99,
        "k_cache": caches[0][..., :-1],
        "v_cache": caches[1][:4],
        "chunk_lookback": -2,
        "k_scale_cache": None,
        "v_scale_cache": caches[3].half(),
    }
    names = {"out": "head_size=65", "kv_quant_mode": "99", "output_scale": "out.dtype", "v_scale_cache": "scale cache of v_cache"}
    for argument, value in cases.items():
        overrides = value if isinstance(value, dict) else {argument.replace("k_cache", "k").replace("v_cache", "v"): value}
        positional = {"k": caches[0], "v": caches[1], "k_scale_cache": caches[2], "v_scale_cache": caches[3], **overrides}
        with pytest.raises(ValueError, match=names.get(argument, argument)):
            read(head_size, mode=mode, **positional)


def test_bad_writes_are_refused_by_name():
    g, mode = golden(64), Mode.INT8_PER_TOKEN_HEAD
    owner, stored = get_backend(mode), write(mode, 64)
    good = dict(
        key=g["key"],
        value=g["value"],
        key_cache=stored[0],
        value_cache=stored[1],
        slot_mapping=g["slot_mapping"],
        k_scale_cache=stored[2],
        v_scale_cache=stored[3],
    )
    before = [t.clone() for t in stored]
    for argument, value in {
        "key": g["key"].to(torch.int8),
        "value": g["value"].float(),
        "slot_mapping": torch.zeros(60).long(),
        "key_cache": stored[0][..., :32],
        "value_cache": stored[1][:, :8],
        "k_scale_cache": stored[2][:, :8],
    }.items():
        with pytest.raises(ValueError, match=argument.replace("k_scale_cache", "scale cache of key_cache")):
            owner.reshape_and_cache(**{**good, argument: value})
    for missing in ("k_scale_cache", "v_scale_cache"):
        with pytest.raises(AssertionError, match="INT8_PER_TOKEN_HEAD requires k_scale_cache / v_scale_cache"):
            owner.reshape_and_cache(**{**good, missing: None})
    assert all(torch.equal(a, b) for a, b in zip(stored, before))

    def flash(kv_cache_dtype, cache, k_scale=1.0):
        backend.triton_reshape_and_cache_flash(g["key"], g["value"], cache, cache, g["slot_mapping"], kv_cache_dtype, k_scale, 1.0)

    rows = torch.zeros(BLOCKS, BLOCK_SIZE, HEADS, 64)
    for error in (AssertionError, ValueError):
        with pytest.raises(error, match=r"unsupported kv_cache_dtype \(str\), got int3"):
            flash("int3", rows)
    with pytest.raises(ValueError, match=r"key_cache\.dtype"):
        flash("fp8", rows)
    with pytest.raises(ValueError, match=r"key_cache\.dtype"):
        flash("bfloat16", rows)
    with pytest.raises(ValueError, match="k_scale"):
        flash("fp8", rows.to(torch.float8_e4m3fn), torch.tensor([1.0, 2.0]))
    with pytest.raises(ValueError, match="k_scale"):
        flash("fp8", rows.to(torch.float8_e4m3fn), 0.0)
