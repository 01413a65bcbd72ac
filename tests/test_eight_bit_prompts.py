"""`prompt_precision="8bit"`: scores of prompts by products of 8-bit integers, beside attention in float64."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from full_precision_engine import Engine
from quantkv import AttentionOptions, assumed, get_format, implementations, ops, warmup
from quantkv.engine import fake_quantized
from quantkv.engine.layer import LayerAttention, PagedLayer
from quantkv.engine.layer_config import LayerConfig
from quantkv.engine.warm_up import StepLimits, _calls, check_prompts, summary, who_serves
from quantkv.geometry import Heads
from quantkv.implementations import batches
from quantkv.implementations.batches import runs_of
from quantkv.implementations.prefill import attend as prefill
from quantkv.implementations.prefill import backends
from quantkv.implementations.prefill.plan import CAUSAL, KeySlice, Round
from quantkv.implementations.reference import eight_bit
from quantkv.testing import SampleBatch, check, relative_error

MUST = 0.02  # of an output on random rows; FlashAttention-3's fp8 is off by 0.049


def random_rows(queries, keys, heads=4, head_size=128, shift=0.0):
    """One kv head: queries `[heads, M, D]`, keys and values `[N, D]`, bf16 as float64. shift: of every key, the same."""
    generator = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=generator).bfloat16().double()
    q, k, v = normal(heads, queries, head_size), normal(keys, head_size), normal(keys, head_size)
    return q, (k + shift * normal(head_size)).bfloat16().double(), v


def attention(score, v, queries):
    """Causal attention by scores that are not scaled yet."""
    keys = score.shape[-1]
    ahead = torch.arange(keys) - torch.arange(keys - queries, keys)[:, None]
    return (score * 128**-0.5).masked_fill(ahead > 0, -torch.inf).softmax(-1) @ v


def test_rows_are_integers_and_the_nearest():
    x = torch.randn(3, 70, 32, generator=torch.Generator().manual_seed(0))
    x[1, 5] = 0
    for block in (1, 64):
        codes, scales = eight_bit.quantize(x, block)
        assert torch.equal(codes, codes.to(torch.int8).float()) and codes.abs().max() == 127
        assert ((codes * scales[..., None] - x).abs() <= scales[..., None] * 0.50001).all()
        for first in range(0, 70, block):
            mine = slice(first, first + block)
            largest = x[:, mine].abs().amax((1, 2)).clamp_min(2.0**-40)
            assert torch.equal(scales[:, mine], (largest / 127)[:, None].expand(3, len(range(70)[mine])))


def test_sums_are_those_of_integers():
    """Floats hold every product and sum of rows of 256 exactly."""
    q, k = (torch.randn(2, 40, 256, generator=torch.Generator().manual_seed(n)) for n in range(2))
    mean = k.mean(1, keepdim=True)
    a, b = eight_bit.quantize(q), eight_bit.quantize(k - mean, 64)
    integers = (a.codes.int()[:, :, None] * b.codes.int()[:, None]).sum(-1)
    want = integers.double() * a.scales.double()[..., None] * b.scales.double()[:, None] + q.double() @ mean.double().mT
    assert (eight_bit.scores(q, k).double() - want).abs().max() <= 2e-6 * want.abs().max()


@pytest.mark.parametrize("block", [1, 64, 80, 128])
def test_the_error_on_random_rows(block):
    for queries, keys in ((1024, 1024), (128, 2048)):
        q, k, v = random_rows(queries, keys)
        want = attention(q @ k.mT, v, queries)
        found = attention(eight_bit.scores(q.float(), k.float(), block).double(), v, queries)
        assert 0.004 < relative_error(found, want) < 0.7 * MUST


def test_the_mean_of_keys_costs_nothing():
    """Keys that are shifted by eight times their spread: as they are, 8 bits are not enough; less their mean, they are what they were."""
    q, k, v = random_rows(256, 1024, shift=8.0)
    want = attention(q @ k.mT, v, 256)
    found = attention(eight_bit.scores(q.float(), k.float()).double(), v, 256)
    a, b = eight_bit.quantize(q), eight_bit.quantize(k, 64)
    plain = attention((a.codes @ b.codes.mT) * a.scales[..., None] * b.scales, v, 256)
    assert relative_error(found, want) < MUST < relative_error(plain, want)


def test_the_mean_of_a_sample():
    """At most 1,024 keys, from the first to the last part of the sequence."""
    k = torch.arange(5000.0)[:, None].expand(5000, 4)
    assert torch.equal(eight_bit.sample_mean(k)[0], torch.arange(0, 5000, 5).float().mean())
    assert torch.equal(eight_bit.sample_mean(k[:1024])[0], k[:1024].mean(0)[0])


def batch(queries, keys, fmt="none"):
    """Normal rows in a cache, in place of those that break a quantizer: of these 8 bits lose more."""
    b = SampleBatch.make(fmt, queries, keys, num_kv_heads=2, group=2, dtype=torch.float32)
    key, value = (torch.randn(b.key.shape, generator=torch.Generator().manual_seed(n)) for n in (1, 2))
    b.cache.write(key, value, b.slots, b.positions, implementation="reference")
    return replace(b, key=key, value=value)


@pytest.mark.parametrize("fmt", ["none", "int8", "tq4", "int4"])
def test_the_reference_serves_prompts(fmt):
    """Whole ones and chunks on a cache, with a rotation and without, and what reads scores beside the softmax: softcap, sinks,
    log-sum-exps. A sequence of few queries among them is at 16 bits."""
    b = batch((130, 3, 128), (130, 40, 300), fmt)
    for options in ({}, {"sinks": torch.linspace(-1, 2, 4)}, {"softcap": 5.0, "window": 70}):
        (out, lse), (want, sums) = b.attend(prompt_precision="8bit", **options), b.oracle(**options)
        prompts = torch.arange(261) < 130, torch.arange(261) >= 133
        for mine in prompts:
            assert 0.001 < relative_error(out[mine], want[mine]) < MUST
            assert 1e-4 < (lse[mine] - sums[mine]).abs().max() < 0.2
        plain, plain_lse = b.attend(**options)
        assert torch.equal(out[130:133], plain[130:133]) and torch.equal(lse[130:133], plain_lse[130:133])


def test_the_reference_computes_what_it_specifies():
    """Scores of whole sequences by `eight_bit.scores`, written down once more."""
    b = batch((200,), (300,))
    out, lse = b.attend(prompt_precision="8bit")
    q = b.q.transpose(0, 1).unflatten(0, (2, 2))
    score = eight_bit.scores(q, b.key.transpose(0, 1)[:, None]).double() * 64**-0.5
    ahead = torch.arange(300) - torch.arange(100, 300)[:, None]
    score = score.masked_fill(ahead > 0, -torch.inf)
    want = (score.softmax(-1) @ b.value.transpose(0, 1)[:, None].double()).flatten(0, 1).transpose(0, 1)
    assert relative_error(out, want) < 1e-5  # a tile of queries reads all of the keys
    assert (lse.T.unflatten(0, (2, 2)).double() - score.logsumexp(-1)).abs().max() < 1e-5


@pytest.mark.parametrize("fmt", ["none", "tq4"])
def test_prefill_serves_them_where_a_dense_kernel_has_them(fmt):
    """Whole and in slices, by the dense kernel of a CPU, which rounds rows that are mapped back: the integers are not the reference's."""
    b = batch((130, 150), (130, 400), fmt)
    lengths = ((130, 130), (150, 400))
    call = b.call(prompt_precision="8bit", lengths=lengths, sinks=torch.linspace(-1, 2, 4))
    want, sums = b.oracle(sinks=torch.linspace(-1, 2, 4))
    ops.attend(call, "prefill")
    for scratch_bytes in (prefill.SCRATCH_BYTES, 200 * 2 * 2 * 64 * 4):
        out, lse = torch.empty_like(call.out), torch.empty_like(call.lse)
        prefill.serve(replace(call, out=out, lse=lse), scratch_bytes=scratch_bytes)
        assert 0.001 < relative_error(out, want) < MUST and 1e-4 < (lse - sums).abs().max() < 0.2
        assert torch.equal(out, call.out) == (scratch_bytes == prefill.SCRATCH_BYTES)
    assert implementations.refusal("prefill", b.call(prompt_precision="8bit")).startswith("prompt_precision: of several sequences")
    assert backends.fitting(torch.device("cpu"), torch.float32, 64, 64, eight_bit=True) == ["math"]


def test_a_gpu_that_is_no_hopper_has_none():
    for name, there in (("h200", ["hopper"]), ("a100", [])):
        with assumed.assuming(assumed.GPUS[name]):
            assert backends.fitting(torch.device("cpu"), torch.bfloat16, 64, 64, eight_bit=True) == there


def test_a_scale_of_the_tensor():
    b = batch((130,), (130,))
    call = b.call(prompt_precision="8bit")
    (segment,) = call.segments
    halved = replace(call, segments=(segment._replace(k=segment.k._replace(scale=0.5)),), out=None, lse=torch.empty_like(call.lse))
    for a, b in zip(ops.attend(halved), ops.attend(replace(call, scale=call.scale / 2, out=None))):
        assert torch.equal(a, b)


def test_refused_by_name():
    b = batch((130,), (130,), "int8")
    for name in {*implementations.NAMES} - {"prefill", "reference"}:
        with pytest.raises(ValueError, match="prompt_precision: not supported here; supported by prefill, reference"):
            ops.attend(b.call(prompt_precision="8bit"), name)
    for wrong in ("8", 8, None, torch.tensor(8)):
        with pytest.raises(ValueError, match=r"prompt_precision=.*one of 16bit, 8bit"):
            b.call(prompt_precision=wrong)
    latents = SampleBatch.make("int8+none", (130,), (130,), head_size=64, head_size_v=32, num_kv_heads=1, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="prompt_precision=8bit: scores of latents"):
        latents.call(prompt_precision="8bit")


def test_a_batch_without_prompts_is_served_by_all():
    b = batch((100, 28), (140, 40), "int8")
    assert b.call(prompt_precision="8bit").options.prompt_precision == "8bit", "the lengths are not known"
    assert b.call(prompt_precision="8bit", max_query_len=127).options.prompt_precision == "16bit"
    assert b.call(prompt_precision="8bit", max_query_len=128).options.prompt_precision == "8bit"
    b = batch((100, 27), (140, 40), "int8")
    assert b.call(prompt_precision="8bit").options.prompt_precision == "16bit", "fewer queries than a prompt has, all together"
    b = batch((3, 1), (40, 20), "int8")
    check(b, b.attend(prompt_precision="8bit", implementation="cpu"))


class Rounded(Engine):
    """An engine whose prompts, and nothing else, are at 8 bits. errors: of the prompts."""

    errors = ()

    def _compare(self, seq, count, exact, q, out, options):
        if count < 128:
            return super()._compare(seq, count, exact, q, out, options)
        want = torch.stack([expected for expected, _ in self._expected(seq, count, exact, q, options)])
        self.errors += (relative_error(out, want),)


@pytest.mark.parametrize("served", ["prefill", "reference"])
@pytest.mark.parametrize("own", [True, False])
def test_an_engines_steps(own, served, monkeypatch):
    """Prompts whole and in chunks on a long cache, several in a step beside others that decode or have few queries; their own rows and
    pages, with sink and recent tokens at full precision. What is no prompt is exact."""
    monkeypatch.setattr(batches, "cut", lambda call: [batches.Run(call)] if call.batch.lengths is None else runs_of(call))
    monkeypatch.setattr(implementations, "ON_CPU", ("cpu", served, "reference"))
    engine = Rounded("int8", seqs=4, num_blocks=140, own=own, runs=True, layers=2, prompt_precision="8bit")
    for counts in ([300, 1, 7, 150], [1, 1, 128, 129], [130, 127, 1, 400], [1, 1, 1, 1], [0, 500, 3, 1]):
        engine.step(counts)
    assert len(engine.errors) == 7 and all(0.001 < error < MUST for error in engine.errors), engine.errors


def test_teacher_forced_prompts():
    """Rows whose products are the scores; and attention of a prompt over them, whose other queries are at 16 bits."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(heads, 300, 32, generator=generator) for heads in (4, 2, 2))
    k += 1
    rows, columns = eight_bit.as_products(q, k)
    want = eight_bit.scores(q.unflatten(0, (2, 2)), k[:, None]).flatten(0, 1)
    assert (rows @ columns.repeat_interleave(2, 0).mT - want).abs().max() <= 1e-5 * want.abs().max()
    given = {"softcap": 5.0, "sinks": torch.zeros(4)}
    for prompt in (127, 200):
        plain, found = (
            fake_quantized.attend(q, k, v, (k, v), 0.2, prompt=prompt, prompt_precision=precision, **given)
            for precision in ("16bit", "8bit")
        )
        assert torch.equal(found[prompt:], plain[prompt:])
        if prompt == 200:
            assert 0.001 < relative_error(found[:prompt], plain[:prompt]) < MUST
            ahead = torch.arange(200) - torch.arange(200)[:, None]
            score = eight_bit.scores(q[:, :200].unflatten(0, (2, 2)), k[:, None, :200]).double() * 0.2
            score = (5 * torch.tanh(score / 5)).masked_fill(ahead > 0, -torch.inf)
            weight = torch.cat([score, torch.zeros_like(score[..., :1])], -1).softmax(-1)[..., :-1]
            assert relative_error(found[:prompt], (weight @ v[:, None, :200].double()).flatten(0, 1).transpose(0, 1)) < 1e-5
        else:
            assert torch.equal(found, plain)


LAYERS = {  # a layer's attention, its sizes of keys and values, and why no kernel serves its prompts
    "plain": ({}, (128, 128), None),
    "window, softcap, sinks": ({"window": 512, "softcap": 30.0, "sinks": torch.zeros(4)}, (64, 64), None),
    "ALiBi": ({"alibi_slopes": torch.ones(4)}, (128, 128), "alibi_slopes: not supported here"),
    "batch-invariant": ({"batch_invariant": True}, (128, 128), "batch_invariant: not supported here"),
    "chunks": ({"window": 64, "chunk_lookback": 0}, (128, 128), "chunks of 64 tokens, fewer than 128"),
    "head size": ({}, (512, 512), "no dense backend for torch.bfloat16 rows of 512 and 512"),
}


@pytest.mark.parametrize("name", LAYERS)
def test_an_engine_is_told_before_it_starts(name):
    """On a GPU; on a CPU the reference serves."""
    options, sizes, reason = LAYERS[name]
    tensors = {name: options[name] for name in ("sinks", "alibi_slopes") if name in options}
    others = {name: value for name, value in options.items() if name not in tensors}
    given = Heads(2, *sizes), torch.bfloat16, torch.device("cpu")
    layer = {p: LayerAttention(4, options=AttentionOptions(**others, prompt_precision=p), **tensors) for p in ("8bit", "16bit")}
    check_prompts(layer["8bit"], *given)
    for gpu in ("h100", "a100"):
        with assumed.assuming(assumed.GPUS[gpu]):
            check_prompts(layer["16bit"], *given)
            if reason is None and gpu == "h100":
                check_prompts(layer["8bit"], *given)
                continue
            why = reason or "no dense backend for torch.bfloat16"
            with pytest.raises(ValueError, match=f"^prompt_precision=8bit: {why}.*: 16bit is needed"):
                check_prompts(layer["8bit"], *given)


@pytest.mark.parametrize(
    "device, capability, hip, dtype, served",
    [
        ("cuda", (9, 0), None, torch.bfloat16, True), ("cuda:1", (9, 0), None, torch.float16, True),
        ("cuda", (8, 0), None, torch.bfloat16, False), ("cuda", (10, 0), None, torch.bfloat16, False),
        ("cuda", (9, 0), "6.3", torch.bfloat16, False), ("xpu", None, None, torch.bfloat16, False),
        ("cuda", (9, 0), None, torch.float32, False),
    ],
)  # fmt: skip
def test_a_gpu_is_asked_for_its_capability_alone(device, capability, hip, dtype, served, monkeypatch):
    """So that a process that uses no GPU may ask; and not even for that at 16 bits."""
    asked = []
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda given: asked.append(given) or capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    given = Heads(2, 128, 128), dtype, torch.device(device)
    check_prompts(LayerAttention(4), *given)
    assert asked == []
    layer = LayerAttention(4, options=AttentionOptions(prompt_precision="8bit"))
    if served:
        check_prompts(layer, *given)
    else:
        with pytest.raises(ValueError, match=f"no dense backend for {dtype} rows of 128 and 128 on {device}.*: 16bit is needed"):
            check_prompts(layer, *given)
    assert asked == [torch.device(device)] * (capability is not None and hip is None)


def test_on_a_gpu_the_reference_is_not_chosen(monkeypatch):
    """But by name. Everything else about the call is one that the reference serves."""
    of_others = {name: (lambda call: "not here") for name in ("hopper", "prefill", "triton", "cpu")}
    monkeypatch.setattr(implementations, "refusal", lambda name, call: of_others.get(name, lambda call: None)(call))
    monkeypatch.setattr(implementations, "kind", lambda call: "attend")
    monkeypatch.setattr(implementations, "AttendCall", SimpleNamespace)
    for device, precision, told in (("cuda", "8bit", True), ("cuda", "16bit", False), ("cpu", "8bit", False)):
        call = SimpleNamespace(q=SimpleNamespace(device=torch.device(device)), options=AttentionOptions(prompt_precision=precision))
        assert implementations.resolve(call, "reference")[0] == "reference"
        if told:
            with pytest.raises(ValueError, match="prompt_precision: the reference serves 8bit where it is asked for by name"):
                implementations.resolve(call)
        else:
            assert implementations.resolve(call)[0] == "reference"


@pytest.mark.parametrize("longest", [127, 256])
def test_who_serves_says_so(longest):
    """Where a sequence may be a prompt."""
    layer = PagedLayer(LayerConfig(get_format("int4")), Heads(2, 64, 64), torch.float32)
    attention = LayerAttention(4, options=AttentionOptions(prompt_precision="8bit"))
    told = who_serves(layer, attention, StepLimits(2, 64, longest), torch.device("cpu"), 16)
    assert ("attend of 1 x 128 queries of 128 keys with 8bit scores" in told) == (longest == 256)
    assert ("128 queries among others with 8bit scores by reference" in summary(told)) == (longest == 256)


def test_all_else_is_served_alike():
    """Decode, verification, chunks of fewer than 128 queries, and writes, on a Hopper GPU."""
    pytest.importorskip("triton")
    layer = PagedLayer(LayerConfig(get_format("int4")), Heads(2, 128, 128), torch.bfloat16)
    with assumed.assuming(assumed.GPUS["h100"]):
        found = []
        for precision in ("16bit", "8bit"):
            attention = LayerAttention(8, options=AttentionOptions(prompt_precision=precision))
            calls = _calls(layer, attention, StepLimits(4, 2048, 4096, 4), torch.device("cpu"))
            mixed = warmup.mixed_batches(8, 4, 2048, 4096, True)
            found.append(warmup.who_serves(layer.allocate(1, 16, torch.device("cpu")), 8, mixed=mixed, **calls))
    plain, rounded = ({what: name for what, (name, _) in of.items()} for of in found)
    prompts = {what for what in plain if " 128 queries" in what or " 512 queries" in what}
    assert {what: name for what, name in rounded.items() if "8bit" not in what} == {what: plain[what] for what in plain.keys() - prompts}
    assert {what: name for what, name in rounded.items() if "8bit" in what} == {f"{what} with 8bit scores": "prefill" for what in prompts}


def test_scratch_memory_of_a_step(monkeypatch):
    """Rounding takes a byte of a number, a scale and a product for each query, a scale for each key, a mean for each sequence and head."""
    pytest.importorskip("triton")
    from quantkv.implementations.prefill import eight_bit as rounding

    monkeypatch.setattr(rounding, "_launch", lambda *given: None)
    round = Round((KeySlice(0, 20, 0, 50, 0, 64),), CAUSAL, 64)
    found = rounding.rounded(torch.empty(20, 4, 128), torch.empty(2, 64, 128), round, [torch.zeros(2).int()] * 3, 64)
    assert sum(t.nbytes for t in found) == 20 * 4 * (128 + 8) + 64 * 2 * (128 + 4)
    plain, more = (implementations.scratch_bytes(8192, 32, (128, 128), 2, eight_bit) for eight_bit in (False, True))
    rows = prefill.SCRATCH_BYTES // (8 * 256 * 2)
    taken = [8192 * 32 * (128 + 8), rows * 8 * (128 + 4), 64 * 8 * 128 * 4]
    assert sum(taken) <= more - plain <= sum(taken) + 64 * 24 * 128 * 4
    plain, more = (implementations.scratch_bytes(1 << 20, 32, (128, 128), 2, eight_bit) for eight_bit in (False, True))
    assert more - plain >= taken[1]  # of queries there is a bound


def test_runs_of_a_mixed_batch():
    """Those that decode are at 16 bits, also in the calls of further layers."""
    b = batch((1, 130), (20, 200), "int8")
    call = b.call(prompt_precision="8bit", lengths=((1, 20), (130, 200)))
    runs = runs_of(call)
    assert [run.call.options.prompt_precision for run in runs] == ["16bit", "8bit"]
    other = replace(call, options=replace(call.options))
    assert [run.of(other).options.prompt_precision for run in runs] == ["16bit", "8bit"]
