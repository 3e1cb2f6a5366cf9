"""One module as several exported programs, each for other input shapes: the form of a saved cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from batchmaker.compile.dataflow import TracedSize, TracedValue
from batchmaker.compile.declaration import Declared
from batchmaker.compile.export import said_first, spec_of_rows
from batchmaker.errors import ModelError, ShapeError
from batchmaker.graph.spec import ValueSpec


@final
@dataclass(frozen=True, slots=True, eq=False)
class ReadProgram:
    """An exported program as its graph alone, for which torch.export's machinery is not needed.

    graph: calls that change nothing; inputs and weights are placeholders, values are noted as TracedValue. weights: by
    placeholder; those that are parameters are nn.Parameter. out_spec: how the module that was exported returns its
    outputs. exported: gives the program as torch has it.
    """

    graph: fx.Graph
    weights: dict[fx.Node, Tensor]
    out_spec: pytree.TreeSpec
    exported: Callable[[], torch.export.ExportedProgram]

    @property
    def rows(self) -> Declared:
        """Rows that it takes and gives, as it notes them."""
        inputs = [node for node in self.graph.nodes if node.op == "placeholder" and node not in self.weights]
        made: Any = self.graph.output_node().args[0]
        sides = [tuple([spec_of_rows(node.meta["val"]) for node in side]) for side in (inputs, made)]
        return Declared(*sides)


AnyProgram: TypeAlias = torch.export.ExportedProgram | ReadProgram


def module_of(program: AnyProgram) -> nn.Module:
    """Return a program as a module, which takes and returns what the module that was exported does."""
    return _ReadModule(program) if isinstance(program, ReadProgram) else program.module(check_guards=False)


@final
class EvaluatedProgram(nn.Module):
    """A program as a module that lets itself be put in eval mode, as a part of another; it always is in that."""

    def __init__(self, program: AnyProgram) -> None:
        super().__init__()
        self._source, self.program = program, module_of(program)

    def exported(self) -> torch.export.ExportedProgram:
        """Return the program as torch has it."""
        return self._source.exported() if isinstance(self._source, ReadProgram) else self._source

    def train(self, mode: bool = True) -> EvaluatedProgram:
        """Leave everything as it is: torch's own module of a program refuses."""
        return self

    def forward(self, *inputs: Tensor) -> Any:
        return self.program(*inputs)


def prove_values(program: ReadProgram, where: str, batches: Sequence[tuple[Tensor, ...]]) -> tuple[ValueSpec, ...]:
    """Run batches of rows through the graph: every value is what the graph notes. Return the outputs' rows.

    Raises ModelError for any other value, and where a call raises.
    """
    for rows in batches:
        sources, num_rows = iter(rows), len(rows[0])
        values: dict[fx.Node, Any] = {}
        for node in program.graph.nodes:
            if node.op == "output":
                continue
            try:
                if node.op == "placeholder":
                    values[node] = program.weights[node] if node in program.weights else next(sources)
                else:
                    arguments, named = fx.map_arg((node.args, node.kwargs), lambda read: values[read])  # noqa: B023
                    with torch.no_grad():
                        values[node] = node.target(*arguments, **named)
            except Exception as error:  # whatever the call runs into
                raise ModelError(
                    f"{where}: its saved graph does not run: {node.name} raised {said_first(error)} for {num_rows} "
                    "rows. Save the model again."
                ) from error
            if not _is_noted(values[node], node.meta.get("val"), num_rows):
                raise ModelError(
                    f"{where}: its saved graph says that {node.name} is {_said(node.meta.get('val'))}; for {num_rows} "
                    f"rows it is {_said(values[node])}. Save the model again."
                )
    return program.rows.outputs


def _is_noted(value: Any, noted: Any, num_rows: int) -> bool:
    """Whether a value is what was noted of it; nothing is noted of checks, which have no value."""
    if isinstance(noted, TracedValue):
        shape = tuple([_at(size, num_rows) for size in noted.shape])
        return isinstance(value, Tensor) and value.dtype is noted.dtype and tuple(value.shape) == shape
    if isinstance(noted, TracedSize):
        return type(value) is int and value == _at(noted, num_rows)
    if isinstance(noted, tuple):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(noted)
            and all(_is_noted(one, its, num_rows) for one, its in zip(value, noted, strict=True))
        )
    return value is None


def _at(size: int | TracedSize, num_rows: int) -> int | None:
    return size if isinstance(size, int) else size.at(num_rows)


def _said(value: Any) -> str:
    if isinstance(value, Tensor | TracedValue):
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]".removeprefix("torch.")
    return f"({', '.join(map(_said, value))})" if isinstance(value, list | tuple) else str(value)


@final
class _ReadModule(nn.Module):
    """Runs the graph of a program that was read."""

    def __init__(self, program: ReadProgram) -> None:
        super().__init__()
        graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
        names = {node: f"weight_{number}" for number, node in enumerate(program.weights)}
        for node in program.graph.nodes:
            name = names.get(node)
            copies[node] = graph.node_copy(node, lambda read: copies[read]) if name is None else graph.get_attr(name)
        self._graph = fx.GraphModule({names[node]: weight for node, weight in program.weights.items()}, graph)
        self._out_spec = program.out_spec

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Call it as the module that was exported."""
        return pytree.tree_unflatten(self._graph(*pytree.tree_leaves((inputs, named))), self._out_spec)


@final
@dataclass(frozen=True, slots=True)
class Programs:
    """Exported programs of one module with their row specs: at least one, no two for the same inputs."""

    forms: tuple[tuple[Declared, AnyProgram], ...]

    @property
    def declared(self) -> Declared | None:
        """The declaration of the only program; None if there are several."""
        return self.forms[0][0] if len(self.forms) == 1 else None

    @property
    def first(self) -> AnyProgram:
        return self.forms[0][1]

    def have(self, inputs: Sequence[ValueSpec]) -> bool:
        """Whether there is a program for these inputs."""
        return any(_alike(declared.inputs, inputs) for declared, _ in self.forms)

    def form(self, inputs: Sequence[ValueSpec]) -> tuple[Declared, AnyProgram]:
        """Return the program for these inputs. ShapeError if there is none and there are several others."""
        for declared, program in self.forms:
            if _alike(declared.inputs, inputs):
                return declared, program
        if len(self.forms) == 1:
            return self.forms[0]  # the caller compares its inputs and raises a better error
        raise ShapeError(f"got rows of {_shown(inputs)}; it was saved for {self}")

    def __str__(self) -> str:
        return " or ".join(_shown(declared.inputs) for declared, _ in self.forms)

    def state_after(self, step_inputs: Sequence[ValueSpec]) -> tuple[ValueSpec, ...]:
        """Return the inputs after these; those of the first program if none begins with these."""
        fitting = [d.inputs for d, _ in self.forms if _alike(d.inputs[: len(step_inputs)], step_inputs)]
        return (fitting or [self.forms[0][0].inputs])[0][len(step_inputs) :]


def _alike(one: Sequence[ValueSpec], other: Sequence[ValueSpec]) -> bool:
    return [spec.row_signature for spec in one] == [spec.row_signature for spec in other]


def _shown(specs: Sequence[ValueSpec]) -> str:
    return f"({', '.join(map(str, specs))})"
