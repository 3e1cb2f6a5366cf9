"""A cell: an nn.Module that can be batched over its first dimension, and how an unfold function calls it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from operator import index
from typing import Any, Final, cast, final

import numpy as np
import torch
from torch import nn

from batchmaker.compile.binding import traced
from batchmaker.compile.causes import parameter_sizes
from batchmaker.compile.declaration import Declared, checked_module, declared_by, state_specs
from batchmaker.compile.export import flat_module, infer_outputs
from batchmaker.compile.memories import MemoryModule, in_order
from batchmaker.compile.opaque import Opaque, float_dtype_of
from batchmaker.compile.programs import AnyProgram, Programs, ReadProgram, module_of
from batchmaker.compile.whole_run_trial import WholeRun, check_whole_form
from batchmaker.errors import InvalidRequestError, ModelError, OptionError, RowsError, ShapeError
from batchmaker.graph.argument_errors import misfit, never_computed
from batchmaker.graph.calls import Calls
from batchmaker.graph.misuse import misused
from batchmaker.graph.recorder import Argument
from batchmaker.graph.spec import GIVEN, CellType, ValueSpec
from batchmaker.graph.trees import SequenceArgument
from batchmaker.graph.values import HostValues, Value, ValueSequence, missing
from batchmaker.model.arguments import (
    as_floats,
    column,
    fitted,
    is_empty,
    is_several,
    likely_element,
    single,
    where,
)
from batchmaker.model.batch_sizes import checked_sizes
from batchmaker.model.elements import INDEX, Element, Same
from batchmaker.model.host_values import CallData
from batchmaker.model.memory import ROWS, Memory, as_range, declared_memories, in_place_of, outputs_kept
from batchmaker.model.options import check_flag, check_whole, checked_priority
from batchmaker.model.scope import Arguments, CellTypes, UnfoldingScope, current_scope, scope_of
from batchmaker.model.stand_ins import StandIn
from batchmaker.model.trees import TreeCalls, tree

DEFAULT_MAX_SHAPES = 8


@final
class Cell:
    """An nn.Module as the unit of batching: dimension 0 of every input and output is the batch.

    module: an nn.Module, the result of `bm.onnx` or `bm.opaque`, or an exported program with a dynamic dimension 0.

    - max_batch: most rows in one call (`batchmaker profile` helps to choose it).
    - batch_sizes: the only sizes at which the module is called; a batch in between is padded up. Default: every size to
      32, then coarser steps up to max_batch.
    - priority: larger goes first when several cells could run. Give later parts of a network more (decoder over
      encoder, inner nodes over leaves).
    - host_outputs: numbers of outputs that control the request, such as a word. `until` of a loop looks at the first.
    - name: for messages and reports. A Model names its cells after their attributes.
    - declared: input and output rows of the program. They are proved against the program here and against the requests
      at first use.
    - state: shapes of the parts of the state, in order, an int for one dimension: `state=(64, 128, 128)`. Needed only
      if chains start from zeros and the widths cannot be found in the module. The dtype is that of the module's
      weights; give another as a ValueSpec.
    - max_shapes: the number of input shapes that the cell accepts, such as pictures of several widths. Only rows of one
      shape are batched.
    - optimize: plan the operations inside the cell at first use, and run them in batches where this is measured to be
      faster (see `batchmaker plan`).
    - independent_rows: False for a module whose rows depend on each other. It then runs row by row, whatever max_batch
      is; batch_sizes cannot be given.
    - memory: the parameters of forward() that take a sequence of any length: names, or a bm.Memory each. See bm.Memory.
    - whole: a second form for whole runs, an nn.Module. It takes the inputs of all steps as rows [batch, room, ...],
      one argument for each input of a step; then the number of steps [batch], int64; then each part of the state
      before the first step [batch, ...]. It returns all outputs as the last step returns them. A run takes this form
      if nothing reads its steps and it is long enough for it to be faster, which is measured at first use.
    - whole_from: the fewest steps of a run that takes the form `whole`, instead of what would be measured.

    The methods are for use inside `Model.unfold`.
    """

    def __init__(
        self,
        module: nn.Module | torch.export.ExportedProgram | Programs,
        *,
        max_batch: int | None = None,
        batch_sizes: Iterable[int] | None = None,
        priority: int = 0,
        host_outputs: Iterable[int] = (),
        name: str | None = None,
        declared: Declared | None = None,
        state: Iterable[int | tuple[int, ...] | ValueSpec] | None = None,
        max_shapes: int = DEFAULT_MAX_SHAPES,
        optimize: bool = False,
        independent_rows: bool = True,
        memory: str | Memory | Iterable[str | Memory] = (),
        whole: nn.Module | None = None,
        whole_from: int | None = None,
    ) -> None:
        if isinstance(module, torch.export.ExportedProgram):
            module = Programs(((declared_by(module, declared), module),))
        self.programs = module if isinstance(module, Programs) else None
        if isinstance(module, Programs):
            declared, module = module.declared, module_of(module.first)
        check_flag("optimize", optimize)
        check_flag("independent_rows", independent_rows)
        sizes = checked_sizes(max_batch, batch_sizes, one_by_one=not independent_rows)
        check_whole("max_shapes", max_shapes, least=1)
        self.module = checked_module(module)
        self.declared = self.module.declared if declared is None and isinstance(self.module, Opaque) else declared
        self.batch_sizes = sizes
        self.priority = checked_priority(priority)
        self.state = None if state is None else state_specs(state, self.float_dtype)
        self.max_shapes = max_shapes
        self.host_outputs = tuple(host_outputs)
        self.name = name
        self.optimize = optimize
        self.independent_rows = independent_rows
        self.memories, self.own_rows = declared_memories(memory, self.module, self.float_dtype)
        self.memory_outputs = outputs_kept(self.memories)
        self._with_memories: nn.Module | None = None
        self.places: tuple[int, ...] = ()
        if self.memories:
            if self.programs is not None or isinstance(self.module, Opaque) or optimize:
                raise OptionError("memory= is for an nn.Module, without optimize=True")
            names = [one.name for one in self.memories]
            self._with_memories = reordered = MemoryModule(self.module, names)
            self.places = reordered.in_forward
            self._order = in_order(self.module, names)
        check_whole_form(whole, whole_from, has_memories=bool(self.memories))
        self.whole, self.whole_from = whole, whole_from

    @property
    def max_batch(self) -> int:
        return self.batch_sizes[-1]

    @cached_property
    def float_dtype(self) -> str:
        """Dtype of the module's first floating weight, else float32. Floating data of requests is converted to it."""
        return float_dtype_of(self.module)

    @cached_property
    def _data_dtypes(self) -> tuple[str, ...]:
        """Dtypes of the inputs, as far as they are known before first use."""
        if isinstance(self.module, Opaque):
            return tuple([form.dtype for form in self.module.inputs])
        return () if self.programs is None else tuple([spec.dtype for spec in self.programs.forms[0][0].inputs])

    def data_dtype(self, port: int) -> str:
        """Return the dtype of an input's request data before first use, if it is of that kind; otherwise None."""
        return self._data_dtypes[port] if port < len(self._data_dtypes) else self.float_dtype

    def source(self, inputs: tuple[ValueSpec, ...]) -> nn.Module | AnyProgram:
        """Return what computes these inputs: the module, or a program. ShapeError if no program is for them.

        A module with memories takes them first (see `compile.memories`).
        """
        if self._with_memories is not None:
            return self._with_memories
        return self.module if self.programs is None else self.programs.form(inputs)[1]

    def module_for(self, inputs: tuple[ValueSpec, ...]) -> nn.Module:
        """Return the module for these inputs. ShapeError as for `source`."""
        source = self.source(inputs)
        if isinstance(source, nn.Module):
            return source
        first = self.programs is not None and source is self.programs.first
        return self.module if first else module_of(source)

    def declared_for(self, inputs: tuple[ValueSpec, ...]) -> Declared | None:
        """Return the cell's declaration for these inputs, or None if nothing is known before binding."""
        return self.declared if self.programs is None else self.programs.form(inputs)[0]

    def exported(self, inputs: tuple[ValueSpec, ...]) -> torch.export.ExportedProgram:
        """Return the cell as a program with a dynamic batch. CannotRewriteError if it cannot be traced."""
        source = self.source(inputs)
        if isinstance(source, ReadProgram):
            return source.exported()
        return traced(flat_module(source), inputs) if isinstance(source, nn.Module) else source

    # --- inside an unfold function ----------------------------------------------------------------------------

    def __call__(self, *values: Any) -> Any:
        """Add one node. Arguments: values of other cells, or data of this request (one row, without the batch).

        A memory's argument is a sequence of values, or data [n, *shape]; its number is no argument. Returns the cell's
        output, or a tuple of its outputs.
        """
        scope, arguments = current_scope.get() or scope_of(self), cast(Sequence[Any], values)
        memories: list[ValueSequence] = []
        read: Sequence[Any] = ()
        if self.memories:
            read, arguments = self._parted(values)
        if scope.decisions is not None:
            first, ports = len(self.memories), self._given_memories()
            inputs = [(self, port, one, False) for port, one in enumerate(arguments, start=first)]
            reads = [(self, port, one) for port, one in zip(ports, read, strict=True)]
            scope, arguments, read = scope.decisions.place(inputs, reads)
        if self.memories:
            memories = [self._memory(scope, one, port) for port, one in zip(self._given_memories(), read, strict=True)]
        calls = scope.calls.get(self) or self._first_call(scope, arguments, memories)
        try:
            outputs = calls.add(arguments, memories)
        except ShapeError as error:
            outputs = self._other_calls(scope, arguments, memories, error).add(arguments, memories)
        return outputs[0] if len(outputs) == 1 else outputs

    def run(self, sequence: Any, init: Any = None, *, memory: Any = None) -> Any:
        """Add a chain: one call per element; the last outputs of a call are the last inputs of the next.

        sequence: data [steps, *shape], a sequence of values, or one value of shape [steps, *shape] from a cell. If the
        cell takes several inputs per step, a tuple of those. init: the initial state, one value or a tuple. It is zeros
        if omitted, and so are parts that are None. memory: the sequence that every step reads, if the cell declares a
        memory that is given; a tuple of sequences if it declares several.

        Returns the last step's output (or a tuple of outputs); `.steps` of each is the sequence over all steps. If the
        sequence is empty and `init` is given, the state that is returned is `init`; the other outputs have no value.
        """
        scope = scope_of(self)
        is_tuple = type(sequence) is not StandIn and isinstance(sequence, tuple)
        parts: Sequence[Any] = sequence if is_tuple and sequence and is_several(sequence) else (sequence,)
        scope, parts, init, memory = self._placed(scope, parts, init, memory)
        if init is not None and all(map(is_empty, parts)):
            return self._not_run(scope, tuple(parts), init)
        can_be_whole = self.whole is not None and scope is scope_of(self)  # in a branch, runs are steps
        return self._chain(scope, self._elements(scope, parts), init, None, None, memory, can_be_whole=can_be_whole)

    def loop(self, init: Any, *, until: Any = None, max_steps: int, memory: Any = None) -> Any:
        """Add a chain that feeds all its inputs from its own last outputs, starting with `init`, as in `run`.

        It ends after max_steps steps, or after the step at which the watched output equals `until`. The watched output
        is the first of the cell's host_outputs, or output 0 if none is declared. `until` may also be a function: it
        takes an array of watched values, one per request, and returns an array of bools. `until={1: True, 0: eos}`
        watches these outputs, by number; the loop ends after the step at which one of them does what is said for it, a
        value or a function. memory: as for `run`. Returns the same as `run`.
        """
        scope = scope_of(self)
        if type(until) is Value or type(until) is ValueSequence:
            raise misused("ends a loop at", "a function as `until` looks at the watched output of the cell itself")
        try:
            max_steps = index(max_steps)
        except TypeError:
            raise InvalidRequestError(
                f"{where(self)}: max_steps must be a whole number, got {type(max_steps).__name__}"
            ) from None
        scope, _, init, memory = self._placed(scope, (), init, memory)
        return self._chain(scope, (), init, max_steps, until, memory)

    def map(self, *sequences: Any, memory: Any = None) -> Any:
        """Add one node per element, without recurrence. Returns the output as a sequence, or a tuple of sequences.

        memory: as for `run`.
        """
        scope, placed = current_scope.get() or scope_of(self), cast(Sequence[Any], sequences)
        decisions = scope.decisions
        if decisions is not None:
            inputs = [(self, port, sequence, True) for port, sequence in enumerate(sequences, start=len(self.memories))]
            reads = self._reads(memory)
            scope, placed, read = decisions.place(inputs, reads, as_nodes=False, may_have_size=True)
            memory = self._as_given(read)
        memories, num_memories = self._memories(scope, memory), len(self.memories)
        cell_type, columns, error = self._columns(scope, self._elements(scope, placed))
        if cell_type is not None:
            error = self._misfit(cell_type, memories) if self.memories else None
            cell_type = cell_type if error is None else None
        cell = cell_type or self._type_of(scope, (*self._all_memories(memories), *columns), error)
        if len(columns) != len(cell.inputs) - num_memories:
            raise InvalidRequestError(
                f"{where(self)} takes {len(cell.inputs) - num_memories} inputs, got {len(columns)} sequences"
            )
        outputs = scope.recorder.map(cell, fitted(self, columns, cell, num_memories), memories)
        return _one_or_all(outputs if decisions is None else decisions.results(scope, outputs))

    def tree(self, children: Any, leaves: Any, *inputs: Any) -> Any:
        """Add the inner nodes of a tree or DAG, all of them calls of this cell.

        children: integers [num_nodes, arity], children before parents. An entry below the number of leaves is a leaf;
        any other is inner node `entry - number of leaves`. leaves: a sequence of values or data; a tuple of sequences
        if a node's state has several parts. inputs: optional sequences with one element per inner node. The module is
        called with the inputs, then the state of each child in order: forward(h_left, c_left, h_right, c_right).

        Returns the outputs as sequences over the inner nodes. The root of a tree is the last: `h[-1]`.
        """
        return tree(leaves, self.at(slice(None), children, *inputs))

    def at(self, places: Any, children: Any, *inputs: Any) -> TreeCalls:
        """Return this cell's nodes of a tree with several cells, for `bm.tree`.

        places: integers [count], the positions of these nodes among all inner nodes of the tree. children: integers
        [count, arity] as for `tree`; inner nodes are numbered over the whole tree. inputs: optional sequences with one
        element per place.
        """
        if self.memories:
            raise ModelError(f"{where(self)} reads a memory, which the nodes of a tree cannot: call it node by node")
        return TreeCalls(self, places, children, inputs)

    # --- memories -----------------------------------------------------------------------------------------------

    def _given_memories(self) -> list[int]:
        """Return the memories that are not the run's own."""
        return [port for port, one in enumerate(self.memories) if not one.own]

    def _parted(self, arguments: Sequence[Any]) -> tuple[list[Any], tuple[Any, ...]]:
        """Return what is given for the memories and the other arguments of a single call."""
        for_memories: list[Any] = [None] * len(self.memories)
        others: list[Any] = []
        order = [memory for memory in self._order if memory == GIVEN or not self.memories[memory].own]
        if len(arguments) > len(order):
            raise InvalidRequestError(f"{where(self)} takes {len(order)} arguments, got {len(arguments)}")
        for memory, argument in zip(order, arguments, strict=False):
            if memory == GIVEN:
                others.append(argument)
            else:
                for_memories[memory] = argument
        return [for_memories[port] for port in self._given_memories()], tuple(others)

    def _reads(self, memory: Any) -> list[tuple[Cell, int, Any]]:
        """Return what `memory=` of a run, loop or map gives, with the input of each."""
        ports = self._given_memories()
        if memory is None and not ports:
            return []
        parts = [memory] if len(ports) == 1 else list(memory) if isinstance(memory, tuple | list) else []
        if len(parts) != len(ports):
            names = ", ".join([repr(self.memories[port].name) for port in ports]) or "none"
            raise InvalidRequestError(f"{where(self)}: memory= gives its memories, which are {names}, in this order")
        return [(self, port, part) for port, part in zip(ports, parts, strict=True)]

    @staticmethod
    def _as_given(read: Sequence[Any]) -> Any:
        """Return memories as `memory=` takes them."""
        return tuple(read) if len(read) > 1 else read[0] if read else None

    def _memories(self, scope: UnfoldingScope, memory: Any) -> list[ValueSequence]:
        """Return the memories that `memory=` of a run, loop or map gives."""
        if memory is None and not self.memories:
            return []
        return [self._memory(scope, part, port) for _, port, part in self._reads(memory)]

    def _memory(self, scope: UnfoldingScope, argument: Any, port: int) -> ValueSequence:
        """Return what is given for a memory as a sequence whose nodes are a range; a cell copies others into one."""
        if argument is None:
            raise InvalidRequestError(f"{where(self)}: its memory {self.memories[port].name!r} is missing: give {ROWS}")
        if type(argument) is Value:
            if not argument.spec.shape:
                raise InvalidRequestError(
                    f"{where(self)}: its memory {self.memories[port].name!r} is one number, expected {ROWS}"
                )
            argument = elements(scope, argument)
        cell_type = scope.types.type_of(self)
        rows = column(self, argument, cell_type, port)
        in_range = as_range(rows, scope.recorder.num_kept) if isinstance(rows, ValueSequence) else None
        return copies(scope, rows) if in_range is None else in_range

    def _all_memories(self, sequences: Sequence[ValueSequence]) -> tuple[Value | ValueSequence | HostValues, ...]:
        """Return an argument for each memory, those of the run's own included."""
        following = iter(sequences)
        return tuple([next(following) if row is None else in_place_of(row) for row in self.own_rows])

    def _misfit(self, cell_type: CellType, memories: Sequence[ValueSequence]) -> ShapeError | None:
        """Return the error for memories of other rows than the type takes; None if all fit."""
        for port, memory in enumerate(self._all_memories(memories)):
            if not memory.spec.is_like(cell_type.inputs[port]):
                return misfit(cell_type, port, memory.spec)
        return None

    # --- inside -------------------------------------------------------------------------------------------------

    def _placed(
        self, scope: UnfoldingScope, sequences: Sequence[Any], init: Any, memory: Any
    ) -> tuple[UnfoldingScope, Sequence[Any], Any, Any]:
        """Return the scope that a chain goes to, and its arguments there, if the request decides by values."""
        if scope.decisions is None:
            return scope, sequences, init, memory
        state = () if init is None else init if isinstance(init, tuple | list) else (init,)
        count, first = len(sequences), len(self.memories)
        parts = enumerate((*sequences, *state), start=first)
        inputs = [(self, port, one, port < first + count) for port, one in parts]
        if sequences and state and all(map(is_empty, sequences)):  # nothing runs: the state is the result
            scope, placed, _ = scope.decisions.place(inputs[count:], ())
            return scope, sequences, tuple(placed), None
        scope, placed, read = scope.decisions.place(inputs, self._reads(memory), may_have_size=True)
        return scope, placed[:count], None if init is None else tuple(placed[count:]), self._as_given(read)

    def _elements(self, scope: UnfoldingScope, sequences: Sequence[Any]) -> Sequence[Any]:
        """Return sequences in which values of cells are sequences too."""
        if Value not in map(type, sequences):
            return sequences
        return tuple([elements(scope, x) if type(x) is Value and x.spec.shape else x for x in sequences])

    def _columns(
        self, scope: UnfoldingScope, sequences: Sequence[Any]
    ) -> tuple[CellType | None, list[SequenceArgument], ShapeError | None]:
        """Return sequences for the first inputs, the type for them if known, and an error or None.

        There is one element per call in each sequence. The error is set, and the type is None, if the known type takes
        other shapes.
        """
        cell_type = scope.types.type_of(self)
        columns: list[SequenceArgument] = []
        try:
            for port, sequence in enumerate(sequences, start=len(self.memories)):
                laid_out = column(self, sequence, cell_type, port)
                if (
                    cell_type is not None
                    and port < len(cell_type.inputs)
                    and not laid_out.spec.is_like(cell_type.inputs[port])
                ):
                    raise misfit(cell_type, port, laid_out.spec)
                columns.append(laid_out)
        except ShapeError as error:
            return None, self._columns_anew(sequences), error
        return cell_type, columns, None

    def _columns_anew(self, sequences: Sequence[Any]) -> list[SequenceArgument]:
        """Return sequences for the first inputs after the memories, whatever the known type takes."""
        first = len(self.memories)
        return [column(self, sequence, None, port) for port, sequence in enumerate(sequences, start=first)]

    def _type_of(
        self, scope: UnfoldingScope, arguments: Arguments, error: ShapeError | None, state: tuple[ValueSpec, ...] = ()
    ) -> CellType:
        """Return a new type for these arguments. error: that of the cell's existing type, which takes others.

        state: the last specs, of which some may start from zeros.
        """
        specs = [argument.spec for argument in arguments[: len(arguments) - len(state)] if argument is not None]
        inputs = (*specs, *state)
        if error is None:
            return scope.types.learn(self, inputs, arguments)
        return scope.types.other(self, inputs, error, arguments)

    def _other_calls(
        self, scope: UnfoldingScope, arguments: Sequence[Any], memories: list[ValueSequence], error: ShapeError
    ) -> Calls:
        """Return the object that adds this request's calls with these shapes."""
        cell_type = self._type_of(scope, self._singles(arguments, memories), error)
        calls = scope.other_calls.get(cell_type.type_id)
        if calls is None:
            layout = CallData(cell_type.inputs, self.float_dtype, lambda port: where(self, port))
            calls = scope.other_calls[cell_type.type_id] = scope.recorder.calls(cell_type, layout)
        return calls

    def _singles(self, arguments: Sequence[Any], memories: list[ValueSequence]) -> Arguments:
        """Return the arguments of a single call, whatever the known type takes."""
        first = len(self.memories)
        return [
            *self._all_memories(memories),
            *[single(self, part, None, port) for port, part in enumerate(arguments, start=first)],
        ]

    def _first_call(self, scope: UnfoldingScope, arguments: Sequence[Any], memories: list[ValueSequence]) -> Calls:
        """Return the object that adds this request's calls, at the first of them."""
        cell_type = scope.types.type_of(self)
        if cell_type is None:
            cell_type = self._type_of(scope, self._singles(arguments, memories), None)
        layout = CallData(cell_type.inputs, self.float_dtype, lambda port: where(self, port))
        calls = scope.calls[self] = scope.recorder.calls(cell_type, layout)
        return calls

    def _chain(
        self,
        scope: UnfoldingScope,
        sequences: Sequence[Any],
        init: Any,
        max_steps: int | None,
        until: Any,
        memory: Any,
        *,
        can_be_whole: bool = False,
    ) -> Any:
        memories = self._memories(scope, memory)
        cell_type, columns, error = self._columns(scope, sequences)
        try:
            state = self._state(init, cell_type, len(self.memories) + len(columns))
            if cell_type is not None and memories and (other := self._misfit(cell_type, memories)) is not None:
                raise other
        except ShapeError as other:
            if cell_type is None:
                raise
            cell_type, error = None, other
            columns = self._columns_anew(sequences)
            state = self._state(init, None, len(self.memories) + len(columns))
        given_first = [*self._all_memories(memories), *columns]
        if cell_type is None:
            initial = None if state is None else [None if value is None else value.spec for value in state]
            if initial is None or None in initial:
                zeros = self._zeros(scope, given_first, error)
                initial = list(zeros) if initial is None else [a or b for a, b in zip(initial, zeros, strict=False)]
            specs = tuple([spec for spec in initial if spec is not None])
            cell_type = self._learned(scope, given_first, state or [None] * len(specs), specs, error)
            columns = fitted(self, columns, cell_type, len(self.memories))
            state = None if state is None else fitted(self, state, cell_type, len(given_first))
        cell_type = scope.types.in_runs(cell_type, len(given_first))
        whole = (
            scope.types.whole_form(self, cell_type, (*columns, *(state or ())), len(columns)) if can_be_whole else None
        )
        outputs = scope.recorder.run(
            cell_type, columns, state, max_steps=max_steps, open_ended=until is not None, memories=memories, whole=whole
        )
        if until is not None:
            scope.end_at(cell_type, outputs, until)
        decisions = scope_of(self).decisions
        if decisions is not None:
            begin = [None] * (len(cell_type.inputs) - len(given_first)) if state is None else state
            outputs = decisions.results(scope, outputs, begin)
        return _one_or_all(outputs)

    def _not_run(self, scope: UnfoldingScope, sequences: tuple[Any, ...], init: Any) -> Any:
        """Return the outputs of a run over empty sequences."""
        cell_type, first = scope.types.type_of(self), len(sequences)
        try:
            state = self._state(init, cell_type, first)
        except ShapeError:  # the cell may have been called with other shapes first
            cell_type, state = None, self._state(init, None, first)
        assert state is not None
        if any(value is None for value in state) or (
            cell_type is not None and len(cell_type.inputs) != first + len(state)
        ):
            wanted = "a value for each part" if cell_type is None else f"{len(cell_type.inputs) - first} values"
            raise InvalidRequestError(
                f"{where(self)}: the sequence is empty, so `init` is the result, and needs {wanted} of the state, none "
                f"of them None; got {len(state)}"
            )
        ends = [end_of_no_step(scope, value) for value in state if value is not None]
        outputs = self._outputs_of_no_step(cell_type, sequences, tuple([end.spec for end in ends]))
        others = [missing(k, spec, scope.recorder) for k, spec in enumerate(outputs[: len(outputs) - len(ends)])]
        return _one_or_all((*others, *ends))

    def _outputs_of_no_step(
        self, cell_type: CellType | None, sequences: tuple[Any, ...], state: tuple[ValueSpec, ...]
    ) -> tuple[ValueSpec, ...]:
        """Return the outputs' specs. A cell that was not called yet is tried with its state and likely elements."""
        if cell_type is not None:
            return cell_type.outputs
        if self.declared is not None:
            return self.declared.outputs
        elements = [likely_element(sequence, self.float_dtype) for sequence in sequences]
        sizes = parameter_sizes(self.module) if None in elements else []
        guesses = (ValueSpec((), "int64"), *state, *[ValueSpec((size,), self.float_dtype) for size in sizes])
        for guess in dict.fromkeys(guesses):
            with suppress(ModelError), torch.random.fork_rng(devices=[]):
                inputs = (*[element or guess for element in elements], *state)
                outputs = infer_outputs(flat_module(self.module), inputs, where(self))
                if len(outputs) >= len(state):
                    return outputs
        raise InvalidRequestError(
            f"{where(self)}: the sequence is empty, and the cell has not been called before, so that nothing tells how "
            "many outputs it has; give the model an example_request in which it runs"
        )

    def _state(self, init: Any, cell_type: CellType | None, first: int) -> list[Argument | None] | None:
        """Return the initial state, the inputs from `first` on, with None for zeros; None if it is not given."""
        if init is None:
            return None
        parts = init if type(init) is not StandIn and isinstance(init, tuple | list) else (init,)
        return [None if part is None else single(self, part, cell_type, first + k) for k, part in enumerate(parts)]

    def _zeros(
        self, scope: UnfoldingScope, columns: Sequence[Argument | ValueSequence], error: ShapeError | None
    ) -> tuple[ValueSpec, ...]:
        """Return the zero state. Integers among the columns may be floats. Raises `error` if there is none."""
        specs = tuple([column.spec for column in columns])
        try:
            return scope.types.zero_state(self, specs)
        except ModelError as refused:
            floats = as_floats(columns, specs, self.float_dtype)
            if error is None and floats != specs:
                with suppress(ModelError):
                    return scope.types.zero_state(self, floats)
            raise (error or refused) from None

    def _learned(
        self,
        scope: UnfoldingScope,
        columns: Sequence[Argument | ValueSequence],
        init: list[Argument | None],
        state: tuple[ValueSpec, ...],
        error: ShapeError | None,
    ) -> CellType:
        """Return the type of a chain's cell. Integers among the initial state may be floats.

        ShapeError if the cell returns a state of another shape than it takes.
        """
        arguments = (*columns, *init[: len(state)])
        try:
            cell_type = self._type_of(scope, arguments, error, state)
            scope.types.in_runs(cell_type, len(columns))  # raises if the cell returns another state than it takes
            return cell_type
        except RowsError:
            raise
        except ModelError as refused:
            floats = as_floats(init, state, self.float_dtype)
            if floats != state:
                first = refused if isinstance(refused, ShapeError) else ShapeError(str(refused))
                with suppress(ModelError):
                    learnt = scope.types.type_of(self) is not None
                    cell_type = self._type_of(scope, arguments, (error or first) if learnt else None, floats)
                    scope.types.in_runs(cell_type, len(columns))
                    return cell_type
            if error is not None:
                raise error from None
            try:
                zeros = scope.types.zero_state(self, tuple([column.spec for column in columns]))
            except ModelError:  # the length is unknown
                zeros = state
            if [part.row_signature for part in state] != [part.row_signature for part in zeros]:
                mine, wanted = ("(" + ", ".join(map(str, parts)) + ")" for parts in (state, zeros))
                raise ShapeError(
                    f"{where(self)}: the initial state has rows of {mine}, expected {wanted}; give init= as many "
                    "values, each one row without a batch, or leave it out for zeros"
                ) from None
            raise

    def __repr__(self) -> str:
        return f"Cell({self.name or type(self.module).__name__}, max_batch={self.max_batch}, priority={self.priority})"


def elements(scope: UnfoldingScope, value: Value) -> ValueSequence:
    """Return a value of shape [n, *shape] as a sequence of n values. A node of its own copies each element out."""
    if value.is_missing:
        raise never_computed("a sequence")
    spec, count = value.spec, value.spec.shape[0]
    cell = _ELEMENTS.get(spec) or _ELEMENTS.setdefault(spec, Cell(Element(), name=f"element {spec}"))
    cell_type = scope.types.type_of(cell) or scope.types.learn(cell, (spec, INDEX))
    repeated = ValueSequence(np.full(count, value.node), value.of, holds=value)
    (sequence,) = scope.recorder.map(cell_type, [repeated, HostValues(np.arange(count), count, INDEX)])
    return sequence


def end_of_no_step(scope: UnfoldingScope, argument: Argument) -> Value:
    """Return an argument as the end of a run without steps. A node of its own copies it."""
    (value,) = scope.recorder.node(copy_type(scope.types, argument.spec), [argument])
    return value.after_no_step()


def copies(scope: UnfoldingScope, rows: SequenceArgument) -> ValueSequence:
    """Return a sequence of equal values whose nodes are a range. A node of its own copies each value."""
    (sequence,) = scope.recorder.map(copy_type(scope.types, rows.spec), [rows])
    return sequence


def copy_type(types: CellTypes[Cell], *value_specs: ValueSpec) -> CellType:
    """Return the type of the cell that copies values of these specs together, or makes values of data."""
    specs = tuple([ValueSpec(spec.shape, spec.dtype) for spec in value_specs])
    cell = copying(specs)
    return types.type_of(cell) or types.learn(cell, specs)


def whole_run(cell: Cell, num_columns: int) -> Cell:
    """Return the cell of the second form of a cell's runs. It takes its memories first; see WholeRun."""
    assert cell.whole is not None
    made = Cell(
        WholeRun(cell.whole, num_columns),
        batch_sizes=None if not cell.independent_rows else cell.batch_sizes,
        priority=cell.priority,
        host_outputs=cell.host_outputs,
        name=f"{cell.name or type(cell.module).__name__} whole",
        independent_rows=cell.independent_rows,
    )
    made.memories, made.own_rows = (
        tuple([Memory(f"steps {port}") for port in range(num_columns)]),
        (None,) * num_columns,
    )
    made.memory_outputs, made._with_memories = outputs_kept(made.memories), made.module
    return made


def copying(specs: tuple[ValueSpec, ...]) -> Cell:
    """Return the cell that takes values of these specs and returns them."""
    return _COPIES.get(specs) or _COPIES.setdefault(specs, Cell(Same(), name=f"copy {', '.join(map(str, specs))}"))


_COPIES: Final[dict[tuple[ValueSpec, ...], Cell]] = {}
"""The cells that copy values, by their specs. Shared by all models of the process."""


_ELEMENTS: Final[dict[ValueSpec, Cell]] = {}
"""The cells that copy elements out of values, by spec. Shared by all models of the process."""


def _one_or_all(outputs: tuple[Any, ...]) -> Any:
    return outputs[0] if len(outputs) == 1 else outputs
