"""A default device on which none of the tensors lies: engines set one (`torch.set_default_device`, `with torch.device("cuda")`).

Here it is meta, whose tensors hold no numbers: what is made without a device meets the others and fails, on a machine with no GPU too.
"""

import ast
import io
import os
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._device import _device_constructors
from torch.utils._pytree import tree_leaves

from hopper_on_cpu import AVAILABLE, Device
from quantkv import (
    LayerMaps,
    LinearMap,
    PagedCache,
    PageStore,
    PageViews,
    copy_pages_between,
    get_format,
    prepare_attend,
    prepare_write,
    warm_up,
)
from quantkv import vllm_api as backend
from quantkv.calibration import Calibration, LayerMoments
from quantkv.calls import WriteCall
from quantkv.copies import CacheWithCopies, CopiedPages, FullPrecisionStep, cache_of_copies
from quantkv.formats.trellis.hopper import TrellisConfig
from quantkv.full_precision import FullPrecisionTokens
from quantkv.implementations import refusal
from quantkv.implementations.hopper.host import operands
from quantkv.implementations.hopper.write import Hadamard
from quantkv.implementations.hopper.write.round import RoundConfig
from quantkv.maps import default_map, hadamard
from quantkv.policy import Policy
from quantkv.testing import POISON, SampleBatch, check, rows

SOURCE = Path(__file__).parent.parent / "src" / "quantkv"
TRITON = os.environ.get("TRITON_INTERPRET") == "1"
BATCH = dict(query_lens=(1, 5), seq_lens=(4, 20))
META = torch.device("meta")


def forget() -> None:
    """Tensors that functions of the package kept, they make anew."""
    for name, module in list(sys.modules.items()):
        if name.startswith(("quantkv.formats", "quantkv.maps", "quantkv.vllm_api", "quantkv.implementations.cpu.sides")):
            for value in vars(module).values():
                if hasattr(value, "cache_clear"):
                    value.cache_clear()


def alike(run):
    """Asserts that `run` returns the same tensors and numbers, to the bit, whatever the default device is; returns them."""
    forget()
    with META:
        there = tree_leaves(run())
    here = tree_leaves(run())
    assert len(there) == len(here) > 0
    for a, b in zip(there, here):
        if isinstance(a, torch.Tensor):
            assert a.device == b.device == torch.device("cpu") and a.dtype == b.dtype and a.shape == b.shape
            a, b = (t.detach().contiguous().view(torch.uint8).numpy().tobytes() for t in (a, b))
        assert a == b
    return here


def numbers(values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device="cpu")


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu").to(dtype)


def maps_of(name, head_size, heads=2):
    """The format's own map with key means and, where its writer takes one, a Hessian."""
    fmt, eye = get_format(name), torch.eye(head_size, device="cpu")
    half = normal(heads, head_size, 2 * head_size, seed=1)
    sides = []
    for codec, key_mean in ((fmt.k, normal(4, heads, head_size, seed=2)), (fmt.v, None)):
        plain = default_map(codec, head_size) or LinearMap(eye[None], eye[None])
        sides.append(LinearMap(plain.forward, plain.inverse, key_mean, half @ half.mT if codec.encode_in else None))
    return LayerMaps(*sides)


def test_every_tensor_is_made_with_a_device():
    """So that no default decides."""
    names, found = {made.__name__ for made in _device_constructors()}, []
    for file in sorted(SOURCE.rglob("*.py")):
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr in names:
                of_torch = isinstance(call.func.value, ast.Name) and call.func.value.id == "torch"
                if of_torch and not any(keyword.arg == "device" for keyword in call.keywords):
                    found.append(f"{file.relative_to(SOURCE)}:{call.lineno}: {ast.unparse(call)}")
    assert {"tensor", "arange", "zeros", "empty", "full", "ones", "eye", "randn", "as_tensor"} <= names
    assert not found, "\n".join(found)


def served(batch, implementation, **options):
    call = batch.call("cpu", max_query_len=5, **options)
    return () if implementation != "auto" and refusal(implementation, call) else batch.attend(implementation=implementation, **options)


def test_writes_reads_and_attention(format_name):
    def run():
        b = SampleBatch.make(format_name, **BATCH)
        b.cache.write(b.key, b.value, b.slots, b.positions)
        answers = [served(b, name) for name in ("auto", "cpu", "reference")]
        return b.cache.buffer, b.cache.dequantize(b.slots, b.positions), answers

    alike(run)


OPTIONS = {
    "window": lambda: {"window": 9},
    "chunks": lambda: {"window": 16, "chunk_lookback": 0},
    "sinks": lambda: {"sinks": torch.linspace(-1, 1, 6, device="cpu"), "softcap": 20.0},
    "alibi": lambda: {"alibi_slopes": torch.linspace(0.1, 1, 6, device="cpu")},
    "start": lambda: {"key_start": numbers([0, 16])},
    "range": lambda: {"key_range": numbers([[1, 4], [0, 19]])},
    "pairs": lambda: {"batch_invariant": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_and_maps(options):
    def run():
        b = SampleBatch.make("levels4/int4", **BATCH, maps=maps_of("levels4/int4", 64))
        return [served(b, name, **options()) for name in ("auto", "reference")]

    alike(run)


@pytest.mark.parametrize("lengths", [((130, 160), (128, 128)), ((140, 140), (1, 20))], ids=["chunk", "mixed"])
def test_prompts(lengths):
    """By a dense kernel, and in a batch of which it serves a part."""

    def run():
        b = SampleBatch.make("levels4/int4", *zip(*lengths), maps=maps_of("levels4/int4", 64), dtype=torch.float32)
        how = "prefill" if min(n for n, _ in lengths) >= 128 else "auto"
        return [b.attend(implementation=how, lengths=lengths, **given) for given in ({}, {"window": 50})]

    alike(run)


@pytest.mark.skipif(not TRITON, reason="needs Triton's interpreter")
@pytest.mark.parametrize("name", ["int4/tq3", "levels4", "trellis2"])
def test_triton(name):
    def run():
        b = SampleBatch.make(name, (1, 2), (5, 17), maps=maps_of(name, 64))
        return b.attend(implementation="triton", softcap=20.0), b.cache.buffer

    alike(run)


def test_steps_that_are_prepared_and_warm():
    def run():
        b = SampleBatch.make("int4", **BATCH)
        write = prepare_write(b.slots, b.positions)
        attend = prepare_attend(block_table=b.block_table, seq_lens=b.seq_lens, cu_seqlens_q=b.cu_seqlens_q, max_query_len=5)
        write(b.cache, b.key, b.value)
        warm = warm_up(b.cache, 6, query_lens=(1, 3), batch_sizes=(1, 2), write_sizes=(2,), max_seq_len=64)
        return b.cache.buffer, attend(b.cache, b.q), sorted(warm.items())

    alike(run)


def test_full_precision_tokens():
    """A step over pages of which the first and latest are read exactly."""

    def run():
        b, tokens = SampleBatch.make("int4", **BATCH, dtype=torch.float32), FullPrecisionTokens(16, 8)
        exact = CopiedPages(tokens, 16, 2, b.cache.num_blocks)
        cache = CacheWithCopies(b.cache, cache_of_copies(b.cache, exact.num_copies, torch.float32), exact)
        exact.watch(b.cache)
        ends, starts = b.seq_lens.tolist(), numbers([0, 4, 24])
        step = FullPrecisionStep(tokens, 16, 2, sum(ends), torch.device("cpu"))
        table = b.block_table.clamp_min(0)
        exact.advance(table, b.seq_lens, starts, b.slots, step)
        prepare_write(b.slots, b.positions, full_precision=step)(cache, b.key, b.value)
        attend = prepare_attend(block_table=table, seq_lens=b.seq_lens, cu_seqlens_q=b.cu_seqlens_q, max_query_len=5, full_precision=step)
        exact.forget(numbers([0], torch.int64))
        exact.make_room(5, 40)
        return exact.state, attend(cache, b.q)

    alike(run)


def test_pages_move(tmp_path):
    """Copies, files, streams, host memory, and pages that an engine owns."""

    def run():
        b = SampleBatch.make("tq4", **BATCH)
        spec, pages = b.cache.spec, b.cache.num_blocks
        others = [PagedCache(spec, pages) for _ in range(4)]
        memory = torch.zeros(pages, spec.num_kv_heads, spec.page_bytes, dtype=torch.uint8, device="cpu")
        b.cache.copy_pages(numbers([1, 2], torch.int64), numbers([3, 0], torch.int64))
        b.cache.save(tmp_path / "pages")
        others[0].load(tmp_path / "pages")
        b.cache.save(stream := io.BytesIO(), [2, 0])
        others[1].load(io.BytesIO(stream.getvalue()), [1, 3])
        copy_pages_between(b.cache, PagedCache.wrap(memory, spec), [0, 2], [1, 0])
        store = PageStore([b.cache], 3, checksums=True)
        stored = store.store([3, 1])
        store.load(stored, [0, 2]).wait()
        views = PageViews(b.cache.k, b.cache.v, b.cache.format, b.cache.maps)
        copy_pages_between(views, others[2], numbers([0, 1], torch.int64), [2, 3])
        return b.cache.buffer, [other.buffer for other in others], memory, stream.getvalue(), (tmp_path / "pages").read_bytes()

    alike(run)


def test_calibrations_and_policies(tmp_path):
    def run():
        k, v = normal(2, 64, 128), normal(2, 64, 128, seed=1)
        k, v = k @ k.mT, v @ v.mT
        v[0] = 0  # a head that no query reads
        made = Calibration(2, {0: LayerMoments(normal(3, 2, 64, seed=2).half(), k, v), 1: LayerMoments(None, k, v)})
        maps = {0: LayerMaps(LinearMap(*(scale * hadamard(64).float()[None] for scale in (1.0, 1 / 64))))}
        Policy("levels3", {1: "int8"}, maps, made, FullPrecisionTokens(16, 8)).save(tmp_path / "toy.json")
        read = Policy.load(tmp_path / "toy.json")
        tensors = [part for moments in read.calibration.layers.values() for part in moments.tensors().values()]
        names = ("levels3", "int8", "int4", "none")
        sides = [side for name in names for n in (0, 1) for m in [made.maps(n, get_format(name))] for side in (m.k, m.v) if side]
        matrices = [t for side in sides for t in (side.forward, side.key_mean, side.hessian) if t is not None]
        return tensors, read.maps[0].k.forward, read.calibration.digest, matrices, read.maps[0].fingerprint()

    alike(run)


@pytest.mark.parametrize("mode", [backend.KVQuantMode.INT8_PER_TOKEN_HEAD, backend.KVQuantMode.INT4_PER_TOKEN_HEAD], ids=str)
def test_vllm_names(mode):
    def run():
        owner, (key, value) = backend.get_backend(mode), normal(2, 20, 2, 64, dtype=torch.bfloat16)
        shape, like = (3, 16, 2, owner.packed_head_size(64)), dict(dtype=torch.uint8, device="cpu")
        kind = {True: torch.int8}.get(mode is backend.KVQuantMode.INT8_PER_TOKEN_HEAD, torch.uint8)
        k, v = (torch.zeros(shape, **like).view(kind) for _ in range(2))
        scales = owner.allocate_scale_caches(3, 16, 2, torch.device("cpu"))
        slots = torch.arange(16, 36, device="cpu")
        backend.triton_reshape_and_cache_flash_per_token_head_quant(key, value, k, v, *scales, slots, mode)
        q = normal(2, 4, 64, seed=3, dtype=torch.bfloat16)
        batch = dict(cu_seqlens_q=numbers([0, 1, 2]), max_seqlen_q=1, seqused_k=numbers([20, 7]), max_seqlen_k=20)
        plain = dict(softmax_scale=0.125, causal=True, window_size=(-1, -1), softcap=0.0, q_descale=None, k_descale=None, v_descale=None)
        table = dict(block_table=numbers([[1, 2], [2, 1]]), kv_quant_mode=mode, k_scale_cache=scales[0], v_scale_cache=scales[1])
        backend.unified_attention(q=q, k=k, v=v, out=(out := torch.empty_like(q)), **batch, **plain, **table)
        return k, v, scales, out

    alike(run)


def test_turboquant_by_vllms_names():
    def run():
        config = backend.TurboQuantConfig.from_cache_dtype("turboquant_4bit_nc", 64)
        levels = backend.get_centroids(64, config.centroid_bits)
        rotation = backend.fast_hadamard_transform(torch.eye(64, device="cpu")) / 8
        pages = torch.zeros(3, 16, 2, config.slot_size_aligned, dtype=torch.uint8, device="cpu")
        key, value = normal(2, 20, 2, 64, dtype=torch.bfloat16)
        how = config.key_mse_bits, config.key_packed_size, config.effective_value_quant_bits, config.key_fp8
        slots = torch.arange(16, 36, device="cpu")
        backend.triton_turboquant_store(key, value, pages, slots, rotation, (levels[:-1] + levels[1:]) / 2, *how)
        return pages, levels, rotation

    alike(run)


def test_operands_of_hopper():
    """Maps, key means and Hessians as its kernels read them."""

    def run():
        key, keys = get_format("tq4").k.hopper(), maps_of("levels4", 64).k
        signs = torch.where(normal(144) > 0, 1.0, -1.0)
        made = [
            operands.KernelMap.matrix(keys.inverse, key),
            operands.KernelMap.matrix(keys.inverse),
            operands.KernelMap.hadamard(keys.operands._replace(signs=signs, diagonal=signs[None])),
            operands.KernelMap.hadamard(keys.operands._replace(signs=None, diagonal=signs[None] / 4)),
        ]
        made += [operands.KernelKeyMeans.of(keys.operands.mapped_key_mean, key), Hadamard.of(0.5, signs[:128])]
        tensors = [each.signs if isinstance(each, Hadamard) else each.data for each in made]
        return tensors, operands.key_order(key, 96), RoundConfig.feedback_of(keys.rounding), TrellisConfig.feedback_of(keys.rounding)

    alike(run)


def test_a_model():
    """Passes over a cache with padding, windows and full-precision tokens, of a fixed size too; sequences that part and join; a
    calibration."""
    pytest.importorskip("transformers")
    from quantkv.integrations.transformers import QuantizedCache, calibrate, use_quantkv_attention
    from test_transformers import logits, prompts, tiny

    model = use_quantkv_attention(tiny("gemma2"))
    ids, mask = prompts([25, 18])

    def run():
        outs = []
        for kept, room in (("int4", 0), ("int4", 40), (Policy("int4", full_precision=FullPrecisionTokens(16, 8)), 0)):
            cache = QuantizedCache(model.config, kept, num_tokens=room)
            outs.append(logits(model, cache, ids[:, :24], mask[:, :24], [0, 8, 22, 23]))
            cache.reorder_cache(numbers([1, 1], torch.int64))
            outs.append(logits(model, cache, ids[[1, 1]], mask[[1, 1]], [24]))
            cache.batch_select_indices([False, True])
            outs.append(cache.batch_size)
        made = calibrate(model, torch.arange(256, device="cpu").view(4, 64) % 90 + 2)
        return outs, made.digest

    alike(run)


@pytest.mark.skipif(not AVAILABLE, reason="needs g++")
def test_hopper(monkeypatch, tmp_path):
    """Its kernels, run on a CPU: a Hadamard map with signs, and any matrices with key means, of many packed query rows too."""
    device = Device(monkeypatch, tmp_path, 1)
    forget()
    with META:
        made = normal(2, 64, 64, seed=5)
        matrix, inverse = made, torch.linalg.inv(made.double()).float()
        maps = LayerMaps(LinearMap(matrix, inverse, normal(4, 2, 64, seed=6)), LinearMap(matrix, inverse))
        for name, own in (("int4", None), ("tq4", maps)):
            b = SampleBatch.make(name, (1, 1), (40, 33), dtype=torch.bfloat16, maps=own, group=4)
            call = b.call(max_query_len=1)
            device.serve(call)
            check(b, (call.out, call.lse))
        written = PagedCache(get_format("int4").cache_spec(2, 64), 4)
        expected = PagedCache(written.spec, 4)
        key, slots = rows(45, 2, 64, torch.bfloat16), torch.arange(45, device="cpu")
        for cache in (written, expected):
            cache.buffer.fill_(POISON)
        expected.write(key, key, slots, implementation="reference")
        device.serve(WriteCall(key, key, written.k, written.v, written.format, slots, written.maps))
        assert (written.buffer != expected.buffer).sum() <= 1e-4 * written.buffer.numel()
