"""Compiles loops over arrays to machine code, for work that would need many NumPy passes."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache, partial
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final, ParamSpec, TypeVar, cast, final

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
    "fastmath": {"nsz", "arcp", "contract", "afn", "reassoc"},  # NaN and infinity keep their meaning
}

_WITHIN: Final[dict[str, Any]] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def compiled(loop: Callable[P, R]) -> Callable[P, R]:
    """Compile a function of arrays and numbers at its first call; the machine code is kept on disk for other processes.

    It holds the interpreter's lock: loops take microseconds, and releasing the lock would cost more. If no directory
    can be written, every process compiles for itself. With NUMBA_DISABLE_JIT=1 the Python code runs instead.

    A call of one such function by another counts the references to each array argument, which takes longer than a few
    look-ups. So write the work for each item directly in the loop, or let it be written there (`compiled_inline`).
    """
    return _compiled(loop, {})


def compiled_arithmetic(loop: Callable[P, R]) -> Callable[P, R]:
    """As `compiled`, for longer loops of arithmetic: without the interpreter's lock, vectorised.

    A sum may be added up in any order, and a division by zero gives infinity.
    """
    return _compiled(loop, _ARITHMETIC)


def compiled_part(loop: Callable[P, R]) -> Callable[P, R]:
    """As `compiled_arithmetic`, for functions that only compiled loops call: stored as part of each of them."""
    return _typed(partial(njit, **_WITHIN, **_ARITHMETIC)(), loop)


def compiled_within(loop: Callable[P, R]) -> Callable[P, R]:
    """As `compiled`, for functions that only compiled loops call: stored as part of each of them."""
    return _typed(partial(njit, **_WITHIN)(), loop)


def compiled_inline(loop: Callable[P, R]) -> Callable[P, R]:
    """As `compiled`, for functions that only compiled loops call: written out in each of them.

    For functions of many arrays that are called at every turn: nothing is counted at a call that is not there.
    """
    return _typed(partial(njit, inline="always")(), loop)


def number(value: int) -> int:
    """Return an int64, for what compiled loops hand to each other: numba compiles a loop anew for each literal."""
    return cast(int, np.int64(value))


def int64s(given: NDArray[Any]) -> NDArray[np.int64]:
    """Return integers in the form for compiled loops: int64, contiguous and writable.

    Each other form of an array would be compiled once more. An array in this form is returned itself.
    """
    if given.dtype == _INT64 and given.flags.carray:
        return given
    found = np.ascontiguousarray(given, np.int64)
    return found if found.flags.writeable else found.copy()


def is_compiled(loop: Callable[..., Any]) -> bool:
    """Whether calls run machine code, and not the loop's Python code (NUMBA_DISABLE_JIT=1)."""
    return is_jitted(loop) is True


def directory_of(package: Path, given: str) -> str:
    """Return the directory of a package's machine code: another one for each state of its sources.

    numba identifies its cache entries by the loop's own file, but they contain loops of other files that it calls. Nor
    does it know whether they check bounds (NUMBA_BOUNDSCHECK=1); these have a directory of their own.
    given: NUMBA_CACHE_DIR, empty if it is not set; then the directory is beside the bytecode, or else the user's.
    """
    digest = blake2b(digest_size=6)
    for path in sorted(package.rglob("*.py")):
        found = path.stat()
        digest.update(f"{path.relative_to(package)} {found.st_mtime_ns} {found.st_size}\n".encode())
    users = os.path.join(os.environ.get("XDG_CACHE_HOME", ""), "batchmaker")
    if not os.path.isabs(users):
        users = os.path.expanduser("~/.cache/batchmaker")
    beside = str(package / "__pycache__") if os.access(package, os.W_OK) else users
    return os.path.join(given or beside, f"compiled-{digest.hexdigest()}{'-bounds' if config.BOUNDSCHECK else ''}")


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
