"""Small models that the server's tests save and serve; the server's process imports this file too."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.server import Signature, TensorSpec


class Count(nn.Module):
    """n -> n + 1."""

    def forward(self, n: Tensor) -> Tensor:
        return n + 1


class Counter(bm.Model):
    """Counts to n, waiting for every number: a request that lasts as long as it says, and streams.

    In a sequence, each chunk counts on for as many as it says.
    """

    example_request = 2

    def __init__(self) -> None:
        self.count = bm.Cell(Count(), host_outputs=(0,))

    def unfold(self, n: int) -> Iterator[Any]:
        yield from self.unfold_chunk(n, None)

    def unfold_chunk(self, chunk: int, state: Any) -> Iterator[Any]:
        value: Any = 0 if state is None else state
        for _ in range(chunk):
            value = self.count(value)
            yield value
        return None, value


class Ahead(bm.Model):
    """Gives each number plus the one after it, so that it is a number behind until the end; after the last comes 0."""

    def __init__(self) -> None:
        self.add = bm.Cell(Accumulate())
        self.example_request = [1.0, 2.0]
        self.example_chunks = ([1.0, 2.0], [3.0])

    def unfold(self, xs: Any) -> Any:
        return self.unfold_chunk(xs, None, last=True)[0]

    def unfold_chunk(self, xs: Any, state: Any, last: bool) -> Any:
        values = [*([] if state is None else [state]), *([] if xs is None else [float(x) for x in xs])]
        ends = [*values, 0.0] if last and values else values
        return self.add.map(ends[:-1], ends[1:]) if len(ends) > 1 else [], values[-1] if values else None


def waiting_at(gate: str | Path) -> Path:
    """Return the file with a byte for each request that has come to a gate."""
    return Path(f"{gate}.waiting")


class Gated(Counter):
    """Counts once a file is there. Until then all requests for more than 2 are in flight, however fast the machine.

    Beside it is a file with a byte for each request that has come to the gate.
    """

    def __init__(self, gate: str) -> None:
        super().__init__()
        self.gate = gate

    def unfold_chunk(self, chunk: int, state: Any) -> Iterator[Any]:
        if chunk > 2:
            with waiting_at(self.gate).open("ab") as file:
                file.write(b".")
        while chunk > 2 and not Path(self.gate).exists():
            time.sleep(0.01)  # it is a file: another process opens the gate
        return (yield from super().unfold_chunk(chunk, state))


class Rooted(Counter):
    """Counts; after a chunk for more than 5 its state has what cannot be moved."""

    def unfold_chunk(self, chunk: int, state: Any) -> Iterator[Any]:
        _, value = yield from super().unfold_chunk(chunk, None if state is None else state[0])
        return None, (value, object() if chunk > 5 else None)


class Leaving(Counter):
    """Counts, and asks the process to end for a request for 13."""

    def unfold(self, n: int) -> Iterator[Any]:
        if n == 13:
            raise SystemExit("13")
        yield from super().unfold(n)


class Ending(Counter):
    """Counts, and ends the process for a request for 13, as a fault of a compiled library does."""

    def unfold(self, n: int) -> Iterator[Any]:
        if n == 13:
            os._exit(13)
        yield from super().unfold(n)


class Accumulate(nn.Module):
    """x, total -> total + x."""

    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        return total + x


class Sums(bm.Model):
    """Sums of rows, exact for small whole numbers, so that answers tell their requests apart."""

    def __init__(self, width: int = 2) -> None:
        self.add = bm.Cell(Accumulate())
        self.width = width
        self.example_request = {"rows": [[1.0] * width], "start": [0.0] * width}

    def unfold(self, rows: Any, start: Any) -> Any:
        total = self.add.run(rows, (start,))
        return {"total": total, "steps": total.steps}


class Poisoned(nn.Module):
    """Adds, and raises where a row holds 13: cannot be traced, so it runs as it is."""

    def forward(self, x: Tensor, total: Tensor) -> Tensor:
        if bool((x == 13).any()):
            raise ValueError("a secret of the inside")
        return total + x


class Fragile(bm.Model):
    """Fails for a request with a 13 in it, and for no other."""

    def __init__(self) -> None:
        self.add = bm.Cell(Poisoned())
        self.example_request = [1.0, 2.0]

    def unfold(self, xs: Any) -> Any:
        if len(xs) == 7:
            raise KeyError("a secret of the inside")
        return self.add.run([[float(x)] for x in xs], ([0.0],))


class Declared(Counter):
    """Says itself how it appears."""

    def serving_signature(self) -> Signature:
        number = TensorSpec("upto", "INT32", (1,))
        return Signature((number,), (TensorSpec("numbers", "FP64", (-1,)),), request="value", stream="elements")


class Pair(bm.Model):
    """Returns a tuple, one part of it a whole number."""

    example_request = torch.zeros(3, 2)

    def __init__(self) -> None:
        self.add = bm.Cell(Accumulate())
        self.count = bm.Cell(Count())

    def unfold(self, rows: Any) -> Any:
        return self.add.run(rows, ([0.0, 0.0],)), self.count(len(rows))


class Weigh(nn.Module):
    """n, total -> total + the square of n, looked up. There are ten squares: any other n makes this raise."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("squares", torch.arange(10.0).square().reshape(10, 1))

    def forward(self, n: Tensor, total: Tensor) -> Tensor:
        return total + self.squares[n + 0]


class Scales(bm.Model):
    """The sum of squares of numbers that nobody looks at before the cell does: a request can make it raise."""

    def __init__(self) -> None:
        self.weigh = bm.Cell(Weigh())
        self.example_request = [1, 2]

    def unfold(self, numbers: Any) -> Any:
        return self.unfold_chunk(numbers, None)[0]

    def unfold_chunk(self, chunk: Any, state: Any) -> Any:
        total = self.weigh.run(chunk, ([0.0],) if state is None else (state,))
        return total, total


class Spelled(bm.Model):
    """Sums the letters of a word: clients send a string, the network has numbers."""

    def __init__(self) -> None:
        self.add = bm.Cell(Accumulate())
        self.example_request = self.encode("ab")

    def unfold(self, numbers: Any) -> Any:
        return self.add.run(numbers, ([0.0],))

    def encode(self, word: str) -> list[list[float]]:
        return [[float("abc".index(letter))] for letter in word]

    def decode(self, total: Tensor, word: str) -> str:
        if total.item() == 3:
            raise KeyError("a secret of the inside")
        return f"{word} {total.item():g}"

    def serving_signature(self) -> Signature:
        word, said = TensorSpec("word", "BYTES", (1,)), TensorSpec("said", "BYTES", (1,))
        return Signature((word,), (said,), request="value", encode=self.encode, decode=self.decode)


class Tempered(bm.Model):
    """Adds rows to what a client may leave out: one default is a number, one a text, one nothing in particular."""

    def __init__(self) -> None:
        self.add = bm.Cell(Accumulate())
        self.example_request = {"rows": [[1.0, 2.0]]}

    def unfold(self, rows: Any, temperature: float = 0.5, *, sign: str = "+", start: Any = None) -> Any:
        first = [temperature if sign == "+" else -temperature] * 2
        return self.add.run(rows, (first if start is None else start,))
