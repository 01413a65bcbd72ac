"""Makes Triton's CPU interpreter right on bfloat16 and 8-bit floats, where the stock one is silently wrong, and faster."""

from dataclasses import replace

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

TORCH = {
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
BITS = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
MASKED = {"create_masked_load": 1, "create_masked_store": 2}  # operations of the interpreter, and which argument is their mask
LARGEST = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}
stock_convert = interpreter._convert_float


def convert_float(data, source, target, rounding_mode):
    """To nearest even; to 8 bits saturating, as GPUs do."""
    if source not in TORCH or target not in TORCH:
        return stock_convert(data, source, target, rounding_mode)
    raw = np.ascontiguousarray(data)
    values = torch.from_numpy(raw.view(BITS[raw.itemsize])).view(TORCH[source])
    if target in LARGEST:
        values = values.float().clamp(-LARGEST[target], LARGEST[target])
    result = values.to(TORCH[target])
    size = result.element_size()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    return result.view(integer).numpy().view(np.dtype(f"u{size}")).reshape(data.shape)


def is_bfloat16(value) -> bool:
    return isinstance(value, interpreter.TensorHandle) and value.dtype.scalar == tl.bfloat16 and value.data.dtype == np.uint16


def widened(value):
    if not is_bfloat16(value):
        return value
    return interpreter.TensorHandle(convert_float(value.data, tl.bfloat16, tl.float32, None).view(np.float32), tl.float32)


def narrowed(data):
    return interpreter.TensorHandle(convert_float(data, tl.float32, tl.bfloat16, None).view(np.uint16), tl.bfloat16)


def through_float32(stock):
    """An elementwise operation whose bfloat16 operands, kept as integers, are computed in float32."""

    def operation(self, *operands):
        if operands[-1] is np.where or not any(is_bfloat16(x) for x in operands):
            return stock(self, *operands)
        result = stock(self, *[widened(x) for x in operands])
        if result.data.dtype == np.float32:
            return narrowed(result.data)
        return interpreter.TensorHandle(result.data, tl.int1 if result.data.dtype == np.bool_ else tl.bfloat16)

    return operation


def install() -> None:
    """Patch the interpreter; once."""
    if interpreter._convert_float is convert_float:
        return
    interpreter._convert_float = convert_float
    builder = interpreter.InterpreterBuilder
    for name in ("binary_op", "ternary_op", "unary_op"):
        setattr(builder, name, through_float32(getattr(builder, name)))
    stock_dot, stock_cast = builder.create_dot, builder.cast_impl

    def create_dot(self, a, b, d, *precision):
        return stock_dot(self, widened(a), widened(b), d, *precision)

    def cast_impl(self, source, target):
        if is_bfloat16(source) and target.scalar not in (tl.float32, tl.bfloat16):
            return stock_cast(self, widened(source), target)
        if target.scalar == tl.bfloat16 and source.dtype.scalar not in (tl.float32, tl.bfloat16):
            return narrowed(stock_cast(self, source, tl.float32).data)
        return stock_cast(self, source, target)

    def with_mask(name):
        stock = getattr(builder, name)

        def access(self, *given):
            given = [interpreter.TensorHandle(x.data.astype(bool), tl.int1) if at == MASKED[name] else x for at, x in enumerate(given)]
            return stock(self, *given)

        return access

    builder.create_dot, builder.cast_impl = create_dot, cast_impl
    for name in MASKED:  # Triton 3.9: a comparison of a program's number is an integer, which it takes for no mask then
        setattr(builder, name, with_mask(name))
    patch_once()
    keep_types()


def patch_once() -> None:
    """The interpreter patches triton.language at every launch and every call of a device function: do it once."""
    stock_patch, done, seen = interpreter._patch_lang, set(), {}

    class Kept:
        def restore(self):
            pass

    def patch_lang(function):
        if id(function.__globals__) in seen:
            return Kept()
        seen[id(function.__globals__)] = function.__globals__  # kept, so that no other has its id
        language = tuple(sorted({id(v) for v in function.__globals__.values() if v is tl or v is tl.core}))
        if language not in done:
            stock_patch(function)
            tl.core.tensor.__index__ = lambda self: self.handle.data.item()  # Triton 3.6: int() of an array, which numpy 2.4 refuses
            done.add(language)
        return Kept()

    interpreter._patch_lang = patch_lang


def keep_types() -> None:
    """Types of values, most of what the stock interpreter computes, are made once each; sums are not checked for an overflow that nobody
    is told of without `debug`."""
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    core, stock_numpy, stock_broadcast = tl.core, interpreter._get_np_dtype, interpreter.TritonSemantic.broadcast_impl_value
    stock_block, stock_tensor = core.block_type.__init__, core.tensor.__init__
    numpy_types, blocks, scalars = {}, {}, (core.tuple([]), core.constexpr(1))

    def numpy_type(of):
        if of.name not in numpy_types:
            numpy_types[of.name] = stock_numpy(of)
        return numpy_types[of.name]

    def equal(self, other):
        other = other.value if isinstance(other, core.constexpr) else other
        return self is other or (isinstance(other, core.dtype) and self.name == other.name)

    def block(self, element_ty, shape):
        shape = shape.value if isinstance(shape, core.constexpr) else shape
        sizes = tuple([size.value if isinstance(size, core.constexpr) else size for size in shape])
        made = blocks.get((element_ty.name, sizes))
        if made is None:
            stock_block(self, element_ty, shape)
            self.of_tensors = core.tuple([core.constexpr(size) for size in sizes]), core.constexpr(self.numel)
            blocks[element_ty.name, sizes] = dict(self.__dict__)
        else:
            self.__dict__.update(made, element_ty=element_ty)

    def tensor(self, handle, type):
        if not isinstance(type, (core.block_type, core.dtype)):
            stock_tensor(self, handle, type)
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = type.of_tensors if type.is_block() else scalars

    def broadcast(self, lhs, rhs):
        same = lhs.type.is_block() and rhs.type.is_block() and lhs.type.shape is rhs.type.shape
        return (lhs, rhs) if same else stock_broadcast(self, lhs, rhs)

    interpreter._get_np_dtype, interpreter.TritonSemantic.broadcast_impl_value = numpy_type, broadcast
    core.dtype.__eq__, core.block_type.__init__, core.tensor.__init__ = equal, block, tensor
