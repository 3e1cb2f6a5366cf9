"""MV-RNN over parsed sentences (Socher et al. 2012): each node is a vector and a matrix."""

from __future__ import annotations

from typing import final

import torch
from torch import Tensor, nn

from batchmaker.lab.zoo.parts import Classify, check_positive, seeded
from batchmaker.lab.zoo.trees import Output, TreeModel


@final
class MatrixLeaf(nn.Module):
    """word -> (v, M): the word's own vector [hidden] and matrix [hidden, hidden]."""

    def __init__(self, vocabulary_size: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.vector = nn.Embedding(vocabulary_size, hidden)
        self.matrix = nn.Embedding(vocabulary_size, hidden * hidden)

    def forward(self, word: Tensor) -> tuple[Tensor, Tensor]:
        return self.vector(word), self.matrix(word).unflatten(1, (self.hidden, self.hidden))


@final
class MatrixInner(nn.Module):
    """(v1, M1, v2, M2) -> (v, M): v = tanh(W [M1 v2; M2 v1] + b), M = U [M1; M2] + b, with one b for all columns.

    Matrices are kept transposed, so that U applies to their last dimension, as a linear layer does.
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.vector = nn.Linear(2 * hidden, hidden)
        self.left = nn.Linear(hidden, hidden)
        self.right = nn.Linear(hidden, hidden, bias=False)

    def forward(self, v1: Tensor, m1: Tensor, v2: Tensor, m2: Tensor) -> tuple[Tensor, Tensor]:
        crossed = torch.cat((torch.bmm(v2[:, None], m1), torch.bmm(v1[:, None], m2)), 2)
        return self.vector(crossed[:, 0]).tanh(), self.left(m1) + self.right(m2)


@final
class MvRnnModel(TreeModel):
    """A parse tree through an MV-RNN. Options as for TreeLstmModel; words are as wide as states.

    Each word has a matrix [hidden, hidden] of its own, so a large vocabulary needs much memory: 1000 words of hidden
    256 are 260 MB. ED-Batch's code limits their number too and lets words share matrices.
    """

    def __init__(
        self,
        vocabulary_size: int = 1000,
        hidden: int = 64,
        dtype: str = "float32",
        output: Output = "labels",
        labels: int = 5,
        max_batch: int = 256,
        seed: int = 0,
    ) -> None:
        check_positive(vocabulary_size=vocabulary_size, hidden=hidden, labels=labels)
        with seeded(seed):
            leaf, inner, classify = MatrixLeaf(vocabulary_size, hidden), MatrixInner(hidden), Classify(hidden, labels)
        super().__init__(
            leaf, inner, classify, vocabulary_size=vocabulary_size, dtype=dtype, output=output, max_batch=max_batch
        )
