"""A result has memory of its own where it leaves, and a request is read from memory of its own."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import batchmaker as bm
from batchmaker.policies import BASELINES


class Sums(bm.Model):
    """Sums of rows [n, width], in several forms of results."""

    def __init__(self, width: int, form: str = "last") -> None:
        self.step = bm.Cell(nn.GRUCell(width, width))
        self.width, self.form = width, form

    def unfold(self, rows: Any) -> Any:
        h = self.step.run(rows)
        return {"last": h, "steps": h.steps, "both": {"h": h, "first": h.steps[0]}, "list": list(h.steps)}[self.form]

    def unfold_chunk(self, chunk: Any, state: Any) -> Any:
        h = self.step.run(chunk, state)
        return (h, h.steps, state), h

    def batched(self, requests: Any) -> Any:
        return list(self.alone_together(requests))

    def alone_together(self, requests: Any) -> Tensor:
        h = torch.zeros(len(requests), self.width)
        for x in torch.stack([torch.as_tensor(request) for request in requests]).unbind(1):
            h = self.step.module(x, h)
        return h


class Waits(Sums):
    def unfold(self, rows: Any) -> Any:
        h = self.step.run(rows)
        first = yield h.steps[0]
        kept = first.clone()
        last = yield h
        assert torch.equal(first, kept)
        return first, last


def tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    else:
        for part in result.values() if isinstance(result, dict) else result or ():
            yield from tensors(part)


def request(k: int, width: int) -> Tensor:
    return torch.full((3, width), k / 10)


def check_apart(results: list[Any]) -> None:
    """No two results share a storage, and none carries more than itself where it is saved."""
    owners: dict[int, int] = {}
    for k, result in enumerate(results):
        for tensor in tensors(result):
            assert owners.setdefault(tensor.untyped_storage().data_ptr(), k) == k
            assert tensor.untyped_storage().nbytes() <= tensor.nbytes
        file = io.BytesIO()
        torch.save(result, file)
        size = sum(tensor.nbytes for tensor in tensors(result))
        assert len(file.getvalue()) < size + 2500 * (1 + sum(1 for _ in tensors(result)))


@pytest.mark.parametrize("width", [4, 128])  # of a result table, and too wide for one
@pytest.mark.parametrize("form", ["last", "steps", "both", "list"])
def test_results_share_no_memory_with_those_of_other_requests(width: int, form: str) -> None:
    with bm.Engine(Sums(width, form)) as engine:
        answers = [engine.submit(request(k, width)) for k in range(40)]
        check_apart([answer.result() for answer in answers])
        check_apart(engine.map([request(k, width) for k in range(40)], progress=False))


def test_streamed_values_and_chunks_share_no_memory_with_others() -> None:
    with bm.Engine(Sums(4, "steps")) as engine:
        answers = [engine.submit(request(k, 4), stream=True) for k in range(20)]
        check_apart([list(answer) for answer in answers])
        sequences = [engine.open_sequence() for _ in range(10)]
        for _ in range(2):
            answers = [sequence.submit(request(k, 4)) for k, sequence in enumerate(sequences)]
            check_apart([answer.result() for answer in answers])


def test_a_caller_that_changes_a_streamed_value_changes_nothing_else() -> None:
    with bm.Engine(Waits(4)) as engine:
        expected = engine.submit(request(3, 4)).result()
        answer = engine.submit(request(3, 4), stream=True)
        for value in answer:
            value.fill_(100.0)
        torch.testing.assert_close(answer.result(), expected)


@pytest.mark.parametrize("policy", sorted(set(BASELINES) & {"padded", "serial"}))
def test_results_of_whole_requests_share_no_memory(policy: str) -> None:
    with bm.Engine(Sums(4), policy=policy) as engine:
        answers = [engine.submit(request(k, 4)) for k in range(20)]
        check_apart([answer.result() for answer in answers])


class Gate(bm.Model):
    """Its first request holds the engine's thread until the gate is open, so that others wait."""

    def __init__(self) -> None:
        self.step = bm.Cell(nn.GRUCell(4, 4))
        self.gate = threading.Event()

    def unfold(self, rows: Any) -> Any:
        if rows is None:
            self.gate.wait(60)
            return None
        while isinstance(rows, tuple | dict):
            rows = next(iter(rows.values())) if isinstance(rows, dict) else rows[0]
        return self.step.run(rows)


BUFFERS: dict[str, tuple[Any, Any]] = {
    "array": (lambda: np.zeros((3, 4), np.float32), lambda buffer, k: buffer.fill(k / 10)),
    "tensor": (lambda: torch.zeros(3, 4), lambda buffer, k: buffer.fill_(k / 10)),
    "data of a tensor": (lambda: torch.zeros(3, 4), lambda buffer, k: buffer.data.fill_(k / 10)),
    "transposed": (lambda: torch.zeros(4, 3).T, lambda buffer, k: buffer.fill_(k / 10)),
    "list": (lambda: [[0.0] * 4] * 3, lambda buffer, k: buffer.__setitem__(slice(None), [[k / 10] * 4] * 3)),
    "inner list": (lambda: [[0.0] * 4], lambda buffer, k: buffer[0].__setitem__(slice(None), [k / 10] * 4)),
    "in a dict": (lambda: {"a": (np.zeros((3, 4), np.float32),)}, lambda buffer, k: buffer["a"][0].fill(k / 10)),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_may_be_written_again_once_it_is_submitted(name: str) -> None:
    make, write = BUFFERS[name]
    model, buffer = Gate(), make()
    with bm.Engine(model) as engine:
        expected = []
        for k in range(6):
            write(buffer, k)
            expected.append(engine.submit(buffer).result())
        held, answers = engine.submit(None), []
        for k in range(6):
            write(buffer, k)
            answers.append(engine.submit(buffer))
        write(buffer, 100)
        model.gate.set()
        held.result()
        for answer, wanted in zip(answers, expected, strict=True):
            torch.testing.assert_close(answer.result(), wanted)
