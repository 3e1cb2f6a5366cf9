"""Opaque modules: they compute batches of rows and are never compiled."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Self, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from batchmaker.compile.declaration import Declared
from batchmaker.compile.export import check_alike, dtype_name, float_dtype, said_first, spec_of_rows
from batchmaker.errors import ModelError, OptionError, ShapeError
from batchmaker.graph.spec import ValueSpec

Array = NDArray[Any]
Size = int | None
RowGiven = int | tuple[Size, ...] | tuple[tuple[Size, ...], str] | ValueSpec
"""One row as users write it: 64, (2, 64), ((None, 64), "float32") or a ValueSpec."""

DTYPES: Final = ("float32", "float16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
"""The dtypes that NumPy and the state tables share."""


@final
@dataclass(frozen=True, slots=True)
class RowForm:
    """The form of the rows of one input or output.

    name: for messages and dicts. shape: of a row, without the batch. A size is None if each request may choose it; the
    whole shape is None if it is unknown. dtype: one of DTYPES.
    """

    name: str
    shape: tuple[Size, ...] | None
    dtype: str

    @property
    def spec(self) -> ValueSpec | None:
        """The spec of its rows, None if a size is open."""
        sizes = () if self.shape is None else tuple([size for size in self.shape if size is not None])
        return ValueSpec(sizes, self.dtype) if self.shape is not None and len(sizes) == len(self.shape) else None

    def takes(self, shape: Sequence[int], dtype: str) -> bool:
        """Whether rows of this shape and dtype have this form."""
        if dtype != self.dtype:
            return False
        if self.shape is None:
            return True
        return len(shape) == len(self.shape) and all(b in (None, a) for a, b in zip(shape, self.shape, strict=True))

    def __str__(self) -> str:
        sizes = "..." if self.shape is None else ", ".join("?" if size is None else str(size) for size in self.shape)
        return f"{self.dtype}[{sizes}]"


class Opaque(nn.Module, ABC):
    """A module that is called on whole batches and is never traced, compiled, folded or split.

    inputs, outputs: the forms of its rows, in order. It computes on the CPU; values of other devices are copied there
    and back.
    """

    def __init__(self, inputs: tuple[RowForm, ...], outputs: tuple[RowForm, ...]) -> None:
        super().__init__()
        self.inputs, self.outputs = inputs, outputs

    @property
    @abstractmethod
    def kind(self) -> str:
        """A short description for messages."""

    @property
    @abstractmethod
    def identity(self) -> str | None:
        """A text that is equal for modules that compute the same; None if the module is equal to itself alone."""

    @abstractmethod
    def compute(self, rows: list[Array]) -> Sequence[Array]:
        """Return a batch [n, *shape] per output. rows: a read-only batch per input, which must not be kept."""

    @property
    def declared(self) -> Declared | None:
        """The specs of its rows, None if a size is open."""
        sides = [tuple([form.spec for form in forms]) for forms in (self.inputs, self.outputs)]
        inputs, outputs = (tuple([spec for spec in side if spec is not None]) for side in sides)
        return Declared(inputs, outputs) if (inputs, outputs) == tuple(sides) else None

    @property
    def float_dtype(self) -> str:
        """Dtype of its first floating input, else float32."""
        return next((form.dtype for form in self.inputs if form.dtype.startswith("float")), "float32")

    def forward(self, *rows: Tensor) -> tuple[Tensor, ...]:
        """Return a batch per output. ShapeError if `compute` returns other rows than declared."""
        made = self.compute([row.detach().cpu().numpy() for row in rows])
        if len(made) != len(self.outputs):
            raise ShapeError(
                f"got {len(made)} outputs, expected {len(self.outputs)}, as it says ({_named(self.outputs)})"
            )
        count = len(rows[0])
        for form, array in zip(self.outputs, made, strict=True):
            batch = array.shape[0] if array.ndim else None
            if batch != count or not form.takes(array.shape[1:], array.dtype.name):
                raise ShapeError(
                    f"output {form.name!r}: got {array.dtype.name}{list(array.shape)} for {count} rows, expected rows "
                    f"of {form}. Keep the batch in dimension 0, and return the shape and dtype that were said."
                )
        return tuple([torch.from_numpy(array).to(rows[0].device) for array in made])

    def check_inputs(self, inputs: Sequence[ValueSpec], where: str) -> None:
        """ModelError unless there is a value for each input; ShapeError unless they have the declared forms."""
        if len(inputs) != len(self.inputs):
            raise ModelError(
                f"{where}: takes {len(self.inputs)} inputs ({_named(self.inputs)}), got {len(inputs)} "
                f"({', '.join(map(str, inputs))}). Give a value for each: inputs first, then the state."
            )
        for index, (spec, form) in enumerate(zip(inputs, self.inputs, strict=True)):
            if not form.takes(spec.shape, spec.dtype):
                raise ShapeError(f"{where}, input {index} ({form.name!r}): got rows of {spec}, expected {form}")

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self  # it is immutable


def _named(forms: Iterable[RowForm]) -> str:
    return ", ".join(f"{form.name}: {form}" for form in forms)


def float_dtype_of(module: nn.Module) -> str:
    """Return the dtype to which floating data is converted: that of the module's first floating weight or input."""
    return module.float_dtype if isinstance(module, Opaque) else float_dtype(module)


# --- functions ------------------------------------------------------------------------------------------------------


@final
class OpaqueFunction(Opaque):
    """A Python function over arrays. See `opaque`."""

    def __init__(self, function: Callable[..., Any], inputs: tuple[RowForm, ...], outputs: tuple[RowForm, ...]) -> None:
        super().__init__(inputs, outputs)
        self.function = function

    @property
    def kind(self) -> str:
        return f"the function {getattr(self.function, '__qualname__', None) or type(self.function).__name__}"

    @property
    def identity(self) -> None:
        return None

    def compute(self, rows: list[Array]) -> Sequence[Array]:
        """Call the function on copies, which it may change or keep, and copy its result, which it may keep too."""
        made = self.function(*[row.copy() for row in rows])
        return [np.array(one, order="C") for one in (made if isinstance(made, tuple | list) else (made,))]


def opaque(
    function: Callable[..., Any],
    *,
    inputs: Mapping[str, RowGiven] | Sequence[RowGiven],
    outputs: Mapping[str, RowGiven] | Sequence[RowGiven],
) -> OpaqueFunction:
    """Return a function over NumPy arrays as a module, for `Cell`. It is called, and never compiled.

    - function: takes one array [n, *shape] per input and returns one per output, a single array or a tuple. Rows must
      not depend on each other. It may change its arguments. It is first called with the example's values and made-up
      ones; with several workers, from several threads at once.
    - inputs, outputs: one row each, in order, by name if it is a dict: an int or a tuple of sizes, in float32; (sizes,
      dtype), such as ((), "int64"); or a ValueSpec. Each request chooses a size that is None. State comes last, as for
      any cell.

    The cell cannot be saved. Raises ModelError, OptionError.
    """
    if isinstance(function, nn.Module):
        raise ModelError(
            f"bm.opaque takes a function over arrays; {type(function).__name__} is a module: bm.Cell(module)"
        )
    if not callable(function):
        raise ModelError(f"bm.opaque takes a function over arrays, got {type(function).__name__}")
    return OpaqueFunction(function, row_forms(inputs, "input"), row_forms(outputs, "output"))


def row_forms(rows: Mapping[str, RowGiven] | Sequence[RowGiven], kind: str) -> tuple[RowForm, ...]:
    """Return users' rows as forms. kind: "input" or "output", for messages. OptionError for an invalid row."""
    if not isinstance(rows, Mapping | list | tuple) or not rows:
        raise OptionError(f"{kind}s must be a list of rows, or a dict of rows by name, at least one; got {rows!r}")
    named = rows.items() if isinstance(rows, Mapping) else ((f"{kind}{i}", row) for i, row in enumerate(rows))
    return tuple([_row_form(str(name), row) for name, row in named])


def _row_form(name: str, row: Any) -> RowForm:
    shape, dtype = row, "float32"
    if isinstance(row, ValueSpec):
        shape, dtype = row.shape, row.dtype
    elif isinstance(row, tuple | list) and len(row) == 2 and isinstance(row[0], tuple | list | int | None):
        if isinstance(row[1], torch.dtype):
            shape, dtype = row[0], str(row[1]).removeprefix("torch.")
        elif not isinstance(row[1], int | None):
            shape, dtype = row[0], _dtype(row[1])
    sizes = (shape,) if isinstance(shape, int) else shape
    if not isinstance(sizes, tuple | list) or not all(s is None or (type(s) is int and s > 0) for s in sizes):
        raise OptionError(
            f"{name}: a row is written as its sizes, 64 or (2, 64), or with a dtype, ((), 'int64'), without the batch; "
            f"None for a size that requests choose. Got {row!r}"
        )
    if dtype not in DTYPES:
        raise OptionError(
            f"{name}: dtype {dtype!r} is not one that arrays of rows have; use one of {', '.join(DTYPES)}"
        )
    return RowForm(name, tuple(sizes), dtype)


def _dtype(dtype: Any) -> str:
    try:
        return str(np.dtype(dtype).name)
    except TypeError:
        return str(dtype)


# --- proving --------------------------------------------------------------------------------------------------------


def proved_outputs(
    module: Opaque, inputs: tuple[ValueSpec, ...], where: str, batches: Sequence[tuple[Tensor, ...]]
) -> tuple[ValueSpec, ...]:
    """Return the outputs' row specs, found by running batches of rows.

    Raises ModelError if the module refuses these inputs, ShapeError if an output differs from its declaration, or its
    row shape depends on the batch.
    """
    module.check_inputs(inputs, where)
    seen = {len(rows[0]): tuple(map(spec_of_rows, _tried(module, rows, where))) for rows in batches}
    check_alike(seen, where)
    return next(iter(seen.values()))


def _tried(module: Opaque, rows: tuple[Tensor, ...], where: str) -> tuple[Tensor, ...]:
    try:
        made: tuple[Tensor, ...] = module(*rows)
    except ShapeError as error:
        raise ShapeError(f"{where}, {error}") from None
    except Exception as error:  # the user's own function, or ONNX Runtime
        shown = ", ".join(
            f"{form.name}: {dtype_name(row)}{list(row.shape)}" for form, row in zip(module.inputs, rows, strict=True)
        )
        raise ModelError(
            f"{where}: a trial run with ({shown}) raised {said_first(error)}. Before the first request it is "
            "called with the values of the example, at every batch size, and must take them."
        ) from error
    return made
