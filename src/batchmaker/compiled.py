"""Compiles loops over arrays to machine code, for work that would need many NumPy passes."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache, partial, wraps
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final, ParamSpec, TypeVar, cast, final

import numpy as np
from numba import config as _config
from numba import njit, typeof, types
from numba.core import event, sigutils
from numba.core.caching import FunctionCache
from numba.core.compiler_lock import global_compiler_lock
from numba.core.runtime.nrt import rtsys
from numba.extending import intrinsic, is_jitted
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

NOT_COMPILING: Final[Any] = global_compiler_lock
"""Within this no other thread compiles a loop, or loads one."""

_NO_CFUNC: Final[dict[str, Any]] = {"no_cfunc_wrapper": True}  # a second entry, for callers written in C
_WITHIN: Final[dict[str, Any]] = {"no_cpython_wrapper": True, **_NO_CFUNC}
_LOG: Final = logging.getLogger(__name__)


@final
class _Compiling(event.Listener):
    """Counts the loops that are compiled now; numba compiles one after the other, and within one what it calls."""

    def __init__(self) -> None:
        self.count = 0

    def on_start(self, _: Any) -> None:
        self.count += 1

    def on_end(self, _: Any) -> None:
        self.count -= 1


_COMPILING: Final = _Compiling()
event.register("numba:compile", _COMPILING)  # type: ignore[no-untyped-call]


def is_compiling() -> bool:
    """Whether a loop is compiled now, in any thread. Loading one that is kept on disk does not count."""
    return _COMPILING.count > 0


def compiled(loop: Callable[P, R]) -> Callable[P, R]:
    """Compile a function of arrays and numbers at its first call; the machine code is kept on disk for other processes.

    It holds the interpreter's lock: most loops take microseconds, and releasing the lock would cost more. If its
    directory cannot be written (`kept_in`), every process compiles for itself. With NUMBA_DISABLE_JIT=1 the Python code
    runs instead.

    A call of one such function by another counts the references to each array argument, which takes longer than a few
    look-ups. So write the work for each item directly in the loop, or let it be written there (`compiled_inline`).
    """
    return _compiled(loop, {})


def compiled_unlocked(loop: Callable[P, R]) -> Callable[P, R]:
    """As `compiled`, without the interpreter's lock, which other threads get meanwhile: for loops that take longer."""
    return _compiled(loop, {"nogil": True})


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


def compiled_exact(loop: Callable[P, R]) -> Callable[P, R]:
    """As `compiled_part`, for arithmetic that is rounded as it is written: no sum is reordered."""
    return _typed(partial(njit, **_WITHIN, nogil=True, error_model="numpy")(), loop)


def compiled_inline(loop: Callable[P, R]) -> Callable[P, R]:
    """As `compiled`, for functions that only compiled loops call: written out in each of them.

    For functions of many arrays that are called at every turn: nothing is counted at a call that is not there.
    """
    return _typed(partial(njit, inline="always")(), loop)


def compiled_merged(loop: Callable[P, R]) -> Callable[P, R]:
    """As `compiled_within`, and merged into its caller when that is optimised: for a large part that is called once.

    Nothing is counted at its call either, and it is compiled once: `compiled_inline` would compile all that it calls
    anew, wherever it is written out.
    """
    return _typed(partial(njit, forceinline=True, **_WITHIN)(), loop)


def machine_code(write: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function for compiled loops to call, from one that writes its LLVM instructions."""
    return cast(Callable[..., Any], intrinsic(write))


def external(name: str, signature: str) -> Callable[..., Any]:
    """Return a function of the C library for compiled loops to call. signature: in numba's names of types."""
    arguments, returned = sigutils.normalize_signature(signature)  # type: ignore[no-untyped-call]
    return cast(Callable[..., Any], types.ExternalFunction(name, returned(*arguments)))


def number(value: int) -> int:
    """Return an int64, for what compiled loops hand to each other: numba compiles a loop anew for each literal."""
    return cast(int, np.int64(value))


def int64s(integers: NDArray[Any]) -> NDArray[np.int64]:
    """Return integers in the form for compiled loops: int64, contiguous and writable.

    Each other form of an array would be compiled once more. An array in this form is returned itself.
    """
    if integers.dtype == _INT64 and integers.flags.carray:
        return integers
    converted = np.ascontiguousarray(integers, np.int64)
    return converted if converted.flags.writeable else converted.copy()


def is_compiled(loop: Callable[..., Any]) -> bool:
    """Whether calls run machine code, and not the loop's Python code (NUMBA_DISABLE_JIT=1)."""
    return is_jitted(loop) is True


@final
class CalledForms:
    """The loops that Python calls while the forms are learnt, in order, each with the types of its arguments: its form.

    Loops run as Python code meanwhile (NUMBA_DISABLE_JIT=1). `learn` comes before the modules with the loops are
    imported. seen: (module, name, types). What loops call is part of them and no form.
    """

    _learning: CalledForms | None = None

    def __init__(self) -> None:
        self.seen: dict[tuple[str, str, tuple[Any, ...]], Callable[..., Any]] = {}
        self._is_inside = False

    def learn(self) -> None:
        """Note the calls of all loops that are defined from here on."""
        CalledForms._learning = self

    @staticmethod
    def noted(loop: Callable[P, R]) -> Callable[P, R]:
        """Return the loop, so that its calls are noted if forms are learnt."""
        forms = CalledForms._learning
        return loop if forms is None else forms._noting(loop)

    def _noting(self, loop: Callable[P, R]) -> Callable[P, R]:
        @wraps(loop)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            """Call the loop. The first call with arguments of these types is noted, if no other loop made it."""
            if self._is_inside:
                return loop(*args, **kwargs)
            self.seen.setdefault((loop.__module__, loop.__name__, tuple(map(typeof, args))), loop)
            self._is_inside = True
            try:
                return loop(*args, **kwargs)
            finally:
                self._is_inside = False

        return called


def directory_of(package: Path, setting: str) -> str:
    """Return the directory of a package's machine code: another one for each state of its sources.

    numba identifies its cache entries by the loop's own file, but they contain loops of other files that it calls. Nor
    does it know whether they check bounds (NUMBA_BOUNDSCHECK=1); these have a directory of their own.
    setting: NUMBA_CACHE_DIR, empty if it is not set; then the directory is beside the bytecode, or else the user's.
    """
    digest = blake2b(digest_size=6)
    for path in sorted(package.rglob("*.py")):
        stat = path.stat()
        digest.update(f"{path.relative_to(package)} {stat.st_mtime_ns} {stat.st_size}\n".encode())
    users = os.path.join(os.environ.get("XDG_CACHE_HOME", ""), "batchmaker")
    if not os.path.isabs(users):
        users = os.path.expanduser("~/.cache/batchmaker")
    beside = str(package / "__pycache__") if os.access(package, os.W_OK) else users
    return os.path.join(setting or beside, f"compiled-{digest.hexdigest()}{'-bounds' if config.BOUNDSCHECK else ''}")


@cache
def place() -> str:
    """Return the directory for machine code. It need not exist, nor can it be written for sure."""
    return directory_of(Path(__file__).parent, config.CACHE_DIR)


@cache
def kept_in() -> Path | None:
    """Return the directory in which machine code is kept, None if it cannot be written."""
    try:
        os.makedirs(place(), exist_ok=True)
        TemporaryFile(dir=place()).close()
    except OSError:
        return None
    return Path(place())


@final
class _KeptCode(FunctionCache):
    """numba's store of machine code. It loads without what is needed to compile, all that numba knows of Python and
    NumPy, which takes as long as loading all loops; numba makes that ready by itself before it compiles."""

    def load_overload(self, sig: Any, target_context: Any) -> Any:
        """Return what is kept for a signature, None if there is nothing."""
        rtsys.initialize(target_context)
        with self._guard_against_spurious_io_errors():
            return self._load_overload(sig, target_context)  # type: ignore[no-untyped-call]

    def save_overload(self, sig: Any, data: Any) -> None:
        """Keep what is compiled for a signature. If there is no room for it, it serves this process alone."""
        try:
            super().save_overload(sig, data)  # type: ignore[no-untyped-call]
        except OSError as error:
            _LOG.warning("the machine code of %s cannot be kept: %s", self._name, error)


def _compiled(loop: Callable[P, R], options: dict[str, Any]) -> Callable[P, R]:
    made = _typed(partial(njit, **_NO_CFUNC, **options)(), CalledForms.noted(loop))
    if is_compiled(made) and kept_in() is not None:
        before, config.CACHE_DIR = config.CACHE_DIR, place()  # looked at while the store is made
        try:
            made._cache = _KeptCode(loop)  # type: ignore[attr-defined, no-untyped-call]
        except RuntimeError:  # nowhere to keep what is compiled
            pass
        finally:
            config.CACHE_DIR = before
    return made


def _typed(decorate: Callable[..., Callable[P, R]], loop: Callable[P, R]) -> Callable[P, R]:
    return decorate(loop)
