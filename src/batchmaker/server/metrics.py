"""Metrics for Prometheus: Triton's names where they exist, `batchmaker_` for the rest."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final, final

import msgspec
import torch
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

import batchmaker
from batchmaker.server.connections import Connections
from batchmaker.server.logs import LogQueue
from batchmaker.server.served_model import ServedModel
from batchmaker.server.service import Service
from batchmaker.server.statistics import CellCounts, Histogram, ModelStatistics

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_LABELS: Final = ("model", "version")

_TRITON: Final[dict[str, tuple[str, Callable[[ServedModel], float]]]] = {
    "nv_inference_request_success": ("Requests answered", lambda m: m.statistics.succeeded),
    "nv_inference_count": ("Requests answered", lambda m: m.statistics.succeeded),
    "nv_inference_exec_count": ("Batched calls of cells", lambda m: m.port.stats.steps),
    "nv_inference_request_duration_us": ("Time of requests answered", lambda m: _total_us(m.statistics)),
    "nv_inference_queue_duration_us": ("Time until the first cell began", lambda m: 1e6 * m.statistics.queue_s),
    "nv_inference_compute_input_duration_us": ("Time to read inputs", lambda m: 1e6 * m.statistics.input_s),
    "nv_inference_compute_infer_duration_us": (
        "Time from the first cell to the answer",
        lambda m: 1e6 * m.statistics.compute_s,
    ),
    "nv_inference_compute_output_duration_us": ("Time to make outputs", lambda m: 1e6 * m.statistics.output_s),
}
_OWN: Final[dict[str, tuple[str, Callable[[ServedModel], float]]]] = {
    "batchmaker_tasks": ("Tasks given to workers", lambda m: m.port.stats.tasks),
    "batchmaker_nodes": ("Nodes of requests answered", lambda m: m.statistics.nodes),
    "batchmaker_padding_rows": (
        "Rows computed only to fill a batch size",
        lambda m: m.port.stats.padded_cells - m.port.stats.cells,
    ),
    "batchmaker_deadline_misses": (
        "Requests given up at their deadline, or refused for it",
        lambda m: m.statistics.missed,
    ),
    "batchmaker_sequences": ("Sequences begun", lambda m: m.sequences.num_begun),
    "batchmaker_websockets": ("Sequences begun by WebSocket", lambda m: m.sequences.num_connected),
    "batchmaker_scheduler_seconds": ("Time of the scheduler", lambda m: m.port.stats.scheduler_s),
    "batchmaker_unfold_seconds": ("Time of unfold functions", lambda m: m.port.stats.unfold_s),
    "batchmaker_busy_seconds": ("Time in which workers computed", lambda m: m.port.stats.busy_s),
}
_CELLS: Final[dict[str, tuple[str, Callable[[CellCounts], float]]]] = {
    "batchmaker_cell_steps": ("Batched calls of a cell", lambda c: c.steps),
    "batchmaker_cell_rows": ("Useful rows of a cell; by steps, its batch fill", lambda c: c.rows),
    "batchmaker_cell_computed_rows": ("Rows of a cell, padding included", lambda c: c.padded),
    "batchmaker_cell_busy_seconds": ("Time in a cell", lambda c: c.busy_s),
}


_ENGINE: Final[dict[str, tuple[str, Callable[[ServedModel], float]]]] = {
    "batchmaker_engine_up": (
        "1 while the engine's thread is alive and does not hang",
        lambda m: m.responds,
    ),
    "batchmaker_engine_turn_seconds": (
        "How long the engine's thread has been in its present turn; 0 while it waits. Large: it hangs",
        lambda m: m.port.heartbeat.busy_for_s,
    ),
}


def _total_us(counts: ModelStatistics) -> float:
    return 1e6 * (counts.queue_s + counts.input_s + counts.compute_s + counts.output_s)


@final
class Metrics(Collector):
    """Reads the counts of every loaded model on request; it keeps no counts of its own."""

    def __init__(self, service: Service, connections: Connections, log: LogQueue | None = None) -> None:
        self._service = service
        self._connections = connections
        self._log = log
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format, of type CONTENT_TYPE."""
        return generate_latest(self._registry)

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics with their present values, for prometheus_client. Called for each scrape."""
        models = self._service.repository.models()
        yield from self._triton(models)
        for name, (meaning, value) in _OWN.items():
            family = CounterMetricFamily(name, meaning, labels=_LABELS)
            for model in models:
                family.add_metric(_labels(model), value(model))
            yield family
        yield from _cell_metrics(models)
        slack = HistogramMetricFamily(
            "batchmaker_slack_ms", "What was left before the deadlines of requests answered", labels=_LABELS
        )
        for model in models:
            _add_histogram(slack, model, model.statistics.slack_ms)
        yield slack
        for name, (meaning, state) in _ENGINE.items():
            gauge = GaugeMetricFamily(name, meaning, labels=_LABELS)
            for model in models:
                gauge.add_metric(_labels(model), state(model))
            yield gauge
        sequences = GaugeMetricFamily("batchmaker_open_sequences", "Sequences that hold rows", labels=_LABELS)
        for model in models:
            sequences.add_metric(_labels(model), model.port.num_sequences)
        yield sequences
        sockets = GaugeMetricFamily("batchmaker_open_websockets", "Connections that are a sequence", labels=_LABELS)
        for model in models:
            sockets.add_metric(_labels(model), len(model.connected))
        yield sockets
        yield GaugeMetricFamily("batchmaker_open_streams", "Streams being sent", value=self._service.num_streams)
        yield from self._of_the_server()

    def _of_the_server(self) -> Iterator[Metric]:
        found, log = self._connections, self._log
        yield GaugeMetricFamily("batchmaker_connections", "Open HTTP connections", value=found.num_open)
        for name, meaning, value in (
            (
                "refused_connections",
                "HTTP connections refused: their address had as many as one may",
                found.num_refused,
            ),
            ("closed_idle_connections", "Idle HTTP connections closed to make room", found.num_closed_idle),
            ("dropped_log_lines", "Lines of the log dropped, since nobody read them", log.num_dropped if log else 0),
        ):
            yield CounterMetricFamily(f"batchmaker_{name}", meaning, value=value)
        info = GaugeMetricFamily("batchmaker_build_info", "1; what is running", labels=("version", "torch", "python"))
        info.add_metric([batchmaker.__version__, str(torch.__version__), platform.python_version()], 1)
        yield info
        limits = GaugeMetricFamily("batchmaker_limit", "The server's limits, by their names", labels=("limit",))
        for name, limit in msgspec.structs.asdict(self._service.limits).items():
            limits.add_metric([name], limit)
        yield limits

    @staticmethod
    def _triton(models: Sequence[ServedModel]) -> Iterator[Metric]:
        for name, (meaning, value) in _TRITON.items():
            yield _triton_counter(name, meaning, [(_triton_labels(model), value(model)) for model in models])
        failures = []
        for model in models:
            for kind, count in model.statistics.failed.items():
                number = count + model.statistics.refused[kind]
                failures.append(({**_triton_labels(model), "reason": kind.value}, float(number)))
        yield _triton_counter("nv_inference_request_failure", "Requests refused or failed", failures)
        pending = GaugeMetricFamily("nv_inference_pending_request_count", "Requests in flight", labels=_LABELS)
        first = HistogramMetricFamily(
            "nv_inference_first_response_histogram_ms", "Time to the first response", labels=_LABELS
        )
        for model in models:
            pending.add_metric(_labels(model), model.statistics.in_flight)
            _add_histogram(first, model, model.statistics.first_response_ms)
        yield pending
        yield first


def _triton_counter(name: str, meaning: str, samples: Sequence[tuple[dict[str, str], float]]) -> Metric:
    """Return a counter under exactly this name. It is untyped, because prometheus_client would append `_total`."""
    metric = Metric(name, meaning, "unknown")
    for labels, value in samples:
        metric.add_sample(name, labels, value)
    return metric


def _cell_metrics(models: Sequence[ServedModel]) -> Iterator[Metric]:
    for name, (meaning, value) in _CELLS.items():
        family = CounterMetricFamily(name, meaning, labels=(*_LABELS, "cell"))
        for model in models:
            for cell, counts in model.statistics.cells.items():
                family.add_metric([*_labels(model), cell], value(counts))
        yield family


def _add_histogram(family: HistogramMetricFamily, model: ServedModel, histogram: Histogram) -> None:
    counts = list(accumulate(histogram.counts))
    bounds = [*map(str, histogram.bounds), "+Inf"]
    family.add_metric(_labels(model), list(zip(bounds, counts, strict=True)), histogram.total)


def _labels(model: ServedModel) -> list[str]:
    return [model.name, model.version]


def _triton_labels(model: ServedModel) -> dict[str, str]:
    return dict(zip(_LABELS, _labels(model), strict=True))
