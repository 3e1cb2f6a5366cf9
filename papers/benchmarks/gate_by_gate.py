"""Models whose cells are written as DyNet's users do: a product for each gate and what it reads, run as it stands.

Nothing is folded, merged, hoisted or planned in such a cell: it refuses to be traced, so the engine calls the module
itself. Weights are drawn anew; none of the networks goes another way because of them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from batchmaker.lab.zoo import lattice, mvrnn, treegru, treelstm
from batchmaker.lab.zoo.parts import frozen
from batchmaker.model.cell import Cell
from batchmaker.model.model import Model
from batchmaker_papers import gatewise


class AsWritten(nn.Module):
    """A module that is not traced. embedding: of its first argument, a token, if it has one."""

    def __init__(self, module: nn.Module, embedding: nn.Embedding | None = None) -> None:
        super().__init__()
        self.module, self.embedding = module, embedding

    def forward(self, first: Tensor, *state: Tensor) -> Any:
        if torch.compiler.is_exporting():
            raise RuntimeError("its gates are to be computed one by one")
        return self.module(first if self.embedding is None else self.embedding(first), *state)


class LstmCell(nn.Module):
    """In the place of an nn.LSTMCell: (x, (h, c)) -> (h, c)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gates = AsWritten(gatewise.Lstm(hidden))

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        after: tuple[Tensor, Tensor] = self.gates(x, *state)
        return after


WHOLE: Final[dict[type[nn.Module], Callable[[int], nn.Module]]] = {
    lattice.GruArc: gatewise.Gru,
    mvrnn.MatrixInner: gatewise.Mv,
    treegru.GruInner: gatewise.TreeGruInternal,
    treegru.GruLeaf: gatewise.TreeGruLeaf,
    treelstm.LstmInner: gatewise.TreeLstmInternal,
    treelstm.LstmLeaf: gatewise.TreeLstmLeaf,
}
"""Cells by module; in all others it is the LSTMs inside them that are replaced."""


def gate_by_gate(model: Model, hidden: int) -> Model:
    """Return the model with its recurrent and tree cells written out; other cells, such as outputs, are shared.

    hidden: width of its embeddings and states, where a module does not say it.
    """
    other = copy.copy(model)
    for name, cell in model.cells.items():
        module = written_out(cell.module, hidden)
        if module is not None:
            replaced = Cell(
                frozen(module, cell.float_dtype), batch_sizes=cell.batch_sizes, priority=cell.priority,
                host_outputs=cell.host_outputs, declared=cell.declared,
            )  # fmt: skip
            setattr(other, name, replaced)
    return other


def written_out(module: nn.Module, hidden: int) -> nn.Module | None:
    """Return the module of a cell gate by gate, or None if it has none."""
    make = WHOLE.get(type(module))
    if make is not None:
        return AsWritten(make(hidden), getattr(module, "embedding", None))
    lstms = [name for name, part in module.named_modules() if isinstance(part, nn.LSTMCell)]
    if not lstms:
        return None
    shared = {id(weight): weight for weight in module.parameters()}
    written = copy.deepcopy(module, shared)
    for name in lstms:
        lstm = written.get_submodule(name)
        if lstm.input_size != lstm.hidden_size:
            raise ValueError(f"{name}: an LSTM that is written out is as wide as what it reads, got {lstm}")
        written.set_submodule(name, LstmCell(lstm.hidden_size))
    return written
