"""Calls that read the rows of their own tokens as given, and the pages only before them: every implementation against float64 attention
over dequantized pages and given rows, one query and one key at a time."""

from dataclasses import replace

import pytest
import torch

import hopper_on_cpu
from oracle import attention
from quantkv import PagedCache, implementations, ops, prepare_attend
from quantkv.implementations import batches
from quantkv.implementations.own import Lowered
from quantkv.implementations.prefill import attend as prefill
from quantkv.implementations.prefill import backends
from quantkv.implementations.triton import launch
from quantkv.testing import LSE_BUDGET, OUTPUT_BUDGET, POISON, SampleBatch, relative_error

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
READERS = [name for name in implementations.NAMES if name not in ("prefill", "hopper")]
GROUP, HEADS = 2, 2
QUERIES, KEYS = (5, 1, 3, 9, 0), (21, 18, 3, 26, 7)  # a chunk, a decode, a prompt, a chunk over a page's end, nothing


def batch(name="int2", queries=QUERIES, keys=KEYS, dtype=torch.float32, **arguments):
    given = {"head_size": 32, "num_kv_heads": HEADS, "group": GROUP, "dtype": dtype, "device": DEVICE, "block_size": 8, **arguments}
    return SampleBatch.make(name, queries, keys, **given)


def own_of(b):
    """The rows of the tokens of q: views with strides of a fused product; and those of others, which nobody must read."""
    rows, first = [], 0
    for queries, keys in zip(b.cu_seqlens_q.diff().tolist(), b.seq_lens.tolist()):
        rows += range(first + keys - queries, first + keys)
        first += keys
    fused = torch.full((len(rows), b.key.shape[1], b.key.shape[2] + b.value.shape[2] + 8), float("nan"), dtype=b.key.dtype, device=DEVICE)
    key, value = fused[..., 8 : 8 + b.key.shape[2]], fused[..., 8 + b.key.shape[2] :]
    key.copy_(b.key[rows]), value.copy_(b.value[rows])
    return key, value


def hide(b):
    """Pages of sequences with several queries hold NaN where their own tokens are, and are not there where they hold no others."""
    first, size = 0, b.cache.spec.block_size
    table = b.block_table.clone()
    for s, (queries, keys) in enumerate(zip(b.cu_seqlens_q.diff().tolist(), b.seq_lens.tolist())):
        if queries > 1:
            for side in (b.cache.k, b.cache.v):
                for slot in b.slots[first + keys - queries : first + keys].tolist():
                    side.codes[slot // size, slot % size].view(torch.uint8).fill_(POISON)
                    if side.meta is not None:
                        side.meta[slot // size, slot % size].fill_(float("nan"))
            table[s, -(-(keys - queries) // size) :] = -(2**30)
        first += keys
    return replace(b, block_table=table)


def expected(b, own, **options):
    """Attention in float64 by the definition: out `[T, HQ, D_V]`, log-sum-exp `[T, HQ]`."""
    read = b.cache.dequantize(b.slots, b.positions, torch.float64)
    keys, values = (t.cpu() for t in read)
    first, outs, sums = 0, [], []
    starts = b.cu_seqlens_q.tolist()
    tensors = {name: options.pop(name, None) for name in ("sinks", "alibi_slopes", "causal", "prefix_ranges", "key_range")}
    for s, length in enumerate(b.seq_lens.tolist()):
        queries = slice(starts[s], starts[s + 1])
        count = queries.stop - queries.start
        k, v = keys[first : first + length].clone(), values[first : first + length].clone()
        first += length
        if count > 1:
            k[length - count :], v[length - count :] = (t[queries].double().cpu() for t in own)
        of_head = []
        for h in range(GROUP * HEADS):
            given = {n: None if tensors[f"{n}s"] is None else float(tensors[f"{n}s"][h]) for n in ("sink",)}
            given["slope"] = None if tensors["alibi_slopes"] is None else float(tensors["alibi_slopes"][h])
            if tensors["causal"] is not None:
                given["causal"] = tensors["causal"] if isinstance(tensors["causal"], bool) else bool(tensors["causal"][s])
            if tensors["prefix_ranges"] is not None:
                given["prefix_ranges"] = tensors["prefix_ranges"][s].tolist()
            given |= {"context": length - count, "scale": b.q.shape[2] ** -0.5, **options}
            of_head.append(attention(b.q[queries, h].double().cpu(), k[:, h // GROUP], v[:, h // GROUP], **given))
        outs.append(torch.stack([out for out, _ in of_head], 1)), sums.append(torch.stack([lse for _, lse in of_head], 1))
    return torch.cat(outs), torch.cat(sums)


def check(result, wanted, dtype, budget=None):
    (out, lse), (expected_out, sums) = result, wanted
    assert relative_error(out, expected_out) <= (budget or OUTPUT_BUDGET[dtype])
    finite = sums.isfinite()
    assert torch.equal(finite, lse.cpu().isfinite()), "a query sees a key that it must not see, or misses all"
    assert (lse.cpu().double() - sums)[finite].abs().max() <= LSE_BUDGET[dtype]


def serve(b, implementation, own, **options):
    if reason := implementations.refusal(implementation, b.call(own=own, **options)):
        pytest.skip(reason)
    return b.attend(own=own, implementation=implementation, **options)


OPTIONS = {
    "plain": {},
    "window": {"window": 4},
    "wide window": {"window": 12},
    "chunks": {"window": 8, "chunk_lookback": 0},
    "softcap and sinks": {"softcap": 3.0, "sinks": torch.linspace(-1, 2, 4)},
    "alibi": {"alibi_slopes": torch.linspace(0.05, 0.3, 4)},
    "not causal": {"causal": False},
    "causal by sequence": {"causal": torch.tensor([True, False, False, True, True])},
    "prefix ranges": {"window": 6, "prefix_ranges": torch.tensor([[[3, 18]], [[0, 0]], [[0, 2]], [[20, 24]], [[0, 0]]])},
    "qq bias": {"qq_bias": torch.linspace(-2, 2, 81).view(9, 9)},
}


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("implementation", READERS)
def test_own_rows_and_pages_before_them(implementation, name):
    options = {n: t.to(DEVICE) if isinstance(t, torch.Tensor) else t for n, t in OPTIONS[name].items()}
    b = batch()
    own = own_of(b)
    wanted = expected(b, own, **options)
    check(serve(hide(b), implementation, own, **options), wanted, torch.float32)


TRITON = [False, True] if launch.INTERPRETED or DEVICE == "cuda" else [False]
FLOAT32 = 100 * 2.0**-24  # a row, a mapped query, a part and the result are each rounded to float32, by sums of up to 100 terms
FRESH = (9, 4, 5), (9, 4, 5)  # prompts that no token precedes
CUTS = {
    "whole": {},
    "slices": {"scratch_bytes": 1},
    "sequence by sequence": {"together": False},
    "two streams": {"overlap": True, "scratch_bytes": 1},
}


@pytest.mark.parametrize("triton", TRITON)
@pytest.mark.parametrize("shape", [(QUERIES, KEYS), FRESH, ((7,), (7,)), ((6,), (19,))], ids=["mixed", "fresh", "prompt", "chunk"])
@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("name", ["int2", "tq4", "levels2"])
def test_prefill_has_own_rows_beside_pages_in_one_scratch(name, cut, shape, triton, monkeypatch):
    """Mapped and not, of several sequences in a round and of one; with planned lengths too, as of a kernel whose mask is aligned to the top
    left."""
    monkeypatch.setattr(backends, "PLANNED", 8)
    monkeypatch.setattr(prefill, "MAPPED_BACK", 0)
    b = batch(name, *shape)
    own = own_of(b)
    wanted = expected(b, own)
    call = hide(b).call(own=own, lengths=tuple(zip(*shape)))
    prefill.serve(call, triton=triton, backend="math", **CUTS[cut])
    check((call.out, call.lse), wanted, torch.float32, FLOAT32)


@pytest.mark.parametrize("name", ["int8", "tq4", "fp8", "levels2", "k8v4", "bf16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("implementation", READERS)
def test_formats_and_dtypes(implementation, dtype, name):
    if name == "bf16" and dtype == torch.float16:
        pytest.skip("a bfloat16 cache takes rows of its own type")
    b = batch(name, dtype=dtype)
    own = own_of(b)
    wanted = expected(b, own)
    check(serve(hide(b), implementation, own), wanted, dtype)


def scaled(name, k_scale, v_scale, **arguments):
    """A batch whose cache has per-tensor scales."""
    b = batch(name, **arguments)
    cache = PagedCache(b.cache.spec, b.cache.num_blocks, DEVICE, k_scale=k_scale, v_scale=v_scale)
    cache.write(b.key, b.value, b.slots, b.positions, implementation="reference")
    return replace(b, cache=cache)


@pytest.mark.parametrize("name", ["fp8", "fp8/tq4", "tq4/fp8"])
@pytest.mark.parametrize("implementation", READERS)
def test_pages_with_per_tensor_scales(implementation, name):
    """Own rows have none: values of both meet in one sum."""
    b = scaled(name, 0.75, 3.0)
    own = own_of(b)
    wanted = expected(b, own)
    check(serve(hide(b), implementation, own), wanted, torch.float32)


@pytest.mark.parametrize("queries", [(4, 1, 8, 0), (3, 2, 5, 16), (33, 1, 2, 17)])
@pytest.mark.parametrize("name", ["int4", "tq4", "fp8"])
def test_copies_in_pages(name, queries):
    """What kernels get that read nothing but pages; values of segments without a map share their scale."""
    keys = tuple(n + more for n, more in zip(queries, (20, 9, 0, 5)))
    b = scaled(name, 0.5, 2.0, queries=queries, keys=keys)
    own = own_of(b)
    wanted = expected(b, own)
    call = hide(b).call(own=own, max_query_len=max(queries))
    lowered = Lowered(call, copied=True)
    lowered.pages[0].base.fill_(POISON)
    lowered.store(call.own, lambda write: ops.prepare(write, "reference"))
    plain = lowered.of(call)
    assert plain.own is None and all(s.k.codes.shape[1] % 8 == 0 for s in plain.segments)
    ops.attend(plain, "reference")
    check((plain.out, plain.lse), wanted, torch.float32)


@pytest.mark.parametrize("implementation", READERS)
def test_a_prepared_call_reads_what_its_tensors_hold_when_it_runs(implementation):
    """Lengths, pages and own rows of another step, and of other layers."""
    b = batch("int4", (4, 1, 2), (20, 18, 30))
    if reason := implementations.refusal(implementation, b.call(own=own_of(b))):
        pytest.skip(reason)
    table, starts, lens = b.block_table.clone(), b.cu_seqlens_q.clone(), b.seq_lens.clone()
    held = {"block_table": table, "seq_lens": lens, "cu_seqlens_q": starts, "max_query_len": 5}
    attend = prepare_attend(**held, implementation=implementation)
    for queries, seed in (((4, 1, 2), 1), ((1, 5, 1), 2), ((2, 2, 3), 3)):
        now = batch("int4", queries, (20, 18, 30), seed=seed)
        table.copy_(now.block_table), starts.copy_(now.cu_seqlens_q), lens.copy_(now.seq_lens)
        own = own_of(now)
        wanted = expected(now, own)
        check(attend(hide(now).cache, now.q, own=own, return_lse=True), wanted, torch.float32)
        assert len(attend._prepared) == 1


@pytest.mark.parametrize("name", ["int4", "fp8", "tq4"])
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("implementation", READERS)
def test_a_sequence_with_one_query_gets_what_it_gets_without_own_rows(implementation, invariant, name):
    """To the bit where the call asks for it: in a batch with chunks, and alone."""
    b = batch(name, queries=(1, 9, 1, 3), keys=(30, 26, 1, 3))
    out, lse = serve(b, implementation, own_of(b), batch_invariant=invariant)
    before, sums = b.attend(implementation=implementation, batch_invariant=invariant)
    rows = [0, 10]
    for found, wanted in ((out[rows], before[rows]), (lse[rows], sums[rows])):
        assert torch.equal(found, wanted) if invariant else relative_error(found, wanted) < 1e-6
    alone = {"block_table": b.block_table[:1], "seq_lens": b.seq_lens[:1], "implementation": implementation, "batch_invariant": invariant}
    found = b.cache.attend(b.q[:1], own=tuple(t[:1] for t in own_of(b)), **alone)
    assert torch.equal(found, b.cache.attend(b.q[:1], **alone))
    assert torch.equal(found, out[:1]) if invariant and implementation != "reference" else relative_error(found, out[:1]) < 1e-6


@pytest.mark.skipif(not TRITON[-1], reason="no Triton")
@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("ranges", [(None,), (None, [[0, 9], [2, 20], [0, 0], [1, 30], [0, 7]], None)])
def test_one_launch_works_out_what_torch_does(ranges, copied):
    b = batch(queries=(5, 1, 70, 9, 0), keys=(21, 18, 70, 26, 7))
    call = b.call(own=own_of(b))
    given = [None if r is None else torch.tensor(r, dtype=torch.int32, device=DEVICE) for r in ranges]
    call = call.with_tensors(call.q, call.out, call.lse, tuple(call.segments[0]._replace(key_range=r) for r in given))
    found = [Lowered(call, copied) for _ in range(2)]
    for lowered, triton in zip(found, (False, True)):
        for _ in range(2):
            lowered.numbers = None
            for t in (lowered.table, lowered.start, lowered.ranges, lowered.slots):
                t.fill_(-7)
            lowered.fill(call, triton)
    for name in ("table", "start", "ranges", "slots"):
        assert torch.equal(*(getattr(lowered, name) for lowered in found)), name


def test_runs_of_a_batch_are_what_sequences_read():
    """One query, a prompt from its beginning, a chunk: each run is served as such, and together they are the whole."""
    long = prefill.MIN_QUERIES
    queries, keys = (1, 3, 1, long, long, long, 1), (20, 9, 1, long, long, long + 5, 40)
    b = batch("int8", queries, keys, head_size=16)
    own = own_of(b)
    call = hide(b).call(own=own, lengths=tuple(zip(queries, keys)))
    runs = batches.runs_of(call)
    assert [run.call.batch.num_seqs for run in runs] == [1, 1, 1, 2, 1, 1]
    assert [run.call.own is None for run in runs] == [True, False, True, False, False, True]
    if DEVICE == "cpu":  # no kernel of a GPU takes float32
        assert prefill.plan(runs[3].call).fresh
        assert implementations.refusal("prefill", runs[3].call) is None
    for run in runs:
        ops.prepare(run.call, "reference")(run.of(call))
    wanted = b.oracle(own=own)
    check((call.out, call.lse), wanted, torch.float32)


def test_prompts_with_a_context_and_without_in_turns_are_one_run():
    """Each apart would be a launch of its own."""
    long = prefill.MIN_QUERIES
    queries, keys = (1, *(long,) * 10), (9, *(long, long + 1) * 5)
    b = batch("int8", queries, keys, head_size=16, num_kv_heads=1, group=1)
    runs = batches.runs_of(b.call(own=own_of(b), lengths=tuple(zip(queries, keys))))
    assert [run.call.batch.num_seqs for run in runs] == [1, 10]


@pytest.mark.parametrize("implementation", ["reference", "triton", "prefill"])
def test_a_prompt_from_its_beginning_reads_no_page(implementation):
    """There need not be one."""
    count = prefill.MIN_QUERIES
    b = batch("int4", (count,), (count,), head_size=16)
    own = own_of(b)
    wanted = b.oracle(own=own)
    nowhere = torch.full((1, 0), 0, dtype=torch.int32, device=DEVICE)
    b.cache.buffer.fill_(POISON)
    if implementation == "prefill" and DEVICE == "cuda":
        pytest.skip("no dense kernel of a GPU takes float32")
    for lengths in (((count, count),), None):
        check(replace(b, block_table=nowhere).attend(own=own, implementation=implementation, lengths=lengths), wanted, torch.float32)


def test_under_torch_compile():
    b = batch("int4")
    own = own_of(b)

    def step(key, value):
        return b.attend(own=(key * 2, value), implementation="reference")

    out, lse = torch.compile(step, fullgraph=True, backend="aot_eager")(*own)
    expected_out, expected_lse = step(*own)
    assert torch.equal(out, expected_out) and torch.equal(lse, expected_lse)


REFUSED = {
    "a tensor": (lambda key, value: key, r"own=Tensor: a tuple \(key, value\)"),
    "fewer rows": (lambda key, value: (key[1:], value), r"own\.key\.shape=\(17, 2, 32\)"),
    "other heads": (lambda key, value: (key, value[:, :1]), r"own\.value\.shape=\(18, 1, 32\)"),
    "other types": (lambda key, value: (key, value.half()), r"own\.value\.dtype=torch\.float16"),
    "integers": (lambda key, value: (key.int(), value), r"own\.key\.dtype=torch\.int32"),
    "gradients": (lambda key, value: (key.requires_grad_(), value), r"own\.key\.requires_grad=True"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("queries", [QUERIES, (1, 1, 1, 1, 1)])
def test_refusals(name, queries):
    """Also where no row would be read."""
    b = batch(queries=queries, keys=(21, 18, 3, 26, 7))
    change, said = REFUSED[name]
    if queries == (1, 1, 1, 1, 1):
        said = said.replace("17", "4").replace("18", "5")
    with pytest.raises(ValueError, match=said):
        b.attend(own=change(*(t.clone() for t in own_of(b))), max_query_len=max(queries))


@pytest.mark.skipif(not hopper_on_cpu.AVAILABLE or torch.cuda.is_available(), reason="needs g++, and tensors on a CPU")
@pytest.mark.parametrize("name", ["int4", "fp8"])
def test_hopper_kernels_verify_over_copies(name, monkeypatch, tmp_path):
    """The sources, run on a CPU: drafts beside a sequence that decodes and a short prompt."""
    queries, keys = (4, 1, 3, 4), (70, 33, 3, 20)
    b = batch(name, queries, keys, dtype=torch.bfloat16, head_size=64, block_size=16)
    own = own_of(b)
    wanted = b.oracle(own=own)
    call = hide(b).call(own=own, max_query_len=4, max_seq_len=70)
    lowered = Lowered(call, copied=True)
    lowered.pages[0].base.fill_(POISON)
    lowered.store(call.own, lambda write: ops.prepare(write, "reference"))
    plain = lowered.of(call)
    hopper_on_cpu.Device(monkeypatch, tmp_path).serve(plain)
    check((plain.out, plain.lse), wanted, torch.bfloat16)
