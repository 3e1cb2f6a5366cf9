"""LatticeLSTM and LatticeGRU (Zhang and Yang 2018), in the form of ED-Batch's evaluation."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, ClassVar, Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from batchmaker.compiled import compiled, int64s
from batchmaker.errors import InvalidRequestError, OptionError
from batchmaker.lab.zoo.parts import DTYPES, Classify, check_positive, checked_tokens, frozen, parts_of, seeded
from batchmaker.model.cell import Cell
from batchmaker.model.model import Model
from batchmaker.model.trees import tree


class ArcsOfLattice(Protocol):
    """The argument of `encode`, such as a datasets.Lattice."""

    @property
    def arcs(self) -> NDArray[np.int64]: ...


@final
class LstmArc(nn.Module):
    """(id, h, c) -> (h, c): one step of an LSTM over the embedding of a character or word."""

    def __init__(self, ids: int, embedding: int, hidden: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(ids, embedding)
        self.lstm = nn.LSTMCell(embedding, hidden)

    def forward(self, token: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        after: tuple[Tensor, Tensor] = self.lstm(self.embedding(token), (h, c))
        return after


@final
class GruArc(nn.Module):
    """(id, h) -> h: r, z = sigmoid(U h + W x + b), n = tanh(U (r h) + W x + b), h = z h + (1 - z) n.

    r is applied before the product, as in ED-Batch's code; in nn.GRUCell it is applied after it.
    """

    def __init__(self, ids: int, embedding: int, hidden: int) -> None:
        super().__init__()
        self.hidden = hidden
        self.embedding = nn.Embedding(ids, embedding)
        self.given = nn.Linear(embedding, 3 * hidden)
        self.gates = nn.Linear(hidden, 2 * hidden, bias=False)
        self.candidate = nn.Linear(hidden, hidden, bias=False)

    def forward(self, token: Tensor, h: Tensor) -> Tensor:
        gates, new = self.given(self.embedding(token)).split((2 * self.hidden, self.hidden), 1)
        r, z = (gates + self.gates(h)).sigmoid().chunk(2, 1)
        n = (new + self.candidate(r * h)).tanh()
        after: Tensor = z * h + (1 - z) * n
        return after


@final
class Sum(nn.Module):
    """The states of a node's arcs, as separate inputs -> their sum, part by part."""

    def __init__(self, parts: int) -> None:
        super().__init__()
        self.parts = parts

    def forward(self, *states: Tensor) -> tuple[Tensor, ...]:
        return tuple(reduce(torch.add, states[part :: self.parts]) for part in range(self.parts))


class LatticeModel(Model):
    """A lattice of characters and words, labelled at every character.

    A request is {"arcs": integers [num_arcs, 3]}, each (source, target, id), targets ascending. Node 0 is the start,
    node t the place after character t. An arc from t - 1 to t is a character, every other a word, and each is a cell on
    its source's state. A node with several arcs has their sum, from a cell for each number of arcs: sum2, sum3, ... A
    node without arcs, such as the start, begins from zeros and has no label. In ED-Batch's files only the start has
    none; its code begins there with a learnt vector, the same for all, and labels it as well. `encode` makes a request
    from a datasets.Lattice. Returns the label of each node with arcs, in order, int64.

    vocabulary_size: ids of characters; words: ids of words. max_arity: most arcs to one node. labels: number of labels.
    Other options as for LstmModel.
    """

    can_pad = False
    num_parts: ClassVar[int]
    """Parts of a node's state: h and c, or h alone."""

    def __init__(
        self,
        vocabulary_size: int = 3000,
        words: int = 14_000,
        hidden: int = 256,
        embedding: int | None = None,
        dtype: str = "float32",
        labels: int = 18,
        max_arity: int = 8,
        max_batch: int = 256,
        seed: int = 0,
    ) -> None:
        width = hidden if embedding is None else embedding
        check_positive(vocabulary_size=vocabulary_size, words=words, hidden=hidden, embedding=width, labels=labels)
        if max_arity < 2:
            raise OptionError(f"max_arity must be at least 2, got {max_arity}")
        with seeded(seed):
            character = self._arc(vocabulary_size, width, hidden)
            word = self._arc(words, width, hidden)
            label = Classify(hidden, labels)
        self.character = Cell(frozen(character, dtype), max_batch=max_batch)
        self.word = Cell(frozen(word, dtype), max_batch=max_batch)
        for arity in range(2, max_arity + 1):
            setattr(self, f"sum{arity}", Cell(Sum(self.num_parts).eval(), max_batch=max_batch, priority=1))
        self.label = Cell(frozen(label, dtype), max_batch=max_batch, priority=2)
        self.vocabulary_size, self.words, self.max_arity = vocabulary_size, words, max_arity
        self.hidden, self.dtype = hidden, dtype
        pairs = ((source, target) for target in range(max_arity + 1) for source in range(target))
        self.example_request = {"arcs": [[source, target, 0] for source, target in pairs]}  # every cell is used

    @staticmethod
    @abstractmethod
    def _arc(ids: int, embedding: int, hidden: int) -> nn.Module:
        """Return the module of one arc."""

    def encode(self, lattice: ArcsOfLattice) -> dict[str, Any]:
        """Return the request for a lattice."""
        return {"arcs": lattice.arcs}

    def unfold(self, request: Any) -> Any:
        """Return the label of every node that has arcs, int64 [nodes]. A request is `{"arcs": integers [arcs, 3]}`."""
        arcs = _arcs(request)
        calls, ends, sums = (
            np.empty((3, len(arcs)), np.int64),
            np.empty(len(arcs), np.int64),
            np.empty(len(arcs), np.int64),
        )
        bounds = np.zeros(self.max_arity + 2, np.int64)
        num_characters = lay_out(arcs, self.vocabulary_size, self.words, calls, ends, sums, bounds)
        if num_characters < 0:
            self._check(arcs)
        places, before, tokens = calls
        parts = [
            cell.at(places[mine], before[mine, None], tokens[mine])
            for cell, mine in ((self.character, slice(num_characters)), (self.word, slice(num_characters, None)))
        ]
        first, *rest = bounds[2:].tolist()
        for arity, last in enumerate(rest, start=2):
            if last > first:
                mine = sums[first:last]
                parts.append(self._sum(arity).at(mine, mine[:, None] + np.arange(1 - arity, 1)))
            first = last
        start = (np.zeros((1, self.hidden), np.float32),) * self.num_parts
        return self.label.map(parts_of(tree(start, *parts))[0][ends[: bounds[0]]])

    def _sum(self, arity: int) -> Cell:
        cell: Cell = getattr(self, f"sum{arity}")
        return cell

    def length(self, request: Any) -> int:
        """Return the number of arcs."""
        return len(self._parse(request))

    def batched(self, requests: Sequence[Any]) -> list[Any]:
        """Compute requests one by one, node by node, for policy `serial`: lattices have no padded form."""
        with torch.no_grad():
            return [self._alone(self._parse(request)) for request in requests]

    def _alone(self, arcs: NDArray[np.int64]) -> Tensor:
        zeros = (torch.zeros(1, self.hidden, dtype=DTYPES[self.dtype]),) * self.num_parts
        states: dict[int, tuple[Tensor, ...]] = {}
        for source, target, token in arcs.tolist():
            arc = self.character if source == target - 1 else self.word
            state = parts_of(arc.module(torch.tensor([token]), *states.get(source, zeros)))
            before = states.get(target)
            states[target] = state if before is None else tuple(map(torch.add, before, state))
        return torch.cat([self.label.module(state[0]) for state in states.values()])

    def _parse(self, request: Any) -> NDArray[np.int64]:
        """Return the arcs [num_arcs, 3]. InvalidRequestError unless they make a lattice for the model's cells."""
        arcs = _arcs(request)
        self._check(arcs)
        return arcs

    def _check(self, arcs: NDArray[np.int64]) -> None:
        source, target, token = arcs.T
        if (wrong := np.flatnonzero((source < 0) | (source >= target))).size:
            raise InvalidRequestError(
                f"arcs: arc {wrong[0]} goes from {source[wrong[0]]} to {target[wrong[0]]}; "
                "expected 0 <= source < target, so that there is no cycle"
            )
        if (np.diff(target) < 0).any():
            raise InvalidRequestError("arcs: expected them in order of their targets")
        nodes, counts = np.unique(target, return_counts=True)
        if int(counts.max()) > self.max_arity:
            raise InvalidRequestError(
                f"arcs: node {nodes[counts.argmax()]} has {counts.max()} of them, the model sums at most "
                f"{self.max_arity} (option max_arity)"
            )
        for ids, num_ids, what in (
            (token[source == target - 1], self.vocabulary_size, "characters"),
            (token[source < target - 1], self.words, "words"),
        ):
            if len(ids):
                checked_tokens(ids, num_ids, f"arcs, ids of {what}")


def _arcs(request: Any) -> NDArray[np.int64]:
    """Return the arcs [num_arcs, 3] of a request. InvalidRequestError if there are none."""
    if not isinstance(request, Mapping) or set(request) != {"arcs"}:
        got = sorted(map(str, request)) if isinstance(request, Mapping) else type(request).__name__
        raise InvalidRequestError(f"a request has the key 'arcs', got {got}")
    try:
        arcs = np.asarray(request["arcs"])
    except ValueError as error:  # rows of different lengths
        raise InvalidRequestError(f"arcs must be integers [arcs, 3] ({error})") from None
    if arcs.ndim != 2 or arcs.shape[1] != 3 or len(arcs) == 0 or arcs.dtype.kind not in "iu":
        raise InvalidRequestError(
            f"arcs: got {arcs.dtype} of shape {arcs.shape}, expected integers [arcs, 3] (source, target, id), at "
            "least one"
        )
    return int64s(arcs)


@compiled
def lay_out(
    arcs: NDArray[np.int64],
    characters: int,
    words: int,
    calls: NDArray[np.int64],
    ends: NDArray[np.int64],
    sums: NDArray[np.int64],
    bounds: NDArray[np.int64],
) -> int:
    """Compute the places of the calls: of each arc, and, for several arcs to one node, of their sum.

    arcs: [arcs, 3]. characters, words: numbers of ids. The other arrays are filled. calls: [3, arcs] each arc's place,
    the state it begins from (0: zeros, else one more than a place) and its id, characters before words. ends: the
    places of the states of nodes with arcs, bounds[0] of them. sums: the places of the sums, those of k arcs from
    bounds[k] to bounds[k + 1]. Returns the number of characters; -1 for arcs that make no lattice, or one with other
    ids or with more arcs to a node than bounds has room for.
    """
    num_arcs, most = len(arcs), len(bounds) - 2
    nodes, arity = np.empty(num_arcs, np.int64), np.empty(num_arcs, np.int64)
    num_characters = 0
    for arc in range(num_arcs):
        source, target, token = arcs[arc]
        is_character = source == target - 1
        if not 0 <= source < target or not 0 <= token < (characters if is_character else words):
            return -1
        num_characters += is_character
    character, word, place, ended, arc = 0, num_characters, 0, 0, 0
    while arc < num_arcs:
        target, begin = arcs[arc, 1], arc
        if ended > 0 and target < nodes[ended - 1]:
            return -1
        while arc < num_arcs and arcs[arc, 1] == target:
            source = arcs[arc, 0]
            before = np.searchsorted(nodes[:ended], source)
            at = character if source == target - 1 else word
            if source == target - 1:
                character += 1
            else:
                word += 1
            calls[0, at] = place
            calls[1, at] = 1 + ends[before] if before < ended and nodes[before] == source else 0
            calls[2, at] = arcs[arc, 2]
            place, arc = place + 1, arc + 1
        if arc - begin > most:
            return -1
        if arc - begin > 1:
            bounds[arc - begin + 1] += 1
            place += 1
        nodes[ended], arity[ended], ends[ended] = target, arc - begin, place - 1
        ended += 1
    bounds[:] = np.cumsum(bounds)
    filled = bounds.copy()
    for node in range(ended):
        if arity[node] > 1:
            sums[filled[arity[node]]] = ends[node]
            filled[arity[node]] += 1
    bounds[0] = ended
    return num_characters


@final
class LatticeLstmModel(LatticeModel):
    """A lattice of LSTM steps; see LatticeModel."""

    num_parts = 2

    @staticmethod
    def _arc(ids: int, embedding: int, hidden: int) -> nn.Module:
        return LstmArc(ids, embedding, hidden)


@final
class LatticeGruModel(LatticeModel):
    """A lattice of GRU steps; see LatticeModel."""

    num_parts = 1

    @staticmethod
    def _arc(ids: int, embedding: int, hidden: int) -> nn.Module:
        return GruArc(ids, embedding, hidden)
