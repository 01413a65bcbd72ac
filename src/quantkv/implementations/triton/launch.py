"""What launches of the Triton kernels share: what they are compiled for, tensors as kernels see them, and launching again."""

from __future__ import annotations

import contextlib
import inspect
import math
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget

from ...assumed import assumed
from ...calls import PagedTensor
from ...format import Codec
from ...maps import LinearMap
from ...rounding import Rounding
from ...under_way import compiling, wanted
from .kernels.views import MapView, PagesView, RowPlan, RowsView, TritonCodec

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON_3_4 = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 5)  # the oldest release


def refusal(device: torch.device, sides: Sequence[tuple[PagedTensor, Codec]], stored: bool = False) -> str | None:
    """Why no kernel can run on this device, or read (write, if `stored`) these sides; None where all can."""
    if device.type != "cuda" and not INTERPRETED and assumed() is None:
        return f"tensors are on {device}, and the kernels need a GPU (or TRITON_INTERPRET=1)"
    if torch.version.hip and TRITON_3_4:  # some prompts would take more shared memory than there is
        return f"triton {triton.__version__} on an AMD GPU: 3.5 or later is needed"
    for side, codec in sides:
        if codec.triton is None:
            return f"codec {codec.name} has no Triton codec"
        if stored and codec.triton().encode is None:
            return f"codec {codec.name}: its rows have no code in Triton"
        codes, meta, word_bytes = side.codes, side.meta, codec.triton().word_bytes
        if codes.stride(3) != 1 or (meta is not None and meta.shape[3] > 1 and meta.stride(3) != 1):
            return f"cache strides {codes.stride()}: the bytes of a row, and its metadata, must lie one after the other"
        try:
            codes.view(word_dtype(codes, word_bytes, stored))
        except RuntimeError:
            return (
                f"cache strides {codes.stride()}, storage offset {codes.storage_offset()}: {codec.name} rows are read "
                f"in words of {word_bytes} bytes, to which they must be aligned"
            )
    return None


class Target(NamedTuple):
    """What the kernels are compiled for."""

    ptx: int  # compute capability of an NVIDIA GPU, 10 x major + minor; 0: no inline PTX
    precision: str  # of float32 dots
    processors: int
    shared: int = 100 << 10  # bytes of shared memory of a multiprocessor

    @property
    def turns(self) -> bool:
        """Whether a product may have as few as 8 columns at no loss: NVIDIA's tensor cores take 16 rows by 8, and Triton 3.4 refuses fewer
        than 16."""
        return INTERPRETED or (self.ptx > 0 and not TRITON_3_4)

    @property
    def has_matrix_descriptors(self) -> bool:
        """Whether tensor cores are told where matrices lie in shared memory, as Hopper's and Blackwell's are.

        Of two loops that use one place, the ptxas of Triton 3.6 and 3.7 may leave a descriptor of the second unset where the first has
        no turns: prompts of 8-bit levels read beyond their shared memory."""
        return 90 <= self.ptx < 120

    @classmethod
    def of(cls, device: torch.device) -> Target:
        """What kernels are compiled for on a device; off a GPU, Triton's interpreter."""
        gpu = assumed()
        if gpu is not None:
            return cls(10 * gpu.capability[0] + gpu.capability[1], "tf32x3", gpu.multiprocessors, gpu.shared_bytes)
        if INTERPRETED or device.type != "cuda":
            return cls(0, "ieee", 8)
        return _gpu_target(device.index if device.index is not None else torch.cuda.current_device())


@lru_cache
def _gpu_target(index: int) -> Target:
    properties = torch.cuda.get_device_properties(index)
    if torch.version.hip:
        return Target(0, "ieee", properties.multi_processor_count)
    shared = properties.shared_memory_per_multiprocessor
    return Target(10 * properties.major + properties.minor, "tf32x3", properties.multi_processor_count, shared)


# ---- what a side is compiled for, and its pages


def device_codec(codec: Codec, ptx: int = 0, exact: bool = False, lean: torch.dtype | None = None) -> TritonCodec:
    """The Triton codec of `codec`, with inline PTX where a GPU of capability `ptx` takes it. exact: planes are not rounded to 16 bits.
    lean: dtype of few queries, which need as few instructions as it has; None: there are many, or none."""
    device = codec.triton()
    if lean is not None and device.lean is not None and (lean == torch.bfloat16 or not device.lean.coarse):
        device = device.lean
    if exact and device.exact is not None:
        unpack, operand = device.exact
        return replace(device, unpack=unpack, operand=operand, program=None, exponents=())
    return device if device.program is None or ptx >= device.program.capability else replace(device, program=None)


def row_plan(
    codec: Codec,
    head_size: int,
    map_: LinearMap | None,
    scale: float,
    pages: PagesView,
    target: Target,
    exact: bool = False,
    lean: torch.dtype | None = None,
) -> RowPlan:
    """How rows of a codec lie and are mapped, as a kernel is compiled for it."""
    key_mean = map_ is not None and map_.key_mean is not None
    return RowPlan(
        device_codec(codec, target.ptx, exact, lean),
        head_size,
        *pages.words.stride()[:2],
        *((0, 0) if pages.meta is None else pages.meta.stride()[:2]),
        map_ is not None,
        key_mean,
        key_mean and codec.signed,
        codec.round_mapped,
        scale != 1.0,
        align_meta=1 if pages.meta is None else math.gcd(16, pages.meta.stride(0), pages.meta_head),
        align=math.gcd(16, *pages.words.stride()[:3]),
    )


@lru_cache
def _table(codec: Codec, head_size: int, device: torch.device) -> torch.Tensor | None:
    numbers = codec.triton().table
    return None if numbers is None else numbers(head_size).float().to(device)


def word_dtype(codes: torch.Tensor, word_bytes: int, stored: bool) -> torch.dtype:
    """What a kernel sees a row's bytes as: whole words, or bytes where no integer is as long as a word. Words of three bytes are read
    from triples of int32 where rows lie on and are made of such."""
    if codes.element_size() == word_bytes:
        return codes.dtype
    if word_bytes == 3 and not stored:
        places = (codes.data_ptr(), *(n * codes.element_size() for n in (codes.storage_offset(), codes.shape[3], *codes.stride()[:3])))
        return torch.uint8 if any(n % 4 for n in places) else torch.int32
    return {2: torch.int16, 4: torch.int32, 8: torch.int64}.get(word_bytes, torch.uint8)


def pages(side: PagedTensor, codec: Codec, head_size: int, stored: bool = False) -> PagesView:
    """The views of one side that `refusal` let pass, to read or to be `stored`."""
    codes, meta = side.codes, side.meta
    words = codes.view(word_dtype(codes, codec.triton().word_bytes, stored))
    fields = (None, 0) if meta is None else (meta, meta.stride(2))
    return PagesView(words, words.stride(2), *fields, _table(codec, head_size, codes.device))


def map_view(matrix: torch.Tensor | None, key_mean: torch.Tensor | None = None, rounding: Rounding | None = None) -> MapView:
    """matrix `[HK or 1, D, D]`, or a diagonal `[HK or 1, D]`, dense; key_mean `[buckets, HK or 1, D]`, its last axis dense. rounding: of
    rows rounded by a Hessian."""
    view = MapView(matrix, 0 if matrix is None or matrix.shape[0] == 1 else matrix.stride(0))
    if key_mean is not None:
        head = 0 if key_mean.shape[1] == 1 else key_mean.stride(1)
        view = view._replace(key_mean=key_mean, key_mean_bucket=key_mean.stride(0), key_mean_head=head, num_buckets=key_mean.shape[0])
    if rounding is not None:
        heads = [0 if t.shape[0] == 1 else t[0].numel() for t in rounding[1:]]
        view = view._replace(feedback=rounding.feedback, feedback_head=heads[0], gain=rounding.gain, gain_head=heads[1])
    return view


def hadamard_size(matrix: torch.Tensor | None) -> int:
    """Size of the Hadamard matrices beside a diagonal `[HK or 1, D]`; 0 of a matrix."""
    return 0 if matrix is None or matrix.dim() > 2 else matrix.shape[1] & -matrix.shape[1]


def dense(t: torch.Tensor | None) -> torch.Tensor | None:
    """Contiguous, or None as it is."""
    return None if t is None else t.contiguous()


def dense_rows(t: torch.Tensor | None) -> torch.Tensor | None:
    """`[.., .., D]` with its last axis dense: a copy where it is not."""
    return t if t is None or t.stride(2) == 1 else t.contiguous()


def rows_view(t: torch.Tensor) -> RowsView:
    """Rows `[T, heads, D]` with their strides, as kernels take them."""
    return RowsView(t, *t.stride()[:2])


# ---- launching


def on_device(device: torch.device) -> contextlib.AbstractContextManager:
    """Triton launches on the current device."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return contextlib.nullcontext()
    return torch.cuda.device(device)


def current_stream(device: int) -> int:
    """Address of the current stream of a device."""
    return triton.runtime.driver.active.get_current_stream(device)


def compile_ahead(launches: Iterable[Launch], executor: Executor, device: torch.device) -> int:
    """Compile, and load, what the first of these launches would on a device, in the executor's threads: how many kernels. What fails is
    compiled by its launch. None where Triton, before 3.5, compiles in one thread."""
    together = getattr(triton, "AsyncCompileMode", None)
    if together is None or INTERPRETED:
        return 0
    lenient = {"ignore_errors": True} if "ignore_errors" in inspect.signature(together).parameters else {}
    loading = executor if assumed() is not None else _Loading(executor, device)
    with _assumed_driver(), on_device(device), compiling("kernels by Triton"), together(loading, **lenient) as mode:
        for each in launches:
            each.compile_ahead()
        getattr(executor, "drain", lambda: None)()  # one that forks has no thread by which its tasks would end
        return len(mode.future_kernels)


class _Loading(Executor):
    """An executor whose tasks, which compile kernels, also load them on a device: Triton has a C compiler build a launcher for each, which
    takes as long as a small kernel. What cannot be loaded says why when it is launched."""

    def __init__(self, executor: Executor, device: torch.device) -> None:
        self.executor, self.device = executor, device

    def submit(self, task: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        """Compile and load a kernel."""
        return self.executor.submit(self._loaded, task)

    def _loaded(self, task: Callable[[], Any]) -> Any:
        kernel = task()
        with contextlib.suppress(Exception), on_device(self.device):
            kernel.run  # noqa: B018  (a property)
        return kernel


class AssumedDriver:
    """Driver of a GPU that need not be there: kernels are compiled for it, and none is loaded."""

    def __init__(self, name: str, target: GPUTarget) -> None:
        self.name, self.target = name, target

    def get_current_device(self) -> str:
        """Its name, which is no device's number: what is compiled for it is not launched."""
        return self.name

    def get_current_stream(self, device: str) -> int:
        """None."""
        return 0

    def get_current_target(self) -> GPUTarget:
        """What Triton compiles for."""
        return self.target


@contextlib.contextmanager
def _assumed_driver() -> Iterator[None]:
    """Inside the block Triton compiles for the GPU that is assumed, if one is."""
    gpu = assumed()
    if gpu is None:
        yield
        return
    held = triton.runtime.driver._active  # what `reset_active` would make anew, and cannot without a GPU
    target = GPUTarget("cuda", 10 * gpu.capability[0] + gpu.capability[1], 32)
    triton.runtime.driver.set_active(AssumedDriver(gpu.name, target))
    try:
        yield
    finally:
        triton.runtime.driver._active = held


class Launch:
    """One launch of one kernel. The first goes through Triton, which binds, specializes and compiles. What it compiled is launched again
    with tensors of the same shapes and strides at other addresses, for a tenth of the time on the host.

    arguments: all of the kernel's, by name and in order. options: num_warps and the like.
    places: where the tensors that change stand among them, "argument" or "argument.field". numbers: names of floats that change, for which
    nothing is compiled."""

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        arguments: dict[str, Any],
        options: dict[str, Any],
        places: Sequence[str],
        numbers: Sequence[str] = (),
    ) -> None:
        self.kernel, self.arguments, self.options = kernel, arguments, options
        self.grid = (*grid, 1, 1)[:3]
        starts, self.slices, self.flat = {}, [], []
        for name, value in arguments.items():
            start = starts[name] = len(self.flat)
            if isinstance(value, tuple):
                starts.update({f"{name}.{field}": start + i for i, field in enumerate(value._fields)})
                self.flat += value
                self.slices.append((start, len(self.flat)))
            else:
                self.flat.append(value)
                self.slices.append((start, None))
        self.places, self.numbers = [starts[place] for place in places], [starts[name] for name in numbers]
        self.kept = [t for i, t in enumerate(self.flat) if isinstance(t, torch.Tensor) and i not in self.places]
        self.flat = [t.data_ptr() if isinstance(t, torch.Tensor) else t for t in self.flat]
        # Bits of an address that must be 0, since the kernel is compiled for that: none where it saw an address that has some.
        self.masks = [0 if isinstance(self.flat[p], int) and self.flat[p] % 16 else 15 for p in self.places]
        self.direct: Callable[..., None] | None = None

    def __call__(self) -> None:
        """The first launch, on the current device."""
        collected = wanted()
        if collected is not None:
            collected.append(self)
            return
        with compiling(f"{getattr(self.kernel, '__name__', 'a kernel')} by Triton"):
            compiled = self.kernel[self.grid](**self.arguments, **self.options)
        if all(hasattr(compiled, name) for name in ("run", "function", "packed_metadata")):
            self.direct = compiled.run
            self.fixed = compiled.function, compiled.packed_metadata, None
        self.arguments = None  # they hold the tensors of this call

    def compile_ahead(self) -> None:
        """Compile what the first launch would, on the current device, without launching."""
        self.kernel.warmup(grid=self.grid, **self.arguments, **self.options)

    def again(self, tensors: Sequence[torch.Tensor | None], device: int, numbers: Sequence[float] = ()) -> bool:
        """Launch on the current stream of `device`, the current one, with the tensors that change, in the order of `places`, and the
        numbers. False, and nothing is launched, where only Triton can: a tensor is not aligned to 16 bytes where the first was, or a
        profiler listens."""
        arguments = self.packed(tensors, numbers)
        return arguments is not None and self.launch(arguments, device)

    def packed(self, tensors: Sequence[torch.Tensor | None], numbers: Sequence[float] = ()) -> list[Any] | None:
        """What `launch` takes, of the tensors and numbers of `again`, which have to live until then. None: only Triton can launch it."""
        if self.direct is None:
            return None
        flat, bits = self.flat.copy(), 0
        for place, mask, t in zip(self.places, self.masks, tensors):
            if t is not None:
                flat[place] = address = t.data_ptr()
                bits |= address & mask
        for place, number in zip(self.numbers, numbers):
            flat[place] = number
        return None if bits else [flat[start] if stop is None else tuple(flat[start:stop]) for start, stop in self.slices]

    def launch(self, arguments: list[Any], device: int) -> bool:
        """Launch on the current stream of `device`, the current one. False, and nothing is launched, where a profiler listens."""
        hooks = triton.knobs.runtime
        enter, leave = hooks.launch_enter_hook, hooks.launch_exit_hook
        if any(hook is not None and getattr(hook, "calls", True) for hook in (enter, leave)):
            return False
        self.direct(*self.grid, current_stream(device), *self.fixed, None, None, *arguments)
        return True


def launch_kept(
    kept: dict[Hashable, Launch] | None,
    key: Hashable,
    device: torch.device,
    tensors: Sequence[torch.Tensor | None],
    make: Callable[[], Launch],
    numbers: Sequence[float] = (),
) -> None:
    """Launch what is kept under a key, with these tensors and numbers, or what `make` makes of them, which is kept for the next time. kept:
    None where nothing is."""
    with on_device(device):
        known = None if kept is None else kept.get(key)
        if known is not None and known.again(tensors, device.index, numbers):
            return
        made = make()
        made()
    if kept is not None and known is None and made.direct is not None:
        kept[key] = made
