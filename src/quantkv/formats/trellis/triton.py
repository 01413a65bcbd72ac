"""The Triton codec of the trellis: it is read, not written."""

import torch
import triton
import triton.language as tl

from ...implementations.triton.kernels.views import TritonCodec
from . import words
from .search import CHAIN


def table(head_size: int) -> torch.Tensor:
    """Two fp16 numbers in the bits of each of 256 float32, none of which are a NaN's."""
    return words().view(torch.float32)


@triton.jit
def trellis_unpack(words, table, PLAN: tl.constexpr):
    """Four codes a word, and before them, in the lowest bits, the one that they follow."""
    planes = ()
    for i in tl.static_range(4):
        pair = tl.load(table + ((words >> (4 * i)) & 255)).to(tl.int32, bitcast=True)
        for half in tl.static_range(2):
            planes = planes + ((pair >> (16 * half)).to(tl.int16).to(tl.float16, bitcast=True),)
    return planes


TRELLIS = TritonCodec(8, None, trellis_unpack, overlap=4, chain=CHAIN // 8, num_meta=1, table=table, warps=8)
