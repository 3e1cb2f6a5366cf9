"""Loops over arrays that NumPy would need many passes for, compiled to machine code."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

from numba import njit

P = ParamSpec("P")
R = TypeVar("R")


def compiled(loop: Callable[P, R]) -> Callable[P, R]:
    """Compile a function of arrays and numbers at its first call; the machine code is kept on disk for other processes.

    It holds the interpreter's lock: loops take microseconds, and giving the lock away would cost more. Where no
    directory can be written, every process compiles for itself. NUMBA_DISABLE_JIT=1 runs the Python instead.
    """
    try:
        return _typed(njit(cache=True), loop)
    except RuntimeError:  # nowhere to keep what was compiled
        return _typed(njit, loop)


def _typed(decorate: Callable[..., Callable[P, R]], loop: Callable[P, R]) -> Callable[P, R]:
    return decorate(loop)
