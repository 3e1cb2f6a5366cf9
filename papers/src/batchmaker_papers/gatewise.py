"""The seven cells of ED-Batch's evaluation, gate by gate: a linear layer for each gate and each value it reads.

The formulas in the papers have this form. It is the slowest way to compute them, and the input for measurements of the
planner (`Cell(..., optimize=True)`, `batchmaker plan gatewise`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from batchmaker.errors import unknown_name
from batchmaker.lab.zoo.parts import check_positive, frozen, seeded
from batchmaker.model.cell import Cell
from batchmaker.model.model import Model


@final
class Lstm(nn.Module):
    """(x, h, c) -> (h, c), as nn.LSTMCell."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.xi, self.xf, self.xg, self.xo = (nn.Linear(hidden, hidden) for _ in range(4))
        self.hi, self.hf, self.hg, self.ho = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i = torch.sigmoid(self.xi(x) + self.hi(h))
        f = torch.sigmoid(self.xf(x) + self.hf(h))
        g = torch.tanh(self.xg(x) + self.hg(h))
        o = torch.sigmoid(self.xo(x) + self.ho(h))
        c = f * c + i * g
        return o * torch.tanh(c), c


@final
class Gru(nn.Module):
    """(x, h) -> h, as nn.GRUCell."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.xr, self.xz, self.xn, self.hr, self.hz, self.hn = (nn.Linear(hidden, hidden) for _ in range(6))

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        r = torch.sigmoid(self.xr(x) + self.hr(h))
        z = torch.sigmoid(self.xz(x) + self.hz(h))
        n = torch.tanh(self.xn(x) + r * self.hn(h))
        return (1 - z) * n + z * h


@final
class Mv(nn.Module):
    """(v1, M1, v2, M2) -> (v, M): v = tanh(W [M1 v2; M2 v1] + b), M = U [M1; M2] + b.

    Matrices are kept transposed: U applies to their last dimension, as linear layers do.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.vector, self.matrix = nn.Linear(2 * hidden, hidden), nn.Linear(2 * hidden, hidden)

    def forward(self, v1: Tensor, m1: Tensor, v2: Tensor, m2: Tensor) -> tuple[Tensor, Tensor]:
        first, second = torch.bmm(v2[:, None], m1), torch.bmm(v1[:, None], m2)
        v = torch.tanh(self.vector(torch.cat((first[:, 0], second[:, 0]), 1)))
        return v, self.matrix(torch.cat((m1, m2), 2))


@final
class TreeGruLeaf(nn.Module):
    """x -> h: r, z = sigmoid(W x + b), n = tanh(W (r x) + b), h = z x + (1 - z) n."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.r, self.z, self.n = (nn.Linear(hidden, hidden) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        r, z = torch.sigmoid(self.r(x)), torch.sigmoid(self.z(x))
        n = torch.tanh(self.n(r * x))
        return z * x + (1 - z) * n


@final
class TreeGruInternal(nn.Module):
    """(h1, h2) -> h, the mean over the children of z_k h_k + (1 - z_k) n_k."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.r1, self.z1, self.n1, self.r2, self.z2, self.n2 = (nn.Linear(hidden, hidden) for _ in range(6))

    def forward(self, h1: Tensor, h2: Tensor) -> Tensor:
        r1, z1 = torch.sigmoid(self.r1(h1)), torch.sigmoid(self.z1(h1))
        r2, z2 = torch.sigmoid(self.r2(h2)), torch.sigmoid(self.z2(h2))
        n1, n2 = torch.tanh(self.n1(r1 * h1)), torch.tanh(self.n2(r2 * h2))
        return 0.5 * ((z1 * h1 + (1 - z1) * n1) + (z2 * h2 + (1 - z2) * n2))


@final
class TreeLstmLeaf(nn.Module):
    """x -> (h, c): c = i u, h = o tanh(c)."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.i, self.o, self.u = (nn.Linear(hidden, hidden) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        i, o, u = torch.sigmoid(self.i(x)), torch.sigmoid(self.o(x)), torch.tanh(self.u(x))
        c = i * u
        return o * torch.tanh(c), c


@final
class TreeLstmInternal(nn.Module):
    """(h1, c1, h2, c2) -> (h, c): i, o, u from [h1; h2], a forget gate from each child's own h."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.i, self.o, self.u = (nn.Linear(2 * hidden, hidden) for _ in range(3))
        self.f1, self.f2 = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden)

    def forward(self, h1: Tensor, c1: Tensor, h2: Tensor, c2: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.cat((h1, h2), 1)
        i, o, u = torch.sigmoid(self.i(both)), torch.sigmoid(self.o(both)), torch.tanh(self.u(both))
        f1, f2 = torch.sigmoid(self.f1(h1)), torch.sigmoid(self.f2(h2))
        c = i * u + f1 * c1 + f2 * c2
        return o * torch.tanh(c), c


CELLS: Final[dict[str, Callable[[int], nn.Module]]] = {
    "gru": Gru,
    "lstm": Lstm,
    "mv": Mv,
    "treegru_internal": TreeGruInternal,
    "treegru_leaf": TreeGruLeaf,
    "treelstm_internal": TreeLstmInternal,
    "treelstm_leaf": TreeLstmLeaf,
}
"""The cells by name, in the order of the paper's table; each is made for a width."""


@final
class GatewiseModel(Model):
    """One of the seven cells, called once per request: a request is the list of the cell's inputs."""

    def __init__(
        self, cell: str = "lstm", hidden: int = 256, dtype: str = "float32", optimize: bool = False, seed: int = 0
    ) -> None:
        check_positive(hidden=hidden)
        if cell not in CELLS:
            raise unknown_name("cell written gate by gate", cell, CELLS)
        with seeded(seed):
            module = CELLS[cell](hidden)
        setattr(self, cell, Cell(frozen(module, dtype), optimize=optimize))
        self.cell = cell
        shapes = [(hidden, hidden) if name.startswith("m") else (hidden,) for name in inputs_of(module)]
        self.example_request = [torch.zeros(shape).tolist() for shape in shapes]

    def unfold(self, request: Any) -> Any:
        return self.cells[self.cell](*request)


def inputs_of(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the arguments of forward; those that begin with m are matrices, the others vectors."""
    names = module.forward.__code__.co_varnames
    return tuple(names[1 : module.forward.__code__.co_argcount])
