"""A classifier that a request leaves at the first layer that is sure (BranchyNet, Teerapittayanon et al. 2016)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, final

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchmaker.compile.declaration import Declared
from batchmaker.errors import OptionError
from batchmaker.graph.spec import ValueSpec
from batchmaker.lab.zoo.padding import NetworkModel
from batchmaker.lab.zoo.parts import DTYPES, check_choice, check_positive, checked_vector, frozen, seeded
from batchmaker.model.cell import Cell
from batchmaker.model.decisions import cond

Output = Literal["label", "scores"]


@final
class ExitBlock(nn.Module):
    """A residual block and its exit: forward(x [n, width]) -> (x, label or probabilities, whether it is sure).

    It is sure if the likeliest class has more than `confidence`.
    """

    def __init__(self, width: int, inner: int, classes: int, confidence: float, output: Output) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, inner), nn.Linear(inner, width)
        self.head = nn.Linear(width, classes)
        self.confidence, self.output = confidence, output
        with torch.no_grad():  # so that by chance a part of the requests is sure at each exit
            self.head.weight *= 2.5
            self.down.weight *= 3

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        scores = self.head(x).softmax(-1)
        most, label = scores.max(-1)
        return x, label if self.output == "label" else scores, most > self.confidence


@final
class EarlyExitModel(NetworkModel):
    """Residual blocks with an exit after each: a request leaves after the first that is sure, or after the last.

    A request is a vector [width] of floats. The result is its class, an int, or with output="scores" the
    probabilities [classes]. layers: of blocks, a cell each. inner: width inside a block, 4 times `width` if None.
    confidence: an exit is taken if its likeliest class has a higher probability; BranchyNet (section III) compares the
    entropy with a threshold. Other options as for LstmModel.
    """

    def __init__(
        self,
        width: int = 256,
        inner: int | None = None,
        classes: int = 10,
        layers: int = 6,
        confidence: float = 0.6,
        output: Output = "label",
        dtype: str = "float32",
        max_batch: int = 256,
        seed: int = 0,
    ) -> None:
        inner = 4 * width if inner is None else inner
        check_positive(width=width, inner=inner, classes=classes, layers=layers)
        check_choice("output", output, ("label", "scores"))
        if not 0 <= confidence <= 1:
            raise OptionError(f"confidence must be a probability, from 0 to 1, got {confidence}")
        with seeded(seed):
            network = nn.ModuleList(ExitBlock(width, inner, classes, confidence, output) for _ in range(layers))
        frozen(network, dtype)
        self._network = network
        x = ValueSpec((width,), dtype)
        result = ValueSpec((), "int64") if output == "label" else ValueSpec((classes,), dtype)
        declared = Declared((x,), (x, result, ValueSpec((), "bool")))
        self.blocks = [
            Cell(block, max_batch=max_batch, priority=number, declared=declared) for number, block in enumerate(network)
        ]
        self.width, self.dtype = width, dtype
        self.example_request = np.zeros(width, np.float32)

    def unfold(self, request: Any) -> Any:
        """Return the class of a vector [width], or its probabilities."""
        return self._after(0, checked_vector(request, self.width, "the request"))

    def _after(self, number: int, x: Any) -> Any:
        """Return what the first block from `number` on gives that is sure."""
        x, result, is_sure = self.blocks[number](x)
        if number == len(self.blocks) - 1:
            return result
        return cond(is_sure, lambda: result, lambda: self._after(number + 1, x))

    def length(self, request: Any) -> int:
        """Return 1: all requests are of one length."""
        checked_vector(request, self.width, "the request")
        return 1

    def batched(self, requests: Sequence[Any]) -> list[Any]:
        """Compute block after block for those that were not sure yet."""
        vectors = [checked_vector(request, self.width, "the request") for request in requests]
        x, live = torch.from_numpy(np.stack(vectors)).to(DTYPES[self.dtype]), torch.arange(len(vectors))
        results: list[Any] = [None] * len(vectors)
        with torch.no_grad():
            for block in self._need_network():
                x, outputs, is_sure = block(x)
                for row, one in zip(live.tolist(), outputs, strict=True):  # a later exit replaces an earlier one
                    results[row] = one
                x, live = x[~is_sure], live[~is_sure]
                if not len(live):
                    break
        return [one.item() if one.dim() == 0 else one.clone() for one in results]
