"""A cell's graph as operations of compiled loops: see node_steps.py. For the CPU; products and passes in float32."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Final, Protocol, TypeAlias, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx

from batchmaker.arrays import LINE, Ints
from batchmaker.compile import typed_steps as typed
from batchmaker.compile.dataflow import (
    BATCH,
    CannotRewriteError,
    TracedCell,
    TracedValue,
    dependencies,
    extract,
)
from batchmaker.compile.export import torch_dtype
from batchmaker.compile.lower import Packer, lower
from batchmaker.compile.node_steps import (
    CALL,
    COLUMNS,
    EACH,
    GATHER,
    LOOKUP,
    OPERATION_FIELDS,
    PASS,
    PASS_FIELDS,
    PRODUCT,
    ROWS,
    Code,
    Scratch,
)
from batchmaker.compile.passes.atoms import gate_by_gate
from batchmaker.compile.passes.cheaper import cheaper_sums
from batchmaker.compile.passes.fusion import flatten_rows, fuse_pointwise
from batchmaker.compile.passes.nodes import columns, is_linear, shape_of
from batchmaker.compile.passes.pointwise import Pass
from batchmaker.compile.passes.products import merge_products, parameters
from batchmaker.compile.program import Program, compile_program
from batchmaker.compile.row_operations import RowOperation, is_pair, row_operation
from batchmaker.compile.row_steps import BEST
from batchmaker.compile.typed import KINDS, Typed
from batchmaker.compile.typed import typed as as_typed
from batchmaker.compile.typed_steps import ADDRESS, CHUNK, KIND, OTHER, STAYS, VALUE_BYTES, VALUE_FIELDS, WIDTH
from batchmaker.graph.spec import ValueSpec
from batchmaker.kernels.cpu.products import address_of, library, prepare
from batchmaker.kernels.cpu.steps import AT, COPY_FIELDS, COUNT, NUM_ADDRESSES, PART, SET_THREADS, TARGET

_aten = torch.ops.aten
_RESHAPES: Final = frozenset((
    _aten.unsqueeze.default, _aten.squeeze.dim, _aten.squeeze.default, _aten.view.default, _aten.reshape.default,
    _aten.flatten.using_ints, _aten.contiguous.default, _aten.alias.default, _aten.detach.default, _aten.expand.default,
    _aten.slice.Tensor, _aten.to.dtype, _aten._to_copy.default, _aten.clone.default,
))  # fmt: skip
"""Operations that may give the same numbers in the same order; whether they do is seen from the shapes."""

_MOST_OF_LAYER: Final = 1 << 22
_MOST_WEIGHTS: Final = 1 << 24
"""Most weights of a product, and of all: they are held twice more. Where there are more, a call costs little beside."""

_Written: TypeAlias = Callable[[], None]


@final
class OtherError(Exception):
    """The graph has something else in it."""


@final
class TorchCall:
    """Operations that torch does. reads: a value each, or an input (`from_input`) below 0, ~port; with the row's shape.

    writes: the values of its results.
    """

    def __init__(self, program: Program, reads: list[tuple[int, tuple[int, ...]]], writes: list[int]) -> None:
        self.program, self.reads, self.writes = program, reads, writes


def prepared(cell: TracedCell) -> TracedCell:
    """Return an equal graph with as few products and passes as there can be."""
    made = extract(cell, cell.inputs, cell.outputs)
    merge_products(made)
    made = gate_by_gate(made, layers=False)
    cheaper_sums(made)
    flatten_rows(made)
    fuse_pointwise(made, fewest_saved=0)
    return made


@final
class Writer:
    """Writes the operations of a graph. Numbers of values are their places in `values`.

    kept: what is behind the addresses of operations, slots and records. shapes: (row, dtype) of each value. calls: what
    torch does. num_weights: of products. packer: for calls. in_place: inputs that torch
    gets where they lie.
    """

    def __init__(
        self, cell: TracedCell, inputs: Sequence[ValueSpec], packer: Packer, in_place: Collection[int] = ()
    ) -> None:
        self.operations: list[list[int]] = []
        self.values: list[list[int]] = []
        self.shapes: list[tuple[tuple[int, ...], torch.dtype]] = []
        self.calls: list[TorchCall] = []
        self.weights: list[Any] = []
        self.num_weights = 0
        self.ports = {node: port for port, node in enumerate(cell.inputs)}
        self._inputs, self._packer, self._in_place = inputs, packer, in_place
        self._passes: list[list[int]] = []
        self._programs: list[Ints] = []
        self._slots: list[Ints] = []
        self._base_values: list[int] = []
        self._records: list[list[int]] = []
        self._cell = cell
        self._value_of: dict[fx.Node, int] = {}
        self._results: dict[fx.Node, list[int]] = {}  # of passes with several
        depends = dependencies(cell.graph)
        self._constant = {node for node in cell.graph.nodes if node.op != "output" and depends[node] <= {BATCH}}

    def arrays(self) -> tuple[Ints, Ints, Ints, Ints, Ints]:
        """Return what a Code has after its operations: passes, programs, slots, base values, and records."""
        return (
            np.array(self._passes, np.int64).reshape(-1, PASS_FIELDS),
            np.concatenate([np.zeros((0, 5), np.int64), *self._programs]),
            np.concatenate([np.zeros((0, 4), np.int64), *self._slots]),
            np.array(self._base_values, np.int64),
            np.array(self._records, np.int64).reshape(-1, typed.RECORD_FIELDS),
        )

    def write(self, *, with_calls: bool) -> None:
        """Write all nodes. Without calls of torch, OtherError if there is no operation for one."""
        waiting = [n for n in self._cell.graph.nodes if n.op == "call_function" and n not in self._constant]
        done = {n for n in self._cell.graph.nodes if n.op in ("placeholder", "get_attr")} | self._constant
        while waiting:
            still_waiting: list[fx.Node] = []
            for node in waiting:
                written = self._written(node) if done.issuperset(node.all_input_nodes) else None
                if written is None:
                    still_waiting.append(node)
                else:
                    written()
                    done.add(node)
            waiting = still_waiting
            if waiting:
                if not with_calls:
                    raise OtherError
                called: dict[fx.Node, None] = {}
                for node in waiting:
                    if all(n in done or n in called for n in node.all_input_nodes) and self._written(node) is None:
                        called[node] = None
                self._call(list(called))
                done |= called.keys()
                waiting = [node for node in waiting if node not in called]

    def value(self, node: fx.Node) -> int:
        """Return the number of a node's value; an input is gathered. OtherError if it has none."""
        if node not in self._value_of:
            if node not in self.ports:
                raise OtherError
            spec = self._inputs[self.ports[node]]
            self._value_of[node] = self._add(GATHER, (spec.shape, torch_dtype(spec.dtype)), self.ports[node])
        return self._value_of[node]

    # --- one node ------------------------------------------------------------------------------------------------

    def _written(self, node: fx.Node) -> _Written | None:
        """Return what writes a node; None if there is no operation for it. Looks at the graph alone."""
        if node.target is operator.getitem and self._is_pass(node.args[0]):
            return lambda: self._pick(node)
        if isinstance(node.target, Pass):
            made = node.target
            return None if made.for_machine is None else lambda: self._pass(node, made)
        if isinstance(node.meta.get("val"), tuple) and all(self._is_part(user) for user in node.users):
            return lambda: None
        if is_pair(node) and all(self._written(user) for user in node.users):
            return lambda: None
        if self._rows_of(node) is None:
            return None
        read: Any = node.args[0]
        if is_linear(self._cell, node):
            return self._layer(node)
        if node.target in (_aten.embedding.default, _aten.index_select.default):
            return self._looked_up(node)
        on_rows = row_operation(self._cell, node)
        if on_rows is not None:
            return self._on_rows(node, on_rows)
        if node.target is _aten.cat.default:
            return self._side_by_side(node)
        if node.target in _RESHAPES and self._is_same(node):
            return lambda: self._value_of.__setitem__(node, self.value(read))
        source, start, _ = columns(node)
        if node.target is _aten.select.int and len(shape_of(read)) == 2 and node.args[1] in (1, -1):
            source, start = read, int(node.args[2]) % int(shape_of(read)[1])  # type: ignore[arg-type]
        if source is not node and self._rows_of(source) is not None:
            return lambda: self._part(node, source, start)
        operation = as_typed(self._cell, node)
        return None if operation is None else self._each(node, operation)

    def _rows_of(self, node: Any) -> tuple[tuple[int, ...], torch.dtype] | None:
        """Return the shape and dtype of a node's rows; None if it is no batch of rows of the cell's."""
        value = node.meta.get("val") if isinstance(node, fx.Node) else None
        if not isinstance(value, TracedValue) or not value.shape or node in self._constant:
            return None
        shape = value.shape[1:]
        if value.shape[0] != self._cell.inputs[0].meta["val"].shape[0] or not all(isinstance(s, int) for s in shape):
            return None
        return tuple([int(str(size)) for size in shape]), value.dtype

    def _is_part(self, node: fx.Node) -> bool:
        """Whether the node is columns of a value, and not one of several results."""
        return node.target is operator.getitem and columns(node)[0] is not node and self._rows_of(node) is not None

    def _is_pass(self, node: Any) -> bool:
        return isinstance(node, fx.Node) and isinstance(node.target, Pass) and node.target.for_machine is not None

    def _is_same(self, node: fx.Node) -> bool:
        """Whether the rows have the numbers of the argument's rows, in order. A batch of rows stays one."""
        source, mine = self._rows_of(node.args[0]), self._rows_of(node)
        if source is None or mine is None:
            return False
        return math.prod(source[0]) == math.prod(mine[0]) and source[1] is mine[1]

    def _pick(self, node: fx.Node) -> None:
        self._value_of[node] = self._results[node.args[0]][node.args[1]]  # type: ignore[index]

    def _layer(self, node: fx.Node) -> _Written | None:
        weight, bias = parameters(self._cell, node)
        source = self._rows_of(node.args[0])
        if source is None or {weight.dtype, source[1]} != {torch.float32} or len(source[0]) != 1 or not source[0][0]:
            return None
        if not weight.numel() or weight.numel() > _MOST_OF_LAYER or self.num_weights + weight.numel() > _MOST_WEIGHTS:
            return None
        return lambda: self._multiply(node, weight, bias)

    def _multiply(self, node: fx.Node, weight: Tensor, bias: Tensor | None) -> None:
        source, functions = self.value(node.args[0]), library()  # type: ignore[arg-type]
        plain = weight.detach().t().contiguous()
        prepared, address = prepare(plain.numpy(), functions) if functions.multiplies else (None, 0)
        row = None if bias is None else bias.detach().contiguous()
        self.weights += [plain, prepared, row]
        self.num_weights += weight.numel()
        rows = ((len(weight),), torch.float32)
        self._value_of[node] = self._add(
            PRODUCT, rows, source, address, 0 if row is None else row.data_ptr(), plain.data_ptr()
        )

    def _looked_up(self, node: fx.Node) -> _Written | None:
        by_index = node.target is _aten.index_select.default
        table, token = self._cell.value(node.args[0]), node.args[2 if by_index else 1]
        if table is None or (by_index and node.args[1] != 0) or self._rows_of(token) != ((), torch.int64):
            return None
        return lambda: self._look_up(node, table.contiguous(), token)

    def _look_up(self, node: fx.Node, table: Tensor, token: Any) -> None:
        self.weights.append(table)
        rows = (tuple(table.shape[1:]), table.dtype)
        self._value_of[node] = self._add(LOOKUP, rows, self.value(token), table.data_ptr(), len(table))

    def _on_rows(self, node: fx.Node, operation: RowOperation) -> _Written | None:
        rows, source = self._rows_of(node), self._rows_of(operation.source)
        dtype = torch.int64 if operation.code == BEST else torch.float32
        if rows is None or source is None or rows[1] is not dtype or source[1] is not torch.float32:
            return None
        return lambda: self._work_on_rows(node, operation, rows)

    def _work_on_rows(self, node: fx.Node, operation: RowOperation, rows: tuple[tuple[int, ...], torch.dtype]) -> None:
        constants = [None if w is None else w.contiguous() for w in (operation.weight, operation.bias)]
        epsilon = torch.tensor([operation.epsilon], dtype=torch.float64)
        self.weights += [*constants, epsilon]
        source = self.value(operation.source)
        made = self._value_of[node] = self._add(ROWS, rows, len(self._records))
        addresses = [0 if kept is None else kept.data_ptr() for kept in (*constants, epsilon)]
        self._note_record([operation.code, made, source, operation.width, *addresses])

    def _side_by_side(self, node: fx.Node) -> _Written | None:
        parts: Any = node.args[0]
        rows, part_rows = self._rows_of(node), [self._rows_of(part) for part in parts]
        if rows is None or len(rows[0]) != 1 or (node.args[1] if len(node.args) > 1 else 0) not in (1, -1):
            return None
        if any(part is None or part[1] is not rows[1] or len(part[0]) != 1 for part in part_rows):
            return None
        return lambda: self._join(node, parts, rows)

    def _join(self, node: fx.Node, parts: Sequence[fx.Node], rows: tuple[tuple[int, ...], torch.dtype]) -> None:
        values = [self.value(part) for part in parts]
        self._value_of[node], at = self._value(*rows), 0
        for value in values:
            size = self.values[value][VALUE_BYTES]
            self.operations.append([COLUMNS, self._value_of[node], value, size, 0, at])
            at += size

    def _part(self, node: fx.Node, source: fx.Node, start: int) -> None:
        rows = self._rows_of(node)
        assert rows is not None
        size = rows[1].itemsize
        made = self._add(COLUMNS, rows, self.value(source), math.prod(rows[0]) * size, start * size, 0)
        self._value_of[node] = made

    # --- operations on single numbers ----------------------------------------------------------------------------

    def _each(self, node: fx.Node, operation: Typed) -> _Written | None:
        shape, dims = self._shape(node), len(shape_of(node))
        for operand in operation.operands:
            if isinstance(operand, fx.Node) and not self._spreads(operand, shape, dims):
                return None
        return lambda: self._write_each(node, operation)

    def _shape(self, node: fx.Node) -> tuple[int, ...]:
        rows = self._rows_of(node)
        assert rows is not None
        return rows[0]

    def _spreads(self, operand: fx.Node, shape: tuple[int, ...], dims: int) -> bool:
        """Whether an operand is a number, a row or a batch of rows, each as wide as the result or of one number."""
        constant = self._cell.value(operand)
        if constant is not None:
            own = tuple(constant.shape)
            return constant.numel() == 1 or (own[1:] if len(own) == dims and own[0] == 1 else own) == shape
        rows = self._rows_of(operand)
        if rows is None or len(shape_of(operand)) != dims:
            return False
        return rows[0] == shape or math.prod(rows[0]) == 1

    def _write_each(self, node: fx.Node, operation: Typed) -> None:
        rows = self._rows_of(node)
        assert rows is not None
        operands = [self._operand(operand, operation.dtype, rows[0]) for operand in operation.operands]
        made = self._record(operation.code, operation.dtype, operands, rows)
        if operation.then is not None:
            code, number = operation.then
            itself = [made, 0, rows[1].itemsize * math.prod(rows[0]), 1, KINDS[rows[1]]]
            made = self._record(code, operation.dtype, [itself, self._operand(number, operation.dtype, rows[0])], rows)
        self._value_of[node] = made

    def _operand(self, operand: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> list[int]:
        """Return the fields of an operand of a result with rows of this shape."""
        constant = self._cell.value(operand) if isinstance(operand, fx.Node) else torch.tensor(operand, dtype=dtype)
        if constant is not None:
            constant = constant.contiguous()
            self.weights.append(constant)
            one = constant.numel() == 1
            return [-1, constant.data_ptr(), 0, 0 if one else 1, KINDS[constant.dtype]]
        rows = self._rows_of(operand)
        assert rows is not None
        numbers = math.prod(rows[0])
        step = 0 if numbers == 1 and math.prod(shape) > 1 else 1
        return [self.value(operand), 0, numbers * rows[1].itemsize, step, KINDS[rows[1]]]

    def _record(
        self, code: int, dtype: torch.dtype, operands: list[list[int]], rows: tuple[tuple[int, ...], torch.dtype]
    ) -> int:
        made = self._add(EACH, rows, len(self._records))
        self._note_record([code, made, KINDS[dtype], len(operands), *(f for operand in operands for f in operand)])
        return made

    def _note_record(self, fields: list[int]) -> None:
        self._records.append(fields + [0] * (typed.RECORD_FIELDS - len(fields)))

    # --- passes and calls ------------------------------------------------------------------------------------------

    def _pass(self, node: fx.Node, made: Pass) -> None:
        parts = made.for_machine
        assert parts is not None
        program, slots, num_arguments, num_results = parts
        read = [self.value(argument) for argument in node.args]  # type: ignore[arg-type]
        assert len(read) == num_arguments
        number, width = len(self._passes), made.width
        results = [self._value((width,), torch.float32) for _ in range(num_results)]
        low = [sum(map(len, self._programs)), sum(map(len, self._slots)), len(self._base_values)]
        self._programs.append(program)
        self._slots.append(slots)
        self._base_values += [*read, *results, -1, -1]  # of constants, which have addresses of their own; of registers
        self._passes.append(
            [
                low[0],
                low[0] + len(program),
                low[1],
                low[1] + len(slots),
                low[2],
                len(self._base_values),
                made.num_registers,
                width,
            ]
        )
        self.weights.append(made)
        self._operation(PASS, results[0], number)
        if num_results == 1:
            self._value_of[node] = results[0]
        else:
            self._results[node] = results

    def _call(self, nodes: Sequence[fx.Node]) -> None:
        """Write operations that torch does, together."""
        inside = set(nodes)
        reads = list(dict.fromkeys(source for node in nodes for source in self._sources(node) if source not in inside))
        results = [node for node in nodes if any(user not in inside for user in node.users)]
        specs = [(node, self._rows_of(node)) for node in results]
        if not reads or any(rows is None for _, rows in specs) or any(self._rows_of(node) is None for node in reads):
            raise OtherError
        part = extract(self._cell, reads, results)
        lower(part, self._packer)
        operands = [(self._read_by_torch(node), self._shape(node)) for node in reads]
        made = [self._value(*rows) for _, rows in specs if rows is not None]
        self._value_of |= dict(zip(results, made, strict=True))
        self._operation(CALL, made[0], len(self.calls))
        self.calls.append(TorchCall(compile_program(part), operands, made))

    def _read_by_torch(self, node: fx.Node) -> int:
        """Return a node's value; ~port for an input that torch gets where it lies."""
        port = self.ports.get(node)
        return self.value(node) if port is None or port not in self._in_place else ~port

    def _sources(self, node: fx.Node) -> Iterable[fx.Node]:
        """Yield the values of the cell's rows that a node reads, also through what depends on their number alone."""
        for source in node.all_input_nodes:
            if source not in self._constant:
                yield source

    # --- fields ----------------------------------------------------------------------------------------------------

    def _add(self, code: int, rows: tuple[tuple[int, ...], torch.dtype], *arguments: int) -> int:
        value = self._value(*rows)
        self._operation(code, value, *arguments)
        return value

    def _operation(self, *fields: int) -> None:
        self.operations.append([*fields, *[0] * (OPERATION_FIELDS - len(fields))])

    def _value(self, shape: tuple[int, ...], dtype: torch.dtype) -> int:
        fields = [0] * VALUE_FIELDS
        fields[WIDTH] = math.prod(shape)
        fields[VALUE_BYTES], fields[KIND] = fields[WIDTH] * dtype.itemsize, KINDS.get(dtype, OTHER)
        self.values.append(fields)
        self.shapes.append((shape, dtype))
        return len(self.values) - 1


@final
class Operations:
    """The operations of a graph, ready to run. rows: number of rows for which values have room; see `ValueRoom`."""

    def __init__(self, writer: Writer, stays: Iterable[int]) -> None:
        self.operations = np.array(writer.operations, np.int64).reshape(-1, OPERATION_FIELDS)
        self.values = np.array(writer.values, np.int64).reshape(-1, VALUE_FIELDS)
        self.values[sorted(set(stays)), STAYS] = 1
        self.shapes = writer.shapes
        self._weights = writer.weights
        self.addresses: Ints = np.zeros(NUM_ADDRESSES, np.int64)
        self.code: Code = (self.operations, *writer.arrays(), self.addresses)
        functions = library()
        if writer.num_weights and functions.multiplies:
            _, call, function = functions.product
            self.addresses[call] = address_of(function)
            if functions.set_threads is not None:
                self.addresses[SET_THREADS] = address_of(functions.set_threads)


class Fetches(Protocol):
    """Outputs that travel to the host: see kernels.cpu.loop.LoopTask."""

    @property
    def fetch_at(self) -> tuple[Ints, ...]: ...
    @property
    def fetch_of(self) -> tuple[int, ...]: ...
    @property
    def fetched(self) -> tuple[NDArray[Any], ...]: ...


class ValueRoom:
    """The memory of a call, for steps of up to `largest` rows. values: with their addresses. scratch: see Scratch."""

    def __init__(self, of: Operations, largest: int, block: int) -> None:
        self.largest = largest
        self.values = of.values.copy()
        rows = np.where(of.values[:, STAYS] == 1, largest, min(largest, block))
        sizes = -(-rows * of.values[:, VALUE_BYTES] // LINE) * LINE + LINE  # rows of values do not share cache lines
        self._memory = np.empty(int(sizes.sum()) + LINE, np.uint8)
        start = -self._memory.ctypes.data % LINE
        self._starts = (start + np.cumsum(sizes) - sizes).tolist()
        self.values[:, ADDRESS] = self._memory.ctypes.data + np.array(self._starts, np.int64)
        bases = np.zeros(len(of.code[4]), np.int64)
        floats, integers = np.empty((4, CHUNK), np.float64), np.empty((4, CHUNK), np.int64)
        self.scratch: Scratch = (self.values, bases, floats, integers)
        self._copies: Ints = np.empty((8, COPY_FIELDS), np.int64)

    def copies_of(self, num_kept: int, task: Fetches) -> Ints:
        """Return room for the copies of a task, with its fetches entered after those of `num_kept` outputs."""
        count = num_kept + len(task.fetched)
        if len(self._copies) < count:
            self._copies = np.empty((2 * count, COPY_FIELDS), np.int64)
        copies = self._copies[:count]
        for i, (output, at, values) in enumerate(
            zip(task.fetch_of, task.fetch_at, task.fetched, strict=True), num_kept
        ):
            copies[i] = 0
            copies[i, COUNT], copies[i, AT] = len(at), at.ctypes.data
            copies[i, PART], copies[i, TARGET] = output, values.ctypes.data
        return copies

    def tensor(self, value: int, shape: tuple[int, ...], dtype: torch.dtype, count: int) -> Tensor:
        """Return the rows of a value as a tensor [count, *shape]."""
        size = count * math.prod(shape) * dtype.itemsize
        memory = torch.from_numpy(self._memory[self._starts[value] : self._starts[value] + size])
        return memory.view(dtype).view(count, *shape)


def write_graph(
    cell: TracedCell, inputs: Sequence[ValueSpec], packer: Packer | None = None, in_place: Collection[int] = ()
) -> tuple[Writer, list[fx.Node]]:
    """Return a graph's operations, and the nodes of its outputs. OtherError if they cannot be written.

    packer: for what torch does; None if it is to do nothing.
    """
    try:
        made = prepared(cell)
        writer = Writer(made, inputs, packer or Packer(), in_place)
        writer.write(with_calls=packer is not None)
    except (CannotRewriteError, OverflowError):  # the latter: a number that is none of its dtype
        raise OtherError from None
    return writer, made.outputs
