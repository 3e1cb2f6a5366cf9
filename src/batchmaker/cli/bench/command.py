"""`batchmaker bench`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, final

import typer
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from batchmaker import policies
from batchmaker.cells.model import Model
from batchmaker.cli import options
from batchmaker.cli.bench import load as offering
from batchmaker.cli.bench import report
from batchmaker.cli.bench.load import Measured
from batchmaker.cli.bench.reference import reference_cells_per_s
from batchmaker.cli.bench.report import Result, Setting
from batchmaker.cli.workload import Workload, make_workload
from batchmaker.engine.engine import Engine
from batchmaker.errors import OptionError
from batchmaker.executor.cpu import default_threads


@dataclass(frozen=True, slots=True)
class Plan:
    """How to measure. requests: offer so many at once; else rate_rps, or load, a share of the baseline's peak; else a
    backlog for `seconds`."""

    seconds: float
    requests: int | None
    rate_rps: float | None
    load: float | None
    max_batch: int
    padded_batch: int
    seed: int


@final
class Bench:
    """One model and workload, measured under any policy."""

    def __init__(self, model: Model, workload: Workload, setting: Setting, plan: Plan, bar: Progress) -> None:
        self._model = model
        self._workload = workload
        self._setting = setting
        self._plan = plan
        self._bar = bar

    def measure(self, policy: str, rate_rps: float | None) -> Measured:
        """Measure one policy; rate_rps None means saturated."""
        plan = self._plan
        with self._engine(policy) as engine:
            tell = self._task(policy)
            if rate_rps is not None:
                return offering.poisson(engine, self._workload, rate_rps, plan.seconds, plan.seed, tell)
            if plan.requests is not None:
                return offering.all_at_once(engine, self._workload, plan.requests, tell)
            return offering.backlog(engine, self._workload, self._in_flight(policy), plan.seconds, tell)

    def peak_rps(self, policy: str) -> float:
        """Return the saturated throughput of a baseline, measured shortly, in requests a second."""
        seconds = max(0.5, min(self._plan.seconds, 10.0))
        with self._engine(policy) as engine:
            tell = self._task(f"peak of {policy}")
            measured = offering.backlog(engine, self._workload, self._in_flight(policy), seconds, tell)
        return measured.cells / measured.seconds / float(self._workload.cells.mean())

    def reference(self) -> float:
        tell = self._task("reference")
        setting = self._setting
        found = reference_cells_per_s(
            setting.model, self._model, self._workload, hidden=setting.hidden, layers=setting.layers,
            dtype=setting.dtype, threads=setting.threads,
        )  # fmt: skip
        tell(1.0, 0)
        return found

    def batch_of(self, policy: str) -> int:
        """Return the most requests (graph batching) or cells that the policy puts into one batch."""
        return {"cellular": self._plan.max_batch, "serial": 1}.get(policy, self._plan.padded_batch)

    def _in_flight(self, policy: str) -> int:
        """Several batches deep; graph batching needs as many in each bucket of lengths."""
        return {"cellular": 4, "serial": 8}.get(policy, 16) * self.batch_of(policy)

    def _engine(self, policy: str) -> Engine:
        made = policies.make(policy, max_batch=self._plan.padded_batch) if policy == "padded" else policies.make(policy)
        return Engine(self._model, made, workers=self._setting.workers, threads=self._setting.threads)

    def _task(self, name: str) -> offering.Progress:
        task = self._bar.add_task(name, total=1.0, answered="")

        def tell(share: float, answered: int) -> None:
            self._bar.update(task, completed=share, answered=f"{answered} answered" if answered else "")

        return tell


def bench(
    model: Annotated[str, typer.Argument(help="lstm, gru, seq2seq or treelstm.")],
    data: Annotated[
        list[Path] | None,
        typer.Option(
            help="Text lines (lstm, gru), source then target (seq2seq, give it twice), trees (treelstm). "
            "Default: seeded sentences of Europarl's lengths, seeded trees."
        ),
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(help="cellular, padded or serial; may be given several times.")
    ] = None,
    hidden: options.Hidden = None,
    layers: options.Layers = None,
    dtype: options.Dtype = "float32",
    rate: Annotated[float | None, typer.Option(help="Offer a Poisson process of so many requests a second.")] = None,
    load: Annotated[
        float | None, typer.Option(help="As --rate, as a share of the padded baseline's peak, measured first.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Offer so many requests at once; measure to the last.")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of the measured window.")] = 10.0,
    threads: options.Threads = None,
    workers: options.Workers = 1,
    max_batch: options.MaxBatch = None,
    padded_batch: Annotated[int, typer.Option(min=1, help="Most requests in a padded batch.")] = 64,
    lengths: Annotated[str | None, typer.Option(help="fixed:24 or clip:50, for generated sentences.")] = None,
    seed: options.Seed = 0,
    json: Annotated[Path | None, typer.Option(help="Write the results here, one object per policy.")] = None,
) -> None:
    """Measure policies against each other and against the best of plain torch, all in one run.

    Without --rate, --load or --requests the engine is saturated: many requests always wait.

    [bold]Examples[/bold]

    batchmaker bench lstm --dtype bfloat16 --seconds 20 --json lstm.json

    batchmaker bench lstm --load 0.5 --policy cellular --policy padded

    batchmaker bench seq2seq --data europarl.de --data europarl.en --hidden 512

    batchmaker bench treelstm --data sst/test.txt --requests 1000
    """
    if sum(given is not None for given in (rate, load, requests)) > 1:
        raise OptionError("give one of --rate, --load and --requests")
    for name, value in (("rate", rate), ("load", load)):
        if value is not None and value <= 0:
            raise OptionError(f"--{name} must be above 0, got {value}")
    options.check_writable(json)
    chosen = policy or ["cellular", "serial" if model == "treelstm" else "padded"]
    for name in chosen:
        policies.make(name)
    if model == "treelstm" and "padded" in chosen:
        raise OptionError("trees of different shapes cannot be padded; the baseline of treelstm is --policy serial")
    made_options = {"hidden": hidden, "layers": layers, "dtype": dtype, "max_batch": max_batch, "seed": seed}
    options.make_model(model, **{**made_options, "hidden": 8, "vocabulary_size": 8})  # refuse bad options at once
    workload = make_workload(model, data=data or (), lengths=lengths, count=requests, seed=seed)
    built = options.make_model(model, vocabulary_size=workload.vocabulary_size, **made_options)
    width = hidden or options.default_of(model, "hidden")
    setting = Setting(
        model, width, layers or 1, dtype, threads or default_threads(workers), workers, workload.source, load
    )
    plan = Plan(seconds, requests, rate, load, next(iter(built.cells.values())).max_batch, padded_batch, seed)
    shown = TextColumn("{task.fields[answered]}")
    columns = (TextColumn("{task.description:>16}"), BarColumn(), TimeElapsedColumn(), shown)
    console = options.err()
    with Progress(
        *columns, console=console, transient=True, refresh_per_second=4, disable=not console.is_terminal
    ) as bar:
        results = _measure_all(Bench(built, workload, setting, plan, bar), setting, plan, chosen)
    report.show(options.out(), setting, results)
    if json is not None:
        options.write_json(json, results)


def _measure_all(bench: Bench, setting: Setting, plan: Plan, chosen: list[str]) -> list[Result]:
    """Measure the reference before and after everything else: the better one counts, so that a busy moment does not."""
    before = bench.reference()
    rate_rps = plan.rate_rps
    if plan.load is not None:
        rate_rps = plan.load * bench.peak_rps("serial" if setting.model == "treelstm" else "padded")
    measured = [(policy, bench.measure(policy, rate_rps)) for policy in chosen]
    reference = max(before, bench.reference())
    results = [report.result(setting, policy, bench.batch_of(policy), seen, reference) for policy, seen in measured]
    report.add_ratios(results)
    return results
