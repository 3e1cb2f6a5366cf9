"""tanh, sigmoid, exp, erf and softplus for compiled loops over float32, in a form that LLVM vectorises to any width.

LLVM cannot vectorise calls of the C library's exp and tanh.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numba import types

from batchmaker.compiled import compiled_arithmetic, compiled_exact, machine_code

TANH_ERROR: Final = 3e-7
"""Bound of the absolute error of tanh; that of sigmoid is half of it."""

_HALF = np.float32(0.5)
END: Final = np.float32(7.905311)
"""Beyond it, tanh is one."""

# An odd polynomial over an even one, with the coefficients of Eigen's ptanh for float32.
_P1, _P3, _P5 = np.float32(4.89352455891786e-03), np.float32(6.37261928875436e-04), np.float32(1.48572235717979e-05)
_P7, _P9 = np.float32(5.12229709037114e-08), np.float32(-8.60467152213735e-11)
_P11, _P13 = np.float32(2.00018790482477e-13), np.float32(-2.76076847742355e-16)
_Q0, _Q2 = np.float32(4.89352518554385e-03), np.float32(2.26843463243900e-03)
_Q4, _Q6 = np.float32(1.18534705686654e-04), np.float32(1.19825839466702e-06)
TANH_OVER: Final = (_P13, _P11, _P9, _P7, _P5, _P3, _P1)
TANH_UNDER: Final = (_Q6, _Q4, _Q2, _Q0)
"""Coefficients of the denominator and the numerator in x squared; the numerator is multiplied by x."""


@compiled_arithmetic
def tanh(x: Any) -> Any:
    """Return tanh(x) of a float32 within TANH_ERROR; NaN stays NaN."""
    x = END if x > END else x  # min and max would lose a NaN
    x = -END if x < -END else x
    s = x * x
    p = ((((((_P13 * s + _P11) * s + _P9) * s + _P7) * s + _P5) * s + _P3) * s + _P1) * x
    return p / (((_Q6 * s + _Q4) * s + _Q2) * s + _Q0)


@compiled_arithmetic
def sigmoid(x: Any) -> Any:
    """Return 1 / (1 + exp(-x)) of a float32 within half of TANH_ERROR; NaN stays NaN."""
    return _HALF * tanh(_HALF * x) + _HALF


# --- exp and what is made of it: rounded as it is written, which the splitting of the exponent needs -----------------

EXP_ERROR: Final = 4e-7
"""Bound of the relative error of exp and softplus."""
ERF_ERROR: Final = 6e-7
"""Bound of the absolute and of the relative error of erf."""

_LEAST, _MOST = np.float32(-86.98), np.float32(89)
"""Below and above them, exp is 0 (torch has numbers below 1.7e-38 there) and infinity."""
_LOG2_E, _LN2_HIGH, _LN2_LOW = np.float32(1.44269504), np.float32(0.693359375), np.float32(-2.12194440e-4)
# The coefficients of Cephes' expf, of r^2 and higher powers.
_E2, _E3, _E4 = np.float32(5.0000001201e-1), np.float32(1.6666665459e-1), np.float32(4.1665795894e-2)
_E5, _E6, _E7 = np.float32(8.3334519073e-3), np.float32(1.3981999507e-3), np.float32(1.9875691500e-4)

_ERF_END = np.float32(4)
# An odd polynomial over an even one, with the coefficients of Eigen's erf for float32.
_ERF_OVER: Final = tuple([np.float32(x) for x in (
    -2.72614225801306e-10, 2.77068142495902e-08, -2.10102402082508e-06, -5.69250639462346e-05, -7.34990630326855e-04,
    -2.95459980854025e-03, -1.60960333262415e-02,
)])  # fmt: skip
_ERF_UNDER: Final = tuple([np.float32(x) for x in (
    -1.45660718464996e-05, -2.13374055278905e-04, -1.68282697438203e-03, -7.37332916720468e-03, -1.42647390514189e-02,
)])  # fmt: skip
_O1, _O3, _O5, _O7, _O9, _O11, _O13 = _ERF_OVER[::-1]
_U0, _U2, _U4, _U6, _U8 = _ERF_UNDER[::-1]

_ZERO, _ONE, _TWO = np.float32(0), np.float32(1), np.float32(2)
_A3, _A5, _A7, _A9, _A11, _A13 = (np.float32(1 / power) for power in (3, 5, 7, 9, 11, 13))


@machine_code
def _power_of_two(_typing: Any, exponent: Any) -> Any:
    """Return 2^exponent as float32, for an int32 from -126 to 127."""

    def write(context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        exponent = arguments[0]
        bits = builder.shl(builder.add(exponent, exponent.type(127)), exponent.type(23))
        return builder.bitcast(bits, context.get_value_type(types.float32))

    return types.float32(types.int32), write


@compiled_exact
def exp(x: Any) -> Any:
    """Return e^x of a float32 within EXP_ERROR, or 1.7e-38; NaN stays NaN."""
    y = x if x < _MOST else _MOST
    y = y if y > _LEAST else _LEAST
    whole = np.floor(y * _LOG2_E + _HALF)
    r = (y - whole * _LN2_HIGH) - whole * _LN2_LOW
    p = (((((_E7 * r + _E6) * r + _E5) * r + _E4) * r + _E3) * r + _E2) * (r * r) + r + _ONE
    made = (p + p) * _power_of_two(np.int32(np.int32(whole) - 1))  # 2^128 is no float32
    made = made if x > _LEAST else _ZERO
    return x if x != x else made


@compiled_arithmetic
def erf(x: Any) -> Any:
    """Return the error function of a float32 within ERF_ERROR, from 4 on exactly 1; NaN stays NaN."""
    s = min(x * x, _ERF_END * _ERF_END)
    p = ((((((_O13 * s + _O11) * s + _O9) * s + _O7) * s + _O5) * s + _O3) * s + _O1) * x
    made = p / ((((_U8 * s + _U6) * s + _U4) * s + _U2) * s + _U0)
    made = _ONE if x > _ERF_END else made
    return -_ONE if x < -_ERF_END else made


@compiled_exact
def softplus(x: Any) -> Any:
    """Return log(1 + e^x) of a float32 within EXP_ERROR; NaN stays NaN."""
    y = exp(-abs(x))
    s = y / (_TWO + y)  # log(1 + y) = 2 artanh s
    q = s * s
    series = (((((_A13 * q + _A11) * q + _A9) * q + _A7) * q + _A5) * q + _A3) * q + _ONE
    return (x if x > _ZERO else _ZERO) + _TWO * s * series
