"""What connectors are told of a page's bytes, which connectors are refused, and K/V pairs as types."""

import itertools
import re

import engine
import pytest
import tiny_models
import torch
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1 import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import compute_nixl_compatibility_hash
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.v1 import kv_cache_interface as pages

from quantkv.integrations.vllm.implementation import policy_of
from quantkv.maps import LayerMaps, LinearMap, hadamard
from quantkv.policy import Policy

ARGUMENTS = {"skip_tokenizer_init": True, "max_model_len": 256}
TURN = LinearMap((hadamard(64) / 8).float()[None], (hadamard(64) / 8).float()[None])


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return tiny_models.write("llama", tmp_path_factory.mktemp("llama"))


@pytest.fixture
def seen(llama, tmp_path):
    """What connectors see of an engine's pages: the NIXL hash after each side of a connector is made, and the name of the type."""
    count = itertools.count()

    def configured(kv_cache_dtype, block_size=16, aligned=None, names=("model.layers.0.self_attn.attn",), layout="LBHNC", **given):
        arguments = {"kv_cache_dtype": kv_cache_dtype, "attention_backend": "CUSTOM", "dtype": "float32", **ARGUMENTS, **given}
        extra = {"shared_storage_path": str(tmp_path / f"pages {next(count)}")}
        connector = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both", kv_connector_extra_config=extra)
        config = EngineArgs(llama, **arguments, kv_transfer_config=connector).create_engine_config()
        sizes = {"block_size": block_size, "num_kv_heads": 2, "head_size": 64, "dtype": torch.uint8}
        spec = pages.FullAttentionSpec(**sizes, block_stride_alignment=aligned)
        groups = [pages.KVCacheGroupSpec(list(names), spec)]
        tensors = pages.KVCacheConfig(num_blocks=1, kv_cache_tensors=[], kv_cache_groups=groups, kv_cache_layout=layout)
        found = []
        for role in KVConnectorRole:
            KVConnectorFactory.create_connector(config, role, tensors)
            found.append((compute_nixl_compatibility_hash(config, "CUSTOM"), config.cache_config.cache_dtype))
        assert found[0] == found[1]
        return config, *found[0]

    return configured


def saved(folder, made):
    folder.mkdir()
    made.save(folder / "policy.json")
    return {"additional_config": {"quantkv_policy": str(folder / "policy.json")}}


def test_policies_that_write_other_bytes_have_other_hashes(seen, tmp_path):
    turned = {1: LayerMaps(TURN)}
    key_mean = LinearMap(TURN.forward, TURN.inverse, torch.ones(1, 1, 64))
    made = {
        "one": Policy("int4", {0: "int8"}),
        "another layer": Policy("int4", {1: "int8"}),
        "another format": Policy("levels4", {0: "int8"}),
        "a map": Policy("int4", {0: "int8"}, turned),
        "a key mean": Policy("int4", {0: "int8"}, {1: LayerMaps(key_mean)}),
        "the values' map": Policy("int4", {0: "int8"}, {1: LayerMaps(v=TURN)}),
        "all": Policy("int8"),
    }
    found = {name: seen("quantkv_policy", **saved(tmp_path / name, policy)) for name, policy in made.items()}
    assert len({digest for _, digest, _ in found.values()}) == len(made)


def test_a_policy_at_two_paths_has_one_hash(seen, tmp_path):
    made = Policy("int4", {0: "int8", 1: "levels4"}, {1: LayerMaps(TURN)})
    (config, first, name), (_, second, _) = (seen("quantkv_policy", **saved(tmp_path / n, made)) for n in ("here", "there"))
    assert first == second
    assert policy_of(config).layers == made.layers  # the type is asked for as before
    assert pages.get_kv_quant_mode(name) == pages.KVQuantMode.CUSTOM
    same = Policy("int8", {1: "levels4"}, {1: LayerMaps(TURN)})  # says of layers 0 and 1 what the first says
    assert seen("quantkv_policy", **saved(tmp_path / "same", same))[1] == first


def test_sizes_of_blocks_and_layers_at_16_bits_are_part_of_the_hash(seen):
    plain, again, larger, skipped = (
        seen("quantkv_int4", **more)[1] for more in ({}, {}, {"block_size": 32}, {"kv_cache_dtype_skip_layers": ["1"]})
    )
    assert plain == again and len({plain, larger, skipped}) == 3


def test_where_pages_lie_in_a_packed_block_is_part_of_the_hash(seen):
    one, two = (f"model.layers.{n}.self_attn.attn" for n in range(2))
    made = (
        {"block_size": 80},  # as vLLM plans it
        {"block_size": 80, "aligned": 80},  # packed, in five pages of 16 tokens
        {"block_size": 80, "aligned": 16},  # in one page
        {"block_size": 80, "aligned": 80, "names": (one, two)},
        {"block_size": 80, "aligned": 80, "names": (two, one)},
    )
    assert len({seen("quantkv_int4", **more)[1] for more in made}) == len(made)


def test_where_heads_and_layers_lie_in_a_block_is_part_of_the_hash(seen):
    """Files of whole blocks are found by the name."""
    assert len({seen("quantkv_int4", layout=layout)[1] for layout in ("LBHNC", "BLHNC", "BHLNC")}) == 3


def test_a_type_of_vllms_own_keeps_its_name(seen):
    assert seen("auto")[2] == "auto"


def test_an_engine_with_a_connector_runs_under_the_longer_name(llama, tmp_path):
    """Its pages go to files and come back in another engine."""
    made = saved(tmp_path / "mine", Policy("int4", {0: "int8"}, {1: LayerMaps(TURN)}))
    extra = {"shared_storage_path": str(tmp_path / "pages")}
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    asked = {"tokens": 4, "kv_transfer_config": connector, **ARGUMENTS, **made}
    first, second = (engine.run(llama, "quantkv_policy", [tiny_models.prompt(0, 40)], seed=seed, **asked) for seed in (0, 1))
    for hits, report in enumerate((first, second)):
        assert (report.error, report.formats, "External Cache Hit!" in report.log) == ("", ["int8", "int4"], hits == 1)
    assert first.answers[0].tokens == second.answers[0].tokens


def test_a_folder_of_another_policys_pages_is_refused(llama, tmp_path):
    """Blocks of as many bytes, which vLLM's example connector would take: both digests are named."""
    extra = {"shared_storage_path": str(tmp_path / "pages")}
    connector = {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    policies = {"one": Policy("int4", {}, {1: LayerMaps(TURN)}), "two": Policy("int4", {}, {1: LayerMaps(v=TURN)})}
    first, second = (
        engine.run(
            llama, "quantkv_policy", [tiny_models.prompt(0, 40)], kv_transfer_config=connector, **ARGUMENTS, **saved(tmp_path / n, p)
        )
        for n, p in policies.items()
    )
    assert first.error == "" and second.answers == []
    assert re.search("has blocks of kv_cache_dtype=quantkv_policy.*has the digest [0-9a-f]{16}, [0-9a-f]{16} is needed", second.error)


NIXL = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
REFUSED = {
    "a check that is off": ("int4", {**NIXL, "kv_connector_extra_config": {"enforce_handshake_compat": False}}, "enforce_handshake_compat"),
    "tokens that are moved within blocks": ("int4", {**NIXL, "enable_permute_local_kv": True}, "enable_permute_local_kv"),
    "bytes by head size": ("int4", {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}, "LMCacheConnectorV1"),
    "nothing compared": ("int4", {"kv_connector": "MooncakeConnector", "kv_role": "kv_both"}, "without comparing"),
    "a type whose name says nothing": ("auto", NIXL, "quantkv_none"),
    "one of several": (
        "int4",
        {
            "kv_connector": "MultiConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {
                "connectors": [
                    {"kv_connector": "ExampleConnector", "kv_role": "kv_both"},
                    {**NIXL, "kv_connector_extra_config": {"enforce_handshake_compat": False}},
                ]
            },
        },
        "enforce_handshake_compat",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_connectors_that_would_misread_blocks_are_refused(llama, case):
    stored, connector, said = REFUSED[case]
    name = stored if stored == "auto" else f"quantkv_{stored}"
    report = engine.run(llama, name, **ARGUMENTS, kv_transfer_config=connector)
    assert report.error.startswith(("ValueError", "NotImplementedError")) and said in report.error
    assert "Loading weights took" not in report.log


@pytest.mark.parametrize("pair", ["levels4/trellis2", "int8/none"])
def test_pairs_are_types(llama, pair):
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    asked = parser.parse_args(["--model", llama, "--kv-cache-dtype", f"quantkv_{pair}"])
    assert EngineArgs.from_cli_args(asked).kv_cache_dtype == f"quantkv_{pair}"
    report = engine.run(llama, f"quantkv_{pair}", [tiny_models.prompt(0, 40)], tokens=2, **ARGUMENTS)
    assert report.error == ""
    assert report.formats == [pair.replace("none", "fp32")] * 2
