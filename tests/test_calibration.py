"""Calibrations as files and as maps: what is in them, what is refused, what a writer makes of them."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from quantkv import LayerMaps, LinearMap, PagedCache, available_formats, get_format
from quantkv.calibration import Calibration, LayerMoments
from quantkv.full_precision import FullPrecisionTokens
from quantkv.geometry import Geometry, Heads
from quantkv.policy import Policy

HEADS, SIZE, SIZE_V = 2, 32, 16


def moments(seed=0, buckets=3, heads=HEADS, size=SIZE, size_v=SIZE_V):
    generator = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(heads, n, 2 * n, generator=generator) for n in (size, size_v))
    key_mean = None if buckets is None else 3 * torch.randn(buckets, heads, size, generator=generator).half()
    return LayerMoments(key_mean, k @ k.mT, v @ v.mT, key_spread=1 + torch.rand(heads, size, generator=generator))


def calibration(**changes):
    return Calibration(4, {1: moments(1, **changes), 3: moments(3, **changes)}, {"model": "toy", "tokens": 512})


def test_a_file_holds_it_all(tmp_path):
    made = calibration()
    made.save(tmp_path / "toy.safetensors")
    read = Calibration.load(tmp_path / "toy.safetensors")
    shared = LayerMoments(None, eye := torch.eye(4).repeat(2, 1, 1), eye)
    Calibration(2, {0: shared, 1: shared}).save(tmp_path / "shared.safetensors")
    assert Calibration.load(tmp_path / "shared.safetensors").geometry.heads == {0: (2, 4, 4), 1: (2, 4, 4)}
    assert (read.num_layers, read.made_of, read.digest, read.positions) == (4, {"model": "toy", "tokens": 512}, made.digest, 192)
    assert list(read.layers) == [1, 3] and read.geometry == Geometry(4, dict.fromkeys((1, 3), Heads(HEADS, SIZE, SIZE_V)))
    for number, layer in made.layers.items():
        assert all(torch.equal(t, read.layers[number].tensors()[part]) for part, t in layer.tensors().items())
    tensors = load_file(tmp_path / "toy.safetensors")
    assert tensors["layers.1.k.offset"].shape == (3, HEADS, SIZE) and tensors["layers.1.k.offset"].dtype == torch.float16
    without = calibration(buckets=None)
    without.save(tmp_path / "toy.safetensors")
    assert Calibration.load(tmp_path / "toy.safetensors").layers[1].key_mean is None
    assert without.positions == 0 and without.digest != made.digest


def test_positions_are_those_that_every_offset_covers():
    """Of a layer whose keys do not turn one bucket says all."""
    layers = {0: moments(buckets=1), 1: moments(buckets=5), 2: moments(buckets=9)}
    assert Calibration(3, layers).positions == 5 * 64
    assert Calibration(1, {0: layers[0]}).positions == 64


DAMAGE = {"cut": lambda raw: raw[:-8], "a number": lambda raw: raw[:-1] + bytes([raw[-1] ^ 1]), "no such file": None}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damage_is_named(damage, tmp_path):
    path = tmp_path / "toy.safetensors"
    if damage is not None:
        calibration().save(path)
        path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=r"calibration='.*toy.safetensors'"):
        Calibration.load(path)


WRONG = {
    "another format": ({"format": "quantkv-pages"}, {}, "format=quantkv-pages: 'quantkv-calibration' is needed"),
    "another version": ({"version": "4"}, {}, "version=4: '1' or '2' or '3' is needed"),
    "another digest": ({"digest": "0" * 64}, {}, "damaged: its numbers have the digest .*the file says 0000"),
    "another number of layers": ({"geometry": json.dumps({"num_layers": 5})}, {}, "damaged"),
    "no geometry": ({"geometry": "[]"}, {}, "damaged, or no calibration"),
    "too few layers": ({"geometry": json.dumps({"num_layers": 2})}, {}, "layers of 0 to 1 are needed"),
    "a tensor of another shape": ({}, {"layers.1.k.metric": torch.eye(SIZE).repeat(3, 1, 1)}, r"\(3, 3, 32\) of torch.float16 is needed"),
    "a tensor of another dtype": ({}, {"layers.1.k.offset": torch.zeros(3, HEADS, SIZE)}, "float16 is needed"),
    "a spread of another shape": ({}, {"layers.1.k.spread": torch.ones(HEADS, SIZE + 1)}, r"\(2, 32\) of torch.float32 is needed"),
    "a tensor of another name": ({}, {"layers.1.k.mean": torch.zeros(2)}, "they are named"),
    "a number that is none": ({}, {"layers.1.k.metric": torch.full((HEADS, SIZE, SIZE), float("nan"))}, "not finite"),
    "a part missing": ({}, {"layers.2.k.metric": torch.eye(SIZE).repeat(HEADS, 1, 1)}, "value_hessian"),
}


@pytest.mark.parametrize("metadata, tensors, message", WRONG.values(), ids=WRONG)
def test_wrong_files_are_refused(metadata, tensors, message, tmp_path):
    from safetensors import safe_open

    path = tmp_path / "toy.safetensors"
    calibration().save(path)
    with safe_open(path, "pt") as file:
        before = file.metadata()
    save_file({**load_file(path), **tensors}, path, {**before, **metadata})
    with pytest.raises(ValueError, match=message):
        Calibration.load(path)


DEEP = "[" * 100_000 + "]" * 100_000
EYE = torch.eye(SIZE).repeat(HEADS, 1, 1)
HOSTILE = {
    **{f"{value} layers": ({"num_layers": value}, {}, "num_layers=") for value in (2.5, 1e18, 10**18, True, "3", None, 0, -1)},
    **{f"{value} layers": (f'{{"num_layers": {value}}}', {}, "is no number of JSON") for value in ("Infinity", "-Infinity", "NaN")},
    "1e400 layers": ('{"num_layers": 1e400}', {}, "num_layers=inf"),
    "10^5000 layers": (f'{{"num_layers": 1{"0" * 5000}}}', {}, "damaged, or no calibration"),
    "nested": (DEEP, {}, "nested too deeply"),
    "layers twice": ('{"num_layers": 4, "num_layers": 4}', {}, "the key 'num_layers' stands twice"),
    "no dimension": ({"num_layers": 4}, {"layers.1.v.metric": torch.zeros(())}, r"layers.1.v.metric=\(\): three dimensions"),
    "one dimension": ({"num_layers": 4}, {"layers.1.v.metric": torch.zeros(3)}, r"layers.1.v.metric=\(3,\): three dimensions"),
    "no heads": (
        {"num_layers": 4},
        {f"layers.1.{part}": torch.zeros(0, 4, 4) for part in ("k.metric", "v.metric")},
        r"layers.1.k.metric=\(0, 4, 4\): three dimensions",
    ),
    "a layer by another name": ({"num_layers": 4}, {"layers.01.k.metric": EYE, "layers.01.v.metric": EYE}, "tensor=layers.01.k.metric"),
    "a layer of a sign": ({"num_layers": 4}, {"layers.+2.k.metric": EYE, "layers.+2.v.metric": EYE}, r"tensor=layers.\+2"),
    "a layer of 5,000 digits": ({"num_layers": 4}, {f"layers.{'9' * 5000}.k.metric": EYE}, "tensor=layers.999"),
}


@pytest.mark.parametrize("geometry, tensors, message", HOSTILE.values(), ids=HOSTILE)
def test_hostile_files_are_refused_by_name(geometry, tensors, message, tmp_path):
    """Each with the digest that its numbers have, as whoever writes such a file can work out too."""
    from quantkv.checks import digest_of

    path, made = tmp_path / "toy.safetensors", calibration()
    text = geometry if isinstance(geometry, str) else json.dumps({**json.loads(made._geometry_text()), **geometry}, sort_keys=True)
    all_of_it = {**made._tensors(), **tensors}
    metadata = {"format": "quantkv-calibration", "version": "1", "geometry": text, "digest": digest_of(all_of_it, text)}
    save_file({name: t.clone() for name, t in all_of_it.items()}, path, metadata)
    with pytest.raises(ValueError, match=message) as refused:
        Calibration.load(path)
    assert str(path) in str(refused.value)


@pytest.mark.parametrize("made_of", ["null", "3", "[]", DEEP, '{"loss": NaN}', '{"a": 1, "a": 2}'], ids=lambda text: text[:12])
def test_what_it_was_made_of_is_an_object(made_of, tmp_path):
    from safetensors import safe_open

    calibration().save(path := tmp_path / "toy.safetensors")
    with safe_open(path, "pt") as file:
        before = file.metadata()
    save_file(load_file(path), path, {**before, "made_of": made_of})
    with pytest.raises(ValueError, match=r"calibration='.*toy.safetensors': damaged, or no calibration"):
        Calibration.load(path)


def test_what_could_not_be_read_again_is_not_written(tmp_path):
    made = Calibration(4, {1: moments(1)}, {"loss": float("nan")})
    with pytest.raises(ValueError):
        made.save(tmp_path / "toy.safetensors")
    with pytest.raises(ValueError, match=r"num_layers=2\.5"):
        Calibration(2.5, {1: moments(1)})
    assert not list(tmp_path.iterdir())


def test_another_geometry_is_refused():
    made, heads = calibration(), Heads(HEADS, SIZE, SIZE_V)
    made.check(Geometry(4, {1: heads, 3: heads}))
    made.check(Geometry(4, {1: None, 3: None}))
    cases = {
        "made for 4 layers: the model has 5": Geometry(5, {1: heads, 3: heads}),
        r"keys and values in layers \[1, 3\]: the model differs in layers \[2\]": Geometry(4, {1: heads, 2: heads, 3: heads}),
        r"made for 2 kv heads of 32 \(values 16\) in layer 3: the model has 4 kv heads of 32 \(values 16\)": Geometry(
            4, {1: heads, 3: Heads(4, SIZE, SIZE_V)}
        ),
    }
    for message, geometry in cases.items():
        with pytest.raises(ValueError, match=message):
            made.check(geometry)
    with pytest.raises(ValueError, match=r"layer=2: the calibration holds layers \[1, 3\]"):
        made.maps(2, get_format("levels4"))


def test_maps_are_the_formats_own_with_what_its_writer_can_use():
    made = calibration()
    own = LayerMaps.of(get_format("levels4"), SIZE, SIZE_V)
    levels = made.maps(1, get_format("levels4"))
    assert torch.equal(levels.k.forward, own.k.forward) and torch.equal(levels.k.key_mean, made.layers[1].key_mean.float())
    assert levels.v.key_mean is None and levels.calibration == made.digest
    for map_, given in ((levels.k, made.layers[1].key_hessian), (levels.v, made.layers[1].value_hessian)):
        error = torch.randn(5, HEADS, map_.forward.shape[-1], dtype=torch.float64)
        mapped = error @ map_.forward.double()[0].mT  # what an error costs does not depend on where it is seen, but for one factor a head
        cost = torch.einsum("thd,hde,the->th", error, given.double(), error)
        seen = torch.einsum("thd,hde,the->th", mapped, map_.hessian.double(), mapped)
        factor = seen / cost
        assert torch.allclose(factor, factor[:1].expand_as(factor), rtol=1e-5)
        assert torch.allclose(map_.hessian.diagonal(dim1=1, dim2=2).mean(1), torch.ones(HEADS), atol=1e-5)
    assert made.maps(1, get_format("levels4")) is levels  # made once
    assert made.maps(1, get_format("levels4"), key_mean=False).k.key_mean is None
    for name in ("bf16", "fp8"):
        assert made.maps(1, get_format(name)) == LayerMaps()
    with_key_mean = {name for name in available_formats() if (k := made.maps(3, get_format(name)).k) is not None and k.key_mean is not None}
    four_bits = {"int4", "k4v2", "tq4", "int8", "k8v4", "k8v2", "fp8_token"}  # and more, with a scale for each row
    assert with_key_mean == four_bits | {name for name in available_formats() if get_format(name).k.signed} > four_bits
    assert made.maps(3, get_format("int4")).k.hessian is None and made.maps(3, get_format("int4")).v is None
    int8 = made.maps(1, get_format("int8")).k  # a codec without a map of its own
    assert torch.equal(int8.forward[0], torch.eye(SIZE)) and int8.key_mean is not None and int8.hessian is None


def test_a_head_that_nothing_reads_has_a_plain_metric():
    layer = moments()
    layer.key_hessian[1] = 0
    hessian = Calibration(1, {0: layer}).maps(0, get_format("levels4")).k.hessian
    assert torch.equal(hessian[1], torch.eye(SIZE)) and not torch.equal(hessian[0], torch.eye(SIZE))


@pytest.mark.parametrize("name, gain", [("levels2", 2.5), ("levels4", 3), ("trellis2", 2.5)])
def test_a_few_large_dimensions_do_not_set_the_scale_of_all(name, gain):
    """Rows of a head whose keys are uneven are even behind its map; another head's map is the format's own."""
    size, fmt, generator = 64, get_format(name), torch.Generator().manual_seed(0)
    spread = torch.ones(HEADS, size)
    spread[0, 0], spread[1, :4] = 100.0, 900.0  # mean over geometric mean: 2.4 and 37
    layer = replace(moments(size=size, size_v=size), key_mean=torch.zeros(2, HEADS, size).half(), key_spread=spread)
    plain = Calibration(1, {0: replace(layer, key_spread=None)}).maps(0, fmt)
    even, own = Calibration(1, {0: layer}).maps(0, fmt), LayerMaps.of(fmt, size, size).k
    assert torch.equal(even.k.forward[0], own.forward[0]) and torch.equal(plain.k.forward, own.forward)
    key = torch.randn(96, HEADS, size, generator=generator) * spread.sqrt()
    steps = even.k.operands.steps
    assert torch.equal(steps[0].abs(), torch.ones(size)) and torch.equal(steps[1].abs(), torch.tensor([2.0**-5] * 4 + [1.0] * 60))
    mapped = even.k.apply(key, torch.float32)[:, 1] @ own.inverse[0].mT  # in the model's own dimensions
    assert mapped.square().mean(0).std() < 0.3 * mapped.square().mean()
    costs, slots = [], torch.arange(96)
    for maps in (even, plain):
        cache = PagedCache(fmt.cache_spec(HEADS, size), 6, maps=maps)
        cache.write(key, key, slots, slots)
        error = (cache.dequantize(slots, slots, dtype=torch.float64)[0] - key).double()
        costs.append(torch.einsum("thd,hde,the->h", error, layer.key_hessian.double(), error))
    assert costs[0][1] < costs[1][1] / gain and torch.equal(costs[0][0], costs[1][0])


@pytest.mark.parametrize("name", ["levels2", "levels4"])
def test_a_calibrated_cache_attends_as_its_rows_read_back(name):
    """Attention over what the slots hold, in float64; and rounding by the Hessian costs less than plain rounding, by the Hessian."""
    layer = moments(heads=HEADS, size=64, size_v=64)
    calibrated = Calibration(1, {0: layer})
    fmt, generator = get_format(name), torch.Generator().manual_seed(5)
    tokens = 150  # in three buckets
    key_means = layer.key_mean.float().repeat_interleave(64, 0)[:tokens]
    key, value = key_means + torch.randn(tokens, HEADS, 64, generator=generator), torch.randn(tokens, HEADS, 64, generator=generator)
    key[::20] *= 0.05  # nearer to zero than to the mean key
    query, slots = torch.randn(2, 4, 64, generator=generator), torch.arange(tokens)
    costs = []
    for maps in (calibrated.maps(0, fmt), None):
        cache = PagedCache(fmt.cache_spec(HEADS, 64), 10, maps=maps)
        cache.write(key, value, slots, slots if maps else None)
        k, v = cache.dequantize(slots, slots if maps else None, dtype=torch.float64)
        error = (k - key).double(), (v - value).double()
        costs.append([torch.einsum("thd,hde,the->", e, m.double(), e) for e, m in zip(error, (layer.key_hessian, layer.value_hessian))])
        table, lengths = torch.arange(10)[None].int(), torch.tensor([tokens]).int()
        out = cache.attend(query, block_table=table, seq_lens=lengths, cu_seqlens_q=torch.tensor([0, 2]).int())
        for i in range(2):
            seen = tokens - 1 + i
            scores = torch.einsum("hgd,thd->hgt", query[i].double().view(HEADS, 2, 64), k[:seen]) / 8
            want = torch.einsum("hgt,thd->hgd", scores.softmax(-1), v[:seen]).reshape(4, 64)
            assert torch.allclose(out[i].double(), want, atol=2e-5)
    assert costs[0][0] < costs[1][0] / 2 and costs[0][1] < costs[1][1]


def write(folder, **given):
    path = folder / "policy.json"
    path.write_text(json.dumps({"policy_version": 1, "format": "levels4", **given}))
    return path


def test_a_policy_carries_it(tmp_path):
    made = calibration()
    made.save(tmp_path / "toy.safetensors")
    policy = Policy.load(write(tmp_path, layers={"3": "fp8"}, calibration="toy.safetensors", full_precision={"recent": 24}))
    assert policy.calibration.digest == made.digest and policy.full_precision == FullPrecisionTokens(0, 24)
    assert policy.maps_of(1).k.key_mean is not None and policy.maps_of(3) == LayerMaps()
    own = LinearMap(2 * torch.eye(SIZE)[None], torch.eye(SIZE)[None] / 2)
    mixed = Policy("levels4", maps={1: LayerMaps(k=own)}, calibration=made).maps_of(1)
    assert mixed.k is own and mixed.v.hessian is not None  # a side that is given goes before the calibration's
    values = LinearMap(2 * torch.eye(SIZE_V)[None], torch.eye(SIZE_V)[None] / 2)
    mixed = Policy("levels4", maps={1: LayerMaps(v=values)}, calibration=made).maps_of(1)
    assert mixed.v is values and mixed.k.key_mean is not None
    with pytest.raises(ValueError, match=r"layer=2: the calibration holds"):
        policy.maps_of(2)


def test_a_policy_can_be_saved(tmp_path):
    made = calibration()
    given = LayerMaps(LinearMap(2 * torch.eye(4)[None], torch.eye(4)[None] / 2, torch.randn(2, 3, 4), torch.eye(4).repeat(3, 1, 1)))
    layers = {0: "none", 2: "int8", 3: "int8", 4: "int8", 5: "int4"}
    policy = Policy("levels3", layers, {7: given, 8: given}, made, FullPrecisionTokens(16, 24))
    policy.save(tmp_path / "mine.json")
    assert json.loads((tmp_path / "mine.json").read_text()) == {
        "policy_version": 1,
        "format": "levels3",
        "layers": {"0": "none", "2-4": "int8", "5": "int4"},
        "maps": "mine.maps.safetensors",
        "calibration": "mine.calibration.safetensors",
        "full_precision": {"sink": 16, "recent": 24},
    }
    read = Policy.load(tmp_path / "mine.json")
    assert (read.format, read.layers, read.full_precision, read.calibration.digest) == (
        policy.format,
        policy.layers,
        policy.full_precision,
        made.digest,
    )
    assert read.maps[7].fingerprint() == given.fingerprint() and torch.equal(read.maps[7].k.hessian, given.k.hessian)
    made.save(tmp_path / "model.safetensors")
    Policy("levels3", calibration=made).save(tmp_path / "other.json", calibration="model.safetensors")
    assert Policy.load(tmp_path / "other.json").calibration.digest == made.digest
    assert not (tmp_path / "other.calibration.safetensors").exists()
    with pytest.raises(ValueError, match="it holds another calibration"):
        Policy("levels3", calibration=calibration(buckets=4)).save(tmp_path / "third.json", calibration="model.safetensors")
    assert not (tmp_path / "third.json").exists()


BAD_POLICIES = {
    "no file": ({"calibration": "absent.safetensors"}, "calibration=.*absent"),
    "no name": ({"calibration": 3}, "policy.calibration=3"),
    "exact no object": ({"full_precision": 24}, "policy.full_precision=24"),
    "exact of something else": ({"full_precision": {"last": 24}}, "policy.full_precision="),
    "exact of none": ({"full_precision": {"sink": 0}}, "sink or recent is at least 1"),
    "exact negative": ({"full_precision": {"recent": -1}}, "full_precision.recent=-1"),
    "exact broken": ({"full_precision": {"recent": 2.5}}, "full_precision.recent=2.5"),
}


@pytest.mark.parametrize("given, message", BAD_POLICIES.values(), ids=BAD_POLICIES)
def test_bad_policies_are_refused(given, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        Policy.load(write(tmp_path, **given))


def test_a_page_file_names_it_and_no_reader_minds(tmp_path):
    """Bytes mean the same whatever Hessian guided their writer; the digest is there for people."""
    from safetensors import safe_open

    fmt = get_format("levels4")
    spec = fmt.cache_spec(HEADS, SIZE, SIZE_V)
    one = Calibration(1, {0: moments(0)})
    another = Calibration(
        1, {0: LayerMoments(one.layers[0].key_mean, *(2 * m + 1 for m in (moments(1).key_hessian, moments(1).value_hessian)))}
    )
    cache, reader, plain = (PagedCache(spec, 2, maps=maps) for maps in (one.maps(0, fmt), another.maps(0, fmt), None))
    slots = torch.arange(32)
    cache.write(torch.randn(32, HEADS, SIZE), torch.randn(32, HEADS, SIZE_V), slots, slots)
    cache.save(tmp_path / "pages")
    with safe_open(tmp_path / "pages", "pt") as file:
        assert file.metadata()["calibration"] == one.digest != another.digest
    reader.load(tmp_path / "pages")
    assert torch.equal(reader.buffer, cache.buffer)
    with pytest.raises(ValueError, match="maps="):
        plain.load(tmp_path / "pages")
    cache = PagedCache(spec, 2, maps=one.maps(0, fmt).heads(0, HEADS))
    assert cache.maps.calibration == one.digest
