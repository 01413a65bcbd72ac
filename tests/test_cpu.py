"""The compiled CPU kernels: within the budget for every format and option that they support, the reference's bytes, and who is chosen."""

import subprocess
import sys
import threading
from dataclasses import replace
from types import ModuleType

import pytest
import torch

from quantkv import AttentionOptions, LayerMaps, LinearMap, PagedCache, get_format, implementations, prepare_attend, prepare_write
from quantkv.calls import AttendCall, WriteCall
from quantkv.implementations.cpu import attend, sides, threads, write
from quantkv.implementations.reference.attend import compute
from quantkv.testing import LSE_BUDGET, OUTPUT_BUDGET, POISON, SampleBatch, check, relative_error

pytest.importorskip("numba")

CPU = {"implementation": "cpu"}
RAGGED = (1, 3, 0, 2), (600, 23, 0, 40)  # over a cut of the kernel's work, and an empty sequence


def batch(name, query_lens=(1, 1), seq_lens=(70, 5), dtype=torch.float32, **arguments):
    return SampleBatch.make(name, query_lens, seq_lens, dtype=dtype, **arguments)


def served(b, **options):
    """What the kernels give; AssertionError where they refuse."""
    call = b.call(**options)
    assert attend.refusal(call) is None
    attend.run(call)
    return call.out, call.lse


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_format(format_name, dtype):
    b = batch(format_name, *RAGGED, dtype=dtype)
    check(b, served(b))


@pytest.mark.parametrize(
    "options",
    [
        {"causal": False},
        {"causal": torch.tensor([True, False, True, False])},
        {"window": 30},
        {"window": 2, "causal": False},
        {"window": 600, "softcap": 3.0},
        {"window": 64, "chunk_lookback": 1},
        {"window": 16, "chunk_lookback": 0, "causal": False},
        {"sinks": torch.linspace(-1, 2, 6), "window": 5},
        {"sinks": torch.full((6,), -torch.inf)},
        {"key_start": torch.tensor([7, 0, 0, 0]), "key_range": torch.tensor([[9, 570], [4, 19], [0, 0], [50, 60]])},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["int4", "levels5/tq4", "fp32"])
def test_options_over_ragged_queries(name, options):
    b = batch(name, *RAGGED)
    check(b, served(b, **options), **options)


@pytest.mark.parametrize("sizes", [(8, 8, 24), (80, 48, 16), (128, 64, 32), (256, 256, 40)], ids=str)
def test_sizes_of_heads_and_pages(sizes):
    for name in ("int4", "levels3", "int8", *(["trellis2"] if sizes[0] % 16 == 0 else [])):
        check(b := batch(name, head_size=sizes[0], head_size_v=sizes[1], block_size=sizes[2], num_kv_heads=3, group=2), served(b))


def test_maps_of_each_head_offsets_and_scales():
    generator = torch.Generator().manual_seed(0)
    forward = torch.linalg.qr(torch.randn(2, 64, 64, generator=generator))[0] * 1.5
    key_mean = torch.randn(3, 2, 64, generator=generator)  # of 64 positions each; those after 192 use the last
    maps = LayerMaps(*(LinearMap(forward.contiguous(), forward.inverse(), o) for o in (key_mean, None)))
    for name in ("int4", "levels4", "fp8"):  # levels say of each key whether its key mean was taken off
        b = batch(name, (1, 2), (300, 40), maps=maps)
        check(b, served(b))
    b = batch("fp8", (1, 2), (300, 40))
    scaled = b.call()
    scaled = replace(scaled, segments=tuple(s._replace(k=s.k._replace(scale=0.5), v=s.v._replace(scale=3.0)) for s in scaled.segments))
    expected, expected_lse = compute(scaled, torch.float64)
    attend.run(scaled)
    assert relative_error(scaled.out, expected) < OUTPUT_BUDGET[torch.float32]
    assert (scaled.lse - expected_lse).abs().max() < LSE_BUDGET[torch.float32]


@pytest.mark.parametrize("name", ["int4", "levels4"])
def test_offsets_go_by_position_where_the_first_slot_is_another(name):
    """Keys from 70 on, in slots from 0 on, have the key means of their positions: three buckets, of which the first slots see none."""
    generator = torch.Generator().manual_seed(0)
    key_mean = 3 * torch.randn(4, 2, 64, generator=generator)
    plain = LayerMaps.of(get_format(name), 64, 64)
    maps = LayerMaps(replace(plain.k, key_mean=key_mean, operands=None), plain.v)
    b = batch(name, (1, 2), (300, 90), maps=maps)
    start = {"key_start": torch.tensor([70, 64])}
    check(b, served(b, **start), **start)


def test_outputs_for_8_bit_floats_stay_in_their_range():
    b = batch("int4")
    plain, _ = served(b)
    scale = float(plain.abs().max()) / 600
    out, _ = served(b, output_scale=scale)  # half a step of e4m3 is a 16th of a number, or 2^-10
    torch.testing.assert_close(out.float(), (plain / scale).clamp(-448, 448), rtol=1 / 16, atol=2**-10)


def test_segments_combine():
    """The first keys exact, the others in levels, with sinks: one V map and none."""
    b, exact = batch("levels4", (1, 2), (90, 40)), batch("fp32", (1, 2), (90, 40))
    ends = torch.tensor([[0, 17], [0, 17]]), torch.tensor([[17, 90], [17, 40]])
    segments = tuple(c.call().segments[0]._replace(key_range=r) for c, r in zip((exact, b), ends))
    call = AttendCall(b.q, segments, b.call().batch, None, AttentionOptions(sinks=torch.linspace(-1, 2, 6)), None, torch.empty(3, 6))
    assert attend.refusal(call) is None
    attend.run(call)
    expected, expected_lse = compute(call, torch.float64)
    assert relative_error(call.out, expected) < OUTPUT_BUDGET[torch.float32]
    assert (call.lse - expected_lse).abs().max() < LSE_BUDGET[torch.float32]


@pytest.mark.parametrize("side", ["k", "v"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["fp32", "int8", "int4", "levels4"])
def test_a_row_that_is_not_finite_stays_with_who_sees_it(name, value, side):
    b = batch(name, (6,), (20,))
    expected, expected_lse = served(b)
    (b.cache.k if side == "k" else b.cache.v)[0 if name == "fp32" else 1][b.slots[17] // 16, b.slots[17] % 16] = value
    out, lse = served(b)
    assert torch.equal(out[:3], expected[:3]) and torch.equal(lse[:3], expected_lse[:3])
    assert not out[3:].isfinite().any(-1).all()


def test_large_scores_do_not_overflow():
    b = batch("int8", (1,), (40,))
    b.q[:] *= 1e4
    (out, lse), (expected, expected_lse) = served(b), b.oracle()
    assert relative_error(out, expected) < OUTPUT_BUDGET[torch.float32]
    torch.testing.assert_close(lse.double(), expected_lse, rtol=4e-7, atol=0)


def test_a_sequence_gets_the_same_bits_alone_in_any_batch_and_by_any_number_of_threads(monkeypatch):
    together = batch("int4", (1, 1, 1), (1100, 30, 700))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected, expected_lse = served(together)
        monkeypatch.setattr(attend, "SMALLEST_PART", 1)
        torch.set_num_threads(3)
        out, lse = served(together)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    call = together.call()
    for s in range(3):
        own = call.segments[0]._replace(block_table=together.block_table[s : s + 1])
        own_batch = type(call.batch).of(None, together.seq_lens[s : s + 1])
        alone = AttendCall(call.q[s : s + 1], (own,), own_batch, lse=torch.empty(1, 6))
        attend.run(alone)
        assert torch.equal(alone.out, expected[s : s + 1]) and torch.equal(alone.lse, expected_lse[s : s + 1])


def test_a_prepared_call_follows_the_lengths_and_the_table():
    b = batch("int4", (1, 1), (70, 40))
    lens, table = b.seq_lens.clone(), b.block_table.clone()
    decode = prepare_attend(block_table=table, seq_lens=lens, max_query_len=1, **CPU)
    decode(b.cache, b.q)
    lens.copy_(torch.tensor([33, 7]))
    table[[0, 1], 0] = table[[1, 0], 0]
    b = replace(b, seq_lens=lens, block_table=table)
    out, lse = decode(b.cache, b.q, return_lse=True)
    check(b, (out, lse))
    table[0, 0] = 1 << 20
    with pytest.raises(ValueError, match="block_table"):
        decode(b.cache, b.q)


# ---- writes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["int4", "levels4", "levels2/int4", "int2", "k8v4"])
def test_a_write_stores_the_bytes_of_the_reference(name, dtype, monkeypatch):
    """By the kernels where rows and mapped rows are finite; by the reference where one is not."""
    for head_size in (64, 80, 128):
        if name == "int2" and head_size == 80:
            continue
        spec = get_format(name).cache_spec(3, head_size)
        generator = torch.Generator().manual_seed(head_size)
        key, value = (torch.randn(60, 3, head_size, generator=generator) for _ in range(2))
        key *= torch.randn(60, 1, 1, generator=generator).mul(4).exp()  # subnormal numbers of fp16, and some that it cannot hold
        key[3], key[4], value[5], value[6] = 0, 3e4, value[5].abs() + 30, 1e-9
        value[7, :, 0] = 6e4
        key, value = key.clamp(-6e4, 6e4).to(dtype), value.to(dtype)
        cases = {"finite": (key.clone(), value.clone())}
        if dtype != torch.float16:
            key[8], value[9] = 3e38, 1e30
            map_ = LayerMaps.of(get_format(name), head_size, head_size).v
            signs = 1 if map_ is None or map_.block_signs is None else map_.block_signs.repeat(head_size // len(map_.block_signs))
            value[10] = signs * torch.tensor([2e38, 2e38, 1e38, 1e38, *[0] * (head_size - 4)])  # infinite on the way only
        slots = torch.randperm(96, generator=generator)[:60]
        slots[::7] = -1
        cases["huge"] = key.clone(), value.clone()
        key[20, 1, 3], value[21, 0, 2] = torch.nan, torch.inf
        cases["broken"] = key, value
        for case, (key, value) in cases.items():
            expected, cache = (PagedCache(spec, 6, k_scale=0.3, v_scale=2.0) for _ in range(2))
            for c in (expected, cache):
                c.buffer.fill_(POISON)
            expected.write(key, value, slots, implementation="reference")
            call = WriteCall(key, value, cache.k, cache.v, cache.format, slots, cache.maps)
            assert write.refusal(call) is None
            with monkeypatch.context() as patch:
                if case == "finite":
                    patch.setattr(write.reference, "run", None)
                write.run(call)
            assert torch.equal(cache.buffer, expected.buffer), (head_size, case)


def test_parts_run_at_the_same_time_and_a_failure_of_any_is_told(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    met, ranges = threading.Barrier(3, timeout=30), []

    def part(first, last):
        met.wait()
        ranges.append((first, last))

    threads.in_parts(10, 2, part)
    assert sorted(ranges) == [(0, 3), (3, 6), (6, 10)]
    for failing in (0, 3, 6):
        with pytest.raises(ArithmeticError):
            threads.in_parts(10, 2, lambda first, last, failing=failing: 1 / (first - failing))


def test_two_parts_are_two_threads_and_nothing_runs_on_after_a_failure(monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    both = threading.Barrier(2, timeout=30)
    threads.in_parts(2, 1, lambda first, last: both.wait())
    failed, ended = threading.Event(), threading.Event()

    def part(first, last):
        if first == 0:
            failed.set()
            raise ArithmeticError
        failed.wait(30)
        ended.wait(0.05)  # the other part has failed by now
        ended.set()

    with pytest.raises(ArithmeticError):
        threads.in_parts(2, 1, part)
    assert ended.is_set()


def test_a_row_of_one_number_is_dense_whatever_its_stride():
    """The metadata of int8 are one number a row: how far the next would be makes no difference."""
    b = batch("int8")
    apart = b.cache.k.meta.unsqueeze(-1).expand(*b.cache.k.meta.shape, 2)[..., 0]
    k = b.cache.k._replace(meta=apart.as_strided(apart.shape, (*apart.stride()[:3], 7)))
    assert sides.refusal(k, b.cache.format.k) is None
    codes = b.cache.k._replace(codes=torch.zeros(2, 16, 2, 128, dtype=torch.int8)[..., ::2])
    assert "dense" in sides.refusal(codes, b.cache.format.k)


def test_a_write_in_a_metric_stores_the_bytes_of_the_reference():
    root = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    plain = LayerMaps.of(get_format("levels4"), 64, 64)
    maps = LayerMaps(*(LinearMap(m.forward, m.inverse, None, (root @ root.T)[None]) for m in (plain.k, plain.v)))
    b = batch("levels4", maps=maps)
    expected = b.cache.buffer.clone()
    b.cache.write(b.key, b.value, b.slots, **CPU)
    assert torch.equal(b.cache.buffer, expected)


def test_a_prepared_write_follows_the_slots():
    b = batch("int4")
    expected, slots = b.cache.buffer.clone(), torch.zeros(1, dtype=torch.int64)
    b.cache.buffer.fill_(POISON)
    store = prepare_write(slots, **CPU)
    for i in range(len(b.slots)):
        slots.copy_(b.slots[i : i + 1])
        store(b.cache, b.key[i : i + 1], b.value[i : i + 1])
    assert torch.equal(b.cache.buffer, expected)
    slots.fill_(1 << 20)
    with pytest.raises(ValueError, match="slot_mapping"):
        store(b.cache, b.key[:1], b.value[:1])


# ---- who is chosen


def test_auto_takes_the_kernels_and_leaves_the_rest_to_the_reference():
    assert implementations.resolve(batch("int4").call()) == ("cpu", {})
    assert implementations.resolve(batch("int4", (1, 16), (40, 40)).call()) == ("cpu", {})
    prompt = batch("int4", (1, 17), (40, 40))
    name, reasons = implementations.resolve(prompt.call())
    assert name == "reference" and reasons == {"cpu": "a sequence has 17 queries: at most 16"}
    with pytest.raises(ValueError, match=r"implementation='cpu'.*17 queries"):
        prompt.attend(**CPU)
    name, reasons = implementations.resolve(batch("int4").call(alibi_slopes=torch.ones(6)))
    assert name == "reference" and reasons["cpu"].startswith("alibi_slopes: not supported")


def test_writes_that_gain_nothing_or_need_more_are_the_references():
    plain = LayerMaps.of(get_format("int4"), 64, 64)
    dense = LinearMap(plain.k.forward / 2, plain.k.inverse * 2, torch.ones(1, 1, 64))
    for b in (batch("int8"), batch("fp8/tq4", maps=LayerMaps(dense))):
        c = b.cache
        call = WriteCall(b.key, b.value, c.k, c.v, c.format, b.slots, c.maps, b.positions)
        name, reasons = implementations.resolve(call)
        assert name == "reference" and reasons["cpu"].startswith(f"{c.format.name} has neither a compiled map nor a compiled encoder")


def test_without_numba_auto_is_the_reference_and_an_explicit_choice_says_what_to_install():
    code = """
import sys
sys.modules["numba"] = None
from quantkv import implementations
from quantkv.testing import SampleBatch
b = SampleBatch.make("int4", (1,), (5,))
print(implementations.resolve(b.call()))
try:
    b.attend(implementation="cpu")
except ValueError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert done[0].startswith("('reference', {'cpu': \"the package numba is missing")
    assert done[1] == "implementation='cpu': the package numba is missing: pip install 'quantkv[cpu]'"


def test_each_kernel_is_compiled_once_and_where_nothing_can_be_kept_in_every_process(monkeypatch):
    import numba

    from quantkv.formats.int4.cpu import encode_rows
    from quantkv.implementations.cpu import compiling, kernels, rows

    for name in ("int4", "levels3", "fp16"):
        served(batch(name, dtype=torch.float16))
    for kernel in (kernels.attend_chunks, kernels.combine_chunks, rows.map_rows, encode_rows):
        assert len(kernel.signatures) == 1

    def njit(*arguments, cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return plain(*arguments, **options)

    plain = numba.njit
    monkeypatch.setattr(numba, "njit", njit)
    assert compiling.compiled(numba.int64(numba.int64))(lambda x: x + 1)(1) == 2


def test_exp_is_right_to_the_last_bits():
    from quantkv.implementations.cpu import kernels

    x = -torch.rand(2000, generator=torch.Generator().manual_seed(0)) * 80
    found = torch.tensor([kernels.exp(v) for v in x.numpy()])
    assert ((found.double() - x.double().exp()) / x.double().exp()).abs().max() < 2e-7
    ends = [float(kernels.exp(torch.tensor(v).numpy()[()])) for v in (0.0, -88.0, -torch.inf, torch.nan)]
    assert ends[:3] == [1.0, 0.0, 0.0] and ends[3] != ends[3]


def test_what_is_said_of_a_format_is_what_serves_it(format_name):
    b, fmt = batch(format_name, head_size=64), get_format(format_name)
    c = b.cache
    call = WriteCall(b.key, b.value, c.k, c.v, c.format, b.slots, c.maps, b.positions)
    assert implementations.can_serve("cpu", fmt, "attend") == (attend.refusal(b.call()) is None)
    assert implementations.can_serve("cpu", fmt, "write") == (write.refusal(call) is None)


def test_numba_is_left_alone_beside_vllm(monkeypatch):
    """vLLM's CPU platform reads the attributes of every module as it starts, and fails at llvmlite's."""
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    name, reasons = implementations.resolve(batch("int4").call())
    assert name == "reference" and reasons["cpu"].startswith("vLLM is loaded")
