"""A new format is one file: the registry's tests run over one that lives outside the package, and pass."""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
PLUGIN = "toy_format"
SUITES = ("test_formats.py", "test_cache.py", "test_reference.py", "test_kernels.py")


def test_registry_tests_pass_for_a_format_outside_the_package():
    command = [sys.executable, "-m", "pytest", "-p", PLUGIN, "-k", "toy", *(str(HERE / s) for s in SUITES)]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    passed = int(done.stdout.rsplit(" passed", 1)[0].split()[-1])
    assert passed >= 15
