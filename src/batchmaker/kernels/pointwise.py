"""tanh and sigmoid for compiled loops over float32, in a form that LLVM vectorises to any width.

LLVM cannot vectorise calls of the C library's exp and tanh.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np

from batchmaker.compiled import compiled_arithmetic

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
