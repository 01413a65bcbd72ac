"""Every public entry point with one argument that is anything: it is served where that is legal; else a ValueError or a NotImplementedError
names the argument, and nothing has changed."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from hypothesis import strategies as st

import quantkv
from quantkv import LayerMaps, LinearMap, PagedCache, PageStore, get_format
from quantkv.full_precision import FullPrecisionTokens
from quantkv.packing import pack, unpack
from quantkv.page_table import PageTable
from quantkv.policy import Policy

from . import anything as a
from .anything import FLOATS, INDEX

SHARE = 8

HEADS, D, PAGES, SIZE = 2, 16, 6, 8
LENS, QUERIES, STARTS = [9, 3, 12], [2, 1, 1], [0, 2, 3, 4]


@dataclass
class Entry:
    """call: given the fixture and the arguments. given: arguments that are legal together. legal: for each argument that is replaced,
    what is legal in its place. names: by which an argument may be named in a refusal, where that is not its own name.
    state: of the fixture, to be compared before and after a refusal."""

    fixture: Callable[[], Any]
    call: Callable[..., Any]
    given: dict[str, Any]
    legal: dict[str, a.Legal]
    names: dict[str, tuple[str, ...]] = field(default_factory=dict)
    state: Callable[[Any], Any] = lambda fixture: None


@dataclass(frozen=True)
class Case:
    entry: str
    argument: str
    value: Any


def cache_of(name: str = "int8", pages: int = PAGES, **options: Any) -> PagedCache:
    cache = PagedCache(get_format(name).cache_spec(HEADS, D, block_size=SIZE), pages, **options)
    cache.buffer.random_(0, 64, generator=torch.Generator().manual_seed(0))
    for side in (cache.k, cache.v):
        if side.meta is not None:
            side.meta.fill_(0.01)
    return cache


def key_mean_map(heads: int = 1) -> LayerMaps:
    eye = torch.eye(D).expand(heads, D, D).contiguous()
    return LayerMaps(LinearMap(eye, eye, torch.ones(2, heads, D)))


def bytes_of(cache: PagedCache) -> bytes:
    return cache.buffer.numpy().tobytes()


TABLE = torch.tensor([[0, 1], [2, 0], [3, 4]], dtype=torch.int32)
ATTEND = dict(
    q=torch.zeros(4, 4, D),
    block_table=TABLE,
    seq_lens=torch.tensor(LENS),
    cu_seqlens_q=torch.tensor(STARTS),
    qq_bias=None,
    alibi_slopes=torch.zeros(4),
    window=4,
)
OPTIONS = {
    "causal": a.either(a.boolean, a.tensor((3,), ["bool"])),
    "window": a.integer(0, 2**30),
    "chunk_lookback": a.integer(-1, 3),
    "softcap": a.number(0, high=512),
    "sinks": a.tensor((4,), FLOATS, none=True, high=3.5e38),  # infinity takes all of the weight
    "alibi_slopes": a.tensor((4,), FLOATS, none=True),
    "alibi_sqrt": a.boolean,
    "qq_bias": lambda v: v is None or (a.tensor((None, None), FLOATS)(v) and v.shape[0] >= 2),
    "prefix_ranges": a.tensor((3, None, 2), INDEX, none=True),
    "clamp_prefix_to_window": a.boolean,
    "output_scale": a.number(0, above=True, none=True),
    "batch_invariant": a.boolean,
    "prompt_precision": a.among("16bit", "8bit"),
}
PLACES = {
    "block_table": lambda v: a.tensor((3, None), INDEX, low=0, high=PAGES)(v) and v.shape[1] >= 2,
    "seq_lens": a.tensor((3,), INDEX, low=2, high=17),
    "cu_seqlens_q": a.never,
    "key_start": lambda v: a.tensor((3,), INDEX, none=True, low=-4, high=1 << 40)(v),
    "key_range": a.tensor((3, 2), INDEX, none=True),
    "scale": a.number(none=True),
    "max_query_len": a.integer(2, none=True),
    "max_seq_len": a.integer(12, none=True),
    "lengths": lambda v: v is None,
    "implementation": a.among("auto", "reference"),
}
SPREAD = {"lens": ("seq_lens",), "cu_seqlens_q": ("cu_seqlens_q", "seq_lens"), "seq_lens": ("seq_lens", "block_table", "cu_seqlens_q")}
WRITE = dict(key=torch.zeros(4, HEADS, D), value=torch.zeros(4, HEADS, D), slot_mapping=torch.arange(4), positions=torch.arange(4))
WRITES = {
    "key": a.tensor((4, HEADS, D), ["float32"]),
    "value": a.tensor((4, HEADS, D), ["float32"]),
    "slot_mapping": a.tensor((4,), INDEX, low=-(1 << 40), high=PAGES * SIZE),
    "positions": a.tensor((4,), INDEX, low=0),
    "implementation": a.among("auto", "reference"),
}
NAMED = {"key": ("key", "value", "slot_mapping"), "value": ("value", "key")}  # two sizes that differ: either may be named
MATRIX = {"forward": ("forward",), "inverse": ("inverse",), "key_mean": ("key_mean",), "hessian": ("hessian",)}


def _filled(v: Any) -> bool:
    """A matrix that has an inverse, or tells errors apart: none that is filled with one number, but of one row."""
    return a.tensor((None, 1, 1), ["float32"])(v) and v.fill in (1, 2, 100)


def _one(v: Any) -> bool:
    """What undoes, or is undone by, the matrix 1 of one row."""
    return a.tensor((1, 1, 1), ["float32"])(v) and v.fill == 1


def _layered(name: str, **options: Any) -> Callable[[], PagedCache]:
    return lambda: cache_of(name, **options)


def _store() -> PageStore:
    return PageStore([cache_of(), cache_of("int4")], 3)


def _table() -> PageTable:
    table = PageTable(SIZE, 3)
    table.append(LENS)
    return table


def _prepared_attend(cache: PagedCache, **given: Any) -> Any:
    q = given.pop("q")
    return quantkv.prepare_attend(**given)(cache, q)


def _prepared_write(cache: PagedCache, key: Any, value: Any, **given: Any) -> Any:
    return quantkv.prepare_write(**given)(cache, key, value)


def _entries() -> dict[str, Entry]:
    in_words = a.among(*quantkv.available_formats(), "none", "auto", "bfloat16", "float16", "float32", "half")
    entries = {
        "attend": Entry(
            _layered("int8"),
            lambda cache, **given: cache.attend(**given),
            ATTEND,
            {
                **PLACES,
                **OPTIONS,
                "q": lambda v: a.tensor((4, None, D), FLOATS)(v) and v.shape[1] == 4,
                "out": a.tensor((4, 4, D), FLOATS, none=True),
                "more": a.never,
            },
            {**SPREAD, "more": ("options",), "chunk_lookback": ("chunk_lookback", "window")},
            bytes_of,
        ),
        "prepare_attend": Entry(
            _layered("int4"),
            _prepared_attend,
            ATTEND,
            {**PLACES, **OPTIONS, "q": lambda v: a.tensor((4, 4, D), FLOATS)(v)},
            {**SPREAD, "chunk_lookback": ("chunk_lookback", "window")},
            bytes_of,
        ),
        "write": Entry(_layered("int8", maps=key_mean_map()), lambda cache, **given: cache.write(**given), WRITE, WRITES, NAMED, bytes_of),
        "prepare_write": Entry(
            _layered("levels4"), _prepared_write, WRITE, {**WRITES, "positions": a.tensor((4,), INDEX, none=True, low=0)}, NAMED, bytes_of
        ),
        "dequantize": Entry(
            _layered("levels4", maps=key_mean_map()),
            lambda cache, **given: cache.dequantize(**given),
            dict(slots=torch.arange(4), positions=torch.arange(4)),
            {"slots": a.tensor((4,), INDEX, low=0, high=PAGES * SIZE), "positions": a.tensor((4,), INDEX, low=0), "dtype": a.never},
            {"slots": ("slots", "positions")},
        ),
        "copy_pages": Entry(
            _layered("int8"),
            lambda cache, **given: cache.copy_pages(**given),
            dict(source=torch.tensor([0, 1]), target=torch.tensor([2, 3])),
            {"source": a.tensor((2,), INDEX, low=0, high=PAGES), "target": a.never},
            {"source": ("source", "target"), "target": ("target",)},
            bytes_of,
        ),
        "PagedCache": Entry(
            lambda: None,
            lambda _, **given: PagedCache(**given),
            dict(spec=get_format("int8").cache_spec(HEADS, D, block_size=SIZE), num_blocks=2),
            {
                "spec": a.never,
                "num_blocks": a.integer(1, 1 << 16),
                "device": a.among("cpu"),
                "buffer": lambda v: v is None,
                "maps": lambda v: v is None,
                "k_scale": a.number(0, above=True),
                "v_scale": a.number(0, above=True),
            },
        ),
        "wrap": Entry(
            lambda: None,
            lambda _, **given: PagedCache.wrap(**given),
            dict(buffer=cache_of().buffer, spec=cache_of().spec),
            {"buffer": a.never, "spec": a.never},
        ),
        "save": Entry(
            _layered("int8"), lambda cache, **given: cache.save(**given), dict(file=io.BytesIO()), {"pages": a.pages(PAGES, none=True)}
        ),
        "load": Entry(
            _layered("int8"),
            lambda cache, pages: cache.load(_saved(2), pages),
            dict(pages=[0, 1]),
            {"pages": a.pages(PAGES, 2, none=True)},
            state=bytes_of,
        ),
        "copy_pages_between": Entry(
            lambda: (cache_of(), cache_of()),
            lambda pair, **given: quantkv.copy_pages_between(*pair, **given),
            dict(pages=[0, 1], target_pages=[2, 3]),
            {"pages": a.pages(PAGES, 2), "target_pages": a.pages(PAGES, 2, none=True)},
            {"pages": ("pages", "target_pages")},
            lambda pair: bytes_of(pair[1]),
        ),
        "PageStore": Entry(
            lambda: None,
            lambda _, **given: PageStore(**given),
            dict(caches=[cache_of()], num_pages=2),
            {"num_pages": a.integer(1, 1 << 16), "caches": a.never},
        ),
        "PageStore.store": Entry(
            _store,
            lambda store, pages: store.store(pages),
            dict(pages=[0]),
            {"pages": lambda v: a.pages(PAGES)(v) and len(a.listed(v)) <= 3},
            state=lambda store: store.room,
        ),
        "PageStore.load": Entry(
            _store,
            lambda store, stored, pages: store.load(store.store([0]) if stored is ... else stored, pages),
            dict(stored=..., pages=[2]),
            {"stored": a.never, "pages": a.pages(PAGES, 1)},
            state=lambda store: [bytes_of(c) for c in store.caches],
        ),
        "get_format": Entry(
            lambda: None,
            lambda _, **given: get_format(**given),
            dict(name="none"),
            {"name": in_words, "dtype": a.never},
            {"name": ("format",)},
        ),
        "cache_spec": Entry(
            lambda: None,
            lambda _, **given: get_format("int4").cache_spec(**given),
            dict(num_kv_heads=2, head_size=64, head_size_v=64, block_size=16),
            {
                "num_kv_heads": a.integer(1),
                "head_size": lambda v: a.integer(1)(v) and v % 8 == 0,
                "head_size_v": lambda v: v is None or (a.integer(1)(v) and v % 8 == 0),
                "block_size": lambda v: a.integer(1)(v) and v % 8 == 0,
            },
        ),
        "RowLayout": Entry(
            lambda: None,
            lambda _, **given: quantkv.RowLayout(**given),
            dict(code_bits=4),
            {"code_bits": a.integer(1), "meta": lambda v: v == ()},
        ),
        "LinearMap": Entry(
            lambda: None,
            lambda _, **given: LinearMap(**given),
            dict(forward=torch.ones(1, 1, 1), inverse=torch.ones(1, 1, 1), key_mean=None, hessian=None),
            {
                "forward": _one,
                "inverse": _one,
                "key_mean": lambda v: (
                    v is None or (a.tensor((None, 1, 1), ["float32"])(v) and v.shape[0] > 0 and v.fill in (0, 1, 2, -1, 100))
                ),
                "hessian": lambda v: (
                    v is None or ((_filled(v) or (a.tensor((None, 1, 1), ["float32"])(v) and v.fill == 0)) and v.shape[0] > 0)
                ),
            },
            MATRIX,
        ),
        "LayerMaps": Entry(lambda: None, lambda _, **given: LayerMaps(**given), {}, {"k": lambda v: v is None, "v": lambda v: v is None}),
        "FullPrecisionTokens": Entry(
            lambda: None,
            lambda _, **given: FullPrecisionTokens(**given),
            dict(sink=1, recent=1),
            {"sink": a.integer(0), "recent": a.integer(0)},
        ),
        "Policy": Entry(
            lambda: None,
            lambda _, **given: Policy(**given),
            dict(format="int4"),
            {
                "format": in_words,
                "layers": lambda v: v == {},
                "maps": lambda v: v == {},
                "calibration": lambda v: v is None,
                "full_precision": lambda v: v is None,
            },
        ),
        "Policy.check": Entry(
            lambda: Policy("int4", {3: "int8"}),
            lambda policy, **given: policy.check(**given),
            dict(num_layers=4),
            {"num_layers": a.integer(4)},
            {"num_layers": ("num_layers", "layers")},
        ),
        "pack": Entry(
            lambda: None,
            lambda _, **given: pack(**given),
            dict(values=torch.zeros(8, dtype=torch.int64), bits=4),
            {"bits": lambda v: isinstance(v, int) and 1 <= v <= 8},
        ),
        "unpack": Entry(
            lambda: None,
            lambda _, **given: unpack(**given),
            dict(codes=torch.zeros(16, dtype=torch.uint8), bits=4),
            {"bits": lambda v: isinstance(v, int) and v in (1, 2, 4, 8)},
            {"bits": ("bits", "codes")},
        ),
    }
    for method, argument, legal in (
        ("append", "counts", a.integers_up_to(*[math.inf] * 3)),
        ("reserve", "lengths", a.integers_up_to(*[math.inf] * 3)),
        ("settle", "lengths", a.integers_up_to(16, 8, 16)),
        ("truncate", "lengths", a.integers_up_to(*LENS)),
        ("release", "positions", a.integers_up_to(*LENS)),
        ("select", "indices", a.indices(3)),
    ):
        entries[f"PageTable.{method}"] = Entry(
            _table,
            lambda table, method=method, **given: getattr(table, method)(*given.values()),
            {argument: [0, 0, 0]},
            {argument: legal},
            state=lambda table: copy.deepcopy(vars(table)),
        )
    return entries


def _saved(pages: int) -> io.BytesIO:
    file = io.BytesIO()
    cache_of().save(file, list(range(pages)))
    file.seek(0)
    return file


ENTRIES = _entries()  # and those of `names`


@st.composite
def cases(draw) -> Case:
    name = draw(st.sampled_from(list(ENTRIES)))
    return Case(name, draw(st.sampled_from(list(ENTRIES[name].legal))), draw(a.ANYTHING))


def check(case: Case) -> None:
    """The target."""
    serve(ENTRIES[case.entry], case)


def serve(entry: Entry, case: Case) -> None:
    """The call with its one argument, measured."""
    fixture = entry.fixture()
    before = entry.state(fixture)
    legal = entry.legal[case.argument](case.value)
    try:
        entry.call(fixture, **{**entry.given, case.argument: a.made(case.value)})
    except (ValueError, NotImplementedError) as error:
        assert not legal, f"legal, but refused: {error}"
        names = entry.names.get(case.argument, (case.argument,))
        assert any(name in str(error) for name in names), f"the refusal does not name {case.argument}: {error}"
        assert entry.state(fixture) == before, "a refused call changed something"
    else:
        assert legal, "what is not legal was served"
