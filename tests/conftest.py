import os
from pathlib import Path

import pytest
import torch

import quantkv

if not torch.cuda.is_available():  # before anything imports Triton
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import interpreter
    except ImportError:
        pass
    else:
        interpreter.install()

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # the workers share the cores


@pytest.fixture(scope="session")
def of_the_run(tmp_path_factory) -> Path:
    """A folder that all processes of this run share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session", autouse=True)
def compiled_once(of_the_run):
    """What the compilers of several tests and processes make of the same source is made once."""
    try:
        import hopper_on_cpu
    except ImportError:  # of what the Hopper kernels need
        return
    hopper_on_cpu.COMPILED = of_the_run / "libraries"


@pytest.fixture
def on_device():
    """What a test makes, it makes on the GPU, where there is one."""
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield


def of_every_codec() -> list[str]:
    """Formats that have every codec of the registry, for keys and for values, and none that the others make needless."""
    formats = sorted(map(quantkv.get_format, quantkv.available_formats()), key=lambda fmt: fmt.k is not fmt.v)
    sides = lambda chosen: {(side, getattr(fmt, side).name) for fmt in chosen for side in "kv"}
    for fmt in formats[::-1]:
        others = [other for other in formats if other is not fmt]
        formats = others if sides(others) == sides(formats) else formats
    return [fmt.name for fmt in formats]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`format_name` runs over the registry: a new format is tested without a test edit. `codecs_of` does where no more than the codecs of
    a format count, for keys and for values: over as many formats as have them all."""
    if "format_name" in metafunc.fixturenames:
        metafunc.parametrize("format_name", quantkv.available_formats())
    if "codecs_of" in metafunc.fixturenames:
        metafunc.parametrize("codecs_of", of_every_codec())


@pytest.fixture
def five():
    """A format of 5 bits, made outside the package, for as long as a test runs."""
    known = "five_bits" in quantkv.available_formats()
    from five_bits import FIVE_BITS

    yield quantkv.register(FIVE_BITS)
    if not known:
        quantkv.format.unregister("five_bits")


@pytest.fixture
def on_cpu(monkeypatch, tmp_path):
    """Serves calls of several segments by the Hopper kernels, run on a CPU, and checks them."""
    from hopper_on_cpu import Device

    def serve(several, multiprocessors=2, max_tiles=1024):
        Device(monkeypatch, tmp_path, multiprocessors, max_tiles).serve(several.call)
        several.check()

    return serve
