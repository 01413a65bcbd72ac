"""Powers of two of float32 numbers, by their bits."""

import triton
import triton.language as tl


@triton.jit
def power_of_two_below(x):
    """Largest power of two that is not above x > 0; the smallest normal number for 0."""
    return tl.maximum((x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True), 1.2e-38)


@triton.jit
def inverse_power(x):
    """1 / x of a power of two from 2^-126 to 2^126."""
    return (0x7F000000 - x.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)


@triton.jit
def largest_finite(x):
    """The largest magnitude of x `[N]`, of its finite numbers. As integers: a warp has their maximum in one instruction."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    return tl.max(tl.where(bits < 0x7F800000, bits, 0), axis=0).to(tl.float32, bitcast=True)
