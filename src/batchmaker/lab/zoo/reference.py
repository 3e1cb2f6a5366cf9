"""The reference: one request alone, at batch 1, through the network or the cells' own modules. Nothing is rewritten."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol, final

import numpy as np
import torch
from torch import Tensor, nn

from batchmaker.compile.export import flat_module, flat_outputs, infer_outputs
from batchmaker.compile.memories import TRIED_ROOM, with_rooms
from batchmaker.errors import ModelError, ShapeError
from batchmaker.graph.cell_graph import HOST, ZERO, CellGraph, MemoryRead, NodeBlock, Run
from batchmaker.graph.spec import CellType, TypeId, ValueSpec
from batchmaker.model.cell import Cell
from batchmaker.model.initial_state import initial_state
from batchmaker.model.model import Model
from batchmaker.model.scope import Arguments, Conditions, OpenLoop
from batchmaker.model.unfolding import Unfolding, end_of_loop


def reference(model: Model, request: Any) -> Any:
    """Return the result of `model.unfold(request)` in plain eager PyTorch; every policy must give it.

    It is computed by the network itself if the model has it (`Model.alone`), else by its cells one after the other.
    """
    return interpreted(model, request) if type(model).alone is Model.alone else model.alone(request)


def interpreted(model: Model, request: Any) -> Any:
    """Return the result of a request's cell graph, node by node, through the cells' own modules."""
    types = _types.setdefault(model, PlainTypes())
    unfolding = Unfolding(model, types, request)
    values = NodeValues(types)
    with torch.no_grad():
        try:
            unfolding.start()
            if unfolding.decided is not None:
                raise ModelError(
                    f"{type(model).__name__}.unfold decides by values (cond, switch, while_loop or at), which is not "
                    "interpreted here; give the model a method `alone`"
                )
            values.compute(unfolding.graph, unfolding.loops)
            while unfolding.open:
                unfolding.resume(values.lookup)
                values.compute(unfolding.graph, unfolding.loops)
            return unfolding.result(values.lookup)
        finally:
            unfolding.close()


@final
class PlainTypes:
    """Gives each cell a type of its own by running its module; nothing is traced."""

    def __init__(self) -> None:
        self._type_of: dict[Cell, CellType] = {}
        self.types: list[CellType] = []
        self.modules: list[nn.Module] = []

    def type_of(self, cell: Cell) -> CellType | None:
        return self._type_of.get(cell)

    def learn(self, cell: Cell, inputs: tuple[ValueSpec, ...], arguments: Arguments = ()) -> CellType:
        """Give a cell a type of its own for these inputs. Its outputs are found by running its module."""
        name = cell.name or type(cell.module).__name__
        module, memories = flat_module(cell.module_for(inputs)), cell.memory_outputs
        flat = with_rooms(inputs, len(memories), TRIED_ROOM)
        outputs = infer_outputs(module, flat, f"cell {name!r}")
        number = TypeId(len(self.types))
        made = CellType(
            number, name, inputs, outputs, cell.batch_sizes, cell.priority, cell.host_outputs, memories=memories
        )
        self.types.append(made)
        self.modules.append(module)
        self._type_of[cell] = made
        return made

    def other(
        self, cell: Cell, inputs: tuple[ValueSpec, ...], error: ShapeError, arguments: Arguments = ()
    ) -> NoReturn:
        """Raise the error: only one shape of a cell's inputs is supported here."""
        raise error

    def in_runs(self, cell: CellType, num_step_inputs: int) -> CellType:
        """Return the cell: nothing here depends on the number of inputs per step."""
        return cell

    def whole_form(self, cell: Cell, cell_type: CellType, arguments: Arguments, num_step_inputs: int) -> None:
        """Return nothing: runs are steps here."""

    def zero_state(self, cell: Cell, step_inputs: tuple[ValueSpec, ...]) -> tuple[ValueSpec, ...]:
        return initial_state(cell, step_inputs)


_types: weakref.WeakKeyDictionary[Model, PlainTypes] = weakref.WeakKeyDictionary()


class TypesAndModules(Protocol):
    """Cell types with their modules, which take and return flat tensors."""

    @property
    def types(self) -> Sequence[CellType]: ...

    @property
    def modules(self) -> Sequence[nn.Module]: ...


@final
class NodeValues:
    """The outputs of one request's nodes, each [1, *shape], computed in order of number.

    arguments: those of nodes that are not of the graph, by their numbers; output 0 of each.
    """

    def __init__(self, types: TypesAndModules, arguments: Mapping[int, Tensor] | None = None) -> None:
        self._types = types
        self._rows: dict[tuple[int, int], Tensor] = {(node, 0): row for node, row in (arguments or {}).items()}
        self._memories: dict[tuple[int, int], MemoryRead] = {}  # by node and input
        self._ends: dict[int, int] = {}  # last node of a loop that ended early -> the node of its end

    def lookup(self, node: int, output: int) -> Any:
        """Return one value: a number, or a tensor [*shape]. KeyError for a step that a loop did not take."""
        if node < 0:
            node = self._ends.get(end_of_loop(node), end_of_loop(node))
        row = self._rows[node, output][0]
        return row.item() if row.dim() == 0 else row

    def row(self, node: int, output: int) -> Tensor:
        """Return one output, [1, *shape]; of a loop that ended early, the last."""
        return self._rows[self._ends.get(node, node), output]

    def compute(self, graph: CellGraph, loops: dict[int, OpenLoop]) -> None:
        host: dict[tuple[int, int], Tensor] = {}
        for data in graph.host_inputs:
            values = data.values.copy() if isinstance(data.values, np.ndarray) else data.values
            for i, node in enumerate(np.r_[data.rows(0)].tolist()):
                host[node, data.port] = torch.as_tensor(values[i : i + 1])
        self._memories.update({(read.first + i, read.port): read for read in graph.memories for i in range(read.count)})
        parts: list[NodeBlock | Run] = [*graph.blocks, *graph.runs]
        for part in sorted(parts, key=lambda part: part.first):
            if isinstance(part, Run):
                self._run(part, host, loops[part.first].conditions if part.open_ended else ())
            else:
                self._block(part, host)

    def _block(self, block: NodeBlock, host: dict[tuple[int, int], Tensor]) -> None:
        for i, number in enumerate(block.types.tolist()):
            node = block.first + i
            cell = self._types.types[number]
            inputs = self._memory(cell, node) + [
                self._input(int(block.sources[port, i]), int(block.outputs[port, i]), host, (node, port))
                for port in range(len(cell.memories), len(cell.inputs))
            ]
            self._call(number, node, inputs)

    def _run(self, run: Run, host: dict[tuple[int, int], Tensor], ends: Conditions) -> None:
        cell = self._types.types[run.type_id]
        state = [self._start(run, cell, i, host) for i in range(len(run.init))]
        for step in range(run.length):
            node = run.first + step
            inputs = self._memory(cell, node)
            for port, column in enumerate(run.sequences):
                if port < len(cell.memories):
                    continue
                if column is None:
                    inputs.append(host[node, port])
                else:
                    inputs.append(self._input(int(column[0][step]), column[1], host, (node, port)))
            outputs = self._call(run.type_id, node, inputs + state)
            state = list(outputs[len(outputs) - len(state) :])
            if any(_has_ended(until, outputs[output]) for output, until in ends):
                self._ends[run.last] = node
                break

    def _memory(self, cell: CellType, node: int) -> list[Tensor]:
        """Return the rows and the number of each memory of a node, without room for more."""
        inputs = []
        for port, spec in enumerate(cell.inputs[: len(cell.memories)]):
            read = self._memories[node, port]
            sources = range(read.first, node) if read.own else read.sources.tolist()
            rows = [self._rows[source, read.output] for source in sources]
            empty = torch.zeros((1, 1, *spec.shape), dtype=getattr(torch, spec.dtype))
            inputs += [torch.stack(rows, 1) if rows else empty, torch.tensor([len(rows)])]
        return inputs

    def _start(self, run: Run, cell: CellType, index: int, host: dict[tuple[int, int], Tensor]) -> Tensor:
        source, output = run.init[index]
        port = len(run.sequences) + index
        if source == ZERO:
            spec = cell.inputs[port]
            return torch.zeros((1, *spec.shape), dtype=getattr(torch, spec.dtype))
        return self._input(source, output, host, (run.first, port))

    def _input(self, source: int, output: int, host: dict[tuple[int, int], Tensor], place: tuple[int, int]) -> Tensor:
        return host[place] if source == HOST else self.row(source, output)

    def _call(self, number: int, node: int, inputs: list[Tensor]) -> tuple[Tensor, ...]:
        outputs = flat_outputs(self._types.modules[number](*inputs), self._types.types[number].name)
        for output, row in enumerate(outputs):
            self._rows[node, output] = row
        return outputs


def _has_ended(until: Any, value: Tensor) -> bool:
    test: Callable[[Any], Any] = until if callable(until) else lambda values: values == until
    return bool(np.all(test(value.numpy())))
