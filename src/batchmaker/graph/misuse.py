"""Errors for operations that a handle does not support, with advice."""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from types import CodeType
from typing import Any, Final, NoReturn

from batchmaker.errors import HandleError

_COMPUTE: Final = (
    "__add__ __sub__ __mul__ __matmul__ __truediv__ __floordiv__ __mod__ __divmod__ __pow__ __lshift__ __rshift__ "
    "__and__ __xor__ __or__ __radd__ __rsub__ __rmul__ __rmatmul__ __rtruediv__ __rfloordiv__ __rmod__ __rdivmod__ "
    "__rpow__ __rlshift__ __rrshift__ __rand__ __rxor__ __ror__ __neg__ __pos__ __abs__ __invert__ __round__ "
    "__array__ __array_ufunc__ __array_function__"
)
_LOOK: Final = "__int__ __float__ __complex__ __index__ __lt__ __le__ __gt__ __ge__ __contains__"
_OURS: Final = ("batchmaker", "torch", "numpy")
_LIBRARY: Final = sysconfig.get_path("stdlib")
_MODELS: Final = os.path.join("batchmaker", "lab", "")
"""What is below this has unfold functions, as users' files have."""

COMPUTED: Final = (
    "cells compute, an unfold function only says which: put this into a module, bm.Cell(module), and call that cell on "
    "the handles"
)
WAITED_FOR: Final = "`yield` it to wait for it, and use what comes back"
_AT_LINE: Final = re.compile(r"^(request \d+: )?[^:`]+:\d+(?:, `.*?`)?: ")
_LIKE_A_TENSOR: Final = "its shape and dtype, without the batch, are in `.spec`; cells compute the rest"


def at_line() -> str:
    """Return the position in the unfold function, "file:line, `its text`: ", for the start of a message."""
    frame = sys._getframe(1)
    while not _is_users(frame.f_code.co_filename):
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    return f"{_said(frame.f_code, frame.f_lineno)}: "


def without_line(message: str) -> str:
    """Return a message without the position in the unfold function that `at_line` has given it."""
    return _AT_LINE.sub(r"\1", message, count=1)


def line_of(error: BaseException) -> str:
    """Return the position in the unfold function from which an error came, "file:line, `its text`"; "" if unknown."""
    line, trace = "", error.__traceback__
    while trace is not None:
        if _is_users(trace.tb_frame.f_code.co_filename):
            line = _said(trace.tb_frame.f_code, trace.tb_lineno)
        elif line:
            break
        trace = trace.tb_next
    return line


@lru_cache(1024)
def _is_users(path: str) -> bool:
    """Whether a file is none of this project's, of torch, of NumPy or of Python. By its path, which is the same in the
    form of a function that is observed (see Reads), where other globals stand."""
    if path.startswith(_our_folders()) and _MODELS not in path:
        return False
    return not (path.startswith(_LIBRARY) and "site-packages" not in path)


@lru_cache(1)
def _our_folders() -> tuple[str, ...]:
    specs = [find_spec(name) for name in _OURS]
    return tuple([os.path.join(one, "") for spec in specs if spec for one in spec.submodule_search_locations or ()])


@lru_cache(1024)
def _said(code: CodeType, line: int) -> str:
    text = linecache.getline(code.co_filename, line).strip()
    return f"{os.path.basename(code.co_filename)}:{line}{f', `{text}`' if text else ''}"


def misused(what: str, advice: str) -> HandleError:
    """Return the error for a handle that was used like its value. what: the use. advice: what to do instead."""
    return HandleError(f"{at_line()}{what} a handle, whose value is not known while the request is unfolded; {advice}")


def refuses_to_be_the_value(kind: type[Any]) -> type[Any]:
    """Give a class of handles the methods of values; each raises an error with advice."""
    for names, what, advice in ((_COMPUTE, "computes with", COMPUTED), (_LOOK, "looks at", WAITED_FOR)):
        for name in names.split():
            if name not in vars(kind):
                setattr(kind, name, _refusal(what, advice))
    kind.__torch_function__ = classmethod(_refusal("computes with", COMPUTED))
    kind.__getattr__ = _missing
    kind.__setitem__ = _refusal("writes into", COMPUTED)
    kind.__format__ = _formatted  # type: ignore[assignment]
    return kind


def _refusal(what: str, advice: str) -> Callable[..., NoReturn]:
    def refuse(*_: Any, **__: Any) -> NoReturn:
        raise misused(what, advice)

    return refuse


def _formatted(self: Any, form: str) -> str:
    if form:
        raise misused("formats", WAITED_FOR)
    return str(self)


def _missing(self: Any, name: str) -> NoReturn:
    if name.startswith("_"):
        raise AttributeError(name)
    raise misused(f"asks for .{name} of", _LIKE_A_TENSOR)
