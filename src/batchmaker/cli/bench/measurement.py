"""Measuring one model and workload under the policies of a plan."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import final

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from batchmaker import policies
from batchmaker.cli import options
from batchmaker.cli.bench import load as offering
from batchmaker.cli.bench import report
from batchmaker.cli.bench.load import Measured
from batchmaker.cli.bench.reference import reference_cells_per_s
from batchmaker.cli.bench.report import Result, Setting
from batchmaker.cli.workload import UNPADDED, Workload
from batchmaker.engine.engine import Engine
from batchmaker.errors import OptionError
from batchmaker.model.model import Model
from batchmaker.policies.base import CellPolicy, GraphPolicy
from batchmaker.policies.options import read_options


@final
@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What to measure, and how. OptionError for unknown policies and contradictory loads.

    requests: offer so many at once; else rate_rps, or load, a share of the baseline's peak; else a backlog for
    `seconds`.
    """

    policies: tuple[str, ...]
    seconds: float
    requests: int | None
    rate_rps: float | None
    load: float | None
    padded_batch: int
    seed: int

    def __post_init__(self) -> None:
        if sum(given is not None for given in (self.rate_rps, self.load, self.requests)) > 1:
            raise OptionError("give one of --rate, --load and --requests")
        for name, value in (("rate", self.rate_rps), ("load", self.load)):
            if value is not None and value <= 0:
                raise OptionError(f"--{name} must be above 0, got {value}")
        for policy in self.policies:
            policies.make(policy)


@final
class Bench:
    """One model and workload, measured under any policy."""

    def __init__(self, model: Model, workload: Workload, setting: Setting, plan: BenchPlan, bar: Progress) -> None:
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
        """Return the saturated throughput of a baseline from a short measurement, in requests a second."""
        seconds = max(0.5, min(self._plan.seconds, 10.0))
        with self._engine(policy) as engine:
            tell = self._task(f"peak of {policy}")
            measured = offering.backlog(engine, self._workload, self._in_flight(policy), seconds, tell)
        return measured.cells / measured.seconds / float(self._workload.cells.mean())

    def reference(self) -> float:
        """Return the cells per second of the same network in plain torch at its best batch size."""
        tell = self._task("reference")
        setting = self._setting
        found = reference_cells_per_s(
            setting.model, self._model, self._workload, hidden=setting.hidden, layers=setting.layers,
            dtype=setting.dtype, threads=setting.threads, device=setting.device,
        )  # fmt: skip
        tell(1.0, 0)
        return found

    def batch_of(self, policy: str) -> int:
        """Return the largest number of requests (graph batching) or cells in a batch of the policy."""
        made = self._made(policy)
        return made.max_batch if isinstance(made, GraphPolicy) else next(iter(self._model.cells.values())).max_batch

    def _in_flight(self, policy: str) -> int:
        """Return the backlog: several batches; for graph batching as many in each bucket of lengths."""
        batch = self.batch_of(policy)
        if report.batches_cells(policy):
            return 4 * batch
        return (8 if batch == 1 else 16) * batch

    def _made(self, policy: str) -> CellPolicy | GraphPolicy:
        """Return a new policy; a padding one gets --padded-batch unless its own text sets max_batch."""
        name, _, text = policy.partition(":")
        kind = policies.find(name)
        pads = not report.batches_cells(policy) and "max_batch" in inspect.signature(kind).parameters
        if pads and "max_batch" not in read_options(name, kind, text):
            return policies.make(policy, max_batch=self._plan.padded_batch)
        return policies.make(policy)

    def _engine(self, policy: str) -> Engine:
        setting = self._setting
        return Engine(
            self._model, self._made(policy), workers=setting.workers, threads=setting.threads,
            deadline_ms=setting.deadline_ms, late="finish", device=setting.device,
        )  # fmt: skip

    def _task(self, name: str) -> offering.Progress:
        task = self._bar.add_task(name, total=1.0, answered="")

        def tell(share: float, answered: int) -> None:
            self._bar.update(task, completed=share, answered=f"{answered} answered" if answered else "")

        return tell


def measure_all(model: Model, workload: Workload, setting: Setting, plan: BenchPlan) -> list[Result]:
    """Return one result per policy of the plan, in order, with a progress bar on a terminal.

    The reference is measured before and after all policies; the better one counts, so that a busy moment does not.
    """
    answered = TextColumn("{task.fields[answered]}")
    columns = (TextColumn("{task.description:>16}"), BarColumn(), TimeElapsedColumn(), answered)
    console = options.err()
    with Progress(
        *columns, console=console, transient=True, refresh_per_second=4, disable=not console.is_terminal
    ) as bar:
        return _results(Bench(model, workload, setting, plan, bar), setting, plan)


def _results(bench: Bench, setting: Setting, plan: BenchPlan) -> list[Result]:
    before = bench.reference()
    rate_rps = plan.rate_rps
    if plan.load is not None:
        rate_rps = plan.load * bench.peak_rps("serial" if setting.model in UNPADDED else "padded")
    measured = [(policy, bench.measure(policy, rate_rps)) for policy in plan.policies]
    reference = max(before, bench.reference())
    results = [report.result(setting, policy, bench.batch_of(policy), seen, reference) for policy, seen in measured]
    report.add_ratios(results)
    return results
