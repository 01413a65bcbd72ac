"""Which names of SGLang the adapter relies on: all are there, the list is whole, and a name that is gone is said with what breaks."""

import ast
from dataclasses import replace
from pathlib import Path

import pytest

sglang = pytest.importorskip("sglang")

import quantkv.integrations.sglang as plug_in  # noqa: E402
from quantkv.integrations.sglang import contract  # noqa: E402

SOURCES = sorted(Path(plug_in.__file__).parent.glob("*.py"))
BY_PATH = {name.path: name for name in contract.NAMES}
OF = {  # objects of SGLang, by the names that the adapter gives them
    "configurator": "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator",
    "runner": "sglang.srt.model_executor.model_runner.ModelRunner",
    "forward_batch": "sglang.srt.model_executor.forward_batch_info.ForwardBatch",
    "module": "sglang.srt.layers.radix_attention.RadixAttention",
    "info": "sglang.srt.model_executor.model_runner_components.layer_setup.ModelLayerInfo",
    "model_config": "sglang.srt.configs.model_config.ModelConfig",
    "mode": "sglang.srt.model_executor.forward_batch_info.ForwardMode",
}


def test_every_name_is_there():
    assert contract.missing() == []


def _imported():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "sglang":
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "sglang")


def test_the_list_holds_whatever_is_imported():
    listed = {".".join(name.split(".")[:n]) for name in BY_PATH for n in range(1, name.count(".") + 2)}
    assert set(_imported()) - listed == set()


def test_the_list_holds_whatever_is_read_of_sglangs_objects():
    read = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in OF:
                read.setdefault(OF[node.value.id], set()).add(node.attr)
    assert read.keys() == set(OF.values())
    for owner, attributes in read.items():
        listed = {"name", *BY_PATH[owner].has, *(path.rpartition(".")[2] for path in BY_PATH if path.startswith(f"{owner}."))}
        assert attributes <= listed, owner


def _replaced(listed, **changes):
    return tuple(replace(name, **changes) if name.path == listed else name for name in contract.NAMES)


FORWARD = "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.forward_extend"


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (_replaced("sglang.srt.environ.envs", path="sglang.srt.environ.no_such"), "sglang.srt.environ.no_such (arguments)"),
        (_replaced(OF["info"], has=("start_layer", "no_such")), f"{OF['info']}: no_such (pools)"),
        (_replaced(FORWARD, takes=("q", "no_such"), path=f"{FORWARD}s"), f"{FORWARD}s (attention)"),
    ],
)
def test_a_name_that_is_gone_is_said_with_what_breaks(names, said):
    assert contract.missing(names) == [said]


def test_a_version_that_was_not_tested_gets_one_line_and_no_service(monkeypatch, caplog):
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.plugins.hook_registry import HookRegistry

    taken = [name for name in choices.ATTENTION_BACKEND_CHOICES if not name.startswith("quantkv_")]
    monkeypatch.setattr(choices, "ATTENTION_BACKEND_CHOICES", taken)
    monkeypatch.setattr(choices, "add_attention_backend_choices", taken.extend)
    # Tests in this process may ask for a server that knows none of these names.
    monkeypatch.setattr(attention_registry, "ATTENTION_BACKENDS", dict(attention_registry.ATTENTION_BACKENDS))
    hooked = []
    monkeypatch.setattr(HookRegistry, "register", lambda *given, **named: hooked.append(given))
    monkeypatch.setattr(sglang, "__version__", "0.6.0")
    monkeypatch.setattr(contract.missing, "__defaults__", (_replaced("sglang.srt.environ.envs", path="sglang.srt.environ.no_such"),))
    plug_in.register()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.text.rstrip().endswith("=1 does so anyway; what it lacks: sglang.srt.environ.no_such (arguments)")
    assert not hooked and not any(name.startswith("quantkv_") for name in taken)
    monkeypatch.setenv(plug_in.ANY_VERSION, "1")
    plug_in.register()
    assert hooked and taken[-1] == "quantkv_policy" and {"quantkv_4bit", "quantkv_int4", "quantkv_int8/int4"} <= {*taken}
    before = len(hooked)
    plug_in.register()  # SGLang calls it once a process
    assert len(hooked) == before
