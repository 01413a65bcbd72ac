"""Kernels where an engine puts functions of its own in the place of Triton's: SGLang does so with `triton.next_power_of_2`."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import importlib, pkgutil, triton
from triton.runtime.jit import JITFunction

def replaced(n):  # as SGLang has it
    return 1 << (n - 1).bit_length() if n > 0 else 1

triton.next_power_of_2 = replaced
import quantkv.formats
from quantkv.implementations.triton import kernels

folders = [(kernels.__path__, kernels.__name__), (quantkv.formats.__path__, quantkv.formats.__name__)]
modules = [importlib.import_module(found.name) for path, name in folders for found in pkgutil.walk_packages(path, name + ".")]
found = {value for module in modules for value in vars(module).values() if isinstance(value, JITFunction)}
for kernel in found:
    kernel.cache_key  # what it refers to, which Triton checks before it compiles
print(len(found))
"""


def test_kernels_refer_to_nothing_that_an_engine_replaces():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    found = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) >= 50
