"""Layers of experts, one of them for each vector (Shazeer et al. 2017; Switch Transformer, Fedus et al. 2022)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchmaker.compile.declaration import Declared
from batchmaker.graph.spec import ValueSpec
from batchmaker.lab.zoo.padding import NetworkModel
from batchmaker.lab.zoo.parts import DTYPES, check_positive, checked_vector, frozen, parts_of, seeded
from batchmaker.model.cell import Cell
from batchmaker.model.decisions import switch


@final
class TokenRouter(nn.Module):
    """forward(x [n, width]) -> number of the likeliest expert, int64 [n]; if `gated` also its probability [n]."""

    def __init__(self, width: int, experts: int, *, gated: bool) -> None:
        super().__init__()
        self.choose, self.gated = nn.Linear(width, experts), gated

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        scores: Tensor = self.choose(x)
        if not self.gated:
            return scores.argmax(-1)
        gate, expert = scores.softmax(-1).max(-1)
        return expert, gate


@final
class Expert(nn.Module):
    """forward(x [n, width], gate [n]) -> x + gate W2 gelu(W1 x); without a gate it is 1."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor, *gate: Tensor) -> Tensor:
        output: Tensor = self.down(F.gelu(self.up(x)))
        return x + (gate[0][:, None] * output if gate else output)


@final
class ExpertLayer(nn.Module):
    """A router and its experts."""

    def __init__(self, width: int, inner: int, experts: int, *, gated: bool) -> None:
        super().__init__()
        self.router = TokenRouter(width, experts, gated=gated)
        self.experts = nn.ModuleList(Expert(width, inner) for _ in range(experts))


@final
class ExpertsModel(NetworkModel):
    """Layers of routed experts: in each a vector goes to the likeliest of them.

    A request is a vector [width] of floats, and so is the result. Each router and each expert of each layer is a cell;
    experts that nobody chose do not run. There is no limit to how many requests an expert takes (Switch Transformer,
    section 2.2, has one). inner: width inside an expert, 4 times `width` if None. gated: what an expert adds is
    weighted by its probability, as in Switch Transformer; else by 1, the softmax over the one that is kept (Shazeer et
    al., equation 3). Other options as for LstmModel.
    """

    def __init__(
        self,
        width: int = 256,
        inner: int | None = None,
        experts: int = 4,
        layers: int = 3,
        gated: bool = True,
        dtype: str = "float32",
        max_batch: int = 256,
        seed: int = 0,
    ) -> None:
        inner = 4 * width if inner is None else inner
        check_positive(width=width, inner=inner, experts=experts, layers=layers)
        with seeded(seed):
            network = nn.ModuleList(ExpertLayer(width, inner, experts, gated=gated) for _ in range(layers))
        frozen(network, dtype)
        self._network = network
        made: list[Any] = list(network)
        x, gate = ValueSpec((width,), dtype), (ValueSpec((), dtype),) * gated
        routing, computing = Declared((x,), (ValueSpec((), "int64"), *gate)), Declared((x, *gate), (x,))
        self.routers = [Cell(layer.router, max_batch=max_batch, declared=routing) for layer in made]
        self.experts = [
            [Cell(expert, max_batch=max_batch, declared=computing) for expert in layer.experts] for layer in made
        ]
        self.width, self.dtype = width, dtype
        self.example_request = np.zeros(width, np.float32)

    def unfold(self, request: Any) -> Any:
        """Return the vector [width] that the layers make of a vector [width]."""
        x = checked_vector(request, self.width, "the request")
        for router, experts in zip(self.routers, self.experts, strict=True):
            number, *gate = parts_of(router(x))
            x = switch(number, [_branch(expert, x, *gate) for expert in experts])
        return x

    def length(self, request: Any) -> int:
        """Return 1: all requests are of one length."""
        checked_vector(request, self.width, "the request")
        return 1

    def batched(self, requests: Sequence[Any]) -> list[Any]:
        """Compute layer after layer, in each expert after expert for those that chose it."""
        vectors = [checked_vector(request, self.width, "the request") for request in requests]
        x = torch.from_numpy(np.stack(vectors)).to(DTYPES[self.dtype])
        with torch.no_grad():
            for layer in self._need_network():
                chosen, *gate = parts_of(layer.router(x))
                following = torch.empty_like(x)
                for number, expert in enumerate(layer.experts):
                    which = (chosen == number).nonzero()[:, 0]
                    if len(which):
                        following[which] = expert(x[which], *(part[which] for part in gate))
                x = following
        return [row.clone() for row in x]


def _branch(cell: Cell, *arguments: Any) -> Callable[[], Any]:
    return lambda: cell(*arguments)
