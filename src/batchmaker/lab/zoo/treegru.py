"""Binary TreeGRU over parsed sentences, in the form of ED-Batch's evaluation."""

from __future__ import annotations

from typing import final

from torch import Tensor, nn

from batchmaker.lab.zoo.parts import Classify, check_positive, seeded
from batchmaker.lab.zoo.trees import Output, TreeModel


@final
class GruLeaf(nn.Module):
    """word -> h: r, z = sigmoid(W x + b), n = tanh(W (r x) + b), h = z x + (1 - z) n of the word's embedding x."""

    def __init__(self, vocabulary_size: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary_size, hidden)
        self.gates = nn.Linear(hidden, 2 * hidden)
        self.candidate = nn.Linear(hidden, hidden)

    def forward(self, word: Tensor) -> Tensor:
        x = self.embedding(word)
        r, z = self.gates(x).sigmoid().chunk(2, 1)
        n = self.candidate(r * x).tanh()
        h: Tensor = z * x + (1 - z) * n
        return h


@final
class GruInner(nn.Module):
    """(h1, h2) -> h, the mean over the children k of z_k h_k + (1 - z_k) n_k.

    r_k, z_k = sigmoid(U_k h_k + b_k), n_k = tanh(U_k (r_k h_k) + b_k). ED-Batch's code has one b for both
    children.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(hidden, 2 * hidden) for _ in range(2))
        self.candidates = nn.ModuleList(nn.Linear(hidden, hidden) for _ in range(2))

    def forward(self, h1: Tensor, h2: Tensor) -> Tensor:
        return (self._child(0, h1) + self._child(1, h2)) / 2

    def _child(self, child: int, h: Tensor) -> Tensor:
        r, z = self.gates[child](h).sigmoid().chunk(2, 1)
        n = self.candidates[child](r * h).tanh()
        share: Tensor = z * h + (1 - z) * n
        return share


@final
class TreeGruModel(TreeModel):
    """A parse tree through a binary TreeGRU. Options as for TreeLstmModel; words are as wide as states."""

    def __init__(
        self,
        vocabulary_size: int = 20_000,
        hidden: int = 256,
        dtype: str = "float32",
        output: Output = "labels",
        labels: int = 5,
        max_batch: int = 256,
        seed: int = 0,
    ) -> None:
        check_positive(vocabulary_size=vocabulary_size, hidden=hidden, labels=labels)
        with seeded(seed):
            leaf, inner, classify = GruLeaf(vocabulary_size, hidden), GruInner(hidden), Classify(hidden, labels)
        super().__init__(
            leaf, inner, classify, vocabulary_size=vocabulary_size, dtype=dtype, output=output, max_batch=max_batch
        )
