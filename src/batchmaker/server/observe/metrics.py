"""What Prometheus reads: Triton's names where Triton has one, and under `batchmaker_` all that Prometheus's own
conventions ask for: seconds and bytes, counters that end in `_total`, help and units."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import Final, final

import msgspec
import torch
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

import batchmaker
from batchmaker.server.access.connections import Connections
from batchmaker.server.observe.logs import LogQueue
from batchmaker.server.observe.observed import ObservedModel, ObservedReload, ObservedService
from batchmaker.server.observe.statistics import CellCounts, Histogram, ModelStatistics

_LABELS: Final = ("model", "version")

_TRITON: Final[dict[str, tuple[str, Callable[[ObservedModel], float]]]] = {
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
_OWN: Final[dict[str, tuple[str, Callable[[ObservedModel], float]]]] = {
    "batchmaker_tasks": ("Tasks given to workers", lambda m: m.port.stats.tasks),
    "batchmaker_engine_restarts": (
        "How often the model's engine has failed and begun anew",
        lambda m: m.port.stats.restarts,
    ),
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
    "batchmaker_websockets": ("Sequences without a name: WebSockets, and sound", lambda m: m.sequences.num_connected),
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
_STATES: Final[dict[str, tuple[str, Callable[[ObservedModel], float]]]] = {
    "batchmaker_model_ready": ("1 while the model takes requests", lambda m: m.ready),
    "batchmaker_requests_in_flight": ("Requests accepted and not answered", lambda m: m.statistics.in_flight),
    "batchmaker_engine_up": (
        "1 while the engine's thread is alive and does not hang",
        lambda m: m.responds,
    ),
    "batchmaker_engine_turn_seconds": (
        "How long the engine's thread has been in its present turn; 0 while it waits. Large: it hangs",
        lambda m: m.port.heartbeat.busy_for_s,
    ),
    "batchmaker_open_sequences": ("Sequences that hold rows", lambda m: m.port.num_sequences),
    "batchmaker_open_websockets": ("Connections that carry sequences", lambda m: len(m.connected)),
}
_HISTOGRAMS: Final[dict[str, tuple[str, Callable[[ObservedModel], Histogram]]]] = {
    "batchmaker_request_duration_seconds": (
        "Time from a request that has been read to its whole answer, of requests answered",
        lambda m: m.statistics.duration_s,
    ),
    "batchmaker_queue_duration_seconds": (
        "Time until the first cell began, of requests answered",
        lambda m: m.statistics.queueing_s,
    ),
    "batchmaker_first_response_seconds": (
        "Time to the first value of a stream, or to the answer",
        lambda m: m.statistics.first_response_s,
    ),
    "batchmaker_slack_seconds": (
        "What was left before the deadlines of requests answered",
        lambda m: m.statistics.slack_s,
    ),
}


def _total_us(counts: ModelStatistics) -> float:
    return 1e6 * (counts.queue_s + counts.input_s + counts.compute_s + counts.output_s)


@final
class Metrics(Collector):
    """Reads the counts of every loaded model on request; it keeps no counts of its own."""

    def __init__(
        self,
        service: ObservedService,
        connections: Connections,
        log: LogQueue | None = None,
        reload: ObservedReload | None = None,
    ) -> None:
        self._service = service
        self._connections = connections
        self._log = log
        self._reload = reload
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def text(self) -> bytes:
        """Return all metrics in Prometheus' text format, version 0.0.4."""
        return generate_latest(self._registry)

    def answer(self, accept: str) -> tuple[bytes, str]:
        """Return all metrics and their media type: OpenMetrics, which has units, for who says so in `Accept`."""
        encode, media_type = choose_encoder(accept)
        return encode(self._registry), media_type

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics with their present values, for prometheus_client. Called for each scrape."""
        models = self._service.repository.models()
        yield from self._triton(models)
        yield _outcomes(models)
        yield _sequence_ends(models)
        for name, (meaning, value) in _OWN.items():
            family = CounterMetricFamily(name, meaning, labels=_LABELS, unit=_unit(name))
            for model in models:
                family.add_metric(_labels(model), value(model))
            yield family
        yield from _cell_metrics(models)
        for name, (meaning, histogram) in _HISTOGRAMS.items():
            times = HistogramMetricFamily(name, meaning, labels=_LABELS, unit=_unit(name))
            for model in models:
                _add_histogram(times, model, histogram(model))
            yield times
        for name, (meaning, state) in _STATES.items():
            gauge = GaugeMetricFamily(name, meaning, labels=_LABELS, unit=_unit(name))
            for model in models:
                gauge.add_metric(_labels(model), state(model))
            yield gauge
        yield from self._of_the_server()
        yield from self._of_the_settings()

    def _of_the_server(self) -> Iterator[Metric]:
        service, connections, log = self._service, self._connections, self._log
        for name, meaning, state in (
            ("ready", "1 while the server takes requests for every model", service.ready),
            ("draining", "1 once the server was told to stop", service.draining),
            ("open_streams", "Streams being sent", service.num_streams),
            ("connections", "Open connections of HTTP and gRPC", connections.num_open),
        ):
            yield GaugeMetricFamily(f"batchmaker_{name}", meaning, value=state)
        calls = CounterMetricFamily(
            "batchmaker_calls", "Calls answered, probes among them, by their code", labels=("protocol", "code")
        )
        for (protocol, code), count in service.answered.copy().items():
            calls.add_metric([protocol, code], count)
        yield calls
        for name, meaning, value in (
            (
                "refused_connections",
                "Connections refused: their address had as many as one may",
                connections.num_refused,
            ),
            ("closed_idle_connections", "Idle connections closed to make room", connections.num_closed_idle),
            ("dropped_log_lines", "Lines of the log dropped, since nobody read them", log.num_dropped if log else 0),
        ):
            yield CounterMetricFamily(f"batchmaker_{name}", meaning, value=value)

    def _of_the_settings(self) -> Iterator[Metric]:
        info = GaugeMetricFamily("batchmaker_build_info", "1; what is running", labels=("version", "torch", "python"))
        info.add_metric([batchmaker.__version__, str(torch.__version__), platform.python_version()], 1)
        yield info
        limits = GaugeMetricFamily("batchmaker_limit", "The server's limits, by their names", labels=("limit",))
        for name, limit in msgspec.structs.asdict(self._service.limits).items():
            limits.add_metric([name], limit)
        yield limits
        reload = self._reload
        if reload is None:
            return
        yield GaugeMetricFamily(
            "batchmaker_config_last_reload_successful",
            "1 if the settings were taken over when they were last read, at the start or at SIGHUP",
            value=reload.successful,
        )
        yield GaugeMetricFamily(
            "batchmaker_config_last_reload_success_timestamp_seconds",
            "When settings were last taken over, in seconds since 1970",
            value=reload.taken_over_unix_s,
            unit="seconds",
        )

    @staticmethod
    def _triton(models: Sequence[ObservedModel]) -> Iterator[Metric]:
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
            _add_histogram(first, model, model.statistics.first_response_s, 1e3)
        yield pending
        yield first


def _triton_counter(name: str, meaning: str, samples: Sequence[tuple[dict[str, str], float]]) -> Metric:
    """Return a counter under exactly this name. It is untyped, because prometheus_client would append `_total`."""
    metric = Metric(name, meaning, "unknown")
    for labels, value in samples:
        metric.add_sample(name, labels, value)
    return metric


def _cell_metrics(models: Sequence[ObservedModel]) -> Iterator[Metric]:
    for name, (meaning, value) in _CELLS.items():
        family = CounterMetricFamily(name, meaning, labels=(*_LABELS, "cell"), unit=_unit(name))
        for model in models:
            for cell, counts in model.statistics.cells.items():
                family.add_metric([*_labels(model), cell], value(counts))
        yield family


def _add_histogram(family: HistogramMetricFamily, model: ObservedModel, seconds: Histogram, times: float = 1.0) -> None:
    """times: how many of the family's units are a second."""
    counts = list(accumulate(seconds.counts))
    bounds = [*(str(times * bound) for bound in seconds.bounds), "+Inf"]
    family.add_metric(_labels(model), list(zip(bounds, counts, strict=True)), times * seconds.total)


def _outcomes(models: Sequence[ObservedModel]) -> Metric:
    """Return all requests of models, those that were refused among them, by what became of them."""
    family = CounterMetricFamily(
        "batchmaker_requests", 'Requests by outcome: "success", or why they failed', labels=(*_LABELS, "outcome")
    )
    for model in models:
        family.add_metric([*_labels(model), "success"], model.statistics.succeeded)
        for kind, count in model.statistics.failed.items():
            family.add_metric([*_labels(model), kind.value.lower()], count + model.statistics.refused[kind])
    return family


def _sequence_ends(models: Sequence[ObservedModel]) -> Metric:
    """Return the ended sequences of models, by why they have ended."""
    family = CounterMetricFamily(
        "batchmaker_sequences_ended", "Sequences that have ended, by why", labels=(*_LABELS, "why")
    )
    for model in models:
        for end, count in model.statistics.sequences_ended.items():
            family.add_metric([*_labels(model), end.value.replace(" ", "_")], count)
    return family


def _unit(name: str) -> str:
    """Return the unit of a metric, "" for a number of things."""
    return "seconds" if name.endswith("_seconds") else ""


def _labels(model: ObservedModel) -> list[str]:
    return [model.name, model.version]


def _triton_labels(model: ObservedModel) -> dict[str, str]:
    return dict(zip(_LABELS, _labels(model), strict=True))
