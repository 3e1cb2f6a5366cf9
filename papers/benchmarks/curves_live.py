"""The live part of papers/benchmarks/curves.py: a small LSTM on the engine, where the engine's own cost counts most."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from rich.console import Console
from rich.progress import Progress

from batchmaker.cli import options as cli_options
from batchmaker.cli.bench import load as offering
from batchmaker.cli.bench.contenders import made
from batchmaker.cli.bench.measurement import Bench, BenchPlan
from batchmaker.cli.bench.report import Setting
from batchmaker.cli.bench.statistics import percentiles
from batchmaker.cli.workload import make_workload
from batchmaker.engine.engine import Engine
from shared import Result, interval, made_by

HIDDEN: Final = 128
LOADS: Final = (0.1, 0.25, 0.5, 0.75)
WAYS: Final = ("cellular", "closed:bucket_width=10,max_batch=256", "padded:bucket_width=10,max_batch=256")
"""`padded` has torch's own layers; the others have the engine's cells."""
FIGURES: Final = ("p50_ms", "p90_ms", "p99_ms", "queue_p99_ms")
MEASURES: Final = ("papers/benchmarks/curves_live.py", "src/batchmaker/engine", "src/batchmaker/core")


def measured_live(data: Path, *, quick: bool) -> Result:
    """Measure all ways at all loads, in turn, each with several seeds: shares of the most that `padded` serves."""
    seconds, seeds = (0.3, 2) if quick else (2.5, 3)
    workload = make_workload("lstm", data=[data / "europarl_deen" / "raw5k.en"])
    model = cli_options.make_model("lstm", hidden=HIDDEN, vocabulary_size=workload.vocabulary_size)
    setting = Setting("lstm", HIDDEN, 1, "float32", 1, 1, workload.source, None)
    plan = BenchPlan((WAYS[-1],), seconds, None, None, None, None, 0, False)
    with Progress(console=Console(stderr=True), transient=True) as bar:
        peak = Bench(model, workload, setting, plan, bar).peak_rps(WAYS[-1])
        task = bar.add_task("live", total=seeds * len(LOADS) * len(WAYS))
        seen: dict[tuple[str, float], list[dict[str, float]]] = {}
        for seed in range(seeds):
            for load in LOADS:
                for way in WAYS[:: -1 if seed % 2 else 1]:
                    with Engine(model, made(way, None), threads=1) as engine:
                        found = offering.poisson(engine, workload, load * peak, seconds, seed, lambda *_: None)
                    seen.setdefault((way, load), []).append(_figures(found))
                    bar.advance(task)
    points: list[dict[str, Any]] = [
        {"way": way, "load": load, "rate": load * peak,
         **{name: interval([one[name] for one in each]) for name in FIGURES}}
        for (way, load), each in seen.items()
    ]  # fmt: skip
    return {
        **made_by(MEASURES, "python papers/benchmarks/curves.py --live --data DATA"),
        "work": f"LSTM {HIDDEN} float32",
        "quick": quick,
        "points": points,
    }


def _figures(found: offering.Measured) -> dict[str, float]:
    whole = percentiles(found.latencies_s)
    queue = percentiles(found.queues_s)
    return {
        "p50_ms": whole.p50_ms, "p90_ms": whole.p90_ms, "p99_ms": whole.p99_ms, "queue_p99_ms": queue.p99_ms,
    }  # fmt: skip
