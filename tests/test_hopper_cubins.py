"""The cache of what NVRTC compiled: a folder that cannot be written, a full disk, damaged files, other users. Needs no compiler."""

import errno
import json
import os
import stat
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from quantkv import under_way, whole_file
from quantkv.implementations.hopper.host import nvrtc

SOURCE = nvrtc.HOPPER / "prefill/prefill.cu"
CODE = bytes(range(256)) * 16


@pytest.fixture
def compilations(monkeypatch):
    """The sources that were compiled, by a stub of NVRTC that answers with CODE."""
    done = []

    class Program:
        def __init__(self, text, language, options):
            done.append(text)

        def compile(self, kind):
            return SimpleNamespace(code=CODE)

    bindings, core = ModuleType("cuda.bindings"), ModuleType("cuda.core")
    bindings.nvrtc = SimpleNamespace(nvrtcVersion=lambda: (0, 13, 0))
    core.Program, core.ProgramOptions = Program, SimpleNamespace
    for module in (ModuleType("cuda"), bindings, core):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return done


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("QUANTKV_CACHE", str(tmp_path))
    return tmp_path / "kernels"


def compile_cubin(**macros):
    return nvrtc.compile_cubin(SOURCE, macros)


def only_file(folder):
    (file,) = folder.iterdir()
    return file


def test_a_cubin_is_compiled_once(compilations, folder):
    assert [compile_cubin(), compile_cubin()] == [CODE, CODE]
    assert len(compilations) == 1
    assert compile_cubin(OTHER=1) == CODE
    assert len(compilations) == 2 == len(list(folder.iterdir()))


def test_where_nothing_can_be_kept_the_cubin_is_served_with_one_warning(compilations, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("QUANTKV_CACHE", str(tmp_path / "file"))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert [compile_cubin(), compile_cubin(OTHER=1)] == [CODE, CODE]
    (warning,) = caught
    assert str(tmp_path / "file" / "kernels") in str(warning.message) and "QUANTKV_CACHE" in str(warning.message)


def test_a_full_disk_leaves_the_cubin_and_no_file(compilations, folder):
    resource = pytest.importorskip("resource")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(CODE) // 2, limits[1]))  # a longer file fails in the midst, as on a full disk
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            code = compile_cubin()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert code == CODE and list(folder.iterdir()) == [] and len(caught) == 1
    assert compile_cubin() == CODE and len(compilations) == 2  # and once there is room again, it is kept
    assert compile_cubin() == CODE and len(compilations) == 2


def flipped(data):
    return data[:-1] + bytes([data[-1] ^ 1])


DAMAGES = {
    "empty": lambda data: b"",
    "cut in the digest": lambda data: data[:16],
    "cut after the digest": lambda data: data[: -len(CODE)],
    "cut": lambda data: data[:-1],
    "longer": lambda data: data + b"\0",
    "a bit": flipped,
    "a bit of the digest": lambda data: flipped(data[: -len(CODE)]) + CODE,
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cubin_is_compiled_anew_and_replaced(damage, compilations, folder):
    compile_cubin()
    file = only_file(folder)
    whole = file.read_bytes()
    file.write_bytes(DAMAGES[damage](whole))
    assert compile_cubin() == CODE and len(compilations) == 2
    assert only_file(folder) == file and file.read_bytes() == whole
    assert compile_cubin() == CODE and len(compilations) == 2


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_the_mode_of_a_cubin_follows_the_umask(umask, mode, compilations, folder):
    before = os.umask(umask)
    try:
        compile_cubin()
    finally:
        os.umask(before)
    assert stat.S_IMODE(only_file(folder).stat().st_mode) == mode


def test_a_file_of_another_user_is_compiled_anew_and_replaced(compilations, folder, monkeypatch):
    compile_cubin()
    whole = only_file(folder).read_bytes()
    only_file(folder).write_bytes(b"of another user")

    def denied(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    with monkeypatch.context() as patched:  # root, who may run the tests, reads every file
        patched.setattr(whole_file, "reading", denied)
        patched.setattr(Path, "read_bytes", denied)
        assert compile_cubin() == CODE
    assert len(compilations) == 2 and only_file(folder).read_bytes() == whole


def test_a_folder_in_the_place_of_a_cubin_costs_a_warning(compilations, folder):
    compile_cubin()
    file = only_file(folder)
    file.unlink()
    file.mkdir()
    with pytest.warns(RuntimeWarning, match="QUANTKV_CACHE"):
        assert compile_cubin() == CODE
    assert len(compilations) == 2


def test_a_file_of_an_older_release_is_no_kept_cubin(compilations, folder):
    """They were named `<key>.cubin` and had no digest."""
    compile_cubin()
    assert only_file(folder).suffix != ".cubin"


def apart():
    found = []
    under_way.compile_apart(lambda: found.append(compile_cubin()))
    assert not under_way.in_processes()
    return found[0]


def test_a_process_of_its_own_gets_the_whole_program(compilations, folder, monkeypatch):
    asked, code = [], nvrtc.ELF + CODE

    def run(command, input, capture_output):
        asked.append((command, json.loads(input)))
        return SimpleNamespace(returncode=0, stdout=code)

    monkeypatch.setattr(subprocess, "run", run)
    assert apart() == code == compile_cubin() and not compilations  # kept, too
    ((command, given),) = asked
    assert command == [sys.executable, "-I", nvrtc.nvrtc_process.__file__]
    assert given.pop("text").endswith(f'#line 1 "prefill.cu"\n{SOURCE.read_text()}')
    assert given == {"version": [13, 0], "path": sys.path, "arch": "sm_90a", "folders": list(map(str, nvrtc.FOLDERS))}


@pytest.mark.parametrize("ended", [OSError("no such interpreter"), (1, nvrtc.ELF + CODE), (0, b"a warning"), (-9, b"")], ids=str)
def test_what_no_other_process_compiles_is_compiled_here(ended, compilations, folder, monkeypatch):
    def run(*command, **how):
        if isinstance(ended, OSError):
            raise ended
        return SimpleNamespace(returncode=ended[0], stdout=ended[1])

    monkeypatch.setattr(subprocess, "run", run)
    assert apart() == CODE and len(compilations) == 1
