"""A vector made from noise, in as many steps as each request asks for (DDIM, Song et al. 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, final

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from batchmaker.arrays import Ints
from batchmaker.compile.declaration import Declared
from batchmaker.errors import InvalidRequestError
from batchmaker.graph.spec import ValueSpec
from batchmaker.lab.zoo.padding import NetworkModel
from batchmaker.lab.zoo.parts import DTYPES, check_positive, checked_vector, frozen, seeded
from batchmaker.model.cell import Cell

STEPS: Final = 20
"""Of a request that does not say how many."""
LONGEST_WAVE: Final = 10_000.0
"""As of the positions of a Transformer."""


@final
class NoiseBlock(nn.Module):
    """forward(x [n, width], time [n, inner]) -> x + W2 silu(W1 x + time)."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        y: Tensor = x + self.down(F.silu(self.up(x) + time))
        return y


@final
class DenoisingStep(nn.Module):
    """forward(time [n], turn [n, 2], x [n, width]) -> x at the next time of its request; a step of DDIM.

    The network predicts the velocity v of x at a time (Salimans and Ho 2022): x is turned by an angle from noise
    towards data, x cos - v sin. turn: the cosine and the sine.
    """

    def __init__(self, width: int, inner: int, layers: int, times: int) -> None:
        super().__init__()
        self.waves = nn.Embedding(times, width, _weight=waves(times, width), _freeze=True)
        self.time = nn.Sequential(nn.Linear(width, inner), nn.SiLU(), nn.Linear(inner, layers * inner))
        self.blocks = nn.ModuleList(NoiseBlock(width, inner) for _ in range(layers))
        self.velocity = nn.Linear(width, width)

    def conditioning(self, time: Tensor) -> Tensor:
        """Return what the blocks get of times [n]: [n, layers * inner]."""
        conditioning: Tensor = self.time(self.waves(time))
        return conditioning

    def turned(self, conditioning: Tensor, turn: Tensor, x: Tensor) -> Tensor:
        """Return x at the next time. conditioning: of this time, from the method of that name."""
        y = x
        for block, time in zip(self.blocks, conditioning.chunk(len(self.blocks), -1), strict=True):
            y = block(y, time)
        cosine, sine = turn.chunk(2, -1)
        following: Tensor = x * cosine - self.velocity(y) * sine
        return following

    def forward(self, time: Tensor, turn: Tensor, x: Tensor) -> Tensor:
        return self.turned(self.conditioning(time), turn, x)


def waves(times: int, width: int) -> Tensor:
    """Return a row of sines and cosines for each time, as for the positions of a Transformer: [times, width]."""
    half = (width + 1) // 2
    speed = torch.exp(-math.log(LONGEST_WAVE) / half * torch.arange(half))
    angles = torch.arange(times)[:, None] * speed
    return torch.cat((angles.sin(), angles.cos()), -1)[:, :width].contiguous()


@lru_cache(256)
def plan(steps: int, times: int) -> tuple[Ints, NDArray[np.float32]]:
    """Return the time at which each step begins, from times - 1 down, and its turn [steps, 2]; see DenoisingStep."""
    edges = np.rint(np.linspace(times, 0, steps + 1)).astype(np.int64)
    angles = (edges[:-1] - edges[1:]) * (math.pi / 2 / times)
    return edges[:-1] - 1, np.stack((np.cos(angles), np.sin(angles)), 1).astype(np.float32)


@final
@dataclass(frozen=True, slots=True)
class NoiseOrder:
    """The content of a request."""

    noise: NDArray[np.float32]
    steps: int


@final
class DiffusionModel(NetworkModel):
    """Residual blocks that know the time and take noise out of a vector, step by step; one cell is a step.

    A request is {"noise": vector [width] of floats, "steps": n}, or the vector alone for 20 steps. The result is a
    vector [width]. The same noise gives the same vector, as nothing is drawn on the way. times: there are as many times
    between noise and data as the network knows apart; a request has 1 to `times` steps, which are evenly spaced among
    them. inner: width inside a block, 4 times `width` if None. Other options as for LstmModel.
    """

    optional_inputs = ("steps",)
    sole_input = "noise"

    def __init__(
        self,
        width: int = 256,
        inner: int | None = None,
        layers: int = 3,
        times: int = 1000,
        dtype: str = "float32",
        max_batch: int = 256,
        seed: int = 0,
    ) -> None:
        inner = 4 * width if inner is None else inner
        check_positive(width=width, inner=inner, layers=layers, times=times)
        with seeded(seed):
            network = DenoisingStep(width, inner, layers, times)
        frozen(network, dtype)
        self._network = network
        x = ValueSpec((width,), dtype)
        declared = Declared((ValueSpec((), "int64"), ValueSpec((2,), dtype), x), (x,))
        self.step = Cell(network, max_batch=max_batch, declared=declared)
        self.width, self.times, self.dtype = width, times, dtype
        self.example_request = {"noise": np.zeros(width, np.float32), "steps": min(2, times)}

    def unfold(self, request: Any) -> Any:
        """Return the vector [width] that the steps make of the noise."""
        order = self._parse(request)
        return self.step.run(plan(order.steps, self.times), order.noise)

    def length(self, request: Any) -> int:
        """Return the number of steps."""
        return self._parse(request).steps

    def batched(self, requests: Sequence[Any]) -> list[Any]:
        """Take one step of all that are not done; whoever is done is taken out of the batch."""
        network: DenoisingStep = self._need_network()
        orders = [self._parse(request) for request in requests]
        plans = [plan(order.steps, self.times) for order in orders]
        x = torch.from_numpy(np.stack([order.noise for order in orders])).to(DTYPES[self.dtype])
        live, results = list(range(len(orders))), [x[0]] * len(orders)
        with torch.no_grad():
            for step in range(max(order.steps for order in orders)):
                time = torch.tensor([int(plans[row][0][step]) for row in live])
                turn = torch.from_numpy(np.stack([plans[row][1][step] for row in live])).to(x.dtype)
                x = network(time, turn, x)
                going = [orders[row].steps > step + 1 for row in live]
                if not all(going):
                    for row, one, goes in zip(live, x, going, strict=True):
                        if not goes:
                            results[row] = one.clone()
                    x, live = x[torch.tensor(going)], [row for row, goes in zip(live, going, strict=True) if goes]
        return results

    def _parse(self, request: Any) -> NoiseOrder:
        fields: Mapping[str, Any] = request if isinstance(request, Mapping) else {"noise": request}
        if "noise" not in fields or not fields.keys() <= {"noise", "steps"}:
            raise InvalidRequestError(
                "a request is a vector of noise, or a dict with 'noise' and 'steps'; got the keys "
                f"{sorted(map(str, fields))}"
            )
        steps = fields.get("steps", min(STEPS, self.times))
        if isinstance(steps, bool) or not isinstance(steps, int | np.integer) or not 1 <= steps <= self.times:
            raise InvalidRequestError(f"steps must be a whole number from 1 to {self.times}, got {steps!r}")
        return NoiseOrder(checked_vector(fields["noise"], self.width, "the noise"), int(steps))
