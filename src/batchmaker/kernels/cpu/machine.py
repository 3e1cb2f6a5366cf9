"""Operations that compiled loops need and numba lacks: bfloat16, memory by address, and calls of C functions."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils as _cgutils

from batchmaker.compiled import machine_code

cgutils: Any = _cgutils
_INT, _FLOAT = ir.IntType(32), ir.FloatType()
_ROW_MAJOR, _PLAIN, _TRANSPOSED, _PACKED = 101, 111, 112, 151  # of cblas.h and mkl_cblas.h


@machine_code
def widened(_: Any, value: Any) -> Any:
    """Return a float32 unchanged, an int16 as the float32 whose upper half it is."""

    def build(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        if value == types.float32:
            return args[0]
        return builder.bitcast(builder.shl(builder.zext(args[0], _INT), _INT(16)), _FLOAT)

    return types.float32(value), build


@machine_code
def rounded(_: Any, value: Any, like: Any) -> Any:
    """Return a float32 unchanged; if `like` is an int16, return the bits of the nearest bfloat16 (ties to even)."""

    def build(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        if like == types.float32:
            return args[0]
        bits = builder.bitcast(args[0], _INT)
        odd = builder.and_(builder.lshr(bits, _INT(16)), _INT(1))
        up = builder.add(builder.add(bits, odd), _INT(0x7FFF))
        # Adding to the bits of a NaN could turn it into another number.
        wide = builder.select(builder.fcmp_unordered("uno", args[0], args[0]), builder.or_(bits, _INT(1 << 22)), up)
        return builder.trunc(builder.lshr(wide, _INT(16)), ir.IntType(16))

    return like(types.float32, like), build


@machine_code
def int64_at(_: Any, address: Any, index: Any) -> Any:
    """Return element `index` of the int64 array that begins at an address."""

    def build(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        array = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        return builder.load(builder.gep(array, [args[1]]))

    return types.int64(types.int64, types.int64), build


@machine_code
def write_int64(_: Any, address: Any, index: Any, value: Any) -> Any:
    """Write element `index` of the int64 array that begins at an address."""

    def build(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        array = builder.inttoptr(args[0], ir.IntType(64).as_pointer())
        builder.store(args[2], builder.gep(array, [args[1]]))

    return types.void(types.int64, types.int64, types.int64), build


@machine_code
def float64_at(_: Any, address: Any, index: Any) -> Any:
    """Return element `index` of the float64 array that begins at an address."""

    def build(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        array = builder.inttoptr(args[0], ir.DoubleType().as_pointer())
        return builder.load(builder.gep(array, [args[1]]))

    return types.float64(types.int64, types.int64), build


@machine_code
def write_float64(_: Any, address: Any, index: Any, value: Any) -> Any:
    """Write element `index` of the float64 array that begins at an address."""

    def build(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        array = builder.inttoptr(args[0], ir.DoubleType().as_pointer())
        builder.store(args[2], builder.gep(array, [args[1]]))

    return types.void(types.int64, types.int64, types.float64), build


@machine_code
def byte_at(_: Any, address: Any, index: Any) -> Any:
    """Return a byte, `index` bytes after an address, as a number from 0 to 255."""

    def build(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        array = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        return builder.zext(builder.load(builder.gep(array, [args[1]])), ir.IntType(64))

    return types.int64(types.int64, types.int64), build


@machine_code
def write_byte(_: Any, address: Any, index: Any, value: Any) -> Any:
    """Write the lowest byte of a number, `index` bytes after an address."""

    def build(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        array = builder.inttoptr(args[0], ir.IntType(8).as_pointer())
        builder.store(builder.trunc(args[2], ir.IntType(8)), builder.gep(array, [args[1]]))

    return types.void(types.int64, types.int64, types.int64), build


@machine_code
def copy_bytes(_: Any, target: Any, source: Any, count: Any) -> Any:
    """Copy bytes from one address to another; the two do not overlap."""

    def build(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        to, source, count = args
        byte = ir.IntType(8).as_pointer()
        cgutils.raw_memcpy(builder, builder.inttoptr(to, byte), builder.inttoptr(source, byte), count, 1)

    return types.void(types.int64, types.int64, types.int64), build


@machine_code
def zero_bytes(_: Any, target: Any, count: Any) -> Any:
    """Set bytes from an address on to zero."""

    def build(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        to, count = args
        cgutils.memset(builder, builder.inttoptr(to, ir.IntType(8).as_pointer()), count, 0)

    return types.void(types.int64, types.int64), build


@machine_code
def call_sgemm_compute(
    _: Any, function: Any, rows: Any, width: Any, depth: Any, a: Any, stride: Any, packed: Any, c: Any
) -> Any:
    """Call MKL's cblas_sgemm_compute: c = a @ the packed matrix, for float32 [rows, depth] and [rows, width].

    stride: numbers from one row of `a` to the next.
    """

    def build(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        function, rows, width, depth, a, stride, packed, c = args
        pointer = _FLOAT.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [_INT] * 6 + [pointer, _INT, pointer, _INT, _FLOAT, pointer, _INT])
        rows, width, depth, stride = (builder.trunc(size, _INT) for size in (rows, width, depth, stride))
        a, packed, c = (builder.inttoptr(address, pointer) for address in (a, packed, c))
        how = (_INT(_ROW_MAJOR), _INT(_PLAIN), _INT(_PACKED))
        arguments = (*how, rows, width, depth, a, stride, packed, width, _FLOAT(0), c, width)
        builder.call(builder.inttoptr(function, kind.as_pointer()), arguments)

    return types.void(*[types.int64] * 8), build


@machine_code
def call_brgemm(
    _: Any, function: Any, rows: Any, width: Any, depth: Any, a: Any, stride: Any, b: Any, c: Any, apart: Any
) -> Any:
    """Call torch's brgemm: c = a @ b, for float32 [rows, depth], [depth, width] and [rows, width]; b is contiguous.

    stride, apart: numbers from one row of `a` and of `c` to the next.
    """

    def build(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        function, rows, width, depth, a, stride, b, c, apart = args
        long, pointer = ir.IntType(64), _FLOAT.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [long] * 7 + [pointer] * 3 + [long])
        a, b, c = (builder.inttoptr(address, pointer) for address in (a, b, c))
        adds = has_other_layout = long(0)  # both are bool, of which the lowest byte is read
        arguments = (rows, width, depth, stride, width, apart, adds, a, b, c, has_other_layout)
        builder.call(builder.inttoptr(function, kind.as_pointer()), arguments)

    return types.void(*[types.int64] * 9), build


@machine_code
def call_gemm_bf16(_: Any, function: Any, rows: Any, width: Any, depth: Any, a: Any, b: Any, c: Any) -> Any:
    """Call MKL's cblas_gemm_bf16bf16f32: c = a @ b.T in float32, for bfloat16 [rows, depth] and [width, depth]."""

    def build(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        function, rows, width, depth, a, b, c = args
        half, pointer = ir.IntType(16).as_pointer(), _FLOAT.as_pointer()
        parameters = [_INT] * 6 + [_FLOAT, half, _INT, half, _INT, _FLOAT, pointer, _INT]
        kind = ir.FunctionType(ir.VoidType(), parameters)
        rows, width, depth = (builder.trunc(size, _INT) for size in (rows, width, depth))
        a, b, c = (builder.inttoptr(*pair) for pair in ((a, half), (b, half), (c, pointer)))
        how = (_INT(_ROW_MAJOR), _INT(_PLAIN), _INT(_TRANSPOSED))
        arguments = (*how, rows, width, depth, _FLOAT(1), a, depth, b, depth, _FLOAT(0), c, width)
        builder.call(builder.inttoptr(function, kind.as_pointer()), arguments)

    return types.void(*[types.int64] * 7), build


@machine_code
def call_with_number(_: Any, function: Any, number: Any) -> Any:
    """Call a C function that takes and returns an int."""

    def build(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(_INT, [_INT])
        number = builder.trunc(args[1], _INT)
        return builder.sext(builder.call(builder.inttoptr(args[0], kind.as_pointer()), [number]), ir.IntType(64))

    return types.int64(types.int64, types.int64), build
