"""What holds of every codec, for every format in the registry; the levels of the codebooks; names."""

import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from scipy.stats import norm as normal

from quantkv import Format, available_formats, get_format, register
from quantkv.format import unregister
from quantkv.formats import int2, turboquant
from quantkv.implementations.reference.write import encode
from quantkv.maps import LayerMaps, LinearMap, butterfly, hadamard, named_map, rht_signs
from quantkv.packing import interleave, pack, planes_of, unpack

# Mean squared error of an element of Gaussian rows of 128. Rotated or not makes no difference to them: 4, 3 and 2 bits are
# FORMATS'
# table (uniform 0.00996, 0.0458; codebook 0.00931, 0.0340, 0.1162); the others follow from a step of absmax / 127 (absmax 2.8)
# and from 3 or 2 mantissa bits.
ROW_MSE = {
    "int8": 4.1e-5,
    "fp8_e4m3": 7.0e-4,
    "fp8_e5m2": 2.7e-3,
    "fp8_token": 6.3e-4,
    "tq8": 7.0e-4,
    "int4": 0.00996,
    "tq4": 0.00931,
    "u4": 0.00996,
    "tq3": 0.0340,
    "u3": 0.0458,
    "int2": 0.1162,
    "levels2": 0.1316,  # unbiased, a level's scale is larger than what errs least: d becomes d / (1 - d)
    "levels3": 0.0352,
    "levels4": 0.00951,
    "levels5": 0.00260,
    "levels6": 0.000706,
    "levels8": 5.35e-5,
    "bf16": 0.0,
    "fp16": 0.0,
    "fp32": 0.0,
}


def codecs():
    """Every codec of the registry, once."""
    found = {}
    for name in available_formats():
        fmt = get_format(name)
        found.update({c.name: c for c in (fmt.k, fmt.v)})
    return found


@pytest.fixture(params=sorted(codecs()))
def codec(request):
    return codecs()[request.param]


def round_trip(codec, rows):
    maps = LayerMaps.of(Format("x", codec, codec), rows.shape[-1], rows.shape[-1])
    codes, meta = encode(rows, codec, maps.k)
    back = codec.dequantize(codes, meta, torch.float64)
    return back if maps.k is None else back @ maps.k.inverse[0].double().mT


def test_mean_squared_error(codec):
    rows = torch.randn(1000, 2, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    mse = (round_trip(codec, rows) - rows).square().mean().item()
    assert mse == pytest.approx(ROW_MSE.get(codec.name, mse), rel=0.08, abs=2e-6) and mse < 0.2


def test_encode_keeps_layout_and_dtype(codec):
    rows = torch.randn(3, 5, 64)
    codes, meta = codec.encode(rows)
    assert codes.dtype == codec.code_dtype
    assert codes.shape[:2] == (3, 5) and codes.shape[-1] * codes.dtype.itemsize == codec.row.code_bytes(64)
    assert (() if meta is None else (str(meta.dtype).removeprefix("torch."),) * meta.shape[-1]) == codec.row.meta


def test_rows_are_independent(codec):
    rows = torch.randn(4, 3, 64)
    codes, _ = codec.encode(rows)
    alone, _ = codec.encode(rows[2:3, 1:2])
    assert torch.equal(alone.view(torch.uint8), codes[2:3, 1:2].contiguous().view(torch.uint8))


@pytest.mark.parametrize(
    "row",
    [torch.zeros(64), torch.full((64,), 3.0), torch.eye(64)[7] * 100, torch.arange(64) / 64 + 5],
    ids=["zeros", "constant", "spike", "one-sided"],
)
def test_awkward_rows_stay_finite(codec, row):
    back = round_trip(codec, row.view(1, 1, -1))
    assert back.isfinite().all()
    if row.abs().max() == 0:
        assert back.abs().max() < 1e-5


@pytest.mark.parametrize("bits", range(1, 9))
def test_packing_is_the_bit_string(bits):
    """Against Python's integers, bit by bit: code i of a row stands at bit `bits * i` of its bytes."""
    values = torch.randint(0, 2**bits, (7, 2, 48), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    values[0], values[1] = 2**bits - 1, 0
    codes = pack(values, bits)
    assert codes.shape == (7, 2, 48 * bits // 8) and codes.dtype == torch.uint8
    for row, packed in zip(values.flatten(0, 1).tolist(), codes.flatten(0, 1).tolist()):
        string = sum(code << bits * i for i, code in enumerate(row))
        assert string.to_bytes(len(packed), "little") == bytes(packed)
    planes = unpack(codes, bits)
    assert planes.shape[0] == planes_of(bits)
    assert torch.equal(planes[-1], values[..., planes_of(bits) - 1 :: planes_of(bits)])
    assert torch.equal(interleave(planes), values)


@pytest.mark.parametrize("bits", [0, 9, 16, -1, 2.5])
def test_widths_that_cannot_be_packed_are_refused(bits):
    for call in (
        lambda: planes_of(bits),
        lambda: pack(torch.zeros(48, dtype=torch.uint8), bits),
        lambda: unpack(torch.zeros(48).byte(), bits),
    ):
        with pytest.raises(ValueError, match=f"bits={bits}"):
            call()


def test_rows_that_are_no_whole_words_are_refused():
    with pytest.raises(ValueError, match=r"values.shape=\(2, 12\): .* multiples of 8"):
        pack(torch.zeros(2, 12, dtype=torch.uint8), 5)
    with pytest.raises(ValueError, match=r"codes.shape=\(2, 12\): .* multiples of 5 bytes"):
        unpack(torch.zeros(2, 12, dtype=torch.uint8), 5)


def lloyd_max_exact(levels):
    c = torch.linspace(-2.5, 2.5, levels, dtype=torch.float64).numpy()
    for _ in range(3000):
        edges = [-math.inf, *((c[1:] + c[:-1]) / 2), math.inf]
        mass, pdf = normal.cdf(edges), normal.pdf(edges)
        c = (pdf[:-1] - pdf[1:]) / (mass[1:] - mass[:-1])
    return c


def lloyd_max_as_vllm(levels):
    """vLLM's numerical solution: trapezoids, 200 a cell, tails to 10.5 sigma, at most 200 rounds."""
    c = 3.5 * ((2 * torch.arange(levels, dtype=torch.float64) + 1) / levels - 1)
    for _ in range(200):
        edges = torch.cat([torch.tensor([-10.5]), (c[1:] + c[:-1]) / 2, torch.tensor([10.5])])
        x = edges[:-1, None] + (edges[1:] - edges[:-1])[:, None] * torch.linspace(0, 1, 201, dtype=torch.float64)
        pdf = torch.exp(-x * x / 2)
        new = torch.trapezoid(x * pdf, x) / torch.trapezoid(pdf, x)
        done, c = (new - c).abs().max() < 1e-10, new
        if done:
            break
    return c


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_turboquant_levels(bits):
    half = 2 ** (bits - 1)
    shipped = torch.tensor(turboquant.LEVELS[bits], dtype=torch.float64)
    solved = lloyd_max_as_vllm(2 * half)
    assert ((solved - solved.flip(0))[half:] / 2 - shipped).abs().max() < 1e-9
    assert (shipped / torch.tensor(lloyd_max_exact(2 * half)[half:].copy()) - 1).abs().max() < 8e-4


def test_int2_levels_are_lloyd_max():
    assert (torch.tensor(int2.CENTROIDS).double() - torch.tensor(lloyd_max_exact(4))).abs().max() < 5e-5
    assert abs(int2.BOUNDARIES[2] - (int2.CENTROIDS[2] + int2.CENTROIDS[3]) / 2) < 5e-5


@pytest.mark.parametrize("kind,head_size", [("hadamard", 64), ("hadamard_unit", 128), ("rht", 64), ("rht", 80), ("rht", 96)])
def test_maps_invert(kind, head_size):
    forward, inverse = named_map(kind, head_size)
    assert (forward @ inverse - torch.eye(head_size)).abs().max() < 1e-12
    block = head_size & -head_size
    assert torch.equal(forward.abs() > 0, torch.block_diag(*[torch.ones(block, block)] * (head_size // block)) > 0)


def test_hadamard_refuses_other_sizes():
    with pytest.raises(ValueError, match="size=96"):
        hadamard(96)


def test_linear_map_refuses_wrong_shapes():
    with pytest.raises(ValueError, match="forward"):
        LinearMap(torch.eye(4), torch.eye(4))
    with pytest.raises(ValueError, match="both"):
        LinearMap(torch.eye(4)[None], torch.eye(5)[None])


def test_linear_map_refuses_an_inverse_that_is_none():
    """Of any head: keys would be read back as something else. What rounding does to an inverse is allowed."""
    eye, turn = torch.eye(4).repeat(3, 1, 1), torch.linalg.qr(torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0)))[0]
    LinearMap(turn, turn.mT.contiguous())
    LinearMap(turn.bfloat16().float(), turn.mT.bfloat16().float().contiguous())
    LinearMap(eye, eye * (1 + 2**-8))
    LinearMap(torch.tensor([[[2.0, 0], [1, 1]]]), torch.tensor([[[0.5, 0], [-0.5, 1]]]))
    one_wrong = eye.clone()
    one_wrong[2, 0, 3] = -(2**-7)
    wrong = {"0.0078": (eye, eye * (1 + 2**-7)), "0.00781": (eye, one_wrong), "1": (eye, 0 * eye), "3": (2 * eye, 2 * eye)}
    for error, (forward, inverse) in {**wrong, "": (turn, turn)}.items():
        with pytest.raises(ValueError, match=rf"^inverse: inverse @ forward differs from the identity by {error}.*at most 0.00390625"):
            LinearMap(forward, inverse)


@pytest.mark.parametrize(
    "typed,name",
    [
        ("int4_per_token_head", "int4"),
        ("fp8_e4m3", "fp8"),
        ("turboquant_4bit_nc", "tq4"),
        ("auto", "bf16"),
        ("k8v4", "k8v4"),
        ("int8/int4", "int8/int4"),
        ("int4/int4", "int4"),
        ("fp8_per_tensor", "fp8"),
    ],
)
def test_names(typed, name):
    assert get_format(typed).name == name


def test_none_follows_the_dtype():
    assert get_format("none", torch.float16).k.code_dtype == torch.float16
    with pytest.raises(ValueError, match=r"torch\.float64"):
        get_format("none", torch.float64)


def test_any_k_with_any_v():
    mixed = get_format("turboquant_3bit_nc/int8_per_token_head")
    assert (mixed.k.name, mixed.v.name) == ("tq3", "int8")
    assert get_format(mixed.name) == mixed


NEAR = [("int5", "int"), ("turboquant_4bit", "turboquant_4bit_nc"), ("fp8e4m3", "fp8_e4m3")]
NEAR += [("INT4", "int4'"), ("quantkv_int4", "int4'"), ("quantkv_FP8", "fp8'"), ("NONE", "none'")]  # the case, and vLLM's prefix


@pytest.mark.parametrize("typed,near", NEAR)
def test_unknown_format_names_the_nearest(typed, near):
    with pytest.raises(ValueError, match=f"format='{typed}' is unknown: did you mean '{near}"):
        get_format(typed)


def test_a_preset_is_no_format():
    with pytest.raises(ValueError, match="format='4bit' is unknown: presets are policies, which QuantizedCache, engines and"):
        get_format("4bit")


def test_register_refuses_a_taken_name():
    with pytest.raises(ValueError, match="int4"):
        register(Format("mine", int2.INT2, int2.INT2), "int4")
    if "mine" in available_formats():
        unregister("mine")


@pytest.mark.parametrize("name,head_size", [("int2", 96), ("tq4", 80), ("int4", 36), ("tq3", 8)])
def test_head_size_a_format_cannot_take(name, head_size):
    with pytest.raises(ValueError, match=f"head_size={head_size}: {name}"):
        get_format(name).cache_spec(2, head_size)


@pytest.mark.parametrize("typed", ["int4/int8/int4", "int4/int8/", "a/b/c/d"])
def test_a_pair_has_two_formats(typed):
    with pytest.raises(ValueError, match=f"format='{typed}': one format, or a pair K/V"):
        get_format(typed)


@pytest.mark.parametrize("typed", [None, 4, ["int4"]])
def test_a_format_is_named_by_a_string(typed):
    with pytest.raises(ValueError, match="a name such as int4, or a Format, is needed"):
        get_format(typed)


@pytest.mark.parametrize(
    "statement",
    [
        "from quantkv import ops; print(ops.get_format('int4').name)",
        "from quantkv.format import get_format; print(get_format('int4/int8').k.name)",
        "from quantkv.format import available_formats; print(*[n for n in available_formats() if n == 'int4'])",
        "import toy_format; from quantkv import get_format; print(get_format('int4').name)",
    ],
)
def test_the_registry_is_full_whoever_asks_first(statement):
    here = Path(__file__).parent  # where toy_format is
    done = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True, check=True, cwd=here)
    assert done.stdout.split() == ["int4"]


def test_a_name_of_the_package_is_taken_before_it_was_asked_for():
    code = (
        "from quantkv.spec import RowLayout; from quantkv.format import Codec, Format, register;"
        "c = Codec('mine', RowLayout(8), None, None); register(Format('int4', c, c))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "name='int4': taken" in done.stderr


@pytest.mark.parametrize("name,largest", [("fp8_e4m3", 448.0), ("fp8_e5m2", 57344.0)])
def test_8_bit_floats_saturate(name, largest):
    """What is too large, infinities too, becomes the largest number; NaN stays NaN. A cast alone gives NaN or infinities."""
    x = torch.tensor([1e6, -1e6, torch.inf, -torch.inf, largest, -1.07 * largest, 0.9 * largest, torch.nan])
    codec = get_format(name).k
    back = codec.dequantize(*codec.encode(x.view(1, 1, -1))).flatten()
    assert back[:6].tolist() == [largest, -largest, largest, -largest, largest, -largest]
    assert abs(float(back[6]) / largest - 0.9) < 0.07 and back[7].isnan()


def test_geometry_of_values_of_another_head_size():
    """int8 keys of 128 and int4 values of 64, a float32 for each row: 132 + 36 bytes a token and head."""
    spec = get_format("k8v4").cache_spec(4, 128, 64, block_size=16)
    assert spec.bytes_per_token == 4 * (132 + 36)
    assert spec.elements_per_token == 4 * (128 + 64)
    assert spec.bits_per_element == 8 * (132 + 36) / 192
    assert spec.compression == 16 * 192 / (8 * (132 + 36))


def test_capacity_is_in_whole_pages():
    spec = get_format("int4").cache_spec(2, 64, block_size=16)
    for pages, rest, tokens in ((3, 0, 48), (3, 1, 48), (3, spec.block_bytes // 2, 48), (3, spec.block_bytes - 1, 48), (0, 7, 0)):
        assert spec.capacity(pages * spec.block_bytes + rest) == tokens


def loss(name, rows):
    """Of the rows' norms, on average, in K codec `name`."""
    errors = (round_trip(get_format(name).k, rows) - rows).norm(dim=-1) / rows.norm(dim=-1)
    return errors.mean().item()


@pytest.mark.parametrize("head_size,int2_,tq3,tq4", [(64, 0.93, 0.72, 0.36), (128, 0.98, 0.88, 0.48), (256, 1.01, 1.02, 0.63)])
def test_known_limit_constant_rows(head_size, int2_, tq3, tq4):
    """docs/formats.md has these figures. A rotation without signs puts the row into one coordinate: sqrt(D), where the last level is c."""
    for row in (torch.full((1, 1, head_size), 0.75), hadamard(head_size)[37].float().view(1, 1, -1)):
        for name, expected in (("int2", int2_), ("tq3", tq3), ("tq4", tq4)):
            assert loss(name, row) == pytest.approx(expected, abs=0.008)
        assert 0.07 < loss("int4", row) < 0.121
        assert loss("int8", row) < 1e-3


def test_known_limit_spikes():
    spike = 100 * torch.eye(128)[:1].view(1, 1, -1)
    assert loss("int4", spike) > 0.999 and loss("int2", spike) == pytest.approx(0.51, abs=0.005)
    noisy = torch.randn(500, 2, 128, generator=torch.Generator().manual_seed(0)) + spike
    assert loss("int4", noisy) == pytest.approx(0.4, abs=0.03)


# ---- mapped rows


def by_halves(x):
    """`H x`: the transforms of both halves, added and subtracted. Written another way than `butterfly`, with the same additions."""
    if x.shape[-1] == 1:
        return x
    a, b = (by_halves(t) for t in x.chunk(2, -1))
    return torch.cat([a + b, a - b], -1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name,head_size", [("int2", 64), ("int2", 128), ("int2", 256), ("int4", 64), ("int4", 80), ("int4", 128)])
def test_rotated_bits_are_those_of_the_float32_butterfly(name, head_size, dtype):
    """vLLM's rotation on a CPU: additions in float32 at distances 1, 2, 4, ...; an exact sum has other bits."""
    codec, block = get_format(name).k, head_size & -head_size
    rows = torch.randn(1000, 2, head_size, generator=torch.Generator().manual_seed(2))
    rows[..., 1] *= 8
    rows = rows.to(dtype)
    flipped = rows.float().unflatten(-1, (-1, block)) * (rht_signs(block).float() if name == "int4" else 1)

    def bits(y):
        codes, meta = codec.encode(y.flatten(-2).to(dtype).float())
        return torch.cat([codes, meta.view(torch.uint8)], -1)

    codes, meta = encode(rows, codec, LayerMaps.of(get_format(name), head_size, head_size).k)
    assert torch.equal(torch.cat([codes, meta.view(torch.uint8)], -1), bits(by_halves(flipped)))
    exact = bits(flipped.double() @ hadamard(block))
    if dtype == torch.float32:
        assert not torch.equal(exact, bits(by_halves(flipped)))  # the test can tell them apart


@pytest.mark.parametrize("size", [1, 2, 8, 64])
def test_butterfly_is_the_hadamard_matrix(size):
    x = torch.randint(-9, 9, (3, 2, size)).double()
    assert torch.equal(butterfly(x), x @ hadamard(size))
    assert torch.equal(butterfly(x.transpose(0, 1)), x.transpose(0, 1) @ hadamard(size))


def test_any_other_map_is_a_product_in_float64_rounded_once():
    """A product in float32, or one rounded to float32 on its way to bfloat16, gives other rows."""
    g = torch.Generator().manual_seed(4)
    a = torch.eye(64) + 0.3 * torch.randn(2, 64, 64, generator=g)
    rows = torch.randn(500, 2, 64, generator=g)
    want = torch.einsum("hij,thj->thi", a.double(), rows.double())
    map_ = LinearMap(a, torch.linalg.inv(a))
    for dtype in (torch.float32, torch.bfloat16):
        assert torch.equal(map_.apply(rows, dtype), want.to(dtype))
    halved = LinearMap(hadamard(64).float()[None] / 2, hadamard(64).float()[None] / 32)
    assert torch.equal(halved.apply(rows, torch.float32), (rows.double() @ hadamard(64) / 2).float())


def test_values_have_no_offset():
    eye = torch.eye(16)[None]
    with pytest.raises(ValueError, match=r"v\.key_mean: shape \(3, 1, 16\); None is needed"):
        LayerMaps(v=LinearMap(eye, eye, torch.zeros(3, 1, 16)))
