"""Which names of vLLM the adapter relies on: all of them are there, the list is whole, and a name that is gone is said with what breaks."""

import ast
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")  # before vLLM looks for a device
vllm = pytest.importorskip("vllm")

import quantkv.integrations.vllm as plug_in  # noqa: E402
from quantkv.integrations.vllm import contract  # noqa: E402

SOURCES = sorted(Path(plug_in.__file__).parent.glob("*.py"))
BY_PATH = {name.path: name for name in contract.NAMES}
OPTIONAL = {"vllm.vllm_flash_attn"}  # asked for under `try`
PARTS = {  # of a configuration, by the names that the adapter gives them
    "attention_config": "AttentionConfig",
    "cache_config": "CacheConfig",
    "model_config": "ModelConfig",
    "parallel_config": "ParallelConfig",
    "scheduler_config": "SchedulerConfig",
    "speculative_config": "SpeculativeConfig",
    "compilation_config": "CompilationConfig",
    "kv_transfer_config": "KVTransferConfig",
}
CONFIGURATIONS = {"config", "vllm_config", "get_current_vllm_config"}


def test_every_name_is_there():
    assert contract.missing() == []


def _imported():
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == "vllm":
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "vllm")


def test_the_list_holds_whatever_is_imported():
    listed = {".".join(name.split(".")[:n]) for name in BY_PATH for n in range(1, name.count(".") + 2)}
    assert set(_imported()) - listed - OPTIONAL == set()


def _chain(node):
    """`self.config.cache_config.block_size` -> ["config", "cache_config", "block_size"], from the configuration on."""
    names = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        node = node.func
    if isinstance(node, ast.Name):
        names.insert(0, node.id)
    return names[1:] if names[:1] == ["self"] else names


def test_the_list_holds_whatever_is_read_of_a_configuration():
    """By chains of attributes that begin at a configuration."""
    read = {}
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = _chain(node) if isinstance(node, ast.Attribute) else []
            if names[:1] and names[0] in CONFIGURATIONS and len(names) > 1:
                read.setdefault("vllm.config.VllmConfig", set()).add(names[1])
                names = names[1:]
            if names[:1] and names[0] in PARTS and len(names) > 1:
                read.setdefault(f"vllm.config.{PARTS[names[0]]}", set()).add(names[1])
    assert {"vllm.config.VllmConfig", "vllm.config.CacheConfig", "vllm.config.ModelConfig"} <= read.keys()
    for owner, attributes in read.items():
        assert attributes <= {*BY_PATH[owner].has}, owner


def _replaced(listed, **changes):
    return tuple(replace(name, **changes) if name.path == listed else name for name in contract.NAMES)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (_replaced("vllm.envs.VLLM_BATCH_INVARIANT", path="vllm.envs.NO_SUCH"), "vllm.envs.NO_SUCH (VLLM_BATCH_INVARIANT)"),
        (_replaced("vllm.config.VllmConfig", path="vllm.no_such.VllmConfig"), "vllm.no_such.VllmConfig (configurations)"),
        (
            _replaced("vllm.forward_context.set_forward_context", takes=("attn_metadata", "no_such")),
            "vllm.forward_context.set_forward_context: parameter no_such (statistics)",
        ),
        (
            _replaced("vllm.v1.worker.gpu_model_runner.GPUModelRunner", has=("device", "no_such")),
            "vllm.v1.worker.gpu_model_runner.GPUModelRunner: no_such (statistics)",
        ),
        (_replaced("vllm.v1.attention.backend.AttentionImpl.forward", path="vllm.v1.attention.backend.AttentionImpl.no_such"), None),
    ],
)
def test_a_name_that_is_gone_is_said_with_what_breaks(names, said):
    assert contract.missing(names) == [said or "vllm.v1.attention.backend.AttentionImpl.no_such (attention)"]


def test_a_version_that_was_not_tested_says_what_it_lacks_in_one_line(monkeypatch, caplog):
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    monkeypatch.setattr(contract.missing, "__defaults__", (_replaced("vllm.envs.VLLM_BATCH_INVARIANT", path="vllm.envs.NO_SUCH"),))
    plug_in.register()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert caplog.text.rstrip().endswith("=1 does so anyway; what it lacks: vllm.envs.NO_SUCH (VLLM_BATCH_INVARIANT)")
