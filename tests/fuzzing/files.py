"""Files that were damaged in any way: page files, policies and what these name. They are refused by name, or what was saved is read."""

from __future__ import annotations

import io
import json
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st

from quantkv import LayerMaps, LinearMap, PagedCache, get_format
from quantkv.calibration import Calibration, LayerMoments
from quantkv.full_precision import FullPrecisionTokens
from quantkv.policy import Policy

SHARE = 3

NAMES = {"pages": "kept.pages", "policy": "kept.json", "maps": "kept.maps.safetensors", "calibration": "kept.calibration.safetensors"}
JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(-2, 1 << 40), st.floats(), st.sampled_from(["", "int4", "0", "2-5", "9-", "kept.json"])
    ),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["0", "1-2", "3-", "first", "latest", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@dataclass(frozen=True)
class Case:
    """file: which is damaged. damage: steps, each a way, a place from 0 to 1 and a number; or what a policy's JSON holds in their place."""

    file: str
    way: str
    damage: tuple[tuple[str, float, int], ...] = ()
    content: Any = None


@st.composite
def cases(draw) -> Case:
    file = draw(st.sampled_from(list(NAMES)))
    step = st.tuples(
        st.sampled_from(["flip", "cut", "insert", "overwrite", "move"]), st.floats(0, 1, exclude_max=True), st.integers(0, 255)
    )
    damage = tuple(draw(st.lists(step, max_size=3)))
    if file == "policy" and draw(st.booleans()):
        keys = st.sampled_from(["policy_version", "format", "layers", "maps", "calibration", "full_precision", "more"])
        return Case(
            file,
            "path",
            (),
            draw(st.one_of(JSON, st.dictionaries(keys, JSON, max_size=4).map(lambda d: {"policy_version": 1, "format": "int4"} | d))),
        )
    return Case(file, draw(st.sampled_from(["path", "stream"])), damage)


def cache_of() -> PagedCache:
    cache = PagedCache(get_format("int4").cache_spec(1, 32, block_size=8), 3, k_scale=2.0)
    cache.buffer.random_(generator=torch.Generator().manual_seed(0))
    return cache


def policy_of() -> Policy:
    eye = torch.eye(16)[None]
    maps = {1: LayerMaps(LinearMap(2 * eye, eye / 2, torch.ones(2, 1, 16)))}
    moments = LayerMoments(torch.ones(1, 1, 16).half(), eye, eye)
    return Policy(
        "int4", {0: "int8", 1: "levels4", 2: "levels4"}, maps, Calibration(3, {0: moments, 2: moments}), FullPrecisionTokens(16, 24)
    )


@cache
def whole() -> dict[str, bytes]:
    """The bytes of the files as they were saved."""
    with tempfile.TemporaryDirectory() as folder:
        cache_of().save(Path(folder) / NAMES["pages"])
        policy_of().save(Path(folder) / NAMES["policy"])
        return {file: (Path(folder) / name).read_bytes() for file, name in NAMES.items()}


def damaged(data: bytes, damage: tuple[tuple[str, float, int], ...]) -> bytes:
    for way, place, number in damage:
        at = int(place * len(data))
        if way == "cut":
            data = data[:at]
        elif way == "insert":
            data = data[:at] + bytes([number]) + data[at:]
        elif way == "move":
            data = data[at:] + data[:at]
        elif data:
            byte = data[at] ^ (1 << number % 8) if way == "flip" else number
            data = data[:at] + bytes([byte]) + data[at + 1 :]
    return data


def equal(a: Any, b: Any) -> bool:
    """Two policies, their maps and calibrations by their numbers."""
    same = (a.format, a.layers, a.full_precision, a.maps.keys()) == (b.format, b.layers, b.full_precision, b.maps.keys())
    same = same and all(a.maps[n].fingerprint() == b.maps[n].fingerprint() for n in a.maps)
    return (
        same
        and (a.calibration is None) == (b.calibration is None)
        and (a.calibration is None or a.calibration.digest == b.calibration.digest)
    )


def check(case: Case) -> None:
    """The target."""
    data = damaged(whole()[case.file], case.damage)
    if case.content is not None:
        data = json.dumps(case.content).encode()
    with tempfile.TemporaryDirectory() as folder:
        for file, name in NAMES.items():
            (Path(folder) / name).write_bytes(data if file == case.file else whole()[file])
        path = Path(folder) / NAMES[case.file]
        if case.file == "pages":
            check_pages(case, data, path)
        else:
            check_policy(case, data, Path(folder) / NAMES["policy"])


def check_pages(case: Case, data: bytes, path: Path) -> None:
    target, saved = cache_of(), cache_of()
    target.buffer.fill_(3)
    try:
        target.load(io.BytesIO(data) if case.way == "stream" else path)
    except ValueError as error:
        assert ("BytesIO" if case.way == "stream" else str(path)) in str(error), f"the refusal does not name the file: {error}"
        assert (target.buffer == 3).all(), "a refused file changed something"
        assert data != whole()["pages"], error
    else:
        longer = case.way == "stream" and data.startswith(whole()["pages"])  # a stream may go on
        same_header = torch.equal(target.buffer, saved.buffer)
        assert same_header and (longer or len(data) == len(whole()["pages"])), "a damaged file was read"


def check_policy(case: Case, data: bytes, path: Path) -> None:
    try:
        found = Policy.load(path)
    except ValueError as error:
        assert any(
            word in str(error)
            for word in ("policy", "format", "calibration", "full_precision", "offset", "key_mean", "forward", "metric", "hessian")
        ), error
        assert data != whole()[case.file], error
        return
    assert all(isinstance(name, str) for name in (found.format, *found.layers.values()))
    again = path.with_name("again.json")
    found.save(again)
    assert equal(Policy.load(again), found), "what was loaded is not what is loaded again"
    if case.file != "policy":
        assert equal(found, policy_of()), f"a damaged file of {case.file} was read"
