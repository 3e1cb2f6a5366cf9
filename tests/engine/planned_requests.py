"""Requests of any form, as plans that can be played twice: by an unfold function, and in plain PyTorch row by row.

A plan is a list of moves. Each takes values that earlier moves have made, calls a cell, and adds what it returns. A
value is named by its number among those of its kind, modulo how many there are; where there is none, data is given
instead.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn

import batchmaker as bm

VOCABULARY: Final = 12
HIDDEN: Final = 16
WIDE: Final = 100
POISON: Final = 13
CLOSE: Final = 1e-3
"""Scores that differ by less may choose another token in a batch than alone."""


# --- modules --------------------------------------------------------------------------------------------------------


class Read(nn.Module):
    """word, h, c -> h, c."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.step = nn.Embedding(VOCABULARY, HIDDEN), nn.LSTMCell(HIDDEN, HIDDEN)

    def forward(self, word: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        return self.step(self.embed(word), (h, c))


class Speak(nn.Module):
    """token, h -> the next token, h: a greedy decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.step = nn.Embedding(VOCABULARY, HIDDEN), nn.GRUCell(HIDDEN, HIDDEN)
        self.out = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, token: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        h = self.step(self.embed(token), h)
        return self.out(h).argmax(-1), h


class Say(nn.Module):
    """h -> a token."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, h: Tensor) -> Tensor:
        return self.out(h).argmax(-1)


class Mix(nn.Module):
    """left, right -> a state: an inner node of a tree."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        return self.out(torch.cat([left, right], -1)).tanh()


class Countdown(nn.Module):
    """n, total -> n - 1, total + n."""

    def forward(self, n: Tensor, total: Tensor) -> tuple[Tensor, Tensor]:
        return n - 1, total + n


class Shift(nn.Module):
    """token -> another number, which may be no token."""

    def forward(self, token: Tensor) -> Tensor:
        return token * 2 - 3


class Guard(nn.Module):
    """Hands numbers through, and raises where one is POISON. It cannot be traced, so it runs as it is."""

    def forward(self, number: Tensor) -> Tensor:
        if bool((number == POISON).any()):
            raise ValueError("poison in the batch")
        return number


class Widen(nn.Module):
    """h -> more numbers than a table of results holds."""

    def forward(self, h: Tensor) -> Tensor:
        return h.repeat(1, -(-WIDE // HIDDEN))[:, :WIDE]


def masked(rows: Tensor, number: Tensor) -> Tensor:
    """Return which rows [batch, room, 1] are no memory."""
    return (torch.arange(rows.shape[1]) >= number[:, None])[:, :, None]


class Look(nn.Module):
    """h, a memory -> a state, by attention."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(2 * HIDDEN, HIDDEN)

    def forward(self, h: Tensor, keys: Tensor, number: Tensor) -> Tensor:
        scores = (keys * h[:, None]).sum(-1, keepdim=True).masked_fill(masked(keys, number), -torch.inf)
        return self.out(torch.cat([h, (scores.softmax(1) * keys).sum(1)], -1)).tanh()


class Listen(nn.Module):
    """word, a memory, h -> h: a decoder with attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.look, self.step = nn.Embedding(VOCABULARY, HIDDEN), Look(), nn.GRUCell(HIDDEN, HIDDEN)

    def forward(self, word: Tensor, keys: Tensor, number: Tensor, h: Tensor) -> Tensor:
        return self.step(self.embed(word), self.look(h, keys, number))


class Recall(nn.Module):
    """token, its earlier states, h -> the next token, h: a greedy decoder over its own past."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.step = nn.Embedding(VOCABULARY, HIDDEN), nn.GRUCell(HIDDEN, HIDDEN)
        self.out = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, token: Tensor, past: Tensor, number: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
        total = past.masked_fill(masked(past, number), 0.0).sum(1)
        h = self.step(self.embed(token), h + total / (number[:, None] + 1))
        return self.out(h).argmax(-1), h


MODULES: Final[dict[str, Callable[[], nn.Module]]] = {
    "read": Read, "speak": Speak, "say": Say, "mix": Mix, "count": Countdown, "shift": Shift, "guard": Guard,
    "widen": Widen, "look": Look, "listen": Listen, "recall": Recall,
}  # fmt: skip


def modules(seed: int = 0) -> dict[str, nn.Module]:
    torch.manual_seed(seed)
    made = {name: make().eval() for name, make in MODULES.items()}
    for name in ("speak", "say", "recall"):
        made[name].out.weight.data.mul_(8.0)  # scores far apart
    return made


# --- moves ----------------------------------------------------------------------------------------------------------


class Hand:
    """What the moves of one request have made so far. cells: by name, with the interface of `bm.Cell`.

    vectors, tokens, numbers: single values. rows: sequences of vectors. words: sequences of tokens. results: what is
    returned. seen: the last number that was waited for.
    """

    def __init__(self, cells: dict[str, Any], kept: dict[str, list[Any]] | None = None) -> None:
        self.cells = cells
        kept = kept or {}
        self.vectors: list[Any] = list(kept.get("vectors", ()))
        self.tokens: list[Any] = list(kept.get("tokens", ()))
        self.numbers: list[Any] = list(kept.get("numbers", ()))
        self.rows: list[Any] = []
        self.words: list[Any] = []
        self.results: list[Any] = []
        self.seen = 0

    def vector(self, i: int) -> Any:
        return self.vectors[i % len(self.vectors)] if self.vectors else [0.1 * i] * HIDDEN

    def token(self, i: int) -> Any:
        return self.tokens[i % len(self.tokens)] if self.tokens else i % VOCABULARY

    def number(self, i: int) -> Any:
        return self.numbers[i % len(self.numbers)] if self.numbers else i

    def row(self, i: int) -> Any:
        return self.rows[i % len(self.rows)] if self.rows else [[0.1 * i] * HIDDEN, [-0.1] * HIDDEN]

    def memory(self, i: int) -> Any:
        """Return a sequence to be read: a part of a row, or single vectors as data."""
        row = self.row(i)
        return row[:: 1 + i % 2] if i % 3 else row

    def kept(self) -> dict[str, list[Any]]:
        """What the next chunk of a sequence begins with."""
        return {"vectors": self.vectors[-2:], "tokens": self.tokens[-1:], "numbers": self.numbers[-1:]}


@dataclass(frozen=True)
class Above:
    """A stop test that is called. raises_at: a value for which it raises."""

    limit: int
    raises_at: int | None = None

    def __call__(self, values: np.ndarray) -> np.ndarray:
        if self.raises_at is not None and (values == self.raises_at).any():
            raise ValueError("not this value")
        return values > self.limit


Until = int | Above | None


@dataclass(frozen=True)
class Reads:
    """A chain over words; without any, over words that were said."""

    words: tuple[int, ...]
    of: int
    begins: int | None
    steps: bool

    def __call__(self, hand: Hand) -> None:
        source = list(self.words) or (hand.words[self.of % len(hand.words)] if hand.words else [1, 2])
        state = None if self.begins is None else (hand.vector(self.begins), hand.vector(self.begins + 1))
        h, c = hand.cells["read"].run(source, state)
        hand.vectors += [h, c]
        if self.steps:
            hand.rows.append(h.steps)


@dataclass(frozen=True)
class Speaks:
    """A loop of a greedy decoder."""

    token: int
    of: int
    until: Until
    max_steps: int
    steps: bool

    def __call__(self, hand: Hand) -> None:
        init = (hand.token(self.token), hand.vector(self.of))
        token, h = hand.cells["speak"].loop(init, until=self.until, max_steps=self.max_steps)
        hand.tokens.append(token)
        hand.vectors.append(h)
        if self.steps:
            (hand.results if self.until is not None else hand.words).append(token.steps)


@dataclass(frozen=True)
class Counts:
    """A loop of exact numbers."""

    number: int
    until: Until
    max_steps: int
    steps: bool

    def __call__(self, hand: Hand) -> None:
        number, total = hand.cells["count"].loop(
            (hand.number(self.number), 0), until=self.until, max_steps=self.max_steps
        )
        hand.numbers += [number, total]
        if self.steps:
            hand.results.append(total.steps if self.number % 2 else number.steps)


@dataclass(frozen=True)
class Calls:
    """A single call of a cell."""

    cell: str
    of: int
    other: int

    def __call__(self, hand: Hand) -> None:
        cell = hand.cells[self.cell]
        match self.cell:
            case "mix":
                hand.vectors.append(cell(hand.vector(self.of), hand.vector(self.other)))
            case "say":
                hand.tokens.append(cell(hand.vector(self.of)))
            case "shift":
                hand.tokens.append(cell(hand.token(self.of)))
            case "guard":
                hand.numbers.append(cell(hand.number(self.of)))
            case "widen":
                hand.results.append(cell(hand.vector(self.of)))
            case "speak":
                token, h = cell(hand.token(self.of), hand.vector(self.other))
                hand.tokens.append(token)
                hand.vectors.append(h)
            case "read":
                hand.vectors += cell(hand.token(self.of), hand.vector(self.other), hand.vector(self.other + 1))


@dataclass(frozen=True)
class Maps:
    """A call for each element of a sequence."""

    of: int

    def __call__(self, hand: Hand) -> None:
        hand.rows.append(hand.cells["mix"].map(hand.row(self.of), hand.row(self.of)))


@dataclass(frozen=True)
class Looks:
    """A call that reads a memory, or one for each element of a sequence."""

    of: int
    memory: int
    maps: bool

    def __call__(self, hand: Hand) -> None:
        look, memory = hand.cells["look"], hand.memory(self.memory)
        if self.maps:
            hand.rows.append(look.map(hand.row(self.of), memory=memory))
        else:
            hand.vectors.append(look(hand.vector(self.of), memory))


@dataclass(frozen=True)
class Listens:
    """A chain over words whose steps read a memory, of which one vector may be all."""

    words: tuple[int, ...]
    begins: int | None
    memory: int
    one: bool

    def __call__(self, hand: Hand) -> None:
        state = None if self.begins is None else (hand.vector(self.begins),)
        memory = [hand.vector(self.memory)] if self.one else hand.memory(self.memory)
        h = hand.cells["listen"].run(list(self.words) or [3], state, memory=memory)
        hand.vectors.append(h)
        hand.rows.append(h.steps)


@dataclass(frozen=True)
class Recalls:
    """A loop of a greedy decoder that reads its own earlier steps."""

    token: int
    of: int
    until: Until
    max_steps: int

    def __call__(self, hand: Hand) -> None:
        init = (hand.token(self.token), hand.vector(self.of))
        token, h = hand.cells["recall"].loop(init, until=self.until, max_steps=self.max_steps)
        hand.tokens.append(token)
        hand.vectors.append(h)
        (hand.results if self.until is not None else hand.words).append(token.steps)
        if self.until is None:
            hand.rows.append(h.steps)


@dataclass(frozen=True)
class Grows:
    """A tree over a sequence. children: of each node, modulo what lies before it."""

    of: int
    children: tuple[tuple[int, int], ...]

    def __call__(self, hand: Hand) -> None:
        leaves = hand.row(self.of)
        before = range(len(leaves), len(leaves) + len(self.children))
        children = [[child % count for child in both] for both, count in zip(self.children, before, strict=True)]
        nodes = hand.cells["mix"].tree(children, leaves)
        hand.rows.append(nodes)
        hand.vectors.append(nodes[-1])


@dataclass(frozen=True)
class Cuts:
    """An element of a sequence, and a part of it."""

    of: int
    at: int

    def __call__(self, hand: Hand) -> None:
        if hand.rows:
            row = hand.row(self.of)
            hand.vectors.append(row[self.at % len(row)])
            hand.rows.append(row[self.at % len(row) :][::-1])


@dataclass(frozen=True)
class Returns:
    kind: str
    of: int

    def __call__(self, hand: Hand) -> None:
        values = getattr(hand, self.kind)
        if values:
            hand.results.append(values[self.of % len(values)])


@dataclass(frozen=True)
class Forgets:
    """Drops a value. Nothing that follows can use it."""

    kind: str
    of: int

    def __call__(self, hand: Hand) -> None:
        values = getattr(hand, self.kind)
        if values:
            del values[self.of % len(values)]


@dataclass(frozen=True)
class Waits:
    """Waits for a value, and for a whole sequence if there is one. What follows may depend on it."""

    of: int
    rows: bool

    def __call__(self, hand: Hand) -> Generator[Any, Any, None]:
        number = hand.cells["count"](hand.number(self.of), 1)[0]
        wanted = [number, hand.row(self.of)] if self.rows and hand.rows else [number]
        seen = yield wanted
        hand.seen = int(seen[0])
        hand.numbers.append(hand.seen % POISON)


@dataclass(frozen=True)
class Chooses:
    """One of two moves, by the last number that was waited for."""

    odd: Callable[[Hand], None]
    even: Callable[[Hand], None]

    def __call__(self, hand: Hand) -> None:
        (self.odd if hand.seen % 2 else self.even)(hand)


Move = (
    Reads
    | Speaks
    | Counts
    | Calls
    | Maps
    | Looks
    | Listens
    | Recalls
    | Grows
    | Cuts
    | Returns
    | Forgets
    | Waits
    | Chooses
)


@dataclass(frozen=True)
class Plan:
    """A request."""

    moves: tuple[Move, ...]

    @property
    def waits(self) -> bool:
        return any(isinstance(move, Waits) for move in self.moves)

    def play(self, hand: Hand) -> Iterator[Any]:
        """Make all moves. Yields what is waited for."""
        for move in self.moves:
            made = move(hand)
            if made is not None:
                yield from made
        if not hand.results:
            hand.results += [hand.token(0), hand.vector(0)]


class Planned(bm.Model):
    """Plays plans that do not wait."""

    def __init__(self, cells: dict[str, bm.Cell]) -> None:
        self.by_name = cells

    def unfold(self, plan: Plan) -> Any:
        return self.unfold_chunk(plan, None)[0]

    def unfold_chunk(self, plan: Plan, state: Any) -> Any:
        hand = Hand(self.by_name, state)
        assert not list(plan.play(hand))
        return hand.results, hand.kept()


class PlannedWaiting(Planned):
    """Plays plans that wait for values."""

    def unfold(self, plan: Plan) -> Any:
        hand = Hand(self.by_name)
        yield from plan.play(hand)
        return hand.results

    def unfold_chunk(self, plan: Plan, state: Any) -> Any:
        hand = Hand(self.by_name, state)
        yield from plan.play(hand)
        return hand.results, hand.kept()


MEMORIES: Final = {"look": "keys", "listen": "keys", "recall": bm.Memory("past", own=True, output=1, row=HIDDEN)}


def cells_of(made: dict[str, nn.Module], max_batch: int) -> dict[str, bm.Cell]:
    return {
        name: bm.Cell(
            module,
            max_batch=max_batch,
            host_outputs=(0,) if name in ("speak", "count", "recall") else (),
            memory=MEMORIES.get(name, ()),
        )
        for name, module in made.items()
    }
