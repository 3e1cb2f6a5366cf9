"""Products of a few rows with a tile of weights, and the gates of one row of it, as vectors that stay in registers.

A tile is the weights of all gates of LANES units (or of four times as many units, if there is one gate), packed in the
order in which they are read: [tiles, hidden, vectors, LANES] float32, or [tiles, hidden / 2, vectors, LANES, 2]
bfloat16, with each pair in one 32 bit number. Vectors of LANES numbers are LLVM's, on any processor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import llvmlite.binding as llvm
from llvmlite import ir
from numba import types
from numba.core import cgutils as _cgutils
from numba.extending import intrinsic

from batchmaker.compiled import machine_code
from batchmaker.kernels import pointwise

cgutils: Any = _cgutils
_made_for_constants: Callable[[Callable[..., Any]], Callable[..., Any]] = intrinsic(prefer_literal=True)
_FEATURES: Final = dict(llvm.get_host_cpu_features())
_WIDE: Final = bool(_FEATURES.get("avx512f"))

LANES: Final = 16 if _WIDE else 8
"""Numbers in a vector."""

TILE_ROWS: Final = 6 if _WIDE else 3
"""Rows that are multiplied at once: their sums of four vectors fit into the registers beside the weights."""

_FEW_ROWS: Final = 2
"""Up to so many rows a product waits for its weights, which are then prefetched well before."""

_AHEAD_BYTES: Final = 4096
_FLOAT, _INT, _SHORT, _LONG = ir.FloatType(), ir.IntType(32), ir.IntType(16), ir.IntType(64)
_FLOATS, _INTS, _SHORTS = (ir.VectorType(kind, LANES) for kind in (_FLOAT, _INT, _SHORT))


@_made_for_constants
def prefetch(_: Any, address: Any, locality: Any) -> Any:
    """Prefetch the cache line of an address, which may be unreadable, into the first cache (3) or the second (2)."""
    near = locality.literal_value

    def build(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        _prefetch(builder, args[0], near)

    return types.void(types.int64, locality), build


@_made_for_constants
def multiply_tile(
    _: Any, rows: Any, vectors: Any, more: Any, depth: Any, stride: Any, a: Any, w: Any, t: Any, like: Any
) -> Any:
    """t [rows, vectors, LANES] = a [rows, depth] @ `depth` numbers of a tile of weights, in float32, all by address.

    rows: 1 to TILE_ROWS. vectors: 3 or 4, known at compile time. more: add to the present content. depth: even. stride:
    from one row of `a` to the next, in numbers. like: a number of the weights' dtype.
    """
    count = vectors.literal_value

    def build(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        rows, _, *rest, _ = args
        done = builder.append_basic_block("done")
        switch = builder.switch(rows, done)
        for number in range(1, TILE_ROWS + 1):
            block = builder.append_basic_block(f"rows{number}")
            switch.add_case(_LONG(number), block)
            builder.position_at_end(block)
            _product(builder, number, count, like == types.float32, *rest)
            builder.branch(done)
        builder.position_at_end(done)

    return types.void(types.int64, vectors, types.boolean, *[types.int64] * 5, like), build


def _product(
    builder: Any, rows: int, vectors: int, single: bool, more: Any, depth: Any, stride: Any, a: Any, w: Any, t: Any
) -> None:
    """The product of `rows` rows.

    Two numbers of each row are processed at a time, with separate sums for a single row.
    """
    sets = 2 if rows == 1 else 1
    zero = ir.Constant(_FLOATS, [0.0] * LANES)
    before = builder.block
    body, after = builder.append_basic_block("product"), builder.append_basic_block("sums")
    floats = builder.inttoptr(a, _FLOAT.as_pointer())
    weights = builder.inttoptr(w, (_FLOATS if single else _INTS).as_pointer())
    target = builder.inttoptr(t, _FLOATS.as_pointer())
    start = [
        builder.select(more, builder.load(builder.gep(target, [_LONG(i)]), align=4), zero)
        for i in range(rows * vectors)
    ]
    builder.branch(body)
    builder.position_at_end(body)
    k = builder.phi(_LONG)
    sums = [[[builder.phi(_FLOATS) for _ in range(vectors)] for _ in range(rows)] for _ in range(sets)]
    if rows <= _FEW_ROWS:
        lines = (2 if single else 1) * vectors
        ahead = builder.add(w, builder.mul(k, _LONG((4 if single else 2) * vectors * LANES)))
        for line in range(lines):
            _prefetch(builder, builder.add(ahead, _LONG(_AHEAD_BYTES + line * 4 * LANES)), 3)
    following = [[list(row) for row in half] for half in sums]
    pairs = _weights(builder, weights, k, vectors, single)
    for half in range(2):
        into = following[half % sets]
        for row in range(rows):
            at = builder.add(builder.mul(_LONG(row), stride), builder.add(k, _LONG(half)))
            number = _splat(builder, builder.load(builder.gep(floats, [at])))
            for v in range(vectors):
                into[row][v] = _fma(builder, number, pairs[half][v], into[row][v])
    next_k = builder.add(k, _LONG(2))
    builder.cbranch(builder.icmp_signed("<", next_k, depth), body, after)
    k.add_incoming(_LONG(0), before)
    k.add_incoming(next_k, body)
    for half in range(sets):
        for row in range(rows):
            for v in range(vectors):
                sums[half][row][v].add_incoming(zero if half else start[row * vectors + v], before)
                sums[half][row][v].add_incoming(following[half][row][v], body)
    builder.position_at_end(after)
    for row in range(rows):
        for v in range(vectors):
            total = following[0][row][v]
            if sets == 2:
                total = builder.fadd(total, following[1][row][v])
            builder.store(total, builder.gep(target, [_LONG(row * vectors + v)]), align=4)


def _weights(builder: Any, weights: Any, k: Any, vectors: int, single: bool) -> list[list[Any]]:
    """Return the weights of numbers k and k + 1 as float32 vectors."""
    if single:
        first = builder.mul(k, _LONG(vectors))
        loaded = [
            builder.load(builder.gep(weights, [builder.add(first, _LONG(v))]), align=4) for v in range(2 * vectors)
        ]
        return [loaded[:vectors], loaded[vectors:]]
    first = builder.mul(builder.lshr(k, _LONG(1)), _LONG(vectors))
    loaded = [builder.load(builder.gep(weights, [builder.add(first, _LONG(v))]), align=4) for v in range(vectors)]
    up, upper = _all(_INTS, 16), _all(_INTS, 0xFFFF0000)
    return [
        [builder.bitcast(builder.shl(pair, up), _FLOATS) for pair in loaded],
        [builder.bitcast(builder.and_(pair, upper), _FLOATS) for pair in loaded],
    ]


@machine_code
def finish_lstm_tile(_: Any, t: Any, px: Any, stride: Any, h: Any, c: Any, like: Any) -> Any:
    """Products (i, f, o, 2g) of LANES units of a row at t, and projected inputs -> h and c, by address.

    px: the projected inputs of the first gate. stride: bytes from one gate's to the next's. like: a number of the dtype
    of px, h and c.
    """

    def build(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        t, px, stride, h, c, _ = args
        x = _Gates(builder, like)
        i, f, o, g = (
            x.half_tanh(builder.fadd(x.floats(t, gate), x.values(_along(builder, px, stride, gate))))
            for gate in range(4)
        )
        i, f, o = (x.sigmoid(gate) for gate in (i, f, o))
        new = _fma(builder, f, x.values(c), builder.fmul(i, g))
        x.store(new, c)
        x.store(builder.fmul(o, x.half_tanh(builder.fadd(new, new))), h)

    return types.void(*[types.int64] * 5, like), build


@machine_code
def finish_gru_tile(_: Any, t: Any, px: Any, stride: Any, h: Any, bias: Any, before: Any, like: Any) -> Any:
    """Products (r, z, 2n) of LANES units of a row at t, their bias, projected inputs and h before -> h, by address.

    As finish_lstm_tile; bias: of the first gate, float32, `stride` elements apart as px. before: float32.
    """

    def build(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        t, px, stride, h, bias, before, _ = args
        x = _Gates(builder, like)
        wide = builder.mul(stride, _LONG(4 // x.size))
        r, z, n = (builder.fadd(x.floats(t, k), x.floats(_along(builder, bias, wide, k), 0)) for k in range(3))
        r_x, z_x, n_x = (x.values(_along(builder, px, stride, k)) for k in range(3))
        r = x.sigmoid(x.half_tanh(builder.fadd(r, r_x)))
        z = x.sigmoid(x.half_tanh(builder.fadd(z, z_x)))
        n = x.half_tanh(_fma(builder, r, n, n_x))
        x.store(_fma(builder, z, builder.fsub(x.floats(before, 0), n), n), h)

    return types.void(*[types.int64] * 6, like), build


@machine_code
def finish_rnn_tile(_: Any, relu: Any, t: Any, px: Any, h: Any, like: Any) -> Any:
    """Products of LANES units of a row at t and projected inputs, doubled for tanh -> h, by address."""

    def build(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        relu, t, px, h, _ = args
        x = _Gates(builder, like)
        total, zero = builder.fadd(x.floats(t, 0), x.values(px)), _all(_FLOATS, 0.0)
        positive = builder.select(builder.fcmp_ordered("<", total, zero), zero, total)
        x.store(builder.select(relu, positive, x.half_tanh(total)), h)

    return types.void(types.boolean, *[types.int64] * 3, like), build


class _Gates:
    """Loads and stores of vectors, and the operations of gates. like: numba's type of the stored numbers."""

    def __init__(self, builder: Any, like: Any) -> None:
        self._builder = builder
        self._single = like == types.float32
        self.size = 4 if self._single else 2

    def floats(self, address: Any, number: int) -> Any:
        """Load a vector of float32, `number` vectors after an address."""
        builder = self._builder
        pointer = builder.inttoptr(address, _FLOATS.as_pointer())
        return builder.load(builder.gep(pointer, [_LONG(number)]), align=4)

    def values(self, address: Any) -> Any:
        """Load a vector of stored numbers, as float32."""
        if self._single:
            return self.floats(address, 0)
        builder = self._builder
        bits = builder.load(builder.inttoptr(address, _SHORTS.as_pointer()), align=2)
        return builder.bitcast(builder.shl(builder.zext(bits, _INTS), _all(_INTS, 16)), _FLOATS)

    def store(self, value: Any, address: Any) -> None:
        """Store a vector, rounded as `machine.rounded` does."""
        builder = self._builder
        if self._single:
            builder.store(value, builder.inttoptr(address, _FLOATS.as_pointer()), align=4)
            return
        bits, up = builder.bitcast(value, _INTS), _all(_INTS, 16)
        odd = builder.and_(builder.lshr(bits, up), _all(_INTS, 1))
        nearest = builder.add(builder.add(bits, odd), _all(_INTS, 0x7FFF))
        quiet = builder.or_(bits, _all(_INTS, 1 << 22))
        bits = builder.select(builder.fcmp_unordered("uno", value, value), quiet, nearest)
        short = builder.trunc(builder.lshr(bits, up), _SHORTS)
        builder.store(short, builder.inttoptr(address, _SHORTS.as_pointer()), align=2)

    def sigmoid(self, half_tanh: Any) -> Any:
        """Return tanh(x / 2) as sigmoid(x)."""
        half = _all(_FLOATS, 0.5)
        return _fma(self._builder, half, half_tanh, half)

    def half_tanh(self, x: Any) -> Any:
        """Return tanh(x / 2) as pointwise.tanh does."""
        builder = self._builder
        x = builder.fmul(x, _all(_FLOATS, 0.5))
        for end, beyond in ((pointwise.END, ">"), (-pointwise.END, "<")):
            bound = _all(_FLOATS, float(end))
            x = builder.select(builder.fcmp_ordered(beyond, x, bound), bound, x)
        s = builder.fmul(x, x)
        p, q = (_polynomial(builder, s, of) for of in (pointwise.TANH_OVER, pointwise.TANH_UNDER))
        return builder.fmul(builder.fmul(p, x), _reciprocal(builder, q))


def _polynomial(builder: Any, s: Any, coefficients: tuple[Any, ...]) -> Any:
    total = _all(_FLOATS, float(coefficients[0]))
    for number in coefficients[1:]:
        total = _fma(builder, total, s, _all(_FLOATS, float(number)))
    return total


def _reciprocal(builder: Any, q: Any) -> Any:
    """Return 1 / q of normal numbers.

    With AVX-512 it is the estimate and one step of Newton's method, which is as exact.
    """
    if not _WIDE:
        return builder.fdiv(_all(_FLOATS, 1.0), q)
    mask = ir.IntType(16)
    kind = ir.FunctionType(_FLOATS, [_FLOATS, _FLOATS, mask])
    estimate = cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.avx512.rcp14.ps.512")
    r = builder.call(estimate, [q, _all(_FLOATS, 0.0), mask(0xFFFF)])
    residual = _fma(builder, builder.fneg(q), r, _all(_FLOATS, 1.0))
    return _fma(builder, r, residual, r)


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, rounded once."""
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32"), [a, b, c])


def _along(builder: Any, address: Any, stride: Any, number: int) -> Any:
    return builder.add(address, builder.mul(stride, _LONG(number))) if number else address


def _all(kind: Any, number: Any) -> Any:
    return ir.Constant(kind, [number] * LANES)


def _splat(builder: Any, number: Any) -> Any:
    one = builder.insert_element(ir.Constant(_FLOATS, ir.Undefined), number, _INT(0))
    return builder.shuffle_vector(one, ir.Constant(_FLOATS, ir.Undefined), ir.Constant(_INTS, [0] * LANES))


def _prefetch(builder: Any, address: Any, near: int) -> None:
    pointer = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [pointer, _INT, _INT, _INT])
    name = "llvm.prefetch.p0" if llvm.llvm_version_info[0] > 14 else "llvm.prefetch.p0i8"  # pointers have no types now
    function = cgutils.get_or_insert_function(builder.module, kind, name)
    builder.call(function, [builder.inttoptr(address, pointer), _INT(0), _INT(near), _INT(1)])
