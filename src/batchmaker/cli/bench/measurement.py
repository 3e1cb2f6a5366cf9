"""Measuring one model and workload under the policies of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, final

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from batchmaker import policies
from batchmaker.cli import options
from batchmaker.cli.bench import load as offering
from batchmaker.cli.bench import report
from batchmaker.cli.bench.contenders import USUAL_MAXIMUM, MeasuredPolicy, backlog_of, made, settings_of
from batchmaker.cli.bench.load import Measured
from batchmaker.cli.bench.reference import reference_cells_per_s
from batchmaker.cli.bench.report import Result, Setting
from batchmaker.cli.bench.statistics import percentiles
from batchmaker.cli.workload import UNPADDED, Workload
from batchmaker.engine.engine import Engine
from batchmaker.errors import OptionError
from batchmaker.lab.baselines import ClosedPolicy
from batchmaker.model.model import Model
from batchmaker.policies.base import GraphPolicy

LOOK_S: Final = 1.0
"""Seconds of each measurement of a sweep."""


@final
@dataclass(frozen=True, slots=True)
class BenchPlan:
    """What to measure, and how. OptionError for unknown policies and contradictory loads.

    requests: offer so many at once; else rate_rps, or load, a share of the baseline's peak; else a backlog for
    `seconds`. padded_batch: most requests in a batch of whole requests; None: `padded` is swept over its maximum too.
    sweep: whether `padded` is swept at all.
    """

    policies: tuple[str, ...]
    seconds: float
    requests: int | None
    rate_rps: float | None
    load: float | None
    padded_batch: int | None
    seed: int
    sweep: bool = True

    def __post_init__(self) -> None:
        if sum(option is not None for option in (self.rate_rps, self.load, self.requests)) > 1:
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

    def measure(self, policy: str, rate_rps: float | None) -> MeasuredPolicy:
        """Measure one policy with the best of its settings; rate_rps None means saturated."""
        best, seen = self.best_of(policy, rate_rps)
        return MeasuredPolicy(best, self._once(best, rate_rps, self._plan.seconds, self._task(best)), seen)

    def best_of(self, policy: str, rate_rps: float | None) -> tuple[str, dict[str, float]]:
        """Return the policy's best settings, and what each gave in a short measurement if there are several.

        Under a rate that is the p90 latency in ms, of which the lowest is best; otherwise cells per second.
        """
        plan, late = self._plan, rate_rps is not None
        settings = settings_of(policy, most=plan.padded_batch, full_first=not late, sweep=plan.sweep)
        if len(settings) == 1:
            return settings[0], {}
        bar = self._bar.add_task(f"sweep of {policy}", total=len(settings), answered="")
        seen = {}
        for setting in settings:
            seconds = min(LOOK_S, plan.seconds)
            measured = self._once(setting, rate_rps, seconds, lambda share, answered: None)
            p90_ms = percentiles(measured.latencies_s).p90_ms
            seen[setting] = p90_ms if late else measured.cells / measured.seconds
            self._bar.advance(bar)
        return (min if late else max)(seen, key=seen.__getitem__), seen

    def _once(self, policy: str, rate_rps: float | None, seconds: float, tell: offering.Progress) -> Measured:
        plan, workload = self._plan, self._workload
        with self._engine(policy) as engine:
            if rate_rps is not None:
                return offering.poisson(engine, workload, rate_rps, seconds, plan.seed, tell)
            if plan.requests is not None:
                return offering.all_at_once(engine, workload, plan.requests, tell)
            waiting = backlog_of(policy, self.batch_of(policy), self._model, workload)
            return offering.backlog(engine, workload, waiting, seconds, tell)

    def peak_rps(self, policy: str) -> float:
        """Return the saturated throughput of a baseline with its best settings, in requests a second."""
        best, _ = self.best_of(policy, None)
        seconds = max(0.5, min(self._plan.seconds, 10.0))
        measured = self._once(best, None, seconds, self._task(f"peak of {best}"))
        return measured.cells / measured.seconds / float(self._workload.cells.mean())

    def reference(self) -> float:
        """Return the cells per second of the same network in plain torch at its best batch size."""
        tell = self._task("reference")
        setting = self._setting
        cells_per_s = reference_cells_per_s(
            setting.model,
            self._model,
            self._workload,
            hidden=setting.hidden,
            layers=setting.layers,
            dtype=setting.dtype,
            threads=setting.threads,
            device=setting.device,
        )
        tell(1.0, 0)
        return cells_per_s

    def batch_of(self, policy: str) -> int:
        """Return the largest number of requests (graph batching) or cells in a batch of the policy."""
        policy_made = made(policy, self._padded_batch)
        if isinstance(policy_made, GraphPolicy | ClosedPolicy):
            return policy_made.max_batch
        return next(iter(self._model.cells.values())).max_batch

    @property
    def _padded_batch(self) -> int:
        return USUAL_MAXIMUM if self._plan.padded_batch is None else self._plan.padded_batch

    def _engine(self, policy: str) -> Engine:
        setting = self._setting
        return Engine(
            self._model,
            made(policy, self._padded_batch),
            workers=setting.workers,
            threads=setting.threads,
            deadline_ms=setting.deadline_ms,
            late="finish",
            device=setting.device,
        )

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
    standings = [bench.measure(policy, rate_rps) for policy in plan.policies]
    reference = max(before, bench.reference())
    results = [report.result(setting, one, bench.batch_of(one.policy), reference) for one in standings]
    report.add_ratios(results)
    return results
