"""Rotations of queries and keys as `calibrate` finds them: tables of angles, layouts, other positions, averages; against plain loops."""

import pytest
import torch

pytest.importorskip("transformers")

from quantkv.model_analysis import rotation
from quantkv.model_analysis.rotation import Average, Layout, Rotary, Table, form_of, table_of, unturned

ANGLES = torch.rand(2, 5, 4, generator=torch.Generator().manual_seed(0)) * 3  # of contexts, tokens, pairs
SHAPES = {  # how a model repeats the angles of its pairs
    "halves": lambda t: torch.cat([t, t], -1),
    "neighbours": lambda t: t.repeat_interleave(2, -1),
    "once": lambda t: t,
}


def turning(table, layout, rows):
    """`rows [.., N, D]` turned pair by pair."""
    out, count = rows.clone(), table.cos.shape[1]
    first = 0 if layout.place == "first" else rows.shape[-1] - 2 * count
    sign = -1 if layout.backwards else 1
    for pair in range(count):
        a, b = (pair, pair + count) if layout.pairs == "halves" else (2 * pair, 2 * pair + 1)
        a, b, cos, sin = a + first, b + first, table.cos[:, pair], sign * table.sin[:, pair]
        out[..., a], out[..., b] = cos * rows[..., a] - sin * rows[..., b], cos * rows[..., b] + sin * rows[..., a]
    return out


@pytest.mark.parametrize("kind", [tuple, list])
@pytest.mark.parametrize("form", SHAPES)
def test_a_table_has_each_angle_once(form, kind):
    given = kind(SHAPES[form](t) for t in (ANGLES.cos(), ANGLES.sin()))
    assert form_of(given) == form
    table = table_of(given, form)
    assert torch.equal(table.cos, ANGLES.cos().view(10, 4)) and torch.equal(table.sin, ANGLES.sin().view(10, 4))
    halfway = [SHAPES[form](ANGLES.cos()), torch.rand(2, 5, 8 if form != "once" else 4)]  # sines that are not repeated so
    assert form_of(halfway) == "once"


def test_complex_numbers_are_cosines_and_sines():
    given = torch.polar(torch.ones_like(ANGLES), ANGLES)
    assert form_of(given) == "once"
    table = table_of(given, "once")
    assert torch.allclose(table.cos, ANGLES.cos().view(10, 4)) and torch.allclose(table.sin, ANGLES.sin().view(10, 4))
    assert form_of((ANGLES[..., :3].cos(), ANGLES[..., :3].sin())) == "once"  # an odd number has no halves


@pytest.mark.parametrize(
    "given",
    [
        None,
        "ab",
        torch.ones(2, 4),
        (torch.ones(2, 4),),
        (torch.ones(2, 4),) * 3,
        (torch.ones(2, 4), None),
        (torch.ones(2, 4), torch.ones(2, 4).long()),
        (torch.ones(4), torch.ones(4)),
        {"cos": torch.ones(2, 4), "sin": torch.ones(2, 4)},
    ],
    ids=repr,
)
def test_what_is_no_pair_of_tables_is_none(given):
    assert form_of(given) is None


def test_axes_of_images_are_one_in_text():
    """Of time, height and width. Where they differ there is no table."""
    axes = [SHAPES["halves"](t).expand(3, 2, 5, 8) for t in (ANGLES.cos(), ANGLES.sin())]
    assert form_of(axes) == "halves" and torch.equal(table_of(axes, "halves").sin, ANGLES.sin().view(10, 4))
    for part in (0, 1):
        other = [t.clone() for t in axes]
        other[part][2, 0, 0, 0] += 1
        assert form_of(other) is None
    for some, rows in (([t[:1] for t in axes], 10), ([t[:2] for t in axes], 10), ([t[:, :1] for t in axes], 5)):
        assert table_of(some, "halves").cos.shape == (rows, 4)


def test_nothing_is_turned_by_angles_of_zero():
    cos, sin = unturned((ANGLES.cos(), ANGLES.sin()))
    assert torch.equal(cos, torch.ones(2, 5, 4)) and torch.equal(sin, torch.zeros(2, 5, 4))
    assert isinstance(unturned([ANGLES, ANGLES]), list)
    plain = unturned(torch.polar(torch.ones_like(ANGLES), ANGLES))
    assert torch.equal(plain, torch.ones(2, 5, 4, dtype=torch.complex64))


LAYOUTS = [
    Layout(pairs, place, backwards) for pairs in ("halves", "neighbours") for place in ("first", "last") for backwards in (False, True)
]


@pytest.mark.parametrize("size", [8, 12])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_layout_turns_pairs_of_dimensions(layout, size):
    """A head of as many dimensions as the angles turn has no others."""
    assert Layout("halves", "first") == Layout("halves", "first", False)
    table, rows = Table(1.5 * ANGLES[0].cos(), 1.5 * ANGLES[0].sin()), torch.randn(2, 3, 5, size)
    turned = turning(table, layout, rows)
    turn = layout.turn(table, size)
    assert torch.allclose(turn.apply(rows), turned, atol=1e-6) and torch.allclose(turn.inverse().apply(turned), rows, atol=1e-5)
    same = Layout(layout.pairs, "first", layout.backwards) if size == 8 else layout  # then the first are the last
    assert Layout.found(rows, turned, table, torch.float32) == same
    assert layout.turn(table, 7) is None


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 8 * 2**-7), (torch.float16, 8 * 2**-10)])
def test_a_layout_is_found_within_the_rounding_of_a_models_dtype(dtype, bound):
    """Of the norm of all rows."""
    table, layout, rows = Table(ANGLES[0].cos(), ANGLES[0].sin()), Layout("halves", "first"), torch.randn(2, 5, 8)
    exact = layout.turn(table, 8).apply(rows)
    strays = torch.randn(2, 5, 8)
    for part, found in ((0.95, layout), (1.05, None)):
        after = exact + part * bound * exact.norm() * strays / strays.norm()
        assert Layout.found(rows, after, table, dtype) == found


def test_rows_of_zeros_fit_any_layout():
    table, rows = Table(ANGLES[0].cos(), ANGLES[0].sin()), torch.zeros(2, 5, 8)
    assert Layout.found(rows, rows, table, torch.float32) == Layout("halves", "first")


class Angles(torch.nn.Module):
    """A rotary module that keeps what it was called for."""

    def __init__(self, rates=(1.0, 0.1)):
        super().__init__()
        self.rates, self.calls = torch.tensor(rates), []

    def forward(self, x, positions, layer_type=None):
        self.calls.append((x, positions, layer_type))
        angles = positions[..., None] * self.rates
        return angles.cos(), angles.sin()


@pytest.mark.parametrize(
    ("positions", "shape"), [(torch.arange(5), (9,)), (torch.arange(5)[None], (1, 9)), (torch.arange(10).view(2, 5), (1, 9))]
)
def test_a_module_is_asked_for_other_positions_as_it_was_called(positions, shape):
    """Of one context, by a copy of it; hidden states are one number, and what is no tensor stays."""
    module = Angles()
    rotary = Rotary(module, (torch.ones(2, 5, 8, dtype=torch.bfloat16) * 3,), {"positions": positions, "layer_type": "full"}, "once")
    (table,) = rotary.tables(9, 4)
    angles = torch.arange(9)[:, None] * module.rates
    assert torch.allclose(table.cos, angles.cos()) and torch.allclose(table.sin, angles.sin()) and module.calls == []
    seen = []
    module.register_forward_pre_hook(lambda module, args, kwargs: seen.append((args, kwargs)), with_kwargs=True)
    list(rotary.tables(9, 4))
    ((x,), given) = seen[0]
    assert x.tolist() == [[[3.0]]] and x.dtype == torch.float32
    assert given["positions"].shape == shape and given["positions"].flatten().tolist() == list(range(9)) and given["layer_type"] == "full"


def test_axes_of_positions_are_kept():
    """Three of them, for images."""
    rotary = Rotary(Angles(), (torch.ones(1), torch.arange(5).expand(3, 2, 5)), {}, "once")
    seen = []
    rotary.module.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    (table,) = rotary.tables(4, 4)
    assert seen[0].shape == (3, 1, 4) and torch.allclose(table.cos, (torch.arange(4)[:, None] * rotary.module.rates).cos())


def test_calls_of_one_rotation_have_one_key():
    """Whatever positions and hidden states."""
    module = Angles()
    key = lambda module=module, form="once", args=(torch.ones(1), "full"), **kwargs: Rotary(module, args, kwargs, form).key
    assert key() == key(args=(torch.zeros(3), "full")) == key(positions=torch.ones(2))
    assert len({key(), key(module=Angles()), key(form="halves"), key(args=(torch.ones(1), "window")), key(scale=2)}) == 5


@pytest.mark.parametrize(("kind", "lengths"), [(None, [16, 16, 6]), ("dynamic", [8, 8, 8, 8, 6]), ("longrope", [8, 8, 8, 8, 6])])
def test_angles_that_depend_on_how_long_a_text_is_are_those_of_each_bucket(kind, lengths, monkeypatch):
    """Of others whole buckets are asked for at once."""
    monkeypatch.setattr(rotation, "AT_ONCE", 20)
    module = Angles()
    if kind is not None:
        module.rope_type = kind
    tables = list(Rotary(module, (torch.ones(1), torch.arange(5)[None]), {}, "once").tables(38, 8))
    assert [len(table.cos) for table in tables] == lengths
    assert torch.allclose(torch.cat([table.cos for table in tables]), (torch.arange(38)[:, None] * module.rates).cos())


@pytest.mark.parametrize("layout", LAYOUTS[::3], ids=str)
def test_averages_are_those_of_all_positions(layout):
    """Of means by bucket, the last of which is shorter, and of second moments over all."""
    angles = torch.arange(20)[:, None] * torch.tensor([1.0, 0.3])
    cos, sin = 1.25 * angles.cos(), 1.25 * angles.sin()
    found = Average.of(iter([Table(cos[:16], sin[:16]), Table(cos[16:], sin[16:])]), layout, 6, 8)
    rows = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(1)).double()  # of two heads
    turned = turning(Table(cos.double(), sin.double()), layout, rows[:, :, None].expand(-1, -1, 20, -1))
    mean = rows.mean(1)
    of_mean = turning(Table(cos.double(), sin.double()), layout, mean[:, None].expand(-1, 20, -1))
    for bucket, (start, end) in enumerate(((0, 8), (8, 16), (16, 20))):
        assert torch.allclose(found.turned_mean(mean)[bucket].double(), of_mean[:, start:end].mean(1), atol=1e-5)
    assert len(found.turned_mean(mean)) == 3
    expected = torch.einsum("hrnd,hrne->hde", turned, turned) / 20
    assert torch.allclose(found.turned_moments(torch.einsum("hrd,hre->hde", rows, rows)), expected, atol=1e-5)
