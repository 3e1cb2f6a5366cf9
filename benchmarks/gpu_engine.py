"""The sections of benchmarks/gpu.py on the engine."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any, Final
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

import gpu_padded
from batchmaker.cli import options
from batchmaker.cli.bench import load as offering
from batchmaker.cli.workload import Workload, make_workload
from batchmaker.engine.engine import Engine
from batchmaker.executor.cuda.gpu import Gpu
from batchmaker.executor.cuda.open import open_devices
from batchmaker.lab import zoo
from batchmaker.model.model import Model
from gpu_deadline import Deadline
from gpu_kernels import call_ms

Row = dict[str, Any]
DEVICE: Final = "cuda:0"
POLICY: Final = "cellular"
"""An engine's own on GPUs."""
POLICIES: Final = (POLICY, "cellular:max_steps=5", "auto")
"""With the first the GPU schedules itself, with the others the host does: BatchMaker's rule for the steps of a task,
and the policy that is an engine's own elsewhere."""
DEADLINES: Final = (("lstm", "float16", 5000, 20.0), ("seq2seq", "float32", 2000, 60.0))
"""Model, dtype, requests a second, and the deadline in ms."""
WITH_DEADLINES: Final = ("auto", "lazy:max_steps=5", POLICY)
MAX_BATCH: Final = 512
WAITING: Final = 8192
"""Requests that wait at once where it is measured how many are answered."""
V100: Final = {  # requests/s and p90 in ms of BatchMaker's paper; seq2seq on four GPUs, the others on one
    "lstm": (20_000, 12.0), "seq2seq": (17_000, None), "treelstm": (3_100, 6.8),
}  # fmt: skip
RATES: Final = {"lstm": (2000, 5000, 10_000), "seq2seq": (1000, 2000, 3000), "treelstm": (1000, 2000)}
"""Requests a second at which latency is measured."""
DTYPES: Final = ("float16", "bfloat16")
"""Of the LSTM beside nn.LSTM; the engine computes in the first, by hand in either."""
CHECKED: Final = {"float32": 1e-4, "bfloat16": 6e-2, "float16": 6e-3}
TIMES: Final = ("scheduler_s", "unfold_s", "busy_s")


def agreement(until: Deadline) -> list[Row]:
    """Small models on the GPU beside the same weights in float32 on the CPU: the largest difference."""
    rows = []
    sentences = [[(i * 7 + j * 3) % 50 for j in range(1 + (i * 5) % 17)] for i in range(60)]
    for name in ("lstm", "gru"):
        sizes: dict[str, Any] = {"hidden": 64, "vocabulary_size": 50, "max_batch": 64}
        with Engine(zoo.make(name, **sizes)) as engine:
            wanted = engine.map(sentences, progress=False)
        for dtype, tolerance in CHECKED.items():
            if until.passed:
                rows.append({"model": name, "dtype": dtype, "not_run": "out of time"})
                continue
            with Engine(zoo.make(name, **sizes, dtype=dtype), device=DEVICE) as engine:
                found = engine.map(sentences, progress=False)
                executor, num_padded = engine.driver._executor, engine.stats.padded_cells - engine.stats.cells
                num_tasks = engine.stats.tasks
            error = max(float((a.float() - b).abs().max()) for a, b in zip(found, wanted, strict=True))
            rows.append({
                "model": name, "dtype": dtype, "error": error, "tolerance": tolerance, "passed": error <= tolerance,
                "notes": executor.notes, "padded_cells": num_padded, "tasks": num_tasks,
                "whole_tasks": executor.num_whole_tasks,
            })  # fmt: skip
    return rows


def launches(until: Deadline) -> list[Row]:
    """What the host needs to copy the blocks of a task and to launch a recorded step of an LSTM of 1024."""
    (device,) = open_devices(DEVICE)
    rows = []
    for batch in (1, 64, 512):
        x, weights = device.zeros((batch, 1024), torch.bfloat16), device.zeros((1024, 4096), torch.bfloat16)
        cell = nn.LSTMCell(1024, 1024).to("cuda", torch.bfloat16).requires_grad_(False)
        launch = device.record(partial(_record_nothing, device, lambda x=x, w=weights, cell=cell: (x @ w, *cell(x))))
        words = device.pinned(8 * 9 * batch).view(np.int64)
        words[:] = 0
        block = device.zeros((len(words),), torch.int64)

        def copies(block: Tensor = block, words: np.ndarray = words) -> None:
            device.upload((block, words))

        with device.submitting():
            rows.append({
                "batch": batch, "block_bytes": words.nbytes, "copy_us": _host_us(copies, device),
                "launch_us": _host_us(launch, device), "gpu_us": 1e3 * call_ms(launch),
            })  # fmt: skip
    return rows


def _record_nothing(device: Any, work: Callable[[], tuple[Tensor, ...]]) -> None:
    device.compute(work)


def _host_us(call: Callable[[], object], device: Any, calls: int = 200) -> float:
    """Return the median time of a call on the host alone, over 5 times so many in a row."""
    times = []
    for _ in range(5):
        device.stop()
        begin_s = time.perf_counter()
        for _ in range(calls):
            call()
        times.append(1e6 * (time.perf_counter() - begin_s) / calls)
    return statistics.median(times)


def tasks(until: Deadline) -> list[Row]:
    """LSTM of 1024 in small batches: tasks in one launch of a persistent kernel, and the same step by step."""
    rows, workload = [], make_workload("lstm", seed=0)
    for policy, at_once in product(POLICIES, (True, False)):
        about = {"model": "lstm", "dtype": "bfloat16", "policy": policy, "at_once": at_once}
        if until.left_s < 4:
            rows.append({**about, "not_run": "out of time"})
            continue
        with nullcontext() if at_once else mock.patch.object(Gpu, "recurrent", return_value=None):
            model = made("lstm", workload, "bfloat16", hidden=1024, max_batch=32)
            row = saturated(model, workload, WAITING // 4, policy=policy)
            rows.append({**about, **row, **alone(model, workload, policy=policy)})
    return rows


def in_flight(until: Deadline) -> list[Row]:
    """The same LSTM with a worker's next task submitted while one runs, and only then."""
    rows, workload = [], make_workload("lstm", seed=0)
    for run_ahead in (1, 0):
        if until.left_s < 5:
            rows.append({"model": "lstm", "in_flight": 1 + run_ahead, "not_run": "out of time"})
            continue
        model = made("lstm", workload, "bfloat16", hidden=1024, max_batch=MAX_BATCH)
        row = saturated(model, workload, WAITING, run_ahead=run_ahead)
        row |= loaded(model, workload, RATES["lstm"][1], 1.5, run_ahead=run_ahead)
        rows.append({"model": "lstm", "dtype": "bfloat16", "in_flight": 1 + run_ahead, **row})
    return rows


def deadlines(until: Deadline) -> list[Row]:
    """Which share of requests is late under each policy, where the late are finished."""
    rows = []
    for name, dtype, rate, deadline_ms in DEADLINES:
        workload = make_workload(name, seed=0)
        for policy in WITH_DEADLINES:
            about = {"model": name, "dtype": dtype, "policy": policy, "rate": rate, "deadline_ms": deadline_ms}
            if until.left_s < 4:
                rows.append({**about, "not_run": "out of time"})
                continue
            model = made(name, workload, dtype, hidden=1024, max_batch=MAX_BATCH)
            found = loaded(model, workload, rate, 1.5, policy=policy, deadline_ms=deadline_ms, late="finish")
            rows.append({**about, **found})
    return rows


def lstm(until: Deadline) -> list[Row]:
    """LSTM of 1024 on Europarl's lengths, and nn.LSTM over padded and packed batches on the same GPU."""
    workload = make_workload("lstm", seed=0)
    ways = {f"{('padded', 'packed')[pack]} {dtype}": (dtype, pack) for dtype in DTYPES for pack in (False, True)}
    runs = {way: gpu_padded.lstm(workload, 1024, dtype, "cuda", pack=pack) for way, (dtype, pack) in ways.items()}
    return beside("lstm", workload, DTYPES[0], 1024, MAX_BATCH, runs, workload.chains[:, 0], until)


def seq2seq(until: Deadline) -> list[Row]:
    """Seq2Seq of 1024, and padded batches with as many words as the longest of a batch."""
    workload = make_workload("seq2seq", seed=0, count=WAITING // 8)
    model = made("seq2seq", workload, "float32", hidden=1024, max_batch=MAX_BATCH)
    decoder: Any = model.cells["decoder"].module
    runs = {"padded": gpu_padded.seq2seq(workload, decoder, 1024, "float32", "cuda")}
    return beside("seq2seq", workload, "float32", 1024, MAX_BATCH, runs, workload.chains[:, 1], until)


def treelstm(until: Deadline) -> list[Row]:
    """TreeLSTM of 1024, and trees level by level in closed batches."""
    workload = make_workload("treelstm", seed=0)
    model = made("treelstm", workload, "float32", hidden=1024, max_batch=MAX_BATCH)
    leaf, inner = (model.cells[name].module for name in ("leaf", "inner"))
    runs = {"by levels": gpu_padded.trees(workload, leaf, inner, "cuda")}  # type: ignore[arg-type]
    return beside("treelstm", workload, "float32", 1024, MAX_BATCH, runs, workload.cells, until)


# --- one model -------------------------------------------------------------------------------------------------------


def beside(
    name: str, workload: Workload, dtype: str, hidden: int, max_batch: int, runs: dict[str, gpu_padded.Run],
    lengths: np.ndarray, until: Deadline,
) -> list[Row]:  # fmt: skip
    """Return a row for what is answered with all waiting, and one for each rate: the engine, and the best by hand."""
    model = made(name, workload, dtype, hidden=hidden, max_batch=max_batch)
    about = {"model": name, "dtype": dtype, "hidden": hidden, "max_batch": max_batch}
    with exact_float32():
        by_hand = {way: gpu_padded.most_per_s(run, lengths) for way, run in runs.items()}
    best = max(by_hand, key=lambda way: by_hand[way]["rps"])
    rows: list[Row] = []
    for policy in POLICIES:
        row = {**about, "policy": policy, "rate": None, **saturated(model, workload, WAITING, policy=policy)}
        row |= {"hand_rps": by_hand[best]["rps"], "hand": f"{best}, {by_hand[best]['setting']}"}
        row |= {"over_hand": row["peak_rps"] / row["hand_rps"], "v100_rps": V100[name][0], "by_hand": by_hand}
        rows.append(row)
    for rate in RATES[name]:
        if until.left_s < 6:
            rows.append({**about, "rate": rate, "not_run": "out of time"})
            continue
        with exact_float32():
            found = {way: gpu_padded.latency(run, lengths, rate, 1.5, seed=0) for way, run in runs.items()}
        way = min(found, key=lambda each: found[each]["p90_ms"])
        hand = {f"hand_{key}": value for key, value in found[way].items()}
        for policy in POLICIES:
            row = {**about, "policy": policy, "rate": rate, **loaded(model, workload, rate, 1.5, policy=policy), **hand}
            row |= {"p90_over_hand": row["p90_ms"] / hand["hand_p90_ms"], "v100_p90_ms": V100[name][1]}
            rows.append({**row, "hand": f"{way}, {found[way]['setting']}"})
    return rows


def made(name: str, workload: Workload, dtype: str, *, hidden: int, max_batch: int) -> Model:
    """Return a built-in model for these requests."""
    sizes = {"vocabulary_size": workload.vocabulary_size, **workload.options}
    return options.make_model(name, **sizes, hidden=hidden, dtype=dtype, max_batch=max_batch, seed=0)


def saturated(
    model: Model, workload: Workload, count: int, *, policy: str = POLICY, **engine_options: Any
) -> Row:  # fmt: skip
    """Return what is answered a second with so many waiting, and what a step of that takes on the host, in us.

    The second of two times counts: the first compiles and loads.
    """
    requests = [workload.requests[number % len(workload)] for number in range(count)]
    with Engine(model, policy=policy, device=DEVICE, **engine_options) as engine:
        executor = engine.driver._executor
        executor.submit = submit = Timed(executor.submit)
        engine.map(requests, progress=False)
        before, submit.seconds = dataclasses.replace(engine.stats), 0.0
        with offering.quiet_interpreter():
            begin_s = time.perf_counter()
            answers = engine.map(requests, progress=False)
            seconds = time.perf_counter() - begin_s
        del answers
        after, whole = engine.stats, getattr(executor, "num_whole_tasks", None)
    steps = after.steps - before.steps
    spent = {key.replace("_s", "_us"): 1e6 * (getattr(after, key) - getattr(before, key)) / steps for key in TIMES}
    return {
        "peak_rps": count / seconds, "mean_batch": (after.cells - before.cells) / steps, "steps": steps, **spent,
        "submit_us": 1e6 * submit.seconds / steps, "request_us": 1e6 * seconds / count, "whole_tasks": whole,
        "idle_share": 1.0 - (after.busy_s - before.busy_s) / seconds,
    }  # fmt: skip


def loaded(
    model: Model, workload: Workload, rate: float, seconds: float, *, policy: str = POLICY, **engine_options: Any
) -> Row:  # fmt: skip
    """Return latency in ms under Poisson arrivals."""
    with Engine(model, policy=policy, device=DEVICE, **engine_options) as engine:
        found = offering.poisson(engine, workload, rate, seconds, 0, lambda share, answered: None)
    deadline_s = engine_options.get("deadline_ms", np.inf) / 1e3
    p50_ms, p90_ms = (1e3 * np.percentile(found.latencies_s, (50, 90))).tolist()
    return {
        "p50_ms": p50_ms, "p90_ms": p90_ms, "late_ms": found.late_ms, "failed": found.num_failed,
        "unanswered": int((~found.answered).sum()), "busy_share": found.stats.busy_s / found.seconds,
        "late_share": 1.0 - found.num_in_time(deadline_s) / len(found.answered),
    }  # fmt: skip


def alone(model: Model, workload: Workload, count: int = 100, *, policy: str = POLICY) -> Row:
    """Return the median time in ms of requests that come one at a time, and the us of each step of them."""
    took = []
    with Engine(model, policy=policy, device=DEVICE) as engine:
        for number in range(count):
            begin_s = time.perf_counter()
            engine.submit(workload.requests[number]).result()
            took.append(time.perf_counter() - begin_s)
    steps = workload.cells[:count].tolist()
    each = [seconds / cells for seconds, cells in zip(took, steps, strict=True)]
    return {"alone_ms": 1e3 * statistics.median(took), "alone_step_us": 1e6 * statistics.median(each)}


class Timed:
    """A function that adds up the time of its calls."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.seconds = 0.0

    def __call__(self, *arguments: Any) -> Any:
        begin_s = time.perf_counter()
        try:
            return self._call(*arguments)
        finally:
            self.seconds += time.perf_counter() - begin_s


def exact_float32() -> Any:
    """Inside, torch rounds no factors of float32, as the engine."""
    return torch.backends.cudnn.flags(enabled=True, allow_tf32=False)
