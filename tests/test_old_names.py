"""Names of the release before: each works, warns, and says what to write."""

import json
import warnings

import pytest

torch = pytest.importorskip("torch")

from quantkv import LinearMap, PagedCache, deprecated, implementations, prepare_attend, prepare_write, warm_up  # noqa: E402
from quantkv.calibration import Calibration, LayerMoments  # noqa: E402
from quantkv.calls import PagedTensor  # noqa: E402
from quantkv.copies import CacheWithCopies, CopiedPages, FullPrecisionStep, cache_of_copies  # noqa: E402
from quantkv.formats import get_format  # noqa: E402
from quantkv.full_precision import FullPrecisionTokens  # noqa: E402
from quantkv.policy import Policy  # noqa: E402
from quantkv.testing import SampleBatch  # noqa: E402


def says(old, new):
    """The warning of an old name."""
    return pytest.warns(DeprecationWarning, match=f"{old} is deprecated.*: write {new}")


def test_prefill_was_called_dense():
    call = SampleBatch.make("int4", (130,), (130,), dtype=torch.float32).call()
    with says("implementation='dense'", "'prefill'"):
        assert implementations.resolve(call, "dense") == ("prefill", {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert implementations.resolve(call, "prefill") == ("prefill", {})


def test_both_names_at_once_are_refused():
    @deprecated.keywords(old="new")
    def function(new=0):
        return new

    with says("old", "new"):
        assert function(old=3) == 3
    with pytest.raises(ValueError, match="old=3: it is called new now"):
        function(old=3, new=4)


def test_full_precision_tokens_were_called_exact():
    tokens = FullPrecisionTokens(sink=16, recent=24)
    with says("first", "sink"), says("latest", "recent"):
        assert FullPrecisionTokens(first=16, latest=24) == tokens
    with says("FullPrecisionTokens.latest", "recent"):
        assert tokens.latest == 24
    with says("exact", "full_precision"):
        policy = Policy("int4", exact=tokens)
    with says("Policy.exact", "full_precision"):
        assert policy.exact == policy.full_precision == tokens
    with says("quantkv.exact.ExactTokens", "quantkv.full_precision.FullPrecisionTokens"):
        from quantkv.exact import ExactTokens
    assert ExactTokens is FullPrecisionTokens
    with says("quantkv.shadow.shadow_pages", "quantkv.copies.cache_of_copies"):
        from quantkv.shadow import shadow_pages
    assert shadow_pages is cache_of_copies
    with pytest.raises(ImportError):
        from quantkv.shadow import nothing  # noqa: F401


def test_a_policy_of_the_release_before_is_read(tmp_path):
    path, tokens = tmp_path / "old.json", FullPrecisionTokens(16, 24)
    path.write_text(json.dumps({"policy_version": 1, "format": "int4", "exact": {"first": 16, "latest": 24}}))
    with says("policy.exact", "policy.full_precision"), says("policy.full_precision.first", "policy.full_precision.sink"):
        assert Policy.load(path) == Policy("int4", full_precision=tokens)
    Policy.load(path).save(path)
    assert json.loads(path.read_text())["full_precision"] == {"sink": 16, "recent": 24}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Policy.load(path).full_precision == tokens


def test_calls_take_exact_as_full_precision():
    spec, tokens = get_format("int4").cache_spec(1, 32), FullPrecisionTokens(16, 16)
    pages = PagedCache(spec, 4)
    copied = CopiedPages(tokens, 16, 1, 4)
    with says("CopiedPages.num_shadows", "num_copies"):
        cache = CacheWithCopies(pages, cache_of_copies(pages, copied.num_shadows, torch.float32), copied)
    with says("CacheWithCopies.shadow", "copies"):
        assert cache.shadow is cache.copies
    step = FullPrecisionStep(tokens, 16, 1, 1, torch.device("cpu"))
    table, lens, slots = (torch.zeros(shape, dtype=torch.int64) for shape in ((1, 1), (1,), (1,)))
    row, lens = torch.ones(1, 1, 32), lens + 1
    with says("exact", "full_precision"):
        write, attend = prepare_write(slots, exact=step), prepare_attend(block_table=table, seq_lens=lens, exact=step)
    copied.advance(table, lens, torch.tensor([0, 1]), slots, step)
    write(cache, row, row)
    assert torch.equal(attend(cache, row), row)  # one key, from its 16-bit copy
    with says("exact", "full_precision"):
        warm_up(pages, 1, batch_sizes=(1,), write_sizes=(1,), max_seq_len=16, exact=tokens, dtype=torch.float32)


def test_the_command_line_takes_exact():
    with says("--exact", "--full-precision"):
        assert [deprecated.option(word) for word in ("tune", "--exact", "--exact=16,24", "x=--exact")] == [
            "tune",
            "--full-precision",
            "--full-precision=16,24",
            "x=--exact",
        ]


def test_a_map_had_an_offset_and_a_metric():
    eye, table = torch.eye(4)[None], torch.ones(2, 1, 4)
    with says("offset", "key_mean"), says("metric", "hessian"):
        map_ = LinearMap(eye, eye, offset=table, metric=2 * eye)
    assert map_.key_mean is table and torch.equal(map_.hessian, 2 * eye)
    with says("LinearMap.offset", "key_mean"), says("LinearMap.metric", "hessian"):
        assert map_.offset is map_.key_mean and map_.metric is map_.hessian


def test_moments_had_offsets_and_metrics():
    eye = torch.eye(16)[None]
    with says("key_offset", "key_mean"), says("key_metric", "key_hessian"), says("value_metric", "value_hessian"):
        moments = LayerMoments(key_offset=torch.ones(1, 1, 16, dtype=torch.float16), key_metric=eye, value_metric=eye)
    made = Calibration(1, {0: moments})
    assert set(moments.tensors()) == {"k.offset", "k.metric", "v.metric"}  # names in files never change
    with says("offset", "key_mean"):
        assert made.maps(0, get_format("int8"), offset=True).k.key_mean is not None


def test_a_sample_batch_was_called_batch():
    with says("quantkv.testing.Batch", "quantkv.testing.SampleBatch"):
        from quantkv.testing import Batch
    assert Batch is SampleBatch
    with says("quantkv.calls.Side", "quantkv.calls.PagedTensor"):
        from quantkv.calls import Side
    assert Side is PagedTensor


def test_calibrate_was_in_the_adapter_of_transformers():
    pytest.importorskip("transformers")
    from quantkv.integrations.transformers import calibrate

    with says("quantkv.integrations.transformers.calibrate.calibrate", "quantkv.model_analysis.calibrate.calibrate"):
        from quantkv.integrations.transformers.calibrate import calibrate as old
    with says("quantkv.integrations.transformers.attention.check_weights", "quantkv.integrations.transformers_model.check_weights"):
        from quantkv.integrations.transformers.attention import check_weights  # noqa: F401

    from quantkv.integrations import transformers

    assert old is calibrate is transformers.calibrate  # the module of that name does not hide the function
