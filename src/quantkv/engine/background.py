"""Kernels of an engine's layers, compiled by another process while the engine loads its weights.

That process needs no GPU: it is told what a layer is, makes the calls that the layer's warm-up will make, as `ahead` does, and fills the
caches of compiled kernels, a process for each kernel. The engine waits for it right before its own warm-up, which finds everything there;
what is missing, or has failed, is compiled then, and says so. One process works for all that ask for the same: ranks, engines.
"""

from __future__ import annotations

import gc
import hashlib
import json
import logging
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from .. import assumed, whole_file
from ..forked import ForkedExecutor
from ..formats import get_format
from ..full_precision import FullPrecisionTokens
from ..geometry import Heads
from ..maps import LayerMaps
from ..options import AttentionOptions
from .ahead import compile_layer, stood_in
from .layer import LayerAttention, PagedLayer
from .layer_config import LayerConfig
from .warm_up import StepLimits

LIMIT = 900.0  # seconds that an engine waits, at most
POLL = 0.02  # seconds
COMPILERS = "quantkv", "torch", "triton", "cuda-core", "nvidia-cuda-nvrtc"
PACKAGE = Path(__file__).parent.parent
MAIN = "import sys; sys.path.append(sys.argv[1]); from quantkv.engine import background; sys.exit(background.main(sys.argv[2]))"


@dataclass(frozen=True)
class Wanted:
    """A layer whose kernels are wanted, as plain data.

    format, full_precision: name, and first and latest tokens with 16-bit copies. statistics: whether maps are made of statistics of the
    model. num_heads: query heads of this rank. heads: kv heads of this rank, size of a key, of a value. dtype: of queries, keys and values.
    block_size: tokens of a page. options: of every call. sinks: their dtype.
    """

    format: str
    full_precision: tuple[int, int] | None
    statistics: bool
    num_heads: int
    heads: tuple[int, int, int]
    dtype: str
    gpu: assumed.Gpu
    limits: StepLimits
    block_size: int
    own_rows: bool
    options: dict[str, Any] = field(default_factory=dict)
    sinks: str | None = None
    alibi: bool = False

    @classmethod
    def read(cls, text: str) -> Wanted:
        """As `text` has it."""
        given = json.loads(text)
        gpu, limits = given.pop("gpu"), given.pop("limits")
        return cls(gpu=assumed.Gpu(**gpu | {"capability": tuple(gpu["capability"])}), limits=StepLimits(**limits), **given)

    @property
    def text(self) -> str:
        """It as JSON."""
        return json.dumps(asdict(self), sort_keys=True)

    def layer(self) -> tuple[PagedLayer, LayerAttention]:
        """The layer, with numbers in place of what it will measure."""
        dtype, heads = getattr(torch, self.dtype), Heads(*self.heads)
        tokens = None if self.full_precision is None else FullPrecisionTokens(*self.full_precision)
        config = LayerConfig(get_format(self.format, dtype), LayerMaps(), tokens)
        zeros = lambda kind: torch.zeros(self.num_heads, dtype=kind, device="cpu")
        sinks = None if self.sinks is None else zeros(getattr(torch, self.sinks))
        slopes = zeros(torch.float32) if self.alibi else None
        attention = LayerAttention(self.num_heads, None, AttentionOptions(**self.options), sinks, slopes, self.own_rows)
        return PagedLayer(stood_in(config, 0, heads) if self.statistics else config, heads, dtype), attention

    def compile(self, executor: ForkedExecutor) -> dict[str, int]:
        """Compile in other processes: {compiler: kernels that it needs}."""
        made = compile_layer(*self.layer(), self.gpu, self.limits, self.block_size, executor)
        executor.drain()
        return made

    @property
    def place(self) -> Path:
        """Where it is noted that this was compiled, by this code and these compilers, but for the ending of the name."""
        named = [
            self.text,
            os.environ.get("TRITON_CACHE_DIR"),
            *map(_version, ("quantkv", "torch", "triton", "cuda-core", "nvidia-cuda-nvrtc")),
        ]
        files = sorted(path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".cu", ".cuh"))
        times = [(path.name, (found := path.stat()).st_mtime_ns, found.st_size) for path in files]
        return whole_file.cache_folder() / "ahead" / hashlib.sha256(repr((named, times)).encode()).hexdigest()[:32]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


class Background:
    """What is being compiled for the layers of this process's engine."""

    def __init__(self) -> None:
        self.asked: set[str] = set()
        self.places: list[Path] = []
        self.processes: list[subprocess.Popen] = []

    def begin(self, wanted: Wanted, logger: logging.Logger) -> None:
        """Have a layer's kernels compiled, unless they were, or somebody is at it. What stands in the way is said, and stops nobody."""
        if wanted.text in self.asked:
            return
        self.asked.add(wanted.text)
        try:
            place = wanted.place
            if place.with_suffix(".done").exists():
                return
            place.parent.mkdir(parents=True, exist_ok=True)
            lock = _lock(place)
            self.places.append(place)
            if lock is None:  # another rank, or engine
                return
            try:
                environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
                command = [sys.executable, "-c", MAIN, str(PACKAGE.parent), str(place)]
                process = subprocess.Popen(command, stdin=subprocess.PIPE, env=environment, pass_fds=(lock,))
                self.processes.append(process)
                with process.stdin as stream:
                    stream.write(wanted.text.encode())
            finally:
                os.close(lock)  # it holds the lock until it ends
        except (ImportError, OSError) as error:
            logger.warning("quantkv: kernels are not compiled while the model loads: %s", error)

    def wait(self, logger: logging.Logger, limit: float = LIMIT) -> float:
        """Return when all of it is compiled, or has failed, or `limit` seconds are over: the seconds that it took. The log is told how
        long, and what failed."""
        began = time.monotonic()
        for place in self.places:
            while (lock := _lock(place)) is None and time.monotonic() - began < limit:
                time.sleep(POLL)
            if lock is None:
                logger.warning("quantkv: kernels that another process compiles are not there after %.0f s", limit)
            else:
                os.close(lock)
        statuses = [process.wait() for process in self.processes if process.poll() is not None or time.monotonic() - began < limit]
        for status in filter(None, statuses):
            logger.warning("quantkv: a process that compiles kernels ended with status %s: they are compiled now", status)
        seconds = time.monotonic() - began
        if self.places:
            logger.info("quantkv: waited %.1f s for kernels that were compiled while the model loaded", seconds)
        self.places, self.processes = [], []
        return seconds


def _lock(place: Path) -> int | None:
    """A descriptor of a file beside `place` that nobody else has locked; None: somebody has."""
    import fcntl

    descriptor = os.open(place.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def main(place: str) -> int:
    """Compile what stands on the standard input, and note it."""
    wanted, executor = Wanted.read(sys.stdin.read()), ForkedExecutor()
    gc.freeze()  # what is there already is not copied by a collection in each process that is forked
    made = wanted.compile(executor)
    if not executor.failed:
        whole_file.write(Path(place).with_suffix(".done"), json.dumps(made).encode())
    return 1 if executor.failed else 0
