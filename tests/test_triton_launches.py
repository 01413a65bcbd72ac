"""How the Triton kernels are launched: what combines partials, what is launched again at other addresses, and without Triton."""

import math
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from quantkv import PagedCache
from quantkv.calls import WriteCall
from quantkv.maps import LayerMaps, LinearMap, block_hadamard, hadamard
from quantkv.testing import SampleBatch, check, relative_error

pytest.importorskip("triton")

from quantkv.implementations.triton import attend, launch, tiling, write

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def batch(name, shape, **arguments):
    return SampleBatch.make(name, *shape, **{"device": DEVICE, "dtype": torch.float16, **arguments})


# ---- combine


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("mapped, by", [(0, "matrix"), (2, "matrix"), (5, "matrix"), (5, "signs"), (2, "diagonal"), (5, "diagonal")])
def test_combine_of_rows_with_and_without_keys(mapped, by, sinks, rows):
    """Splits without keys left NaN where their output would be; a row of such splits only is 0, and its log-sum-exp the sink alone. Rows in
    float32 keep all of their bits where they are multiplied with a bfloat16 matrix of signs, or go through Hadamard matrices."""
    generator = torch.Generator().manual_seed(0)
    tokens, heads, splits, size = 5, 4, 5, 96
    parts = torch.randn(tokens, heads, splits, size, generator=generator, dtype=torch.float64)
    sums = torch.randn(tokens, heads, splits, generator=generator, dtype=torch.float64) * 3
    sums[torch.rand(sums.shape, generator=generator) < 0.4] = -math.inf
    sums[1], sums[2, :, :2], sums[3, :, 2:] = -math.inf, -math.inf, -math.inf  # none; none that are mapped; none that are not
    sums[4, 0] = sums[4, 0] + 300.0  # far above the sinks
    sink = torch.randn(heads, generator=generator, dtype=torch.float64) if sinks else None
    given = matrix = torch.randn(2, size, size, generator=generator)
    if by == "signs":
        given = matrix = matrix.sign().bfloat16()
    if by == "diagonal":
        given = matrix[0, :2]
        matrix = given[..., None] * block_hadamard(size).float()
    weights, values = torch.exp2(sums), parts.clone()
    for h in range(heads):
        values[:, h, :mapped] = 0.5 * parts[:, h, :mapped] @ matrix[h // 2].double().T
    values[:, :, mapped:] *= 3.0
    total = weights.sum(-1) + (torch.exp(sink) if sinks else 0)
    expected = ((weights[..., None] * values).sum(2) / total[..., None]).nan_to_num(0.0)
    expected_lse = total.log()

    parts[sums == -math.inf] = math.nan
    part = attend.Partials(*(t.float().to(DEVICE) for t in (parts, sums)))
    out = torch.full((tokens, heads, size), math.nan, device=DEVICE)
    lse = torch.full((heads, tokens), math.nan, device=DEVICE).T  # strided
    sink = None if sink is None else sink.float().to(DEVICE)
    target = launch.Target.of(out.device)
    combining = attend.Combining(out, lse, 2, given.to(DEVICE), mapped, 0.5, 3.0, sink, rows=rows)
    attend.combine_launch(part, combining, target)()
    torch.testing.assert_close(out.double().cpu(), expected, rtol=1e-4, atol=1e-5)
    assert by == "matrix" or relative_error(out, expected) < 2e-6
    torch.testing.assert_close(lse.double().cpu(), expected_lse, rtol=1e-5, atol=1e-5)
    assert bool((out[1] == 0).all()) and (sinks or bool((lse[1] == -math.inf).all()))
    before = out.clone()
    attend.combine_launch(part, replace(combining, out=out.fill_(math.nan), lse=None), target)()
    assert torch.equal(out, before)


@pytest.mark.parametrize("by", ["signs", "diagonal"])
def test_an_infinite_number_stays_one_behind_a_rotation(by):
    """As a product with the matrix has it, not inf - inf."""
    parts, sums = torch.ones(1, 1, 1, 32, device=DEVICE), torch.zeros(1, 1, 1, device=DEVICE)
    parts[..., 5] = math.inf
    matrix = hadamard(32).bfloat16()[None] if by == "signs" else torch.ones(1, 32)
    out = torch.full((1, 1, 32), math.nan, device=DEVICE)
    combining = attend.Combining(out, None, 1, matrix.to(DEVICE), 1, 1.0, 1.0)
    attend.combine_launch(attend.Partials(parts, sums), combining, launch.Target.of(out.device))()
    assert torch.equal(out[0, 0].cpu(), math.inf * hadamard(32)[:, 5].float())


def test_rows_of_a_program_that_combines(monkeypatch):
    """Several share a matrix where multiprocessors have work all the same; what benchmarks/triton_decode.py varies."""
    target = launch.Target.of(torch.device(DEVICE))
    for splits, most in ((0, 2), (21, 5)):  # rows of a multiprocessor that are alone
        few = most * target.processors
        assert [tiling.combine_rows(rows, splits, target) for rows in (1, few, few + 1, 9 * few)] == [1, 1, 16, 16]
    monkeypatch.setattr(tiling, "ROWS_ALONE", 3)
    assert tiling.combine_rows(3 * target.processors, 0, target) == 1


# ---- slots that nothing wrote


BEYOND = ["bf16", "fp8", "fp8_token", "int8", "int4", "int2", "tq4", "tq3", "tq_k8v4", "levels6", "trellis2"]
DECODE, CHUNK = ((1,), (37,)), ((5,), (37,))


@pytest.mark.parametrize(
    "name, shape, block_size",
    [(name, *how) for name in BEYOND for how in ((DECODE, 16), (CHUNK, 64))] + [("int4", DECODE, 64), ("int4", CHUNK, 16)],
    ids=str,
)
def test_what_lies_beyond_a_sequence_is_not_looked_at(name, shape, block_size):
    """Tiles of 32 keys reach beyond key 37, into slots of 0xFF, zeros, or the largest numbers, and into page 0, which nothing wrote: no bit
    depends on them."""
    b = batch(name, shape, block_size=block_size, dtype=torch.bfloat16 if name == "bf16" else torch.float16)
    cache = PagedCache(b.cache.spec, b.cache.num_blocks + 1, DEVICE)
    table = (b.block_table + 1).clamp(min=0)  # beyond the last page a table may hold anything: here page 0
    at = b.slots // block_size, b.slots % block_size
    call = {"block_table": table, "seq_lens": b.seq_lens, "cu_seqlens_q": b.cu_seqlens_q, "max_query_len": shape[0][0]}
    results = []
    for poison in (0x00, 0xFF, 0x7B, 0x7F):
        cache.buffer.fill_(poison)
        for side, source in ((cache.k, b.cache.k), (cache.v, b.cache.v)):
            side.codes.view(torch.uint8)[at[0] + 1, at[1]] = source.codes.view(torch.uint8)[at]
            if side.meta is not None:
                side.meta[at[0] + 1, at[1]] = source.meta[at]
        results.append(cache.attend(b.q, **call, implementation="triton", return_lse=True))
    assert relative_error(results[0][0], b.oracle()[0]) <= 6e-3
    for out, lse in results[1:]:
        assert torch.equal(out, results[0][0]) and torch.equal(lse, results[0][1])


# ---- launching again


class Recorder:
    """Stands in for a kernel and for what Triton compiles of it, and writes down what is launched."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel, log):
        self.kernel, self.log = kernel, log

    def __getitem__(self, grid):
        def launched(**arguments):
            names = [p for p in self.kernel.arg_names if p in arguments]
            assert names == list(self.kernel.arg_names), "in the order of the kernel's own"
            self.log.append((grid, addresses([arguments[n] for n in names])))
            return self

        return launched

    def run(self, *arguments):
        *grid, stream, function, metadata, _, enter, leave = arguments[:9]
        assert (stream, function, metadata, enter, leave) == ("stream", "function", "metadata", None, None)
        self.log.append((tuple(grid), addresses(arguments[9:])))


def addresses(values):
    """What a launcher makes of arguments: addresses for tensors, tuples for views."""
    return [tuple(addresses(v)) if isinstance(v, tuple) else v.data_ptr() if isinstance(v, torch.Tensor) else v for v in values]


@pytest.fixture
def recorded(monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("launches are recorded here, not made")
    log = []
    for module, kernels in ((attend, ("attend_kernel", "combine_kernel")), (write, ("write_kernel",))):
        for name in kernels:
            monkeypatch.setattr(module, name, Recorder(getattr(module, name), log))
    monkeypatch.setattr(launch, "current_stream", lambda device: "stream")
    return log


def aligned(shape, like, shift=0):
    """An uninitialized tensor at a multiple of 16 bytes, and `shift` elements."""
    memory = torch.empty(math.prod(shape) + 64 + shift, dtype=like.dtype, device=like.device)
    first = (-memory.data_ptr() % 64) // memory.element_size() + shift
    return memory[first : first + math.prod(shape)].view(shape)


def another(b, name, shape, **options):
    """The same batch of another layer: every tensor that may lie elsewhere does."""
    eye = torch.eye(64)[None]
    maps = [LinearMap(eye * n, eye / n, aligned((3, 1, 64), eye).fill_(n) if n == 3 else None) for n in (3, 5)]
    other = batch(name, shape, maps=LayerMaps(*maps) if name == "int8" else None)
    return other.call().with_tensors(
        aligned(b.q.shape, b.q),
        aligned(b.q.shape, b.q),
        aligned(b.q.shape[:2], torch.empty(0, device=DEVICE)),
        (other.cache.segment(b.block_table),),
        b.call(**options).options,
    )


@pytest.mark.parametrize("name", ["int4", "int8", "tq3", "fp8", "bf16"])
def test_what_is_prepared_launches_the_same_at_other_addresses(name, recorded, monkeypatch):
    shape = ((1, 1), (40, 33))
    b = batch(name, shape)
    first = another(b, name, shape, sinks=aligned((6,), torch.empty(0)).zero_(), alibi_slopes=aligned((6,), torch.empty(0)).zero_())
    monkeypatch.setattr(attend.AttendPlan, "partials", lambda plan, call, part=attend.AttendPlan.of(first).partials(first): part)
    serve = attend.prepare(first)
    serve(first)
    for _ in range(2):
        call = another(b, name, shape, sinks=aligned((6,), torch.empty(0)).zero_(), alibi_slopes=aligned((6,), torch.empty(0)).zero_())
        object.__setattr__(call, "batch", first.batch)
        recorded.clear()
        serve(call)
        again = recorded.copy()
        recorded.clear()
        attend.run(call)
        assert again == recorded and len(again) == 2
        assert again[0][1][0][0] == call.q.data_ptr()


def test_what_is_not_aligned_goes_through_triton(recorded):
    """The kernel was compiled for addresses that are multiples of 16 bytes."""
    b = batch("int4", ((1, 1), (40, 33)))
    call = another(b, "int4", ((1, 1), (40, 33)))
    serve = attend.prepare(call)
    serve(call)
    made = []
    stock, attend.launch_all = attend.launch_all, lambda *a: made.append(a) or stock(*a)
    try:
        serve(call)
        assert not made
        serve(call.with_tensors(aligned(b.q.shape, b.q, shift=1), call.out, call.lse, call.segments))
        assert len(made) == 1
    finally:
        attend.launch_all = stock


@pytest.mark.parametrize("name", ["int4", "int8"])
def test_a_prepared_write_launches_the_same_at_other_addresses(name, recorded):
    calls = []
    for _ in range(3):
        b = batch(name, ((1,), (40,)))
        key, value = (aligned(t.shape, t) for t in (b.key, b.value))
        slots = aligned(b.slots.shape, b.slots).copy_(b.slots)
        calls.append(WriteCall(key, value, b.cache.k, b.cache.v, b.cache.format, slots, b.cache.maps))
    serve = write.prepare(calls[0])
    for call in calls:
        recorded.clear()
        serve(call)
        again = recorded.copy()
        recorded.clear()
        write.run(call)
        assert again == recorded and len(again) == 1


def test_what_is_prepared_gives_what_a_call_gives():
    """In the interpreter every launch goes through Triton; on a GPU the second does not."""
    b = batch("int4", ((3, 12), (40, 33)))
    call = b.call(max_query_len=12, sinks=torch.ones(6, device=DEVICE))
    serve = attend.prepare(call)
    for _ in range(3):
        b.q.copy_(torch.randn_like(b.q))
        call.out.fill_(math.nan)
        serve(call)
        check(b, (call.out, call.lse), sinks=call.options.sinks)
    expected = call.out.clone()
    b.cache.buffer[:] = b.cache.buffer.clone()
    attend.run(call)
    assert torch.equal(call.out, expected)


def test_splits_follow_the_bound_not_the_table():
    """A table with room for 131,072 tokens, of sequences that have at most 256: scratch for 256."""
    b = batch("int4", ((1, 1), (90, 33)))
    table = torch.zeros(2, 8192, dtype=torch.int32, device=DEVICE)
    table[:, : b.block_table.shape[1]] = b.block_table
    object.__setattr__(b, "block_table", table)
    for invariant in (False, True):
        wide = attend.AttendPlan.of(b.call(batch_invariant=invariant))
        narrow = attend.AttendPlan.of(b.call(batch_invariant=invariant, max_seq_len=256))
        assert sum(narrow.splits) * 2 <= sum(wide.splits)
        check(b, b.attend(implementation="triton", batch_invariant=invariant, max_seq_len=256))


def test_without_triton_a_call_is_refused_by_name():
    code = """
import sys
sys.modules["triton"] = None
from quantkv import implementations
from quantkv.testing import SampleBatch
call = SampleBatch.make("int8", [1], [5]).call()
print(implementations.refusal("triton", call), len(implementations.module("triton", "attend").SUPPORTED))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("the package triton is missing: pip install 'quantkv[triton]'")


def test_the_oldest_triton_is_refused_on_amd(monkeypatch):
    """It compiles there, but some prompts to more shared memory than a block may have."""
    call = batch("int4", ((1,), (5,))).call()
    assert launch.refusal(call.q.device, []) is None
    monkeypatch.setattr(launch, "TRITON_3_4", True)
    assert launch.refusal(call.q.device, []) is None
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert attend.refusal(call).endswith("on an AMD GPU: 3.5 or later is needed")


@pytest.mark.parametrize("oldest, turns, tiles", [(False, True, [(64, 5), (64, 3)]), (True, False, [(64, 3), (32, 3)])])
def test_tiles_of_the_oldest_triton_on_nvidia(oldest, turns, tiles, monkeypatch):
    """No product of 8 columns, and as many keys and stages of 16-bit latents as fit sm_90 and sm_80: a buffer for each stage but one."""
    for module in (launch, tiling):
        monkeypatch.setattr(module, "INTERPRETED", False)
        monkeypatch.setattr(module, "TRITON_3_4", oldest)
    targets = [launch.Target(90, "tf32x3", 132, 228 << 10), launch.Target(80, "tf32x3", 108, 164 << 10)]
    assert [target.turns for target in targets] == [turns, turns]
    found = [tiling.Tiling.of_latents(16, 1, 512, 2 * 576, False, False, target) for target in targets]
    assert [(tile.block_n, tile.num_stages) for tile in found] == tiles


def test_word_dtype():
    codes = torch.zeros(4, 16, 2, 24, dtype=torch.uint8)
    wanted = {
        1: torch.uint8,
        2: torch.int16,
        3: torch.int32,
        4: torch.int32,
        5: torch.uint8,
        6: torch.uint8,
        7: torch.uint8,
        8: torch.int64,
    }
    assert {n: launch.word_dtype(codes, n, stored=False) for n in wanted} == wanted
    assert launch.word_dtype(codes, 3, stored=True) == torch.uint8
    assert launch.word_dtype(codes.float(), 4, stored=False) == torch.float32
    assert launch.word_dtype(codes.view(torch.int8), 2, stored=True) == torch.int16


@pytest.mark.parametrize("fails", [False, True])
def test_kernels_compiled_ahead_are_loaded_by_the_threads_that_compile_them(fails):
    """Their launchers are built beside each other too. One that cannot be loaded is there all the same: its launch says why."""

    class Kernel:
        loaded_by = None

        @property
        def run(self):
            Kernel.loaded_by = threading.current_thread()
            if fails:
                raise RuntimeError("out of resource: shared memory")

    kernel = Kernel()
    with ThreadPoolExecutor(1) as pool:
        assert launch._Loading(pool, torch.device("cpu")).submit(lambda: kernel).result() is kernel
        with pytest.raises(ZeroDivisionError):
            launch._Loading(pool, torch.device("cpu")).submit(lambda: 1 / 0).result()
    assert Kernel.loaded_by not in (None, threading.current_thread())
