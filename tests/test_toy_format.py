"""A new format is one file: the registry's tests run over some that live outside the package, and pass."""

import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SUITES = ("test_formats.py", "test_cache.py", "test_reference.py", "test_kernels.py", "test_not_finite.py", "test_lessons.py")


@pytest.mark.parametrize("plugin,name", [("toy_format", "toy"), ("five_bits", "five_bits")])
def test_registry_tests_pass_for_a_format_outside_the_package(plugin, name):
    command = [sys.executable, "-m", "pytest", "-p", plugin, "-k", f"{name} and not nearest", *(str(HERE / s) for s in SUITES)]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    passed = int(done.stdout.rsplit(" passed", 1)[0].split()[-1])
    assert passed >= 15
