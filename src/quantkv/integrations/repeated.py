"""What a step does over tensors that stay where they are, as one CUDA graph in place of a hundred launches."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

MOST = 128  # graphs of one function: of as many shapes


class Repeated:
    """`function(*tensors, target)`, which launches kernels and reads nothing on the host, called once a step.

    On a GPU the second call in a row over the same memory is captured, and replayed from then on; all others run as they are. Tensors are
    those of an engine: their memory is taken to be theirs for good.
    """

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._last: Hashable = None
        self._pool: Any = None

    def clear(self) -> None:
        """What the function works on besides is elsewhere now."""
        self._graphs.clear()
        self._last = None

    def __call__(self, *tensors: torch.Tensor, target: Any, kind: Hashable = None) -> None:
        """target: what it fills. kind: what tells apart calls over the same tensors."""
        key = kind, *((t.data_ptr(), t.dtype, t.shape, t.stride()) for t in tensors)
        graph = self._graphs.get(key)
        if graph is None and key == self._last and tensors[0].is_cuda and len(self._graphs) < MOST:
            self._pool = torch.cuda.graph_pool_handle() if self._pool is None else self._pool
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                self.function(*tensors, target)
            self._graphs[key] = graph
        self._last = key
        if graph is None:
            self.function(*tensors, target)
        else:
            graph.replay()
