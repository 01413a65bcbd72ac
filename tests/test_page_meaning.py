"""What the bytes of pages mean: which differences count, which do not, and that whoever refuses pages names both digests."""

import io
import json
import re

import pytest
import torch

from quantkv import LayerMaps, LinearMap, PagedCache, PageViews, copy_pages_between, get_format
from quantkv.page_meaning import MOST_BRACKETS, PageMeaning, codecs_of, rows_meaning

EYE = torch.eye(64)[None]
MEANS = torch.linspace(-1, 1, 2 * 64).view(2, 1, 64)
TURN = LinearMap(torch.eye(64).roll(1, 0)[None], torch.eye(64).roll(1, 0).mT[None])
OTHERS = {  # each differs from the first in one thing that decides what a byte means
    "itself": {},
    "codecs": {"name": "levels4"},
    "the values' codec": {"name": "k4v2"},
    "heads": {"heads": 1},
    "keys' size": {"sizes": (128, 64)},
    "values' size": {"sizes": (64, 128)},
    "tokens of a page": {"block_size": 32},
    "keys' scale": {"k_scale": 2.0},
    "values' scale": {"v_scale": 2.0},
    "keys' rotation": {"maps": LayerMaps(k=TURN)},
    "values' rotation": {"maps": LayerMaps(v=TURN)},
    "key means": {"maps": LayerMaps(k=LinearMap(EYE, EYE, MEANS))},
    "other key means": {"maps": LayerMaps(k=LinearMap(EYE, EYE, -MEANS))},
}


def cache_of(name="int4", heads=2, sizes=(64, 64), block_size=16, **more):
    return PagedCache(get_format(name).cache_spec(heads, *sizes, block_size=block_size), 3, **more)


def test_what_decides_a_byte_decides_the_digest():
    digests = {name: PageMeaning.of(cache_of(**more)).digest for name, more in OTHERS.items()}
    assert len(set(digests.values())) == len(OTHERS), digests
    assert all(re.fullmatch("[0-9a-f]{16}", digest) for digest in digests.values())


def test_what_decides_no_byte_is_left_out():
    first = PageMeaning.of(cache_of(maps=LayerMaps(k=LinearMap(EYE, EYE, MEANS))))
    guided = cache_of(maps=LayerMaps(k=LinearMap(EYE, EYE, MEANS, 2 * EYE), calibration="1f" * 32))
    memory = torch.zeros(2, 3, 5, guided.spec.page_bytes, dtype=torch.uint8)
    elsewhere = PagedCache.wrap(memory[:, :, 1].transpose(0, 1), guided.spec, maps=guided.maps)
    views = PageViews(guided.k, guided.v, guided.format, guided.maps)
    for other in (guided, elsewhere, views):
        meaning = PageMeaning.of(other)
        assert meaning.digest == first.digest
        first.check_same(meaning, "other ", "this needs")


@pytest.mark.parametrize("other", [name for name in OTHERS if name != "itself"])
@pytest.mark.parametrize("way", ["file", "copy"])
def test_whoever_refuses_pages_names_both_digests(other, way):
    theirs, ours, file = cache_of(), cache_of(**OTHERS[other]), io.BytesIO()
    theirs.buffer.fill_(5)
    theirs.save(file)
    file.seek(0)
    digests = [PageMeaning.of(cache).digest for cache in (theirs, ours)]
    with pytest.raises(ValueError, match="what the bytes mean has the digest {}, {} is needed$".format(*digests)):
        ours.load(file) if way == "file" else copy_pages_between(theirs, ours, [0])
    assert not ours.buffer.any()


def test_a_format_is_what_its_codecs_are():
    """One format under two names: pages go from one to the other, by file and by copy."""
    theirs, ours, file = cache_of("k8v4"), cache_of("int8/int4"), io.BytesIO()
    assert theirs.spec.format != ours.spec.format and PageMeaning.of(theirs).digest == PageMeaning.of(ours).digest
    theirs.buffer.random_(generator=torch.Generator().manual_seed(0))
    theirs.save(file)
    file.seek(0)
    ours.load(file)
    assert torch.equal(ours.buffer, theirs.buffer)
    copy_pages_between(theirs, ours, [0, 1, 2], [2, 0, 1])
    assert torch.equal(ours.buffer[[2, 0, 1]], theirs.buffer)
    assert rows_meaning(get_format("k8v4"), LayerMaps()) == rows_meaning(get_format("int8/int4"), LayerMaps())


def test_a_pair_is_no_latent():
    assert codecs_of("int4/bf16") == "int4/bf16" and codecs_of("int4+bf16") == "int4+bf16"
    assert [codecs_of(name) for name in ("k8v4", "int4/int4", "none of ours", None, 3, ["int4"])] == [
        "int8/int4",
        "int4/int4",
        "none of ours",
        None,
        3,
        ["int4"],
    ]


def test_a_header_says_what_a_cache_says():
    for more in OTHERS.values():
        meaning = PageMeaning.of(cache_of(**more))
        assert PageMeaning.of_header(meaning.header()) == meaning


def nested(brackets):
    return "[" * brackets + "]" * brackets


@pytest.mark.parametrize("spec", [None, "int4", "[]", "{}", "{", nested(MOST_BRACKETS), nested(MOST_BRACKETS + 1), nested(100_000)])
def test_a_header_of_anything_is_refused_by_digests(spec):
    meaning = PageMeaning.of(cache_of())
    with pytest.raises(ValueError, match="^header spec=.*: this needs {'.*has the digest [0-9a-f]{16}, " + meaning.digest):
        meaning.check_same(PageMeaning.of_header({**meaning.header(), "spec": spec}), "header ", "this needs")


def test_numbers_of_a_header_are_numbers():
    meaning = PageMeaning.of(cache_of())
    header = {**meaning.header(), "scales": "[1, 1]", "spec": json.dumps({**meaning.spec, "head_size": 64.0})}
    meaning.check_same(PageMeaning.of_header(header), "header ", "this needs")
