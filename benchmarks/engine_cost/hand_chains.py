"""One LSTM batched by hand: continuously, and in closed batches. Both are given what the engine makes for itself.

The embedding is folded into a table of the gates' input shares, the product is packed, gates are one compiled loop.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final, final

import numpy as np
import torch
from numba import njit
from numpy.typing import NDArray
from torch import Tensor, nn

from engine_cost.hand_kernels import FAST, Product, as_array, folded, lstm_gates, lstm_gates_bfloat16, sigmoid, tanh

LANES: Final = 256
LONGEST: Final = 512
BUDGET_S: Final = 1e-3


@final
@dataclass(frozen=True, slots=True)
class Lstm:
    """An LSTM over words, as programs by hand take it. table: [words, 4 hidden]; recurrent: [4 hidden, hidden]."""

    table: NDArray[Any]
    recurrent: Tensor

    @classmethod
    def of(cls, embedding: nn.Embedding, cell: nn.LSTMCell) -> Lstm:
        """Fold an embedding into a cell."""
        return cls(folded(embedding, cell.weight_ih, cell.bias_ih, cell.bias_hh), cell.weight_hh.detach())

    @property
    def hidden(self) -> int:
        return self.recurrent.shape[1]


@njit(**FAST)
def advance(product, table, words, slot, place, length, h, c, n, ended, results, num):
    """One step of the first n lanes. Lanes whose chain ends leave, the last lane takes their place.

    words: [slots, longest]. slot, place, length: [lanes]. ended, results: who has left in this task and the last h of
    each, `num` of them so far. Returns the lanes that are left and the new `num`.
    """
    width = h.shape[1]
    for lane in range(n):
        g, x, hidden, cell = product[lane], table[words[slot[lane], place[lane]]], h[lane], c[lane]
        for j in range(width):
            i = sigmoid(g[j] + x[j])
            f = sigmoid(g[width + j] + x[width + j])
            u = tanh(g[2 * width + j] + x[2 * width + j])
            o = sigmoid(g[3 * width + j] + x[3 * width + j])
            value = f * cell[j] + i * u
            cell[j] = value
            hidden[j] = o * tanh(value)
        place[lane] += 1
    lane = 0
    while lane < n:
        if place[lane] < length[lane]:
            lane += 1
            continue
        results[num], ended[num] = h[lane], slot[lane]
        num, n = num + 1, n - 1
        h[lane], c[lane] = h[n], c[n]
        slot[lane], place[lane], length[lane] = slot[n], place[n], length[n]
    return n, num


@final
class Continuous:
    """Continuous batching of one float32 LSTM, the smallest program that does it: `submit` words, get a future of h.

    A request takes a lane as soon as one is free, first come first served; a task is as many steps of all lanes as fit
    into a budget, by the step times seen so far; who ends inside a task is answered at its end.
    """

    def __init__(self, lstm: Lstm) -> None:
        self._table, product = lstm.table, Product(lstm.recurrent)
        self._h, self._c = (np.zeros((LANES, lstm.hidden), np.float32) for _ in "hc")
        self._products = [product.of(torch.from_numpy(self._h[:n])) for n in range(LANES + 1)]
        self._slot, self._place, self._length = (np.zeros(LANES, np.int64) for _ in range(3))
        self._words, self._owners = np.zeros((LANES, LONGEST), np.int64), [Future[Any]()] * LANES
        self._free = list(range(LANES))
        self._step_s = [1e-4] * (LANES + 1)
        self._inbox: queue.SimpleQueue[tuple[Any, Future[Any]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def submit(self, words: NDArray[np.int64]) -> Future[NDArray[np.float32]]:
        """Return the future of the last h, [hidden]. ValueError for more words than there is room for."""
        if not 0 < len(words) <= LONGEST:
            raise ValueError(f"got {len(words)} words, expected 1 to {LONGEST}")
        future: Future[Any] = Future()
        self._inbox.put((words, future))
        return future

    def close(self) -> None:
        """End the thread; what has not been answered is given up."""
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        waiting: deque[tuple[Any, Future[Any]]] = deque()
        ended, results = np.zeros(LANES, np.int64), np.zeros_like(self._h)
        n = 0
        with torch.no_grad():
            while True:
                while not (n or waiting) or not self._inbox.empty():
                    item = self._inbox.get()
                    if item is None:
                        return
                    waiting.append(item)
                while waiting and n < LANES:
                    n = self._enter(n, *waiting.popleft())
                rows, steps, ran, num = n, max(1, int(BUDGET_S / self._step_s[n])), 0, 0
                begin_s = time.perf_counter()
                while n and ran < steps:
                    n, num = advance(
                        self._products[n](), self._table, self._words, self._slot, self._place, self._length,
                        self._h, self._c, n, ended, results, num,
                    )  # fmt: skip
                    ran += 1
                self._step_s[rows] += 0.2 * ((time.perf_counter() - begin_s) / ran - self._step_s[rows])
                if num:
                    answers = results[:num].copy()
                    for slot, answer in zip(ended[:num].tolist(), answers, strict=True):
                        self._free.append(slot)
                        self._owners[slot].set_result(answer)

    def _enter(self, n: int, words: NDArray[np.int64], future: Future[Any]) -> int:
        slot = self._free.pop()
        self._words[slot, : len(words)], self._owners[slot] = words, future
        self._slot[n], self._place[n], self._length[n] = slot, 0, len(words)
        self._h[n], self._c[n] = 0.0, 0.0
        return n + 1


@final
class Closed:
    """Closed batches with the same work: rows in order of length, and a row that has ended is not computed any more."""

    def __init__(self, lstm: Lstm) -> None:
        self._lstm, self._product = lstm, Product(lstm.recurrent)
        self._gates = lstm_gates if lstm.recurrent.dtype == torch.float32 else lstm_gates_bfloat16

    @torch.no_grad()
    def __call__(self, requests: Sequence[NDArray[np.int64]]) -> list[Tensor]:
        """Return the last h of each request."""
        order, words, running = columns(requests)
        h = torch.zeros((len(order), self._lstm.hidden), dtype=self._lstm.recurrent.dtype)
        bits, c = as_array(h), np.zeros(h.shape, np.float32)
        for now, n in zip(words, running, strict=True):
            self._gates(as_array(self._product(h[:n])), self._lstm.table, now, bits, c, n)
        return list(h[torch.from_numpy(np.argsort(order))])


def columns(
    requests: Sequence[NDArray[np.int64]],
) -> tuple[NDArray[np.int64], NDArray[np.int64], list[int]]:
    """Return the order longest first, words in that order [longest, requests], and how many rows run at each step."""
    lengths = np.array([len(request) for request in requests])
    order = np.argsort(-lengths, kind="stable")
    words = np.zeros((lengths.max(), len(requests)), np.int64)
    for column, number in enumerate(order.tolist()):
        words[: lengths[number], column] = requests[number]
    running = len(requests) - np.searchsorted(np.sort(lengths), np.arange(lengths.max()), side="right")
    return order, words, running.tolist()


@final
class Plain:
    """`nn.LSTM` with its embedding, as torch has them: one request, or a batch, padded or packed."""

    def __init__(self, embedding: nn.Embedding, cell: nn.LSTMCell) -> None:
        self.embedding = embedding
        self.lstm = nn.LSTM(cell.input_size, cell.hidden_size).to(cell.weight_hh.dtype).eval()
        self.lstm.load_state_dict({f"{name}_l0": value for name, value in cell.state_dict().items()})
        self.lstm.requires_grad_(False)

    @torch.no_grad()
    def alone(self, words: NDArray[np.int64]) -> Tensor:
        """Return the last h of one request, [hidden]."""
        return self.lstm(self.embedding(torch.from_numpy(words)[:, None]))[1][0][0, 0]

    @torch.no_grad()
    def padded(self, requests: Sequence[NDArray[np.int64]]) -> list[Tensor]:
        """Return the last h of each, taken from a batch that is as long as its longest request."""
        x, lengths = self._embedded(requests)
        return list(self.lstm(x)[0][lengths - 1, torch.arange(len(lengths))])

    @torch.no_grad()
    def packed(self, requests: Sequence[NDArray[np.int64]]) -> list[Tensor]:
        """Return the last h of each, from a packed batch."""
        x, lengths = self._embedded(requests)
        parts = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        return list(self.lstm(parts)[1][0][0])

    def _embedded(self, requests: Sequence[NDArray[np.int64]]) -> tuple[Tensor, Tensor]:
        padded = nn.utils.rnn.pad_sequence([torch.from_numpy(request) for request in requests])
        return self.embedding(padded), torch.tensor([len(request) for request in requests])
