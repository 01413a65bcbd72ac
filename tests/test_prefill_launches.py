"""What calls of one plan share on the prefill path: launches that are made again with other addresses, numbers that stay on the device.

What Triton would compile is played: a launch that is made again gets addresses and numbers alone, and the interpreter runs the kernel over
the memory at these. So a stale address, or a number of another layer, gives another layer's result. On a GPU the first
test runs as it is."""

import ctypes
import os
from dataclasses import replace

import pytest
import torch

import direct
import prefill_backends
from quantkv import LayerMaps, LinearMap, PagedCache, get_format, testing
from quantkv.implementations.prefill import attend as prefill
from quantkv.implementations.prefill import backends, cudnn_graph, flash3
from quantkv.implementations.prefill.plan import KeySlice

pytest.importorskip("triton")

from quantkv.implementations.prefill import triton_steps
from quantkv.implementations.triton import launch
from test_prefill_rounds import fine_cuts  # noqa: F401  a fixture

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
pytestmark = pytest.mark.skipif(not GPU and os.environ.get("TRITON_INTERPRET") != "1", reason="neither a GPU nor Triton's interpreter")
SINKS = torch.linspace(-2, 3, 6, device=DEVICE)
SIZE, SHAPE = 16, ((33, 9), (70, 9))


class Played:
    """A kernel, and what Triton compiles of it: `run` gets what a launcher gets, tensors as addresses."""

    function, packed_metadata = "function", "metadata"

    def __init__(self, kernel, counts):
        self.kernel, self.counts, self.arg_names = kernel, counts, kernel.arg_names

    def __getitem__(self, grid):
        def launched(**arguments):
            options = {name: arguments.pop(name) for name in ("num_warps",) if name in arguments}
            assert [*arguments] == [*self.arg_names], "in the order of the kernel's own"
            self.counts["compiled"] += 1
            self.kernel[grid](**arguments, **options)
            made = Played(self.kernel, self.counts)
            made.like = {name: described(value) for name, value in arguments.items()}
            return made

        return launched

    def run(self, *arguments):
        *grid, stream, function, metadata, _, enter, leave = arguments[:9]
        assert (stream, function, metadata, enter, leave) == ("stream", "function", "metadata", None, None)
        self.counts["again"] += 1
        if "log" in self.counts:
            return self.counts["log"].append("launch")
        given = arguments[9:]
        assert len(given) == len(self.arg_names)
        self.kernel[tuple(grid)](**{name: at(value, self.like[name], name) for name, value in zip(self.arg_names, given)})


def described(value):
    """Of an argument: the shape of what lies at an address, and what the kernel is compiled for."""
    if isinstance(value, torch.Tensor):
        return "tensor", value.dtype, value.shape, value.stride()
    if isinstance(value, tuple):
        return type(value), [described(v) for v in value]
    return "number", value


def at(value, like, name):
    """The argument that a launcher's value stands for. Numbers of views, and constants, are those that were compiled for."""
    if like[0] == "tensor":
        _, dtype, shape, stride = like
        numbers = 1 + sum((n - 1) * step for n, step in zip(shape, stride)) if shape.numel() else 0
        memory = (ctypes.c_char * (numbers * dtype.itemsize)).from_address(value)
        return torch.frombuffer(memory, dtype=dtype, count=numbers).as_strided(shape, stride)
    if isinstance(like[0], type):
        assert isinstance(value, tuple) and len(value) == len(like[1])
        return like[0](*(at(v, one, name) for v, one in zip(value, like[1])))
    assert type(value) is type(like[1]) and (isinstance(value, float) or value == like[1]), name
    return value


@pytest.fixture
def counts(monkeypatch):
    if GPU:
        pytest.skip("launches are played here, not made")
    return played(monkeypatch)


def played(monkeypatch):
    """Puts `Played` in the place of the kernels; how many launches went through Triton, and how many did not."""
    found = {"compiled": 0, "again": 0}
    for name in ("gather_kernel", "patch_kernel", "fold_kernel"):
        monkeypatch.setattr(triton_steps, name, Played(getattr(triton_steps, name), found))
    monkeypatch.setattr(launch, "current_stream", lambda device: "stream")
    monkeypatch.setattr(prefill, "_steps", lambda triton: triton_steps.TritonSteps)
    return found


def turned(seed, heads=1, key_mean=True, stretch=1.0):
    """Maps of a layer: any matrix, offsets of 2 buckets; its gain is that of stretch."""
    generator = torch.Generator().manual_seed(seed)
    forward = torch.linalg.qr(torch.randn(2, heads, SIZE, SIZE, generator=generator, dtype=torch.float64))[0] * stretch
    key_means = torch.randn(2, heads, SIZE, generator=generator) if key_mean else None
    return LayerMaps(*(LinearMap(f.float(), f.inverse().float(), o) for f, o in zip(forward, (key_means, None))))


def signed(seed, size):
    """Hadamard matrices with signs of their own, and a key mean: rows are mapped back in a 16-bit product."""
    own = PagedCache(get_format("int4").cache_spec(2, size), 1).maps.k
    signs = 1 - 2 * (torch.rand(size, generator=torch.Generator().manual_seed(seed)) < 0.5).float()
    map_ = LinearMap(own.forward * signs, own.inverse * signs[:, None])
    return LayerMaps(replace(map_, key_mean=torch.full((1, 1, size), float(seed)), operands=None), map_)


KINDS = {
    "int8": lambda n: ("int8", None, 1.0),
    "fp8, scales": lambda n: ("fp8", None, 0.3 * n),
    "int4": lambda n: ("int4", None, 1.0),
    "signs": lambda n: ("int4", signed(n, SIZE), 1.0),
    "maps": lambda n: ("int8", turned(n, 2), 1.0),
    "maps, gains": lambda n: ("int4", turned(n, 1, stretch=4.0**n), 1.0),
    "tq3": lambda n: ("tq3", None, 1.0),
}


def layer(kind, n, shape=SHAPE, dtype=torch.float32, **options):
    """The n-th layer's call: pages, maps, scales, queries, sinks and results of its own. Everything lies at multiples of 16 bytes."""
    name, maps, scale = KINDS[kind](n)
    b = testing.SampleBatch.make(name, *shape, head_size=SIZE, dtype=dtype, maps=maps, seed=n, device=DEVICE)
    if scale != 1.0:
        cache = PagedCache(b.cache.spec, b.cache.num_blocks, DEVICE, maps=b.cache.maps, k_scale=scale, v_scale=3 * scale)
        cache.buffer.fill_(testing.POISON)
        cache.write(b.key * 4, b.value * 4, b.slots, b.positions, implementation="reference")
        b = replace(b, cache=cache)
    if "sinks" in options:
        options["sinks"] = SINKS.to(torch.bfloat16) * n
    call = b.call(lengths=tuple(zip(*shape)), **options)
    call.out.fill_(torch.nan)
    call.lse.fill_(torch.nan)
    return b, call, options


def checked(b, call, options, bound=1e-4):
    expected, sums = b.oracle(**options)
    assert testing.relative_error(call.out, expected) < bound
    if call.lse is not None:
        assert (call.lse.cpu() - sums).abs().max() < bound * max(float(sums.abs().max()), 1)


ROWS = SIZE * 2 * 2 * 4  # bytes of a key and its value


CASES = [("int8", 0, 1), ("fp8, scales", 1, 1), ("signs", 0, 1), ("signs", 1, 1), ("maps", 1, 1), ("maps, gains", 0, 1), ("tq3", 1, 1)]
CASES += [("int4", 1, 2), ("fp8, scales", 0, 2), ("signs", 0, 2), ("maps", 1, 2), ("maps, gains", 0, 2)]


@pytest.mark.parametrize("kind,back,lanes", CASES)
def test_layers_launch_again(kind, back, lanes, monkeypatch):
    """Whole, and in several rounds that are combined, on two streams; with sinks; mapped, or mapped back: each layer gets its own pages,
    maps, scales and offsets, and only the first one's launches go through Triton."""
    counts = {} if GPU else played(monkeypatch)
    monkeypatch.setattr(prefill, "MAPPED_BACK", 1000 * back)
    layers = [layer(kind, n, window=50, sinks=True) for n in (1, 2)]
    how = {"scratch_bytes": (64 if lanes > 1 else 1 << 12) * ROWS * lanes, "overlap": lanes > 1}
    plan = prefill.plan(layers[0][1], backend="math", **how)
    assert (max(len(group.rounds) for group in plan.groups) > 1) == (lanes > 1) and plan.lanes == lanes
    for n, (b, call, options) in enumerate([*layers, layers[0]]):
        counts.update(compiled=0, again=0)
        if n == 2:
            call = call.with_tensors(call.q.clone(), torch.full_like(call.out, torch.nan), call.lse, call.segments)
        prefill.follow(call, plan, True)
        checked(b, call, options)
        assert GPU or ((counts["compiled"] > 0) == (n == 0) and (counts["again"] > 0 or n == 0)), counts
        assert all(made.direct is not None for made in plan.kept.values()) and plan.kept


def test_sequences_that_have_rounds_of_their_own(counts):
    """Their rows of a block table of odd width do not lie at multiples of 16 bytes: kernels are compiled for that, and launched again."""
    layers = [layer("signs", n, ((20, 9, 12), (60, 9, 70))) for n in (1, 2)]
    plan = prefill.plan(layers[0][1], together=False)
    for n, (b, call, options) in enumerate(layers):
        assert call.segments[0].block_table.stride(0) % 4
        counts.update(compiled=0)
        prefill.follow(call, plan, True)
        checked(b, call, options)
        assert (counts["compiled"] == 0) == (n == 1)


def with_copies(call, n):
    """The same call with the first keys of each sequence, and its latest ones, in pages of rows as they were given."""
    lens, pages = call.batch.seq_lens.int(), call.segments[0]
    copies = PagedCache(get_format("fp32").cache_spec(2, SIZE, block_size=16), 2 * 2 * len(lens), DEVICE)
    copies.buffer.fill_(testing.POISON)
    rows = torch.randn(2, 16 * copies.num_blocks, 2, SIZE, generator=torch.Generator().manual_seed(n)).to(DEVICE)
    copies.write(*rows, torch.arange(16 * copies.num_blocks, device=DEVICE))
    first, latest = torch.randperm(copies.num_blocks, generator=torch.Generator().manual_seed(n)).to(DEVICE).int().view(2, len(lens), 2)
    begin, end = (lens - 9).clamp(0, 20), (lens - 9).clamp(min=0)
    ranges = [torch.stack(bounds, 1) for bounds in ((begin, end), (torch.zeros_like(begin), begin))]
    main = pages._replace(key_range=ranges[0], complete=True)
    return call.with_tensors(call.q, call.out, call.lse, (main, copies.segment(first, None, ranges[1]), copies.segment(latest, end)))


@pytest.mark.parametrize("kind,back", [("int8", 0), ("signs", 0), ("signs", 1), ("maps", 0), ("maps, gains", 0), ("maps, gains", 1)])
def test_copies_are_put_in_their_places_by_one_launch(kind, back, monkeypatch):
    """For each sequence and segment, of which the second layer's is one that is kept."""
    counts = {} if GPU else played(monkeypatch)
    monkeypatch.setattr(prefill, "MAPPED_BACK", 1000 * back)
    made, patched = [], triton_steps.TritonSteps._patch_launch
    monkeypatch.setattr(triton_steps.TritonSteps, "_patch_launch", lambda *given: made.append(patched(*given)) or made[-1])
    monkeypatch.setattr(triton_steps.TorchSteps, "patch", None)
    plan = None
    for n in (1, 2):
        call = with_copies(layer(kind, n)[1], n)
        plan = plan or prefill.plan(call, backend="math")
        counts.update(compiled=0)
        prefill.follow(call, plan, True)
        batch = {"cu_seqlens_q": call.batch.cu_seqlens_q, "seq_lens": call.batch.seq_lens, "scale": call.scale}
        expected, sums = direct.attend_segments(call.q, call.segments, **batch, dtype=torch.float64)
        assert testing.relative_error(call.out, expected) < 1e-4 and (call.lse - sums).abs().max() < 1e-4 * sums.abs().max()
        assert GPU or (counts["compiled"] > 0) == (n == 1)
    assert len(made) == 2 * len(call.batch.seq_lens)


@pytest.mark.parametrize("kind", ["int8", "maps, gains"])
@pytest.mark.parametrize("token_major", [False, True])
def test_copies_of_alike_sequences(kind, token_major, counts):
    """In both layouts of the scratch, of two slices that differ in their sequence and place alone, as by PyTorch, to the bit or nearly."""
    _, call, _ = layer(kind, 1, ((40, 40), (70, 70)))
    pages, _, latest = with_copies(call, 3).segments
    latest = latest._replace(key_range=torch.tensor([[64, 68], [66, 70]]), key_start=torch.tensor([60, 61], dtype=torch.int32))
    sides = (pages.k, pages.v), pages.fmt, pages.maps, 2
    ways, rows = (triton_steps.TorchSteps(*sides), triton_steps.TritonSteps(*sides, launches={})), []
    for steps in ways:
        scratch = torch.zeros(2, 256, 2, SIZE) if token_major else torch.zeros(2, 2, 256, SIZE)
        scratch = [t.transpose(0, 1) if token_major else t for t in scratch]
        for sequence in (0, 1):
            steps.patch(latest, KeySlice(sequence, 70, 50, 20, 128 * sequence + 3, 100), 70, scratch)
        rows.append(torch.stack(scratch))
    torch.testing.assert_close(rows[1], rows[0], rtol=1e-5, atol=1e-5)
    filled = [bool((rows[0][:, :, at] != 0).any()) for at in range(256)]
    assert [at for at in range(256) if filled[at]] == [17, 18, 19, 20, 147, 148, 149, 150]
    assert counts == {"compiled": 2, "again": 0}  # of two sequences: each has its own


def strided(call):
    q, out = call.q, call.out
    wide = torch.zeros(q.shape[0], q.shape[1] + 2, q.shape[2]), torch.full((out.shape[0], out.shape[1] + 2, out.shape[2]), torch.nan)
    wide[0][:, : q.shape[1]] = q
    return call.with_tensors(wide[0][:, : q.shape[1]], wide[1][:, : q.shape[1]], call.lse, call.segments)


def apart(call, name):
    """The same pages, of which the codes or the metadata are further apart."""
    segment = call.segments[0]

    def moved(t):
        wide = t.new_empty(t.shape[0], t.shape[1] + 2, *t.shape[2:])
        wide[:, :-2] = t
        return wide[:, :-2]

    sides = (side._replace(**{name: moved(getattr(side, name))}) for side in segment[:2])
    return call.with_tensors(call.q, call.out, call.lse, (segment._replace(**dict(zip("kv", sides))),))


def codes_apart(call):
    return apart(call, "codes")


def metadata_apart(call):
    return apart(call, "meta")


def shifted(call):
    """Pages whose metadata, and results, do not lie at multiples of 16 bytes."""
    segment, memory = call.segments[0], torch.empty(call.out.numel() + 1)
    meta = segment.k.meta
    room = torch.empty(meta.numel() + 1)[1:].view(meta.shape).copy_(meta)
    segment = segment._replace(k=segment.k._replace(meta=room))
    return call.with_tensors(call.q, memory[1:].view(call.out.shape), call.lse, (segment,))


def wider(call):
    """A block table with more room."""
    segment = call.segments[0]
    table = torch.zeros(segment.block_table.shape[0], segment.block_table.shape[1] + 5, dtype=torch.int32)
    table[:, :-5] = segment.block_table
    return call.with_tensors(call.q, call.out, call.lse, (segment._replace(block_table=table),))


def of_int64(call):
    """A block table of longer integers."""
    segment = call.segments[0]
    return call.with_tensors(call.q, call.out, call.lse, (segment._replace(block_table=segment.block_table.long()),))


def in_columns(call):
    """A block table whose sequences lie in columns."""
    segment = call.segments[0]
    return call.with_tensors(call.q, call.out, call.lse, (segment._replace(block_table=segment.block_table.T.contiguous().T),))


@pytest.mark.parametrize("change", [strided, codes_apart, metadata_apart, shifted, wider, of_int64, in_columns])
def test_what_lies_otherwise(change, counts):
    """Between two layers that lie as the first one: nothing of one is used for the other. It is launched anew, but for a table that is made
    dense first."""
    first, second, third = (layer("maps", n) for n in (1, 2, 3))
    plan = prefill.plan(first[1])
    prefill.follow(first[1], plan, True)
    counts.update(compiled=0)
    call = change(second[1])
    call.out.fill_(torch.nan)
    prefill.follow(call, plan, True)
    assert (counts["compiled"] > 0) == (change is not in_columns)
    checked(second[0], call, second[2])
    counts.update(compiled=0)
    prefill.follow(third[1], plan, True)
    assert counts["compiled"] == 0
    checked(*third)


@pytest.mark.parametrize("other", ["signs", "maps", "no offset", "one head", "scales", "none"])
def test_layers_of_other_maps(other, counts, monkeypatch):
    """Matrices of signs or any, one for all heads or one each, with key means or without, scales or 1: kernels of their own."""
    kinds = {
        "no offset": lambda n: ("int8", turned(n, 2, key_mean=False), 1.0),
        "one head": lambda n: ("int8", turned(n, 1), 1.0),
        "scales": lambda n: ("int8", turned(n, 2), 0.5),
        "none": lambda n: ("int8", None, 1.0),
        "signs": lambda n: ("int8", signed(n, SIZE), 1.0),
        "maps": lambda n: ("int8", turned(n, 2), 1.0),
    }
    monkeypatch.setitem(KINDS, "other", kinds[other])
    monkeypatch.setattr(prefill, "MAPPED_BACK", 1000)
    first, second = layer("maps", 1), layer("other", 2)
    plan = prefill.plan(first[1])
    for _ in range(2):
        for b, call, options in (first, second):
            call.out.fill_(torch.nan)
            prefill.follow(call, plan, True)
            checked(b, call, options)
    assert counts["again"] >= 3  # the second time of each; of other maps that are alike the first time too


def test_launches_are_of_codecs(counts):
    """Of rows that lie alike, too."""
    cache = PagedCache(get_format("int8").cache_spec(2, SIZE), 2)
    kinds = {"signed": True, "round_mapped": not cache.format.k.round_mapped, "triton": get_format("int4").k.triton}
    formats = [cache.format, *(replace(cache.format, k=replace(cache.format.k, **{name: value})) for name, value in kinds.items())]
    traits = {triton_steps.TritonSteps((cache.k, cache.v), fmt, cache.maps, 2).traits for fmt in [*formats, cache.format]}
    assert len(traits) == len(formats)


@pytest.mark.parametrize("shape", [SHAPE, ((64,), (200,))])
@pytest.mark.parametrize("asked", [True, False])
def test_what_a_call_does_beside_its_kernels(shape, asked, counts, monkeypatch):
    """Of FlashAttention-3, where nothing is mapped or combined: one allocation, one launch, and the kernel; the log-sum-exp is copied where
    it is asked for. No number is made on the device."""
    _, call, _ = layer("int8", 1, shape)
    call = call if asked else call.with_tensors(call.q, call.out, None, call.segments)
    with prefill_backends.installed(monkeypatch, "operator"):
        plan = prefill.plan(call, backend="flash3")
        prefill.follow(call, plan, True)
        made = counts["log"] = []
        for name in ("arange", "full", "tensor", "zeros", "cat", "stack"):
            monkeypatch.setattr(torch, name, lambda *a, name=name, **k: pytest.fail(name))
        for name in ("new_empty", "copy_", "zero_", "contiguous"):
            stock = getattr(torch.Tensor, name)
            monkeypatch.setattr(torch.Tensor, name, lambda self, *a, stock=stock, name=name, **k: made.append(name) or stock(self, *a, **k))
        monkeypatch.setattr(flash3, "_operator", lambda q, k, v, scale, round, ends, *_: made.append("kernel") or (call.out, sums))
        sums = torch.empty(call.q.shape[1], call.q.shape[0])
        prefill.follow(call, plan, True)
        assert made == ["new_empty", "launch", "kernel"] + ["copy_"] * asked
        monkeypatch.undo()


def test_numbers_of_a_graph(counts, monkeypatch):
    """A captured graph makes the numbers of one sequence itself and leaves none behind; an eager call keeps them."""
    b, call, options = layer("int8", 1, ((64,), (200,)))
    made, stock = [], flash3.bounds
    monkeypatch.setattr(flash3, "bounds", lambda *a: made.append(a) or stock(*a))
    for kind, backend in (("operator", "flash3"), ("graph", "cudnn graph")):
        monkeypatch.setattr(prefill, "_capturing", lambda q: False)
        with prefill_backends.installed(monkeypatch, kind):
            plan = prefill.plan(call, backend=backend, scratch_bytes=100 * ROWS)
            rounds = sum(len(group.rounds) for group in plan.groups)
            for n, capturing in enumerate((True, False, True, False)):
                made.clear()
                monkeypatch.setattr(prefill, "_capturing", lambda q, capturing=capturing: capturing)
                call.out.fill_(torch.nan)
                prefill.follow(call, plan, True)
                checked(b, call, options)
                assert len(made) == (rounds if capturing else 0) and rounds > 1
                kept = [key for key in plan.kept if len(key) == 2]
                assert len(kept) == (0 if backend == "flash3" or n == 0 else rounds)
            monkeypatch.setattr(prefill, "_capturing", lambda q: True)
            assert not prefill.plan(call, backend=backend).placed


def test_numbers_of_cudnn_are_kept(counts, monkeypatch):
    """For queries and results of the strides that they are for."""
    layers, made = [layer("maps", n) for n in (1, 2, 3)], []
    stock = cudnn_graph._numbers
    monkeypatch.setattr(cudnn_graph, "_numbers", lambda *a: made.append(a) or stock(*a))
    with prefill_backends.installed(monkeypatch, "graph"):
        plan = prefill.plan(layers[0][1], backend="cudnn graph")
        for n, (b, call, options) in enumerate(layers):
            call = strided(call) if n == 1 else call
            prefill.follow(call, plan, True)
            checked(b, call, options)
        assert len(made) == 1, "queries are mapped: of one layout"
        plain = [layer("int8", n) for n in (1, 2, 3)]
        plan = prefill.plan(plain[0][1], backend="cudnn graph")
        for n, (b, call, options) in enumerate(plain):
            call = strided(call) if n == 1 else call
            prefill.follow(call, plan, True)
            checked(b, call, options)
        assert len(made) == 3


def test_launches_are_on_the_device_of_the_cache(counts, monkeypatch):
    """Triton launches on the current one."""
    seen = []
    stock = launch.on_device
    monkeypatch.setattr(launch, "on_device", lambda device: seen.append(device) or stock(device))
    _, call, _ = layer("int8", 1)
    plan = prefill.plan(call)
    for _ in range(2):
        seen.clear()
        prefill.follow(call, plan, True)
        assert seen == [call.q.device]


def test_memory_that_is_kept_is_no_scratch(counts):
    """A plan keeps numbers, not rows: what calls need beside their tensors is given back."""
    _, call, _ = layer("maps", 1, sinks=True)
    plan = prefill.plan(call, scratch_bytes=64 * ROWS)
    prefill.follow(call, plan, True)
    held = [t for made in plan.kept.values() for t in made.kept]
    assert sum(t.numel() * t.element_size() for t in held) < 4096 and all(t.dtype == torch.float32 for t in held)


def test_backends_say_whether_they_want_the_ends():
    assert [name for name, backend in backends.BACKENDS.items() if backend.ends] == ["flash3", "hopper", "cudnn graph"]
