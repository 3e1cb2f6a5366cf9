"""Loops over arrays that NumPy would need many passes for, compiled to machine code."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar, final

import numpy as np
from numba import config as _config
from numba import njit
from numba.core.caching import FunctionCache
from numba.core.runtime.nrt import rtsys
from numba.extending import is_jitted
from numpy.typing import NDArray

P = ParamSpec("P")
R = TypeVar("R")

config: Any = _config
_INT64: Final = np.dtype(np.int64)
_ARITHMETIC: Final[dict[str, Any]] = {
    "nogil": True,
    "error_model": "numpy",
    "fastmath": {"nsz", "arcp", "contract", "afn", "reassoc"},  # NaN and infinity stay what they are
}


def compiled(loop: Callable[P, R]) -> Callable[P, R]:
    """Compile a function of arrays and numbers at its first call; the machine code is kept on disk for other processes.

    It holds the interpreter's lock: loops take microseconds, and giving the lock away would cost more. Where no
    directory can be written, every process compiles for itself. NUMBA_DISABLE_JIT=1 runs the Python instead.

    A call of one such function by another counts the references to each array that is handed over, which takes longer
    than a few look-ups: what is done for each item of a loop is written in the loop.
    """
    return _compiled(loop, {})


def compiled_arithmetic(loop: Callable[P, R]) -> Callable[P, R]:
    """As `compiled`, for loops of arithmetic that take longer: without the interpreter's lock, as vectors.

    A sum is added up in any order, and a division by zero gives infinity.
    """
    return _compiled(loop, _ARITHMETIC)


def compiled_part(loop: Callable[P, R]) -> Callable[P, R]:
    """As `compiled_arithmetic`, for what only compiled loops call: it is kept as part of each of them."""
    return _typed(partial(njit, no_cpython_wrapper=True, no_cfunc_wrapper=True, **_ARITHMETIC)(), loop)


def int64s(given: NDArray[Any]) -> NDArray[np.int64]:
    """Return integers as compiled loops take them: int64, contiguous and writable, for each other form of an array is
    compiled once more. The array itself where it is like that."""
    if given.dtype == _INT64 and given.flags.carray:
        return given
    found = np.ascontiguousarray(given, np.int64)
    return found if found.flags.writeable else found.copy()


def is_compiled(loop: Callable[..., Any]) -> bool:
    """Whether calls run machine code, and not the Python of a loop (NUMBA_DISABLE_JIT=1)."""
    return is_jitted(loop) is True


def directory_of(package: Path, given: str) -> str:
    """Return where the machine code of a package is kept: another directory for each state of its sources.

    numba knows what it has kept by the file of the loop alone, and in it are the loops of other files that it calls.
    given: NUMBA_CACHE_DIR, empty where that is not set; then it is beside the bytecode, or else the user's.
    """
    digest = blake2b(digest_size=6)
    for path in sorted(package.rglob("*.py")):
        found = path.stat()
        digest.update(f"{path.relative_to(package)} {found.st_mtime_ns} {found.st_size}\n".encode())
    users = os.path.join(os.environ.get("XDG_CACHE_HOME", ""), "batchmaker")
    if not os.path.isabs(users):
        users = os.path.expanduser("~/.cache/batchmaker")
    beside = str(package / "__pycache__") if os.access(package, os.W_OK) else users
    return os.path.join(given or beside, f"compiled-{digest.hexdigest()}")


@cache
def _directory() -> str:
    return directory_of(Path(__file__).parent, config.CACHE_DIR)


@final
class _KeptCode(FunctionCache):
    """numba's store of machine code. It loads without what is needed to compile, all that numba knows of Python and
    NumPy, which takes as long as loading all loops; numba makes that ready by itself before it compiles."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return what is kept for a signature, None if there is nothing."""
        rtsys.initialize(target_context)
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)  # type: ignore[no-untyped-call]


def _compiled(loop: Callable[P, R], options: dict[str, Any]) -> Callable[P, R]:
    made = _typed(partial(njit, **options)(), loop)
    if is_compiled(made):
        before, config.CACHE_DIR = config.CACHE_DIR, _directory()  # looked at while the store is made
        try:
            made._cache = _KeptCode(loop)  # type: ignore[attr-defined, no-untyped-call]
        except RuntimeError:  # nowhere to keep what is compiled
            pass
        finally:
            config.CACHE_DIR = before
    return made


def _typed(decorate: Callable[..., Callable[P, R]], loop: Callable[P, R]) -> Callable[P, R]:
    return decorate(loop)
