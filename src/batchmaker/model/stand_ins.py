"""Stand-ins for the values of a request. If an unfold function succeeds on them, it has looked at no value.

Lists, tuples and dicts of a request are kept; stand-ins replace the numbers in them, and arrays and tensors. A stand-in
knows its shape and can be sliced; any other use raises Looked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, Final, NoReturn, final

import numpy as np
import torch

from batchmaker.arrays import Ints
from batchmaker.errors import ModelError
from batchmaker.graph.spec import ValueSpec
from batchmaker.graph.values import HostValues

Kind = type[int] | type[float] | str | torch.dtype
"""The kind of a request's values: a Python number type, NumPy's name of a dtype, or a tensor's dtype."""

NUMPY_VIEWS: Final = frozenset(("reshape", "ravel", "flatten", "transpose", "squeeze", "swapaxes", "copy", "repeat"))
TORCH_VIEWS: Final = frozenset((
    "view", "reshape", "flatten", "unsqueeze", "squeeze", "permute", "transpose", "t", "unbind", "chunk", "split",
    "unfold", "narrow", "select", "contiguous", "detach", "clone", "expand", "repeat", "flip", "roll", "movedim",
))  # fmt: skip
"""Methods that only rearrange values."""
_ATTRIBUTES: Final = frozenset(("shape", "ndim", "T", "mT"))
_TORCH_SIZES: Final = frozenset(("size", "dim", "numel", "nelement"))

_INTERFACES: Final = frozenset(
    ("__cuda_array_interface__", "__array_interface__", "__array_struct__", "__dlpack__", "__dlpack_device__")
)
"""C code asks whether these are there. Python 3.13 prints what is raised then, unless it is an AttributeError."""


class Looked(BaseException):
    """An unfold function has used more than the shape of its request."""


@final
class StandIns:
    """The stand-ins of one request, in a `with` statement that is the proof. After it they are invalid.

    looked: whether a value was asked for, even if the error was caught. is_finished: whether the proof has ended.
    sizes: number of values of each kind in the request. constants: numbers of the unfold function's own among the
    values, by kind. checks: kind, codes, and the limit that the values must be below.
    """

    def __init__(self) -> None:
        self.looked = False
        self.is_finished = False
        self.sizes: dict[Kind, int] = {}
        self.constants: dict[Kind, list[Any]] = {}
        self.checks: list[tuple[Kind, Ints, int]] = []

    def __enter__(self) -> StandIns:
        return self

    def __exit__(self, *_: object) -> None:
        self.is_finished = True

    def of(self, request: Any) -> Any:
        """Return a request of the same shape without its values. The request must have a shape (see `shapes_of`)."""
        kind = type(request)
        if kind is list or kind is tuple:
            return kind([self.of(part) for part in request])
        if kind is dict:
            return {name: self.of(part) for name, part in request.items()}
        if kind is int or kind is float:
            return StandIn(self._next(kind, 1), kind, self)
        if kind is np.ndarray:
            name = request.dtype.str
            first = self._next(name, request.size)
            return StandIn(np.arange(first, first + request.size).reshape(request.shape), name, self)
        if kind is torch.Tensor:
            first = self._next(request.dtype, request.numel())
            codes = torch.arange(first, first + request.numel()).view(request.shape)
            return StandIn(codes, request.dtype, self)
        return request  # None, True and False are part of the shape

    def _next(self, kind: Kind, count: int) -> int:
        first = self.sizes.get(kind, 0)
        self.sizes[kind] = first + count
        return first

    def look(self) -> NoReturn:
        """Report that a value was asked for. ModelError after the proof, if a function has kept a stand-in."""
        if self.is_finished:
            raise ModelError(
                "this stands for a value of a request while an unfold function is proved to look at none, and was kept "
                "by the function; it has no value"
            )
        self.looked = True
        raise Looked

    # --- arguments of cells ---------------------------------------------------------------------------------------

    def rows(self, data: Any, spec: ValueSpec | None) -> HostValues:
        """Return data that contains stand-ins as rows for an input. Looked unless it fits the input."""
        kind, codes = self.codes(data)
        if spec is None or codes.ndim == 0 or len(codes) == 0 or codes.shape[1:] != spec.shape:
            self.look()
        if kind_letter(kind) != _letter(spec.dtype):
            self.look()
        return HostValues(StandIn(codes, kind, self), len(codes), spec)

    def codes(self, data: Any) -> tuple[Kind, Ints]:
        """Return the codes of data that contains stand-ins. Looked unless it is all of one kind and one shape."""
        kinds = set(_kinds(data))
        if len(kinds) != 1:
            self.look()
        (kind,) = kinds
        try:
            return kind, np.asarray(self._coded(data, kind), np.int64)
        except (ValueError, TypeError):
            self.look()

    def _coded(self, data: Any, kind: Kind) -> Any:
        if type(data) is StandIn:
            codes = data.codes
            return codes.numpy() if isinstance(codes, torch.Tensor) else codes
        if type(data) is list or type(data) is tuple:
            return [self._coded(part, kind) for part in data]
        constants = self.constants.setdefault(kind, [])
        constants.append(data)
        return CONSTANT + len(constants) - 1


CONSTANT: Final = 1 << 40
"""A code is a position among all values of one kind in the request; codes from here on are constants."""

standing_in: ContextVar[StandIns | None] = ContextVar("batchmaker_standing_in", default=None)


def holds_stand_ins(data: Any) -> bool:
    """Whether data for a cell contains a stand-in."""
    if type(data) is StandIn:
        return True
    return (type(data) is list or type(data) is tuple) and any(map(holds_stand_ins, data))


def standing_tokens(data: Any, num_tokens: int) -> Any:
    """Return data with stand-ins as a stand-in for an array [count] of integers below a number.

    Requests with other values are unfolded, so that the caller can refuse them.
    """
    stand_ins = _current()
    kind, codes = stand_ins.codes(data)
    if codes.ndim != 1 or len(codes) == 0 or kind_letter(kind) != "i":
        stand_ins.look()
    stand_ins.checks.append((kind, codes, num_tokens))
    return StandIn(codes, kind, stand_ins)


def standing_frames(data: Any, width: int) -> Any:
    """Return data with stand-ins as a stand-in for an array [count, width] of floats."""
    stand_ins = _current()
    kind, codes = stand_ins.codes(data)
    if codes.ndim != 2 or len(codes) == 0 or codes.shape[1] != width or kind_letter(kind) != "f":
        stand_ins.look()
    return StandIn(codes, kind, stand_ins)


def _current() -> StandIns:
    stand_ins = standing_in.get()
    if stand_ins is None:  # it was kept from another request
        raise Looked
    return stand_ins


def kind_of(stand_in: StandIn) -> type[Any]:
    """Return the class of the values that a stand-in may stand for."""
    codes, kind = stand_in.codes, stand_in.kind
    if isinstance(codes, torch.Tensor):
        return torch.Tensor
    if isinstance(codes, np.ndarray):
        return np.ndarray if codes.ndim else _current().look()
    return kind if isinstance(kind, type) else _current().look()


def kind_letter(kind: Kind) -> str:
    """Return f, i or b; O for anything else."""
    if kind is int or kind is float:
        return "i" if kind is int else "f"
    if isinstance(kind, torch.dtype):
        return "f" if kind.is_floating_point else "b" if kind == torch.bool else "i"
    return {"f": "f", "i": "i", "u": "i", "b": "b"}.get(np.dtype(kind).kind, "O")


def _letter(dtype: str) -> str:
    return "f" if "float" in dtype else "b" if dtype == "bool" else "i"


def _kinds(data: Any) -> Iterator[Any]:
    if type(data) is StandIn:
        yield data.kind
    elif type(data) is list or type(data) is tuple:
        for part in data:
            yield from _kinds(part)
    else:
        yield type(data)  # a number of the same kind can be among them; another kind makes two kinds


@final
class StandIn:
    """A stand-in for a number, an array or a tensor. codes: a number, an array or a tensor of the same shape."""

    __slots__ = ("_stand_ins", "codes", "kind")

    codes: Any
    kind: Kind

    def __init__(self, codes: Any, kind: Kind, stand_ins: StandIns) -> None:
        object.__setattr__(self, "codes", codes)
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "_stand_ins", stand_ins)

    @property
    def is_sequence(self) -> bool:
        """Whether it stands for an array or tensor with a first dimension."""
        return not isinstance(self.codes, int) and self.codes.ndim > 0

    def _other(self, codes: Any) -> Any:
        """Return the stand-in for other positions of the same values, or their known constant."""
        if isinstance(codes, np.integer):
            return StandIn(np.array(codes), self.kind, self._stand_ins)
        if isinstance(codes, np.ndarray | torch.Tensor):
            return StandIn(codes, self.kind, self._stand_ins)
        if isinstance(codes, tuple | list):
            return type(codes)([self._other(part) for part in codes])
        self._stand_ins.look()
        return None

    def __getattr__(self, name: str) -> Any:
        codes = self.codes
        is_tensor = isinstance(codes, torch.Tensor)
        if isinstance(codes, int):
            self._stand_ins.look()
        if name in _ATTRIBUTES:
            value = getattr(codes, name)
            return value if name in ("shape", "ndim") else self._other(value)
        if name == "dtype":
            return self.kind if is_tensor else np.dtype(self.kind)  # type: ignore[arg-type]
        if name in _TORCH_SIZES if is_tensor else name == "size":
            return getattr(codes, name)
        if name in (TORCH_VIEWS if is_tensor else NUMPY_VIEWS):
            method = getattr(codes, name)
            return lambda *arguments, **named: self._other(method(*arguments, **named))
        if name in _INTERFACES and not self._stand_ins.is_finished:
            self._stand_ins.looked = True
            raise AttributeError(name)
        self._stand_ins.look()
        return None

    def __len__(self) -> int:
        if isinstance(self.codes, int) or self.codes.ndim == 0:
            self._stand_ins.look()
        return len(self.codes)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(self.codes, int) or holds_stand_ins(index):
            self._stand_ins.look()
        return self._other(self.codes[index])

    def __iter__(self) -> Iterator[Any]:
        return iter([self[i] for i in range(len(self))])

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # the answer to isinstance
        codes = object.__getattribute__(self, "codes")
        if object.__getattribute__(self, "_stand_ins").is_finished:
            return StandIn
        if not isinstance(codes, np.ndarray) or codes.ndim == 0:  # torch would trust the answer and read memory
            self._stand_ins.look()
        return np.ndarray


def _looks(self: StandIn, *_: Any, **__: Any) -> NoReturn:
    object.__getattribute__(self, "_stand_ins").look()
    raise Looked


_ASKS: Final = (
    "__setattr__ __delattr__ __repr__ __str__ __format__ __bytes__ __bool__ __int__ __float__ __complex__ "
    "__index__ __hash__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __contains__ __reversed__ __setitem__ "
    "__delitem__ __call__ __neg__ __pos__ __abs__ __invert__ __round__ __trunc__ __floor__ __ceil__ __enter__ "
    "__exit__ __copy__ __deepcopy__ __reduce__ __reduce_ex__ __getstate__ __dir__ __sizeof__ __array__ "
    "__array_ufunc__ __array_function__ __torch_function__ __add__ __sub__ __mul__ __matmul__ __truediv__ "
    "__floordiv__ __mod__ __divmod__ __pow__ __lshift__ __rshift__ __and__ __xor__ __or__ __radd__ __rsub__ "
    "__rmul__ __rmatmul__ __rtruediv__ __rfloordiv__ __rmod__ __rdivmod__ __rpow__ __rlshift__ __rrshift__ "
    "__rand__ __rxor__ __ror__ __iadd__ __isub__ __imul__ __imatmul__ __itruediv__ __ifloordiv__ __imod__ "
    "__ipow__"
)

for _name in str.split(_ASKS):
    setattr(StandIn, _name, _looks)


def _harmless(name: str, answer: Callable[..., Any]) -> None:
    """Answer attributes that every object has, after the proof is over."""

    def method(self: StandIn, *arguments: Any) -> Any:
        return answer(self, *arguments) if object.__getattribute__(self, "_stand_ins").is_finished else _looks(self)

    setattr(StandIn, name, method)


_harmless("__repr__", lambda _: "<stand-in for a value of a request>")
_harmless("__str__", lambda _: "<stand-in for a value of a request>")
_harmless("__hash__", object.__hash__)
_harmless("__eq__", lambda self, other: self is other)
_harmless("__ne__", lambda self, other: self is not other)
