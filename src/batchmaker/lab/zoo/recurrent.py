"""Stacks of LSTM or GRU cells over a sentence: the language-model networks of BatchMaker section 7.2."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Literal, final

import numpy as np
import torch
from torch import Tensor, nn

from batchmaker.lab.zoo.padding import PaddedModel, final_states, fused, pad
from batchmaker.lab.zoo.parts import check_choice, check_positive, checked_tokens, frozen, seeded, zeros
from batchmaker.model.cell import Cell

Output = Literal["state", "scores"]


class LstmStack(nn.Module):
    """One step of a word through all layers: forward(token, h1, c1, ..., hL, cL) -> (h1', c1', ..., hL', cL')."""

    def __init__(self, vocabulary_size: int, embedding: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.hidden_size = hidden
        self.embedding = nn.Embedding(vocabulary_size, embedding)
        self.layers = nn.ModuleList(nn.LSTMCell(hidden if layer else embedding, hidden) for layer in range(layers))

    def forward(self, token: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        x = self.embedding(token)
        after: list[Tensor] = []
        for number, layer in enumerate(self.layers):
            x, c = layer(x, (state[2 * number], state[2 * number + 1]))
            after += (x, c)
        return tuple(after)


@final
class OneLstm(LstmStack):
    """A stack of one layer. Its signature shows the number of state parts, so it may start from implicit zeros."""

    def forward(self, token: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return super().forward(token, h, c)


class GruStack(nn.Module):
    """One step of a word through all layers: forward(token, h1, ..., hL) -> (h1', ..., hL')."""

    def __init__(self, vocabulary_size: int, embedding: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.hidden_size = hidden
        self.embedding = nn.Embedding(vocabulary_size, embedding)
        self.layers = nn.ModuleList(nn.GRUCell(hidden if layer else embedding, hidden) for layer in range(layers))

    def forward(self, token: Tensor, *state: Tensor) -> tuple[Tensor, ...]:
        x = self.embedding(token)
        after: list[Tensor] = []
        for layer, h in zip(self.layers, state, strict=True):
            x = layer(x, h)
            after.append(x)
        return tuple(after)


@final
class OneGru(GruStack):
    """A stack of one, as OneLstm."""

    def forward(self, token: Tensor, h: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return super().forward(token, h)


class RecurrentModel(PaddedModel):
    """A sentence through a recurrent stack. A request is a list or array of token ids.

    vocabulary_size, hidden, embedding (default: hidden), layers: sizes. dtype: float32, bfloat16 or float16. output:
    "state", the top layer's last h [hidden], or "scores" of the next word [vocabulary_size]. max_batch: most rows of
    one cell call. seed: of the random weights.
    """

    num_parts: ClassVar[int]
    """Parts of one layer's state: h and c, or h alone."""

    def __init__(
        self,
        vocabulary_size: int = 10_000,
        hidden: int = 1024,
        embedding: int | None = None,
        layers: int = 1,
        dtype: str = "float32",
        output: Output = "state",
        max_batch: int = 256,
        seed: int = 0,
    ) -> None:
        width = hidden if embedding is None else embedding
        check_positive(vocabulary_size=vocabulary_size, hidden=hidden, embedding=width, layers=layers)
        check_choice("output", output, ("state", "scores"))
        with seeded(seed):
            stack = self._stack(vocabulary_size, width, hidden, layers)
            self.step = Cell(frozen(stack, dtype), max_batch=max_batch)
            if output == "scores":
                self.scores = Cell(frozen(nn.Linear(hidden, vocabulary_size), dtype), max_batch=max_batch, priority=1)
        self.vocabulary_size = vocabulary_size
        self.output = output
        self.hidden, self.layers, self.dtype = hidden, layers, dtype
        self._layers = fused(list(stack.layers))  # type: ignore[arg-type]
        self._prepare()
        self.example_request = [0, 0]

    def _prepare(self) -> None:
        self._initial = None if self.layers == 1 else zeros(self.num_parts * self.layers, self.hidden, self.dtype)
        self._top = self.num_parts * (self.layers - 1)

    @staticmethod
    @abstractmethod
    def _stack(vocabulary_size: int, embedding: int, hidden: int, layers: int) -> LstmStack | GruStack:
        """Return the module of the one cell."""

    def unfold(self, request: Any) -> Any:
        return self.unfold_chunk(request, None)[0]

    def unfold_chunk(self, chunk: Any, state: Any) -> tuple[Any, Any]:
        state = self.step.run(self._tokens(chunk), self._initial if state is None else state)
        h = state[self._top] if isinstance(state, tuple) else state
        return self.scores(h) if self.output == "scores" else h, state

    def length(self, request: Any) -> int:
        return len(self._tokens(request))

    def batched(self, requests: Sequence[Any]) -> list[Any]:
        """Run torch's fused layers over the padded batch; each result is taken at its request's own last step."""
        tokens, lengths = pad([self._tokens(request) for request in requests])
        with torch.no_grad():
            h = final_states(self._need_layers(), self.step.module.embedding(tokens), lengths)[0][-1]  # type: ignore[operator]
            return list(self.scores.module(h) if self.output == "scores" else h)

    def _tokens(self, request: Any) -> np.ndarray[Any, np.dtype[np.int64]]:
        return checked_tokens(request, self.vocabulary_size, "the sentence")


@final
class LstmModel(RecurrentModel):
    """An LSTM over a sentence; see RecurrentModel for its options."""

    num_parts = 2

    @staticmethod
    def _stack(vocabulary_size: int, embedding: int, hidden: int, layers: int) -> LstmStack:
        return (OneLstm if layers == 1 else LstmStack)(vocabulary_size, embedding, hidden, layers)


@final
class GruModel(RecurrentModel):
    """A GRU over a sentence; see RecurrentModel for its options."""

    num_parts = 1

    @staticmethod
    def _stack(vocabulary_size: int, embedding: int, hidden: int, layers: int) -> GruStack:
        return (OneGru if layers == 1 else GruStack)(vocabulary_size, embedding, hidden, layers)
