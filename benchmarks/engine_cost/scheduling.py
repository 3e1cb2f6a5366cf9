"""What the engine's own work costs: the scheduler, Python per request and step, queueing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Final

import numpy as np

import batchmaker as bm
from batchmaker.cli.bench import load
from batchmaker.cli.workload import make_workload
from batchmaker.lab import zoo
from batchmaker.policies.cellular import BUDGET_MS
from engine_cost.chains import ALONE_WORDS, WORDS, chain
from engine_cost.measuring import (
    Better,
    Row,
    Settings,
    absolute,
    at_rate,
    compared,
    interleaved,
    per_second,
    spent,
)

OTHER_BUDGETS_MS: Final = (0.5, 1.0, 2.0, 8.0)
BUDGET_LOSS: Final = 0.9
"""The share of another budget's best that the default may have at one kind of load: it serves all of them."""
SLACK_MS: Final = 1.0


def scheduler(settings: Settings) -> Iterator[Row]:
    """The scheduler's time a node at batch 256, and what a step alone and one of many requests cost besides."""
    with chain(settings, (128, "float32")) as it:
        it.map(it.requests)
        many = [spent(it.engine, partial(it.map, it.requests)) for _ in range(settings.of(7, 2))]
    with chain(settings, (64, "float32")) as it:
        generator = np.random.default_rng(0)
        alone = [generator.integers(0, WORDS, ALONE_WORDS) for _ in range(settings.of(60, 10))]

        def one_by_one() -> None:
            for request in alone:
                it.engine.submit(request).result()

        one_by_one()
        few = [spent(it.engine, one_by_one) for _ in range(settings.of(7, 2))]
    per_node = _median(1e6 * stats.scheduler_s / stats.cells for _, stats in many)
    yield absolute(
        "LSTM 128, all waiting", "scheduler, µs per node", "µs", per_node, target=0.5,
        mean_batch=_median(stats.cells / stats.steps for _, stats in many),
    )  # fmt: skip
    yield absolute(
        "LSTM 64, one at a time", "µs per step beside the cell", "µs",
        _median(1e6 * (wall_s - stats.busy_s) / stats.steps for wall_s, stats in few), target=30.0,
        scheduler_us=_median(1e6 * stats.scheduler_s / stats.steps for _, stats in few),
        unfold_us=_median(1e6 * stats.unfold_s / stats.steps for _, stats in few),
        busy_us=_median(1e6 * stats.busy_s / stats.steps for _, stats in few),
    )  # fmt: skip
    count = len(it.requests)
    yield absolute(
        "LSTM 128, all waiting", "Python, µs per request", "µs",
        _median(1e6 * (wall_s - stats.busy_s) / count for wall_s, stats in many), target=30.0,
        unfold_us=_median(1e6 * stats.unfold_s / count for _, stats in many),
        scheduler_us=_median(1e6 * stats.scheduler_s / count for _, stats in many),
    )  # fmt: skip


def _median(values: Iterator[float]) -> float:
    return float(np.median(list(values)))


def queueing(settings: Settings) -> Iterator[Row]:
    """p99 of queueing at half load, from when a request was due, over the default budget, one step and 1 ms."""
    size = settings.of((1024, "bfloat16"), (64, "float32"))
    with chain(settings, size) as it:
        peak = max(per_second(partial(it.map, it.requests), len(it.requests)) for _ in range(2))
    seconds = settings.of(6.0, 1.0)
    work = make_workload("lstm", data=[settings.data / "europarl_deen" / "raw5k.en"], count=4000)
    rows = []
    for seed in range(settings.of(3, 1)):
        model = zoo.make("lstm", hidden=size[0], dtype=size[1], vocabulary_size=work.vocabulary_size)
        engine = bm.Engine(model, threads=1)
        seen = load.poisson(engine, work, 0.5 * peak, seconds, seed, lambda share, answered: None)
        step_ms = 1e3 * seen.stats.busy_s / seen.stats.steps
        p99_ms = 1e3 * float(np.percentile(seen.queues_s, 99))
        rows.append((p99_ms, BUDGET_MS + step_ms + SLACK_MS, seen.late_ms))
    ours, limit, late_ms = np.array(rows).T
    yield compared(
        f"LSTM {size[0]} {size[1]} at half load", "p99 of queueing", "ms", ours, limit, better="lower",
        baseline=f"{BUDGET_MS:g} ms + a step + 1 ms", target=1.0, rate=0.5 * peak,
        generator_late_ms=float(np.median(late_ms)),
    )  # fmt: skip


def budgets(settings: Settings) -> Iterator[Row]:
    """The default budget of a task over the best of others: all waiting, and p90 at half of the slowest peak."""
    others = settings.of(OTHER_BUDGETS_MS, OTHER_BUDGETS_MS[:1])
    for size in settings.of(((128, "float32"), (512, "float32")), ((64, "float32"),)):
        with contextlib.ExitStack() as stack:
            it = stack.enter_context(chain(settings, size))
            model = zoo.make("lstm", hidden=size[0], dtype=size[1], vocabulary_size=WORDS)
            engines = {
                budget: stack.enter_context(bm.Engine(model, threads=1, policy=f"cellular:budget_ms={budget:g}"))
                for budget in (BUDGET_MS, *others)
            }
            waiting: dict[str, Callable[[], Any]] = {
                f"{budget:g} ms": partial(_mapped_rate, engine, it.requests) for budget, engine in engines.items()
            }
            interleaved(waiting, 1)
            peaks = interleaved(waiting, settings.of(3, 1))
            yield _over_others(
                it.name, f"all waiting, {BUDGET_MS:g} ms a task", "requests/s", peaks, "higher", BUDGET_LOSS
            )
            rate = 0.5 * min(float(np.median(values)) for values in peaks.values())
            loaded: dict[str, Callable[[], Any]] = {
                f"{budget:g} ms": at_rate(engine.submit, it.requests, rate, settings.of(2.0, 0.3))
                for budget, engine in engines.items()
            }
            late = {name: values[:, 1] for name, values in interleaved(loaded, settings.of(3, 1)).items()}
            yield _over_others(
                it.name, f"p90 at half load, {BUDGET_MS:g} ms a task", "ms", late, "lower", 1 / BUDGET_LOSS, rate=rate
            )


def _mapped_rate(engine: bm.Engine, requests: Sequence[Any]) -> float:
    return per_second(partial(engine.map, requests, progress=False), len(requests))


def _over_others(
    work: str, figure: str, unit: str, found: Mapping[str, Any], better: Better, target: float, **more: Any
) -> Row:
    """Return the row of the first of these over the best of the others."""
    ours, *others = found
    seen = {name: float(np.median(values)) for name, values in found.items()}
    best = (max if better == "higher" else min)(others, key=seen.__getitem__)
    return compared(
        work, figure, unit, found[ours], found[best], better=better, baseline=f"{best} a task", target=target,
        seen=seen, **more,
    )  # fmt: skip
