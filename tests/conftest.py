import hashlib
import os
import time
import zlib
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


KEPT_S = 14 * 24 * 3600  # for so long compiled files are kept


@pytest.fixture(scope="session")
def of_the_run(tmp_path_factory) -> Path:
    """A folder that all processes of this run share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


@pytest.fixture(scope="session")
def compiled(of_the_run, request) -> Path:
    """A folder for what compilers make, named by all that it depends on: of all processes and runs, where pytest keeps a cache."""
    cache = getattr(request.config, "cache", None)
    folder = of_the_run if cache is None else cache.mkdir("compiled")
    for file in folder.rglob("*"):
        if "PYTEST_XDIST_WORKER" not in os.environ and file.is_file() and time.time() - file.stat().st_mtime > KEPT_S:
            file.unlink()
    return folder


@pytest.fixture(scope="session", autouse=True)
def compiled_once(of_the_run, compiled):
    """What the compilers of several tests, processes and runs make of the same source is made once."""
    try:
        import hopper_on_cpu
    except ImportError:  # of what the Hopper kernels need
        return
    hopper_on_cpu.COMPILED, hopper_on_cpu.INCLUDED = compiled / "libraries", of_the_run / "included"


@pytest.fixture
def cubins(compiled, monkeypatch):
    """NVRTC's cubins are kept for other tests, processes and runs, and so is what the disassembler says of them."""
    from quantkv import whole_file
    from quantkv.implementations.hopper.host import sass

    def listing(cubin: Path) -> list[str]:
        kept = compiled / "listings" / hashlib.sha256(cubin.read_bytes()).hexdigest()[:32]
        if not kept.exists():
            kept.parent.mkdir(exist_ok=True)
            whole_file.write(kept, zlib.compress("\n".join(disassemble(cubin)).encode(), 1))
        return zlib.decompress(kept.read_bytes()).decode().splitlines()

    disassemble = sass.disassemble
    monkeypatch.setattr(sass, "disassemble", listing)
    monkeypatch.setenv("QUANTKV_CACHE", str(compiled / "cubins"))


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
