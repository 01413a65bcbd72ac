"""Policies: formats by layer, read from files, and the maps of a rank's kv heads."""

import json

import pytest
import torch
from safetensors.torch import save_file

from quantkv import LayerMaps, LinearMap
from quantkv.policy import Policy


def write(folder, **given):
    path = folder / "policy.json"
    path.write_text(json.dumps({"policy_version": 1, "format": "int4", **given}))
    return path


def test_formats_by_layer(tmp_path):
    policy = Policy.load(write(tmp_path, layers={"0": "int8", "2-4": "int8/int4", "5": "none"}))
    assert [policy.of(i).name for i in range(7)] == ["int8", "int4", "int8/int4", "int8/int4", "int8/int4", "bf16", "int4"]
    assert policy.of(5, torch.float32).name == "fp32"
    policy.check(6)
    with pytest.raises(ValueError, match=r"policy.layers=\[5\]: the model has layers 0 to 4"):
        policy.check(5)


WRONG = {
    "unknown format": ({"format": "int5"}, "format='int5' is unknown"),
    "unknown format of a layer": ({"layers": {"1": "int44"}}, "did you mean 'int4'"),
    "twice": ({"layers": {"1-3": "int8", "3": "int2"}}, "layer 3 is named twice"),
    "backwards": ({"layers": {"3-1": "int8"}}, "'3-1'|3-1: a number"),
    "no number": ({"layers": {"last": "int8"}}, "last: a number of a layer"),
    "negative": ({"layers": {"-1": "int8"}}, "-1: a number of a layer"),
    "no object": ({"layers": ["int8"]}, "policy.layers="),
    "version": ({"policy_version": 2}, "policy_version=2: 1 is needed"),
    "unknown field": ({"formats": {}}, "policy="),
    "no file of maps": ({"maps": "absent.safetensors"}, "policy.maps=.*absent"),
}


@pytest.mark.parametrize("given, message", WRONG.values(), ids=WRONG)
def test_wrong_files_are_refused(given, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        Policy.load(write(tmp_path, **given))


@pytest.mark.parametrize("text", ["", "{", "[]", '{"policy_version": 1}'])
def test_files_that_are_no_policy(text, tmp_path):
    (tmp_path / "policy.json").write_text(text)
    with pytest.raises(ValueError, match="policy="):
        Policy.load(tmp_path / "policy.json")
    with pytest.raises(ValueError, match=r"policy=.*absent"):
        Policy.load(tmp_path / "absent.json")


def test_maps(tmp_path):
    eye, tables = 2 * torch.eye(8).repeat(4, 1, 1), torch.randn(3, 4, 8)
    tensors = {"layers.2.k.forward": eye, "layers.2.k.inverse": eye / 4, "layers.2.k.offset": tables}
    save_file(tensors, tmp_path / "maps.safetensors")
    policy = Policy.load(write(tmp_path, maps="maps.safetensors"))
    assert list(policy.maps) == [2] and policy.maps[2].v is None
    assert torch.equal(policy.maps[2].k.forward, eye) and torch.equal(policy.maps[2].k.offset, tables)
    with pytest.raises(ValueError, match=r"policy.maps=\[2\]"):
        policy.check(2)
    for name, message in (("layers.2.k.scale", "tensors are named"), ("layers.x.k.forward", "tensors are named")):
        save_file({**tensors, name: eye.clone()}, tmp_path / "maps.safetensors")
        with pytest.raises(ValueError, match=message):
            Policy.load(tmp_path / "policy.json")
    save_file({"layers.2.k.forward": eye}, tmp_path / "maps.safetensors")
    with pytest.raises(ValueError, match="needs forward and inverse"):
        Policy.load(tmp_path / "policy.json")


def test_maps_of_some_heads():
    """Of a rank of a tensor-parallel group: its own heads' matrices and offsets; what heads share stays as it is."""
    forward = torch.eye(4) * torch.arange(1.0, 5)[:, None, None]
    offset = torch.arange(8.0).view(2, 4, 1).expand(2, 4, 4).contiguous()
    maps = LayerMaps(LinearMap(forward, torch.linalg.inv(forward), offset), LinearMap(forward[:1], forward[:1]))
    part = maps.heads(2, 4)
    assert part.k.forward.diagonal(dim1=1, dim2=2)[:, 0].tolist() == [3, 4]
    assert part.k.offset[:, :, 0].tolist() == [[2, 3], [6, 7]]
    rows = torch.randn(5, 4, 4)
    assert torch.equal(part.k.apply(rows[:, 2:], torch.float32), maps.k.apply(rows, torch.float32)[:, 2:])
    assert part.v is maps.v
