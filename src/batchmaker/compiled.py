"""Loops over arrays that NumPy would need many passes for, compiled to machine code."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, ParamSpec, TypeVar

from numba import njit

P = ParamSpec("P")
R = TypeVar("R")


def compiled(loop: Callable[P, R]) -> Callable[P, R]:
    """Compile a function of arrays and numbers at its first call; the machine code is kept on disk for other processes.

    It holds the interpreter's lock: loops take microseconds, and giving the lock away would cost more. Where no
    directory can be written, every process compiles for itself. NUMBA_DISABLE_JIT=1 runs the Python instead.
    """
    return _kept(njit, loop)


def compiled_arithmetic(loop: Callable[P, R]) -> Callable[P, R]:
    """As `compiled`, for a cell's numbers: the interpreter's lock is let go of meanwhile, a product and a sum may be
    rounded once, together, and a division by zero is infinite."""
    return _kept(partial(njit, nogil=True, error_model="numpy", fastmath={"contract"}), loop)


def _kept(decorate: Callable[..., Any], loop: Callable[P, R]) -> Callable[P, R]:
    try:
        made: Callable[P, R] = decorate(cache=True)(loop)
    except RuntimeError:  # nowhere to keep what was compiled
        made = decorate()(loop)
    return made
