"""The reference: the best of plain torch with the same cells on this machine, in full batches of equal lengths.

No request waits for another here and nothing is padded, so it is an upper bound for graph batching.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor, nn

from batchmaker.cli.workload import Workload
from batchmaker.model.model import Model

BATCHES: Final = (64, 256)
BATCHES_ON_GPU: Final = (64, 256, 512, 1024)
WHOLE_BATCHES: Final = (4, 16)
"""Requests computed together if a request is a whole network."""
STEPS: Final = 24
SECONDS_EACH: Final = 0.4


def reference_cells_per_s(
    name: str,
    model: Model,
    workload: Workload,
    *,
    hidden: int | None,
    layers: int,
    dtype: str,
    threads: int,
    device: str = "cpu",
) -> float:
    """Return the useful cells per second of the best method, over the workload's mix of cells.

    device: as an engine's; of several GPUs the first. 0 for models without a reference on GPUs.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    kind = getattr(torch, dtype)
    try:
        with torch.no_grad(), torch.device(device.partition(",")[0]) as where:
            if where.type != "cpu" and name not in ("lstm", "gru", "seq2seq", "treelstm"):
                return 0.0
            if hidden is None or name not in ("lstm", "gru", "seq2seq", "treelstm"):
                return 1.0 / _whole_s(model, workload)
            if name in ("lstm", "gru"):
                return 1.0 / _recurrent_s(name, hidden, layers, kind)
            shares = workload.chains.sum(axis=0) / workload.chains.sum()
            if name == "seq2seq":
                encoder_s = _recurrent_s("lstm", hidden, layers, kind)
                decoder = copy.deepcopy(model.cells["decoder"].module).to(where)
                decoder_s = _decoder_s(decoder, hidden, layers, kind)
                return float(1.0 / (shares[0] * encoder_s + shares[1] * decoder_s))
            leaves = (workload.chains.sum() + len(workload)) / 2 / workload.chains.sum()
            leaf, inner = (copy.deepcopy(model.cells[cell].module).to(where) for cell in ("leaf", "inner"))
            leaf_s = _best_s(lambda batch: lambda: leaf(torch.zeros(batch, dtype=torch.int64)))
            inner_s = _best_s(lambda batch: _bind(inner, [torch.randn(batch, hidden).to(kind) for _ in range(4)]))
            return float(1.0 / (leaves * leaf_s + (1 - leaves) * inner_s))
    finally:
        torch.set_num_threads(before)


def _whole_s(model: Model, workload: Workload) -> float:
    """Return seconds per cell of whole requests, all like the median one, at the better batch size."""
    middle = int(workload.cells.argsort()[len(workload) // 2])
    request, cells = workload.requests[middle], int(workload.cells[middle])

    def whole(batch: int) -> float:
        requests = [request] * batch
        return median_s(lambda: model.batched(requests), SECONDS_EACH) / (batch * cells)

    return min(map(whole, WHOLE_BATCHES))


def _recurrent_s(name: str, hidden: int, layers: int, kind: torch.dtype) -> float:
    """Return seconds per cell of the better of torch's fused layers and a loop of its cells."""
    fused = (nn.LSTM if name == "lstm" else nn.GRU)(hidden, hidden, layers).to(kind).eval()
    cell = (nn.LSTMCell if name == "lstm" else nn.GRUCell)(hidden, hidden).to(kind).eval()

    def sequence(batch: int) -> Callable[[], Any]:
        return _bind(fused, [torch.randn(STEPS, batch, hidden).to(kind)])

    def loop(batch: int) -> Callable[[], Any]:
        x = torch.randn(batch, hidden).to(kind)

        def steps() -> None:
            state: Any = None
            for _ in range(layers):
                state = cell(x, state)

        return steps

    return min(_best_s(sequence) / STEPS, _best_s(loop))


def _decoder_s(decoder: nn.Module, hidden: int, layers: int, kind: torch.dtype) -> float:
    def step(batch: int) -> Callable[[], Any]:
        state = [torch.randn(batch, hidden).to(kind) for _ in range(2 * layers)]
        return _bind(decoder, [torch.zeros(batch, dtype=torch.int64), *state])

    return _best_s(step)


def _bind(module: nn.Module, inputs: list[Tensor]) -> Callable[[], Any]:
    return lambda: module(*inputs)


def _best_s(make: Callable[[int], Callable[[], Any]]) -> float:
    """Return seconds per row at the best batch size: the median of repeated calls."""
    if torch.get_default_device().type == "cpu":
        return min(median_s(make(batch), SECONDS_EACH) / batch for batch in BATCHES)
    return min(median_s(_finished(make(batch)), SECONDS_EACH) / batch for batch in BATCHES_ON_GPU)


def _finished(call: Callable[[], Any]) -> Callable[[], Any]:
    """Return the call with a wait for the GPU at its end."""

    def whole() -> None:
        call()
        torch.cuda.synchronize()

    return whole


def median_s(call: Callable[[], Any], seconds: float, least: int = 3) -> float:
    """Return the median time of a call; see `times_s`."""
    times = times_s(call, seconds, least)
    return times[len(times) // 2]


def times_s(call: Callable[[], Any], seconds: float, least: int = 3) -> list[float]:
    """Return the times of a call, ascending.

    It is repeated for about `seconds` and at least `least` times, after one call to warm up.
    """
    call()
    times: list[float] = []
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s or len(times) < least:
        begin_s = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin_s)
    return sorted(times)
