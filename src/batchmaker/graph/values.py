"""Handles in an unfold function: values and sequences of values that no cell has computed yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final, NoReturn, Protocol, cast, final, overload

import numpy as np
from numpy.typing import NDArray

from batchmaker.arrays import Ints
from batchmaker.compiled import compiled
from batchmaker.errors import InvalidRequestError, ModelError
from batchmaker.graph.misuse import at_line, misused, refuses_to_be_the_value
from batchmaker.graph.spec import TypeId, ValueSpec


@dataclass(slots=True)
class HostValues:
    """Values that came with the request: one array whose first dimension counts nodes.

    values: a NumPy array or torch tensor [count, *spec.shape]. The graph never looks inside. The object must not
    change; it is not frozen only because that takes a microsecond.
    """

    values: Any
    count: int
    spec: ValueSpec

    def __len__(self) -> int:
        return self.count

    def picked(self, index: Ints) -> HostValues:
        """Return some of the values, [len(index)]."""
        return HostValues(self.values[index], len(index), self.spec)


@compiled
def are_below(numbers: NDArray[np.int64], limit: int) -> bool:
    """Whether all numbers are at least 0 and below a limit."""
    outside = 0
    for number in numbers.flat:
        outside += not 0 <= number < limit
    return outside == 0


class Origin(Protocol):
    """The maker of a handle: one per request. A handle of another origin belongs to another request."""

    def fetch(self, value: Value | ValueSequence) -> None:
        """Mark outputs that the host needs."""

    def pick(self, sequence: ValueSequence, index: Value) -> Value:
        """Return the element of a sequence that a value names; see ValueSequence.at."""


_LENGTH_SAID: Final = (
    "the length of a loop with `until` is not known while unfolding; return its steps, or wait for them: `words = "
    "yield loop.steps`"
)
"""Of sequences whose origin says nothing else as `length_said`."""


@final
class Output:
    """One output of one cell in one request: the data shared by all handles to it.

    index: among the outputs of the cell. spec: of one value. type_id: of the cell, None if it is of another request, or
    of several cells.
    """

    __slots__ = ("index", "origin", "spec", "type_id")

    def __init__(self, index: int, spec: ValueSpec, origin: Origin, type_id: TypeId | None = None) -> None:
        self.index = index
        self.spec = spec
        self.origin = origin
        self.type_id = type_id


@final
class Hold:
    """Shared by all handles to one call's outputs. Dropping the last handle calls `on_drop(first, count)`.

    Only requests whose unfold function waits need it: their rows are kept as long as the function could still use them.
    """

    __slots__ = ("_count", "_first", "_on_drop")

    def __init__(self, first: int, count: int, on_drop: Callable[[int, int], None]) -> None:
        self._first = first
        self._count = count
        self._on_drop = on_drop

    def __del__(self) -> None:
        self._on_drop(self._first, self._count)


@final
@dataclass(frozen=True, slots=True)
class Chain:
    """The steps of a run or loop, known at its end: the first step, and whether the run may stop at any step.

    values: of a loop that may, by output, the values of all steps that the unfold function has waited for. on_steps:
    called when the steps are asked for.
    """

    first: int
    open_ended: bool
    values: dict[int, Any] = field(default_factory=dict)
    on_steps: Callable[[], None] | None = None


_MISSING: Final = -1
"""The node of a value that is not there."""


@final
@dataclass(frozen=True, slots=True)
class Collected:
    """What a `while_loop` collects of one part of its state, known at the loop's last state."""

    steps: ValueSequence
    open_ended: bool = False


@final
@refuses_to_be_the_value
class Value:
    """One output of one node: the return value of a cell call inside an unfold function.

    It stands for a tensor of shape `spec.shape` that will exist once the node has run. Pass it to another cell, return
    it, or `yield` it to wait for it. `steps` is the sequence of this output over all steps, if the value is the end of
    a run or loop.
    """

    __slots__ = ("_chain", "_holds", "node", "of")

    def __init__(self, node: int, of: Output, holds: object = None, chain: Chain | Collected | None = None) -> None:
        self.node = node
        self.of = of
        self._holds = holds
        self._chain = chain

    @property
    def output(self) -> int:
        """The output number of its node."""
        return self.of.index

    @property
    def spec(self) -> ValueSpec:
        return self.of.spec

    @property
    def origin(self) -> Origin:
        return self.of.origin

    @property
    def steps(self) -> ValueSequence:
        """This output at every step of the run or loop that ends here. ModelError for a single node.

        The steps of a loop with `until` travel to the host as they are computed and are stored nowhere else. So ask for
        them before the unfold function waits for anything: ModelError afterwards.
        """
        if self._chain is None:
            raise ModelError(
                f"{at_line()}only the outputs of cell.run(...), cell.loop(...) and bm.while_loop(...) have steps; "
                "this value is the output of a single cell call"
            )
        if isinstance(self._chain, Collected):
            return self._chain.steps
        if self._chain.on_steps is not None:
            self._chain.on_steps()
        numbers = range(self._chain.first, self.node + 1)
        if not self._chain.open_ended:
            return ValueSequence(numbers, self.of, holds=self._holds)
        steps = ValueSequence(numbers, self.of, open_ended=self._chain.values, holds=self._holds)
        self.origin.fetch(steps)
        return steps

    def at(self, index: Value | int) -> Value:
        """Return the step that a computed number names, of the run that ends here; see ValueSequence.at."""
        return self.steps.at(index)

    def after_no_step(self) -> Value:
        """Return this value as the end of a run without steps: its `steps` are empty."""
        return Value(self.node, self.of, self._holds, Chain(self.node + 1, open_ended=False))

    @property
    def is_missing(self) -> bool:
        """Whether it is the output of a run without steps, so that there is no such value; see `missing`."""
        return self.node == _MISSING

    @property
    def ends_open_loop(self) -> bool:
        """Whether this is the end of a loop that may stop at any step."""
        return self._chain is not None and self._chain.open_ended

    def __repr__(self) -> str:
        return "Value(of no step)" if self.is_missing else f"Value({self.spec} of node {self.node}, not computed yet)"

    def __bool__(self) -> bool:
        raise ModelError(f"{at_line()}a value is not known while the request is unfolded; `yield` it to wait for it")

    def __eq__(self, other: object) -> bool:
        raise ModelError(
            f"{at_line()}a value is not known while the request is unfolded; `yield` it to wait for it and compare then"
        )

    __hash__ = object.__hash__

    def __iter__(self) -> Iterator[Value]:
        raise ModelError(f"{at_line()}this cell has one output; do not unpack it (use `.steps` for a run's sequence)")

    def __len__(self) -> int:
        raise misused("asks for the length of", "that of a value of shape [n, ...] is `.spec.shape[0]`")

    def __getitem__(self, index: object) -> NoReturn:
        raise misused(
            "indexes",
            "index inside a cell; the elements of a value of shape [n, ...] are what cell.map(value) and "
            "cell.run(value) go over, and `.steps[k]` is step k of a run",
        )


def missing(index: int, spec: ValueSpec, origin: Origin) -> Value:
    """Return the handle to an output of a run without steps. Its `steps` are empty; any other use is an error."""
    return Value(_MISSING, Output(index, spec, origin), None, Chain(0, open_ended=False))


@final
@refuses_to_be_the_value
class ValueSequence:
    """The same output of several nodes, in order: the return value of `map` and `tree`, and a run's `steps`.

    It can be indexed (also by an array, tensor or list of indices), sliced, reversed, iterated and passed to `run` and
    `map`. numbers: its nodes, as a range if they are consecutive. open_ended: for the steps of a loop whose length
    depends on values, the values of its steps by output, as far as they are known. Such a sequence can be returned and
    yielded; when it has been yielded, it stands for its values. holds: objects that must live as long as it and its
    values.
    """

    __slots__ = ("_holds", "_values", "numbers", "of")

    def __init__(
        self, numbers: Ints | range, of: Output, *, open_ended: dict[int, Any] | None = None, holds: object = None
    ) -> None:
        self.numbers = numbers
        self.of = of
        self._values = open_ended
        self._holds = holds

    @property
    def open_ended(self) -> bool:
        """Whether these are the steps of a loop that may stop at any step."""
        return self._values is not None

    @property
    def values(self) -> Any:
        """The values of an open-ended sequence that the unfold function has waited for, [count, *shape]; else None."""
        return None if self._values is None else self._values.get(self.of.index)

    def know(self, values: Any) -> None:
        """Note the values of an open-ended sequence. They must not change."""
        assert self._values is not None
        self._values[self.of.index] = values

    @property
    def nodes(self) -> Ints:
        """Its nodes as an array [count]."""
        numbers = self.numbers
        if type(numbers) is range:
            numbers = self.numbers = np.arange(numbers.start, numbers.stop, numbers.step)
        return numbers

    @property
    def output(self) -> int:
        """The output number of its nodes."""
        return self.of.index

    @property
    def spec(self) -> ValueSpec:
        return self.of.spec

    @property
    def origin(self) -> Origin:
        return self.of.origin

    def __len__(self) -> int:
        if self._values is None:
            return len(self.numbers)
        if self.values is None:
            raise ModelError(f"{at_line()}{getattr(self.origin, 'length_said', _LENGTH_SAID)}")
        return len(self.values)

    @overload
    def __getitem__(self, index: int) -> Value: ...
    @overload
    def __getitem__(self, index: slice | NDArray[np.integer] | list[int]) -> ValueSequence: ...
    def __getitem__(self, index: int | slice | NDArray[np.integer] | list[int]) -> Value | ValueSequence:
        length = len(self)
        if self.open_ended:
            return cast(Value, self._value_at(index))
        if isinstance(index, slice):
            return ValueSequence(self.numbers[index], self.of, holds=self._holds)
        if not isinstance(index, int | np.integer):
            index = index if isinstance(index, np.ndarray) else _as_index(index)
            if index.ndim > 0:
                return ValueSequence(self._picked(index, length), self.of, holds=self._holds)
            index = int(index)
        if not -length <= index < length:
            raise InvalidRequestError(f"index {index} is outside a sequence of {length} values")
        return Value(int(self.numbers[index]), self.of, self._holds)

    def _value_at(self, index: Any) -> Any:
        """Return values, [count, *shape], or one: a number if it is a scalar."""
        values = self.values
        if isinstance(index, slice):
            return values[list(range(len(values))[index])]
        if not isinstance(index, int | np.integer):
            return values[_as_index(index)]
        if not -len(values) <= index < len(values):
            raise InvalidRequestError(f"index {index} is outside a sequence of {len(values)} values")
        value = values[int(index)]
        return value.clone() if value.ndim else value.item()

    def _picked(self, index: NDArray[np.integer], length: int) -> Ints:
        if index.ndim != 1 or index.dtype.kind not in "iu":
            raise InvalidRequestError(
                f"got indices {index.dtype} of shape {index.shape} for a sequence of values, expected integers [count]"
            )
        try:
            picked: Ints = self.nodes[index]
        except IndexError:
            wrong = index[(index < -length) | (index >= length)][0]
            raise InvalidRequestError(f"index {wrong} is outside a sequence of {length} values") from None
        return picked

    def at(self, index: Value | int) -> Value:
        """Return the element that a computed number names, from 0.

        index: one integer that a cell computes. If it is outside the sequence, the request fails with
        InvalidRequestError. A Python integer is as in `sequence[index]`.
        """
        return self.of.origin.pick(self, index) if isinstance(index, Value) else self[index]

    def __eq__(self, other: object) -> bool:
        raise ModelError(
            f"{at_line()}values are not known while the request is unfolded; `yield` them and compare then"
        )

    __hash__ = object.__hash__

    def __iter__(self) -> Iterator[Value]:
        length = len(self)
        if self.open_ended:
            return map(self._value_at, range(length))
        return (Value(node, self.of, self._holds) for node in self.nodes.tolist())

    def __reversed__(self) -> Iterator[Value]:
        return map(self.__getitem__, reversed(range(len(self))))

    def __repr__(self) -> str:
        return f"ValueSequence({len(self.numbers)} x {self.spec}, not computed yet)"


def _as_index(index: Any) -> NDArray[np.integer]:
    """Return a list or tensor of indices as an array. InvalidRequestError for any other object."""
    if isinstance(index, list) or hasattr(index, "__array__"):
        array = np.asarray(index, np.int64) if isinstance(index, list) and not index else np.asarray(index)
        if array.dtype.kind in "iu":
            return array
    raise InvalidRequestError(
        f"{at_line()}a sequence of values is indexed by an integer, a slice, or integers in a list, array or tensor; "
        f"got {type(index).__name__}"
    )
