"""Torch's recurrent layers nn.LSTM, nn.GRU and nn.RNN as cells: one cell for each layer and direction."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchmaker.compile.declaration import Declared
from batchmaker.compile.export import float_dtype
from batchmaker.errors import InvalidRequestError, ModelError
from batchmaker.graph.recorder import Recorder
from batchmaker.graph.spec import ValueSpec
from batchmaker.graph.values import Value, ValueSequence
from batchmaker.model.arguments import reversed_data, sequence_of
from batchmaker.model.cell import Cell, elements
from batchmaker.model.model import Model
from batchmaker.model.scope import scope_of
from batchmaker.model.stand_ins import StandIn

_CELLS: Final[dict[str, tuple[type[nn.Module], dict[str, Any]]]] = {
    "LSTM": (nn.LSTMCell, {}),
    "GRU": (nn.GRUCell, {}),
    "RNN_TANH": (nn.RNNCell, {"nonlinearity": "tanh"}),
    "RNN_RELU": (nn.RNNCell, {"nonlinearity": "relu"}),
}
"""By `nn.RNNBase.mode`: the class of one step, and its options."""


@final
class ProjectedLSTMCell(nn.Module):
    """One step of an nn.LSTM with `proj_size`: x [n, width], h [n, proj_size], c [n, hidden] -> new h, c."""

    weight_ih: Tensor
    weight_hh: Tensor
    weight_hr: Tensor
    bias_ih: Tensor | None
    bias_hh: Tensor | None

    def __init__(self) -> None:
        super().__init__()
        self.bias_ih = self.bias_hh = None

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        h, c = state
        gates = F.linear(x, self.weight_ih, self.bias_ih) + F.linear(h, self.weight_hh, self.bias_hh)
        i, f, g, o = gates.chunk(4, 1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return F.linear(o.sigmoid() * c.tanh(), self.weight_hr), c


@final
class LayerStep(nn.Module):
    """One step of one direction of a layer: (inputs..., state...) -> new state.

    embedding: makes the layer's input from the only input; without it several inputs are concatenated.
    """

    def __init__(self, cell: nn.Module, num_inputs: int, embedding: nn.Module | None) -> None:
        super().__init__()
        self.cell, self.embedding, self.num_inputs = cell, embedding, num_inputs

    def forward(self, *arguments: Tensor) -> Any:
        inputs, state = arguments[: self.num_inputs], arguments[self.num_inputs :]
        x = inputs[0] if len(inputs) == 1 else torch.cat(inputs, -1)
        if self.embedding is not None:
            x = self.embedding(x)
        return self.cell(x, state if len(state) > 1 else state[0])


@final
class Join(nn.Module):
    """Concatenates both directions, as in torch's output."""

    def forward(self, forwards: Tensor, backwards: Tensor) -> Tensor:
        return torch.cat((forwards, backwards), -1)


@final
class RecurrentLayers(Model):
    """The layers of an nn.LSTM, nn.GRU or nn.RNN. Made by `recurrent`; call it inside `unfold`.

    Its cells have torch's names of weights: `l0`, `l0_reverse`, `l1`, ..., and `join` for the output of two directions.
    As a model by itself it takes one sequence [n, input_size] as a request, and its result is that of torch.
    """

    l0: Cell
    join: Cell

    def __init__(
        self,
        module: nn.RNNBase,
        *,
        embedding: nn.Module | None = None,
        join: bool = True,
        max_batch: int | None = None,
        batch_sizes: Iterable[int] | None = None,
        priority: int = 0,
    ) -> None:
        _check(module, embedding)
        sizes = None if batch_sizes is None else tuple(batch_sizes)
        options: dict[str, Any] = {"max_batch": max_batch, "batch_sizes": sizes, "priority": priority}
        self.has_two_parts = isinstance(module, nn.LSTM)
        dtype = float_dtype(module)
        h = ValueSpec((module.proj_size or module.hidden_size,), dtype)
        state = (h, ValueSpec((module.hidden_size,), dtype)) if self.has_two_parts else (h,)
        self.directions = ("", "_reverse") if module.bidirectional else ("",)
        self.num_layers = module.num_layers
        for layer in range(module.num_layers):
            below = (h,) * len(self.directions) if layer else _first_input(module, embedding, dtype)
            for direction in self.directions:
                one = _cell_of(module, f"_l{layer}{direction}", layer)
                step = LayerStep(one, len(below or (h,)), None if layer else embedding)
                declared = None if below is None else Declared((*below, *state), state)
                setattr(self, f"l{layer}{direction}", Cell(step, state=state, declared=declared, **options))
        if module.bidirectional and join:
            self.join = Cell(Join(), declared=Declared((h, h), (ValueSpec((2 * h.shape[0],), dtype),)), **options)
        first = _first_input(module, embedding, dtype)
        if first is not None:
            self.example_request = torch.zeros((2, *first[0].shape), dtype=getattr(torch, first[0].dtype))

    def __call__(self, sequence: Any, state: Any = None) -> tuple[Any, Any]:
        """Run the layers over a request's sequence, inside an unfold function. Returns (output, state) as torch does.

        - sequence: data [n, input_size], a sequence of values of other cells, or one value [n, input_size]. n is at
          least 1, and there is no batch dimension. With an embedding: the embedding's inputs.
        - state: the initial state, as in torch: (h_0, c_0) for an LSTM, else h_0. Each has a row for every layer and
          direction, [num_layers * directions, width]: data, a list of values (None for zeros), or the result of an
          earlier call. Zeros if left out.

        Returns the top layer's h of every step as a sequence of n values (two sequences if `join` is False), and (h_n,
        c_n) or h_n as sequences of num_layers * directions values.
        """
        scope = scope_of(self.l0)
        if type(sequence) is Value and sequence.spec.shape:
            sequence = elements(scope, sequence)
        starts = self._starts(state, scope.recorder)
        ends: list[tuple[Value, ...]] = []
        below: tuple[Any, ...] = (sequence,)
        for layer in range(self.num_layers):
            made = []
            for direction in self.directions:
                cell: Cell = getattr(self, f"l{layer}{direction}")
                inputs = tuple([reversed_data(x) for x in below]) if direction else below
                ended = cell.run(inputs, starts[len(ends)])
                ends.append(ended if isinstance(ended, tuple) else (ended,))
                steps = ends[-1][0].steps
                made.append(steps[::-1] if direction else steps)
            below = tuple(made)
        output = below[0] if len(below) == 1 else self.join.map(*below) if hasattr(self, "join") else below
        after = tuple([sequence_of(part, "the state") for part in zip(*ends, strict=True)])
        return output, after if self.has_two_parts else after[0]

    def unfold(self, request: Any) -> Any:
        return self(request)

    def unfold_chunk(self, chunk: Any, state: Any) -> tuple[Any, Any]:
        """Return the result for a chunk [n, input_size], as `unfold` does for a sequence, and the new state.

        ModelError if there are two directions.
        """
        if not self.takes_chunks:
            raise ModelError(_BACKWARDS)
        output, after = self(chunk, state)
        return (output, after), after

    @property
    def takes_chunks(self) -> bool:
        return len(self.directions) == 1

    def _starts(self, state: Any, recorder: Recorder) -> list[tuple[Any, ...] | None]:
        """Return the initial state of each layer and direction, None for zeros. InvalidRequestError if malformed."""
        count = self.num_layers * len(self.directions)
        if state is None:
            return [None] * count
        parts: tuple[Any, ...] = (state,)
        if self.has_two_parts:
            if type(state) is StandIn or not isinstance(state, tuple | list) or len(state) != 2:
                raise InvalidRequestError(f"an LSTM's state is a tuple (h_0, c_0), got {_said(state)}")
            parts = tuple(state)
        rows = [_rows(part, count, name) for part, name in zip(parts, ("h_0", "c_0"), strict=False)]
        if not self.takes_chunks and any(
            type(row) is Value and row.node < recorder.num_kept for part in rows for row in part
        ):
            raise ModelError(_BACKWARDS)
        return list(zip(*rows, strict=True))


_BACKWARDS: Final = (
    "a bidirectional layer cannot go on from the state of an earlier chunk: its backward direction begins at the end "
    "of the sequence. Submit whole requests, or use a module with bidirectional=False"
)


def recurrent(
    module: nn.RNNBase,
    *,
    embedding: nn.Module | None = None,
    join: bool = True,
    max_batch: int | None = None,
    batch_sizes: Iterable[int] | None = None,
    priority: int = 0,
) -> RecurrentLayers:
    """Return an nn.LSTM, nn.GRU or nn.RNN as cells that share its weights: all layers, both directions, projections.

        self.lstm = bm.recurrent(nn.LSTM(80, 256, num_layers=2))    # in a model's __init__
        output, (h_n, c_n) = self.lstm(frames)                      # in its unfold, as torch returns them

    It is also a model, `bm.Engine(bm.recurrent(module))`: a request is one sequence [n, input_size], and the result is
    that of torch. Sequences (unfold_chunk) continue from the returned state, with one direction only. Requests have no
    batch dimension, so `batch_first` has no effect. Dropout between layers is left out, as in eval mode.

    - embedding: a module that makes the first layer's input, such as the nn.Embedding of a network of tokens. It is in
      the same cell and becomes a table there.
    - join: False returns the outputs of two directions separately, (forwards, backwards), for a cell that takes both.
    - max_batch, batch_sizes, priority: of every cell, as for Cell.

    Raises ModelError for any other module.
    """
    return RecurrentLayers(
        module, embedding=embedding, join=join, max_batch=max_batch, batch_sizes=batch_sizes, priority=priority
    )


# --- cells ----------------------------------------------------------------------------------------------------------


def _check(module: Any, embedding: Any) -> None:
    if not isinstance(module, nn.RNNBase) or module.mode not in _CELLS:
        name = f"the class {module.__name__}" if isinstance(module, type) else type(module).__name__
        raise ModelError(
            f"bm.recurrent takes an nn.LSTM, nn.GRU or nn.RNN, got {name}. One step is bm.Cell(module), a network "
            "without recurrence bm.layers(module); for layers inside a larger module take them out: "
            "bm.recurrent(module.lstm)"
        )
    if embedding is not None and not isinstance(embedding, nn.Module):
        raise ModelError(f"embedding must be a torch.nn.Module, got {type(embedding).__name__}")
    if isinstance(embedding, nn.Embedding) and embedding.embedding_dim != module.input_size:
        raise ModelError(
            f"the embedding gives {embedding.embedding_dim} values, the first layer takes {module.input_size}"
        )


def _first_input(module: nn.RNNBase, embedding: nn.Module | None, dtype: str) -> tuple[ValueSpec] | None:
    """Return the first layer's inputs at each step; None if only the first use can tell."""
    if embedding is None:
        return (ValueSpec((module.input_size,), dtype),)
    return (ValueSpec((), "int64"),) if isinstance(embedding, nn.Embedding) else None


def _cell_of(module: nn.RNNBase, suffix: str, layer: int) -> nn.Module:
    """Return one direction of one layer as a cell that shares the layer's weights."""
    width = module.input_size if layer == 0 else (module.proj_size or module.hidden_size) * (1 + module.bidirectional)
    cell: nn.Module
    if module.proj_size:
        cell = ProjectedLSTMCell()
    else:
        kind, options = _CELLS[module.mode]
        cell = kind(width, module.hidden_size, bias=module.bias, device="meta", **options)
    names = ["weight_ih", "weight_hh", *(["bias_ih", "bias_hh"] if module.bias else ())]
    for name in [*names, "weight_hr"] if module.proj_size else names:
        weight = getattr(module, name + suffix)  # a plain tensor if it is computed, e.g. by weight normalisation
        if not isinstance(weight, nn.Parameter):
            weight = nn.Parameter(weight.detach(), requires_grad=False)
        setattr(cell, name, weight)
    return cell.eval()


# --- state ----------------------------------------------------------------------------------------------------------


def _rows(part: Any, count: int, name: str) -> list[Any]:
    """Return the initial value of each layer and direction, None for zeros."""
    if part is None:
        return [None] * count
    if not _is_sequence(part) or len(part) != count:
        raise InvalidRequestError(
            f"{name} has one row for each layer and direction, {count} here; got {_said(part)}. For one layer that is "
            "[h], a list of one"
        )
    return [part[k] for k in range(count)]


def _is_sequence(part: Any) -> bool:
    if type(part) is StandIn:
        return part.is_sequence
    return isinstance(part, ValueSequence | list | tuple) or getattr(part, "ndim", 0) > 0


def _said(value: Any) -> str:
    return f"{type(value).__name__} of {len(value)}" if _is_sequence(value) else type(value).__name__
