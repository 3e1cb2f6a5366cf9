"""ED-Batch's nine workloads as DyNet's users write them, for dynet_peer.py; needs DyNet and nothing of this project.

Each class builds the graph of one request, in the JSON form of this project's requests, and returns its answer. Shapes
and arithmetic are those of `lab/zoo`: hidden = embedding, an output for every node of a tree, label scores instead of
the likeliest label. Gates that share an input are one product, as in DyNet's own builders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

LABELS = {"tree": 5, "tagger": 9, "lattice": 18}
BOS = 1
SPELLED = -1
State = tuple[Any, ...]


class Network:
    """Parameters of one network. sizes: `words`, and what else a class names. hidden: of every state."""

    def __init__(self, dy: Any, hidden: int, sizes: dict[str, int]) -> None:
        self.dy, self.hidden = dy, hidden
        self.parameters = dy.ParameterCollection()
        self.make(sizes)

    def make(self, sizes: dict[str, int]) -> None:
        raise NotImplementedError

    def build(self, request: Any) -> Any:
        """Return the expression of a request's answer."""
        raise NotImplementedError

    def matrix(self, rows: int, columns: int) -> Any:
        return self.parameters.add_parameters((rows, columns))

    def bias(self, rows: int) -> Any:
        return self.parameters.add_parameters(rows)

    def table(self, ids: int, width: int) -> Any:
        return self.parameters.add_lookup_parameters((ids, width))

    def parts(self, x: Any, count: int, width: int | None = None) -> list[Any]:
        """Return x in equal parts."""
        size = width or self.hidden
        return [self.dy.pick_range(x, number * size, (number + 1) * size) for number in range(count)]

    def lstm(self, given: Any, state: State | None, cell: State) -> State:
        """One step of an LSTM: gates i, f, o, g in one product. cell: bias and both matrices."""
        dy, (bias, inputs, recurrent) = self.dy, cell
        width = bias.shape()[0] // 4
        more = [] if state is None else [recurrent, state[0]]
        i, f, o, g = self.parts(dy.affine_transform([bias, inputs, given, *more]), 4, width)
        new = dy.cmult(dy.logistic(i), dy.tanh(g))
        c = new if state is None else dy.cmult(dy.logistic(f), state[1]) + new
        return dy.cmult(dy.logistic(o), dy.tanh(c)), c

    def lstm_cell(self, given: int, hidden: int) -> State:
        return self.bias(4 * hidden), self.matrix(4 * hidden, given), self.matrix(4 * hidden, hidden)

    def chain(self, vectors: Sequence[Any], layers: Sequence[State]) -> list[Any]:
        """Return the top h after each step of a stack of LSTMs."""
        for cell in layers:
            state, tops = None, []
            for x in vectors:
                state = self.lstm(x, state, cell)
                tops.append(state[0])
            vectors = tops
        return list(vectors)


class Tagger(Network):
    """`bilstm-tagger`: two layers in each direction, a hidden layer over both, scores of each word."""

    def make(self, sizes: dict[str, int]) -> None:
        hidden, labels = self.hidden, LABELS["tagger"]
        self.words = self.table(sizes["words"], hidden)
        self.directions = [[self.lstm_cell(hidden, hidden) for _ in range(2)] for _ in range(2)]
        self.over = [self.matrix(hidden, hidden) for _ in range(2)]
        self.over_bias, self.scores, self.scores_bias = (
            self.bias(hidden),
            self.matrix(labels, hidden),
            self.bias(labels),
        )

    def build(self, request: Any) -> Any:
        dy, vectors = self.dy, self.vectors(request)
        forwards = self.chain(vectors, self.directions[0])
        backwards = self.chain(vectors[::-1], self.directions[1])[::-1]
        scores = []
        for f, b in zip(forwards, backwards, strict=True):
            top = dy.tanh(dy.affine_transform([self.over_bias, self.over[0], f, self.over[1], b]))
            scores.append(dy.affine_transform([self.scores_bias, self.scores, top]))
        return dy.concatenate_cols(scores)

    def vectors(self, request: Any) -> list[Any]:
        return [self.words[word] for word in request]


class CharacterTagger(Tagger):
    """`bilstm-tagger-char`: rare words get the last states of two LSTM layers in each direction over characters."""

    def make(self, sizes: dict[str, int]) -> None:
        super().make(sizes)
        half = self.hidden // 2
        self.characters = self.table(sizes["characters"], half)
        self.spell = [[self.lstm_cell(half, half) for _ in range(2)] for _ in range(2)]

    def vectors(self, request: Any) -> list[Any]:
        spellings = iter(request["spellings"])
        return [self.words[word] if word != SPELLED else self.spelled(next(spellings)) for word in request["words"]]

    def spelled(self, characters: Sequence[int]) -> Any:
        x = [self.characters[character] for character in characters]
        last = [self.chain(x, self.spell[0])[-1], self.chain(x[::-1], self.spell[1])[-1]]
        return self.dy.concatenate(last)


class Translator(Network):
    """`lstm-nmt`: an LSTM encoder, and a decoder whose scores are over all words; it reads words that are given, since
    a likeliest word would have to be computed before the graph goes on."""

    def make(self, sizes: dict[str, int]) -> None:
        hidden, words = self.hidden, sizes["words"]
        self.tables = [self.table(words, hidden) for _ in range(2)]
        self.cells = [self.lstm_cell(hidden, hidden) for _ in range(2)]
        self.scores, self.scores_bias = self.matrix(words, hidden), self.bias(words)

    def build(self, request: Any) -> Any:
        state: State | None = None
        for word in request["source"]:
            state = self.lstm(self.tables[0][word], state, self.cells[0])
        found = []
        for _ in range(request["words"]):
            state = self.lstm(self.tables[1][BOS], state, self.cells[1])
            found.append(self.dy.affine_transform([self.scores_bias, self.scores, state[0]]))
        return self.dy.concatenate_cols(found)


class Trees(Network):
    """A tree of leaf cells and inner cells, with scores of every node from its first part."""

    def make(self, sizes: dict[str, int]) -> None:
        labels = LABELS["tree"]
        self.scores, self.scores_bias = self.matrix(labels, self.hidden), self.bias(labels)
        self.make_cells(sizes)

    def make_cells(self, sizes: dict[str, int]) -> None:
        raise NotImplementedError

    def leaf(self, word: int) -> State:
        raise NotImplementedError

    def inner(self, left: State, right: State, kind: int) -> State:
        raise NotImplementedError

    def build(self, request: Any) -> Any:
        nodes = [self.leaf(word) for word in request["words"]]
        kinds = request.get("kinds") or [0] * len(request["children"])
        for (left, right), kind in zip(request["children"], kinds, strict=True):
            nodes.append(self.inner(nodes[left], nodes[right], kind))
        return self.dy.concatenate_cols([self.dy.affine_transform([self.scores_bias, self.scores, node[0]])
                                         for node in nodes])  # fmt: skip


class TreeLstm(Trees):
    """`treelstm`, and with two kinds of inner nodes `treelstm-2type`: a forget gate from each child."""

    def make_cells(self, sizes: dict[str, int]) -> None:
        hidden = self.hidden
        self.words = self.table(sizes["words"], hidden)
        self.leaf_bias, self.leaf_matrix = self.bias(3 * hidden), self.matrix(3 * hidden, hidden)
        self.kinds = [
            (self.bias(3 * hidden), [self.matrix(3 * hidden, hidden) for _ in range(2)],
             [(self.bias(hidden), self.matrix(hidden, hidden)) for _ in range(2)])
            for _ in range(2)
        ]  # fmt: skip

    def leaf(self, word: int) -> State:
        i, o, u = self._gates(self.dy.affine_transform([self.leaf_bias, self.leaf_matrix, self.words[word]]))
        c = self.dy.cmult(i, u)
        return self.dy.cmult(o, self.dy.tanh(c)), c

    def inner(self, left: State, right: State, kind: int) -> State:
        dy, (bias, gates, forget) = self.dy, self.kinds[kind]
        i, o, u = self._gates(dy.affine_transform([bias, gates[0], left[0], gates[1], right[0]]))
        c = dy.cmult(i, u)
        for (own_bias, matrix), (h, before) in zip(forget, (left, right), strict=True):
            c = c + dy.cmult(dy.logistic(dy.affine_transform([own_bias, matrix, h])), before)
        return dy.cmult(o, dy.tanh(c)), c

    def _gates(self, iou: Any) -> tuple[Any, Any, Any]:
        i, o, u = self.parts(iou, 3)
        return self.dy.logistic(i), self.dy.logistic(o), self.dy.tanh(u)


class TreeGru(Trees):
    """`treegru`: each child's share of a GRU, and their mean."""

    def make_cells(self, sizes: dict[str, int]) -> None:
        hidden = self.hidden
        self.words = self.table(sizes["words"], hidden)
        self.cells = [
            (self.bias(2 * hidden), self.matrix(2 * hidden, hidden), self.bias(hidden), self.matrix(hidden, hidden))
            for _ in range(3)
        ]  # fmt: skip

    def leaf(self, word: int) -> State:
        return (self._share(self.words[word], self.cells[2]),)

    def inner(self, left: State, right: State, kind: int) -> State:
        return ((self._share(left[0], self.cells[0]) + self._share(right[0], self.cells[1])) * 0.5,)

    def _share(self, h: Any, cell: State) -> Any:
        dy, (bias, gates, new_bias, candidate) = self.dy, cell
        r, z = self.parts(dy.logistic(dy.affine_transform([bias, gates, h])), 2)
        n = dy.tanh(dy.affine_transform([new_bias, candidate, dy.cmult(r, h)]))
        return n + dy.cmult(z, h - n)


class MvRnn(Trees):
    """`mvrnn`: a vector and a matrix for each node."""

    def make_cells(self, sizes: dict[str, int]) -> None:
        hidden = self.hidden
        self.vectors = self.table(sizes["words"], hidden)
        self.matrices = self.parameters.add_lookup_parameters((sizes["words"], hidden, hidden))
        self.vector_bias, self.vector_sides = self.bias(hidden), [self.matrix(hidden, hidden) for _ in range(2)]
        self.sides = [self.matrix(hidden, hidden) for _ in range(2)]

    def leaf(self, word: int) -> State:
        return self.vectors[word], self.matrices[word]

    def inner(self, left: State, right: State, kind: int) -> State:
        dy, (v1, m1), (v2, m2) = self.dy, left, right
        crossed = [self.vector_sides[0], m1 * v2, self.vector_sides[1], m2 * v1]
        return dy.tanh(dy.affine_transform([self.vector_bias, *crossed])), self.sides[0] * m1 + self.sides[1] * m2


class Lattice(Network):
    """`latticelstm` and `latticegru`: a cell for each arc, on its source's state; a place has the sum of its arcs."""

    def make(self, sizes: dict[str, int]) -> None:
        hidden, labels = self.hidden, LABELS["lattice"]
        self.tables = [self.table(sizes[what], hidden) for what in ("characters", "words")]
        self.cells = [self.cell() for _ in range(2)]
        self.scores, self.scores_bias = self.matrix(labels, hidden), self.bias(labels)

    def cell(self) -> State:
        return self.lstm_cell(self.hidden, self.hidden)

    def step(self, given: Any, state: State | None, cell: State) -> State:
        return self.lstm(given, state, cell)

    def build(self, request: Any) -> Any:
        states: dict[int, State] = {}
        for source, target, token in request["arcs"]:
            kind = int(source != target - 1)
            state = self.step(self.tables[kind][token], states.get(source), self.cells[kind])
            before = states.get(target)
            states[target] = state if before is None else tuple(a + b for a, b in zip(before, state, strict=True))
        return self.dy.concatenate_cols([self.dy.affine_transform([self.scores_bias, self.scores, state[0]])
                                         for state in states.values()])  # fmt: skip


class GruLattice(Lattice):
    """The reset gate acts before the product."""

    def cell(self) -> State:
        hidden = self.hidden
        return (self.bias(2 * hidden), self.matrix(2 * hidden, hidden), self.matrix(2 * hidden, hidden),
                self.bias(hidden), self.matrix(hidden, hidden), self.matrix(hidden, hidden))  # fmt: skip

    def step(self, given: Any, state: State | None, cell: State) -> State:
        dy, (bias, gates, recurrent, new_bias, new, candidate) = self.dy, cell
        h = None if state is None else state[0]
        more = [] if h is None else [recurrent, h]
        r, z = self.parts(dy.logistic(dy.affine_transform([bias, gates, given, *more])), 2)
        if h is None:
            n = dy.tanh(dy.affine_transform([new_bias, new, given]))
            return (n - dy.cmult(z, n),)
        n = dy.tanh(dy.affine_transform([new_bias, new, given, candidate, dy.cmult(r, h)]))
        return (n + dy.cmult(z, h - n),)


NETWORKS: dict[str, Callable[[Any, int, dict[str, int]], Network]] = {
    "bilstm-tagger": Tagger, "bilstm-tagger-char": CharacterTagger, "lstm-nmt": Translator, "treelstm": TreeLstm,
    "treelstm-2type": TreeLstm, "treegru": TreeGru, "mvrnn": MvRnn, "latticelstm": Lattice, "latticegru": GruLattice,
}  # fmt: skip
