import os

import pytest
import torch

import quantkv

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`format_name` runs over the registry: a new format is tested without a test edit."""
    if "format_name" in metafunc.fixturenames:
        metafunc.parametrize("format_name", quantkv.available_formats())
