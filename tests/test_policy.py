"""Policies: formats by layer, read from files, and the maps of a rank's kv heads."""

import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from quantkv import LayerMaps, LinearMap, policy_file
from quantkv.calibration import Calibration, LayerMoments
from quantkv.full_precision import FullPrecisionTokens
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


def test_layers_of_latents_may_have_a_format_of_their_own(tmp_path):
    """Those that `layers` does not name."""
    policy = Policy("levels4", {1: "int8"}, latents="int4+int8", statistics="auto")
    policy.save(tmp_path / "policy.json")
    assert json.loads((tmp_path / "policy.json").read_text())["latents"] == "int4+int8"
    assert Policy.load(tmp_path / "policy.json") == policy
    assert Policy.from_dict({"format": "levels4", "layers": {1: "int8"}, "latents": "int4+int8", "statistics": "auto"}) == policy
    assert policy.of_latents() == Policy("int4+int8", {1: "int8"}, statistics="auto")
    for given in (policy, policy_file.read(tmp_path / "policy.json")):
        assert [given.name_of(i) for i in range(2)] == ["levels4", "int8"]
        assert [given.of_latents().name_of(i) for i in range(2)] == ["int4+int8", "int8"]
    plain = Policy("levels4")
    assert plain.of_latents() is plain and policy.of_latents().of_latents() == policy.of_latents()


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
    "latents without a name": ({"latents": 4}, r"policy.latents=4: the name of a format, such as int4\+int8, is needed"),
    "unknown format of latents": ({"latents": "int5+int8"}, "format='int5' is unknown"),
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


@pytest.mark.parametrize(
    "given, message",
    [
        ({"layers": ["int8"]}, "layers=.*: a dict of str"),
        ({"layers": {"0": "int8"}}, "layers=.*: a dict of str"),
        ({"layers": {True: "int8"}}, "layers=.*: a dict of str"),
        ({"layers": {-1: "int8"}}, "layers=.*: a dict of str"),
        ({"layers": {0: None}}, "layers=.*: a dict of str"),
        ({"layers": {0: "int8", 1: None}}, "layers=.*: a dict of str"),
        ({"maps": {0: "maps.safetensors"}}, "maps=.*: a dict of LayerMaps"),
        ({"layers": {0: "int5"}}, "format='int5' is unknown"),
        ({"calibration": "model.safetensors"}, "calibration=.*: Calibration or None"),
        ({"full_precision": 16}, "full_precision=.*: FullPrecisionTokens or None"),
        ({"statistics": "on"}, "statistics='on': one of off, auto, require is needed"),
        ({"prompt": "fresh"}, "prompt='fresh': one of own, stored is needed"),
    ],
    ids=str,
)
def test_what_is_no_part_of_a_policy_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Policy("int4", **given)


@pytest.mark.parametrize(
    "layers, written",
    [
        ({}, None),
        ({0: "int8"}, {"0": "int8"}),
        ({7: "int2", 3: "int8", 0: "int8", 2: "int8", 4: "tq4", 8: "int2"}, {"0": "int8", "2-3": "int8", "4": "tq4", "7-8": "int2"}),
    ],
    ids=str,
)
def test_neighbours_of_one_format_are_written_as_a_range(layers, written, tmp_path):
    Policy("int4", layers).save(tmp_path / "policy.json")
    assert json.loads((tmp_path / "policy.json").read_text()) == {"policy_version": 1, "format": "int4"} | (
        {"layers": written} if written else {}
    )
    assert Policy.load(tmp_path / "policy.json").layers == layers


@pytest.mark.parametrize(
    "field, default, other", [("statistics", "off", "auto"), ("prompt", "own", "stored"), ("prompt_precision", "16bit", "8bit")]
)
def test_what_a_policy_chooses(field, default, other, tmp_path):
    """Written where it is not the default, which older versions read; what pages hold does not depend on it."""
    for value in (default, other):
        policy = Policy("int4", **{field: value})
        policy.save(tmp_path / "policy.json")
        written = json.loads((tmp_path / "policy.json").read_text())
        assert written == {"policy_version": 1, "format": "int4"} | ({field: other} if value == other else {})
        assert Policy.load(tmp_path / "policy.json") == policy == Policy.from_dict({"format": "int4", field: value})
        assert policy.fingerprint(3) == Policy("int4").fingerprint(3)
    for wrong in ("", "4bit", 8, None, ["8bit"]):
        with pytest.raises(ValueError, match=rf"^{field}=.*: one of .*{default}.* is needed"):
            Policy("int4", **{field: wrong})
        with pytest.raises(ValueError, match=rf"^policy\.{field}=.*: one of .*{default}.* is needed"):
            Policy.load(write(tmp_path, **{field: wrong}))


def test_a_calibration_that_lies_there_already_is_named_and_compared(tmp_path):
    with_files(2.0).save(tmp_path / "kept.json")
    (tmp_path / "kept.calibration.safetensors").rename(tmp_path / "model.safetensors")
    with_files(2.0).save(tmp_path / "kept.json", calibration="model.safetensors")
    assert json.loads((tmp_path / "kept.json").read_text())["calibration"] == "model.safetensors"
    assert not (tmp_path / "kept.calibration.safetensors").exists()
    with pytest.raises(ValueError, match=r"calibration=.*another calibration than the policy"):
        with_files(4.0).save(tmp_path / "other.json", calibration="model.safetensors")
    assert not (tmp_path / "other.json").exists()


def test_maps(tmp_path):
    eye, tables = 2 * torch.eye(8).repeat(4, 1, 1), torch.randn(3, 4, 8)
    tensors = {"layers.2.k.forward": eye, "layers.2.k.inverse": eye / 4, "layers.2.k.offset": tables}
    save_file(tensors, tmp_path / "maps.safetensors")
    policy = Policy.load(write(tmp_path, maps="maps.safetensors"))
    assert list(policy.maps) == [2] and policy.maps[2].v is None
    assert torch.equal(policy.maps[2].k.forward, eye) and torch.equal(policy.maps[2].k.key_mean, tables)
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
    """Of a rank of a tensor-parallel group: its own heads' matrices and key means; what heads share stays as it is."""
    forward = torch.eye(4) * torch.arange(1.0, 5)[:, None, None]
    key_mean = torch.arange(8.0).view(2, 4, 1).expand(2, 4, 4).contiguous()
    maps = LayerMaps(LinearMap(forward, torch.linalg.inv(forward), key_mean), LinearMap(forward[:1], forward[:1]))
    part = maps.heads(2, 4)
    assert part.k.forward.diagonal(dim1=1, dim2=2)[:, 0].tolist() == [3, 4]
    assert part.k.key_mean[:, :, 0].tolist() == [[2, 3], [6, 7]]
    rows = torch.randn(5, 4, 4)
    assert torch.equal(part.k.apply(rows[:, 2:], torch.float32), maps.k.apply(rows, torch.float32)[:, 2:])
    assert part.v is maps.v


@pytest.mark.parametrize("side", ["k", "v"])
def test_a_map_that_is_given_goes_before_the_calibration_s(side):
    """And only on its side: the other one is the calibration's."""
    eye, other = torch.eye(8)[None], {"k": "v", "v": "k"}[side]
    calibration = Calibration(1, {0: LayerMoments(torch.ones(1, 1, 8, dtype=torch.float16), eye, eye)})
    made = calibration.maps(0, Policy("levels4").of(0))
    given = LinearMap(2 * eye, eye / 2)
    found = Policy("levels4", maps={0: LayerMaps(**{side: given})}, calibration=calibration).maps_of(0)
    assert getattr(found, side) is given
    assert getattr(found, other) is getattr(made, other) and found.calibration == made.calibration


@pytest.mark.parametrize("form", [str, lambda path: path, lambda path: Policy.load(path)], ids=["text", "path", "policy"])
def test_a_policy_is_given_by_what_names_it(form, tmp_path):
    path = write(tmp_path, layers={"0": "int8"})
    given = form(path)
    found = Policy.given(given)
    assert (found.format, found.layers) == ("int4", {0: "int8"})
    assert found is given or not isinstance(given, Policy)
    assert Policy.given("int4") is None and Policy.given(4) is None


def test_a_dict_names_no_files():
    assert Policy.from_dict({"format": "int4", "layers": {0: "int8"}}) == Policy("int4", {0: "int8"})
    for name in ("maps", "calibration"):
        with pytest.raises(ValueError, match=rf"policy\.{name}='beside.safetensors': a dict has no folder to look in: .*{name}=\.\.\."):
            Policy.from_dict({"format": "int4", name: "beside.safetensors"})


@pytest.mark.parametrize(("statistics", "wanted"), [("off", False), ("auto", True), ("require", True)])
def test_statistics_are_wanted_where_there_is_no_calibration(statistics, wanted):
    calibration = Calibration(1, {0: LayerMoments(None, torch.eye(4)[None], torch.eye(4)[None])})
    assert Policy("int4", statistics=statistics).wants_statistics is wanted
    assert Policy("int4", statistics=statistics, calibration=calibration).wants_statistics is False


def test_the_number_of_a_layer_has_few_digits(tmp_path):
    eye = torch.eye(4)[None]
    save_file({"layers.99999.k.forward": eye, "layers.99999.k.inverse": eye.clone()}, tmp_path / "maps.safetensors")
    assert list(Policy.load(write(tmp_path, maps="maps.safetensors")).maps) == [99999]
    save_file({f"layers.{'1' * 40}.k.forward": eye, f"layers.{'1' * 40}.k.inverse": eye.clone()}, tmp_path / "maps.safetensors")
    with pytest.raises(ValueError, match="tensors are named"):
        Policy.load(write(tmp_path, maps="maps.safetensors"))


def with_files(number=1.0):
    """A policy that is written to three files, which differ with the number."""
    eye = torch.eye(4)[None]
    maps = {1: LayerMaps(LinearMap(2 * eye, eye / 2, torch.full((2, 1, 4), number)))}
    return Policy("int4", {0: f"levels{int(number)}"}, maps, Calibration(3, {0: LayerMoments(None, number * eye, eye)}))


def test_a_maps_file_in_which_any_bit_is_flipped_is_refused(tmp_path):
    with_files(3.0).save(tmp_path / "kept.json")
    file = tmp_path / "kept.maps.safetensors"
    whole = file.read_bytes()
    assert torch.equal(Policy.load(tmp_path / "kept.json").maps[1].k.key_mean, torch.full((2, 1, 4), 3.0))
    for place in range(len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        with pytest.raises(ValueError, match=r"policy\.maps="):
            Policy.load(tmp_path / "kept.json")


@pytest.mark.parametrize("field, value", [("digest", "0" * 64), ("digest", None), ("version", "2"), ("format", "quantkv-pages")])
def test_a_maps_file_that_says_something_else_is_refused(tmp_path, field, value):
    with_files(3.0).save(tmp_path / "kept.json")
    file = tmp_path / "kept.maps.safetensors"
    with safe_open(file, "pt") as opened:
        metadata = opened.metadata()
    assert metadata.keys() == {"format", "version", "digest"}
    save_file(load_file(file), file, {name: text for name, text in {**metadata, field: value}.items() if text is not None})
    with pytest.raises(ValueError, match=rf"policy.maps='.*kept.maps.safetensors': {field}={value}: .* is needed"):
        Policy.load(tmp_path / "kept.json")


def test_maps_that_other_tools_wrote_have_no_digest(tmp_path):
    with_files(3.0).save(tmp_path / "kept.json")
    tensors = load_file(tmp_path / "kept.maps.safetensors")
    save_file(tensors, tmp_path / "kept.maps.safetensors", {"format": "pt"})
    assert torch.equal(Policy.load(tmp_path / "kept.json").maps[1].k.forward, 2 * torch.eye(4)[None])
    save_file({**tensors, "layers.1.k.inverse": torch.eye(4)[None]}, tmp_path / "kept.maps.safetensors")
    with pytest.raises(ValueError, match=r"policy.maps=.*kept.maps.safetensors': layers.1.k.inverse: inverse @ forward .* by 1;"):
        Policy.load(tmp_path / "kept.json")


def content(file):
    """Of a JSON file, or the tensors of one of safetensors, whose metadata stand in any order."""
    return file.read_bytes() if file.suffix == ".json" else {name: t.tolist() for name, t in load_file(file).items()}


@pytest.mark.parametrize("older", [False, True])
def test_a_policy_whose_save_fails_leaves_whole_files(tmp_path, monkeypatch, older):
    """At each of its three files in turn: those before it are new, the others are as they were, and the policy's own comes last."""
    names, new, old = ("kept.maps.safetensors", "kept.calibration.safetensors", "kept.json"), tmp_path / "new", tmp_path / "old"
    for folder, number in ((new, 4.0), (old, 2.0)):
        folder.mkdir()
        with_files(number).save(folder / "kept.json")
    fsync = os.fsync
    for failing in range(3):
        left, folder = 2 * failing, tmp_path / str(failing)  # each file asks for its bytes and for its folder

        def until_full(descriptor):
            nonlocal left
            left -= 1
            if left < 0:
                raise OSError("disk full")
            fsync(descriptor)

        folder.mkdir()
        if older:
            with_files(2.0).save(folder / "kept.json")
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", until_full)
            with pytest.raises(OSError, match="disk full"):
                with_files(4.0).save(folder / "kept.json")
        for i, name in enumerate(names):
            if i < failing or older:
                assert content(folder / name) == content((new if i < failing else old) / name), (failing, name)
        assert sorted(os.listdir(folder)) == sorted(names if older else names[:failing])


def test_a_fingerprint_is_of_what_bytes_mean():
    """Not of how that is said, nor of what only guides a writer; layers without keys and values have no part in it."""
    eye = torch.eye(16)
    own, turned = LinearMap(eye[None], eye[None]), LinearMap(2 * eye[None], eye[None] / 2)
    key_mean = LinearMap(eye[None], eye[None], torch.ones(1, 1, 16))
    policies = [
        Policy("int4", {0: "int8"}),
        Policy("int4", {1: "int8"}),
        Policy("int4", {0: "none"}),
        *(Policy("int4", {0: "int8"}, {1: maps}) for maps in map(LayerMaps, (own, turned, key_mean))),
        Policy("int4", {0: "int8"}, {0: LayerMaps(own)}),
        Policy("int4", {0: "int8"}, {1: LayerMaps(v=own)}),
    ]
    found = [policy.fingerprint(2) for policy in policies]
    assert len(set(found)) == len(policies)
    assert Policy("int8", {1: "int4", 5: "int2"}).fingerprint(2) == found[0]
    guided = LinearMap(own.forward, own.inverse, hessian=2 * eye[None])
    assert Policy("int4", {0: "int8"}, {1: LayerMaps(guided)}, full_precision=FullPrecisionTokens(16, 24)).fingerprint(2) == found[3]
    assert policies[2].fingerprint(2, torch.float32) != found[2]
    moments = LayerMoments(torch.zeros(1, 1, 16).half(), eye[None], eye[None])
    calibrated = [Policy("levels4", {0: name}, calibration=Calibration(2, {1: moments})).fingerprint(2) for name in ("int8", "levels4")]
    assert calibrated[0] == calibrated[1]


@pytest.mark.parametrize(
    "text, message",
    [
        ('"format": "int4", "format": "int8"', "the key 'format' stands twice"),
        ('"format": "int4", "layers": {"0": "int8", "0": "int4"}', "the key '0' stands twice"),
        ('"format": "int4", "full_precision": {"sink": 1, "sink": 2}', "the key 'sink' stands twice"),
        ('"format": "int4", "full_precision": {"sink": 1000000000000}', "full_precision.sink=1000000000000: at most 1,048,576 tokens"),
        ('"format": "int4", "full_precision": {"recent": 1048577}', "full_precision.recent=1048577: at most"),
        ('"format": "int4", "full_precision": {"sink": NaN}', "NaN is no number"),
    ],
)
def test_a_policy_says_each_thing_once_and_what_can_be_kept(tmp_path, text, message):
    (tmp_path / "p.json").write_text(f'{{"policy_version": 1, {text}}}')
    with pytest.raises(ValueError, match=message):
        Policy.load(tmp_path / "p.json")


OUTSIDE = (
    "../kept.safetensors",
    "a/../../kept.safetensors",
    "/kept.safetensors",
    "..",
    ".",
    "",
    "C:\\kept",
    "C:kept",
    "a\\..\\kept",
    "\\kept",
)


@pytest.mark.parametrize("part", ["maps", "calibration"])
@pytest.mark.parametrize("name", OUTSIDE)
def test_files_of_a_policy_lie_in_its_folder(tmp_path, part, name):
    with pytest.raises(ValueError, match=rf"policy.{part}=.*: the name of a file in the policy's folder is needed"):
        Policy.load(write(tmp_path, **{part: name}))
    with pytest.raises(ValueError, match=rf"{part}='"):  # asked for: then it is not there
        Policy.load(write(tmp_path, **{part: name}), elsewhere=True)
    if part == "calibration":
        with pytest.raises(ValueError, match=r"calibration=.*: the name of a file in the policy's folder is needed"):
            with_files(2.0).save(tmp_path / "new.json", calibration=name)
        assert not list(tmp_path.glob("new*"))


def test_files_of_a_policy_may_lie_elsewhere_if_asked(tmp_path):
    with_files(2.0).save(tmp_path / "kept.json")
    (tmp_path / "below").mkdir()
    given = {"maps": "../kept.maps.safetensors", "calibration": str(tmp_path / "kept.calibration.safetensors")}
    found = Policy.load(write(tmp_path / "below", **given), elsewhere=True)
    assert found.maps.keys() and found.calibration.digest == with_files(2.0).calibration.digest
    os.link(tmp_path / "kept.maps.safetensors", tmp_path / "below" / "here.safetensors")
    assert Policy.load(write(tmp_path, maps="below/here.safetensors")).maps.keys() == found.maps.keys()
    (tmp_path / "link.safetensors").symlink_to(tmp_path / "below" / "here.safetensors")  # whoever may write to the folder made it
    assert Policy.load(write(tmp_path, maps="link.safetensors")).maps.keys() == found.maps.keys()
