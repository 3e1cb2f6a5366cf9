"""The sections of benchmarks/gpu.py on the engine."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any, Final
from unittest import mock

import numpy as np
import torch
from rich.progress import Progress
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from batchmaker.cli import options
from batchmaker.cli.bench.measurement import Bench, BenchPlan, measure_all
from batchmaker.cli.bench.report import Setting, result
from batchmaker.cli.workload import Workload, make_workload
from batchmaker.engine.engine import Engine
from batchmaker.executor.cuda.gpu import Gpu
from batchmaker.lab import zoo
from gpu_deadline import Deadline

Row = dict[str, Any]
DEVICE: Final = "cuda:0"
LOAD: Final = 0.7
"""Share of the peak at which latency is measured."""
POLICY: Final = "cellular:max_steps=5"
"""An engine's own on GPUs, where nothing has a deadline."""
MAX_BATCH: Final = 512
BUCKET: Final = 10
"""Steps by which lengths in a bucket of the padded baseline may differ, as in BatchMaker's evaluation."""
V100: Final = {  # requests/s and p90 in ms of BatchMaker's paper; seq2seq on four GPUs, the others on one
    "lstm": (20_000, 12.0), "seq2seq": (17_000, None), "treelstm": (3_100, 6.8),
}  # fmt: skip
CHECKED: Final = {"float32": 1e-4, "bfloat16": 6e-2, "float16": 6e-3}


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


def tasks(until: Deadline) -> list[Row]:
    """LSTM of 1024 in small batches: tasks in one launch of a persistent kernel, and the same step by step."""
    rows = []
    for number, at_once in enumerate((True, False)):
        if until.left_s < 10:
            rows.append({"model": "lstm", "at_once": at_once, "not_run": "out of time"})
            continue
        with nullcontext() if at_once else mock.patch.object(Gpu, "recurrent", return_value=None):
            row = served("lstm", "bfloat16", until.left_s / (2 - number) - 2, hidden=1024, max_batch=32)
        rows.append({**row, "at_once": at_once})
    return rows


def lstm(until: Deadline) -> list[Row]:
    """LSTM of 1024 on Europarl's lengths, and the padded baseline in buckets on the same GPU."""
    rows = []
    for dtype in ("float32", "bfloat16"):
        if until.left_s < 15:
            rows.append({"model": "lstm", "dtype": dtype, "not_run": "out of time"})
            continue
        share_s = until.left_s / (2 if dtype == "float32" else 1)
        row = served("lstm", dtype, share_s - 4, hidden=1024, max_batch=MAX_BATCH)
        row |= padded_baseline(make_workload("lstm", seed=0), 1024, dtype)
        rows.append(row)
    return rows


def seq2seq(until: Deadline) -> list[Row]:
    return [served("seq2seq", "float32", until.left_s, hidden=1024, max_batch=MAX_BATCH)]


def treelstm(until: Deadline) -> list[Row]:
    return [served("treelstm", "float32", until.left_s, hidden=1024, max_batch=64)]


def served(name: str, dtype: str, seconds: float, *, hidden: int, max_batch: int) -> Row:
    """Return peak and, at LOAD of it, latency; an eighth of the seconds each, the rest goes to getting ready."""
    window_s = max(1.0, seconds / 8)
    workload = make_workload(name, seed=0)
    sizes = {"vocabulary_size": workload.vocabulary_size, **workload.options}
    begin_s = time.perf_counter()
    model = options.make_model(name, **sizes, hidden=hidden, dtype=dtype, max_batch=max_batch, seed=0)
    setting = Setting(name, hidden, 1, dtype, 1, 1, workload.source, None, device=DEVICE)
    (peak,) = measure_all(model, workload, setting, BenchPlan((POLICY,), window_s, None, None, None, 64, 0))
    rate = LOAD * peak["served_rps"]
    bench = Bench(model, workload, setting, BenchPlan((POLICY,), window_s, None, rate, None, 64, 0), Progress())
    loaded = result(  # the reference takes seconds, and one is enough
        setting, bench.measure(POLICY, rate), max_batch, peak["reference_cells_per_s"]
    )
    return {
        "model": name, "dtype": dtype, "hidden": hidden, "max_batch": max_batch, **summary(peak, loaded),
        "v100_rps": V100[name][0], "v100_p90_ms": V100[name][1], "whole_s": time.perf_counter() - begin_s,
        "peak": peak, "loaded": loaded,
    }  # fmt: skip


def summary(peak: Row, loaded: Row) -> Row:
    """Return the numbers of the table from two results of `bench`."""
    return {
        "peak_rps": peak["served_rps"], "offered_rps": loaded["offered_rps"], "p50_ms": loaded["p50_ms"],
        "p90_ms": loaded["p90_ms"], "of_reference": peak["useful_over_reference"],
        "idle_share": 1.0 - peak["busy_share"], "mean_batch": peak["mean_batch"],
        "padding_share": peak["padding_share"], "failed": peak["failed"] + loaded["failed"],
    }  # fmt: skip


# --- padded ----------------------------------------------------------------------------------------------------------


def buckets(lengths: np.ndarray, width: int, most: int) -> list[np.ndarray]:
    """Return the requests of each padded batch: of lengths in one bucket of `width` steps, at most so many."""
    order = np.argsort(lengths, kind="stable")
    batches = []
    for number in np.unique((lengths - 1) // width):
        mine = order[(lengths[order] - 1) // width == number]
        batches += [mine[at : at + most] for at in range(0, len(mine), most)]
    return batches


def padded_baseline(workload: Workload, hidden: int, dtype: str, most: int = 2048, device: str = "cuda") -> Row:
    """Return the requests a second of nn.LSTM over padded batches in buckets, with copies to and from the host.

    No request waits for a batch to fill: what comes out is the most that such a server could reach.
    """
    requests = workload.requests[:most]
    lengths = np.array([len(request) for request in requests])
    kind = getattr(torch, dtype)
    embedding = nn.Embedding(workload.vocabulary_size or 1, hidden).to(device, kind)
    layer = nn.LSTM(hidden, hidden, batch_first=True).to(device, kind).eval()
    batches = buckets(lengths, BUCKET, MAX_BATCH)

    def run(batch: np.ndarray, pack: bool) -> None:
        tokens = np.zeros((len(batch), int(lengths[batch].max())), np.int64)
        for place, number in enumerate(batch):
            tokens[place, : lengths[number]] = requests[number]
        x: Any = embedding(torch.from_numpy(tokens).to(device))
        if pack:
            x = pack_padded_sequence(x, torch.from_numpy(lengths[batch]), batch_first=True, enforce_sorted=False)
        layer(x)[1][0].cpu()

    row: Row = {}
    with torch.no_grad():
        for name, pack in (("padded_rps", False), ("packed_rps", True)):
            run(batches[0], pack)
            run(batches[-1], pack)
            begin_s = time.perf_counter()
            for batch in batches:
                run(batch, pack)
            row[name] = len(requests) / (time.perf_counter() - begin_s)
    return row
