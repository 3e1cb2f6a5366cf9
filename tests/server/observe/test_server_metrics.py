"""Counts of what happened, under the names that Prometheus users know, and as Triton's statistics."""

from __future__ import annotations

import asyncio
import re

import numpy as np
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics_families
from prometheus_client.parser import text_string_to_metric_families
from served_models import Counter, Fragile

import batchmaker as bm
from batchmaker.saved.sources import parse_source
from batchmaker.server.access.connections import Connections
from batchmaker.server.faults import ServiceError
from batchmaker.server.formats.messages import InferRequest
from batchmaker.server.formats.tensors import Tensor
from batchmaker.server.limits import Limits
from batchmaker.server.observe.metrics import Metrics
from batchmaker.server.observe.statistics import Histogram
from batchmaker.server.service.descriptions import model_statistics
from batchmaker.server.service.engine_port import EngineOptions
from batchmaker.server.service.repository import Entry, Repository
from batchmaker.server.service.service import Service


def numbers(values, datatype="INT64", **parameters):
    data = np.array(values, np.float32 if datatype == "FP32" else np.int64)
    return InferRequest((Tensor("input_0", datatype, data),), parameters=parameters)


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    """Samples by (name, labels without the version), and statistics by model, after a few known requests."""
    folder = tmp_path_factory.mktemp("models")
    bm.save(Counter(), folder / "counter")
    bm.save(Counter(), folder / "idle")

    async def body():
        limits = Limits()
        repository = Repository([Entry(parse_source(str(folder)), EngineOptions(threads=1))], limits)
        await repository.load_all()
        service = Service(repository, limits)
        for n in (3, 4):
            await service.infer("counter", None, numbers([n], deadline_ms=60_000))
        for bad in (numbers([1, 2]), numbers([50_000], deadline_ms=5)):
            with pytest.raises(ServiceError):
                await service.infer("counter", None, bad)
        service.answered["http", "429"] += 3
        metrics = Metrics(service, Connections(9, 9))
        text = metrics.text().decode()
        open_metrics = metrics.answer("application/openmetrics-text; version=1.0.0,text/plain;q=0.5")
        statistics = {model.name: model_statistics(model) for model in repository.models()}
        await repository.close(5.0)
        return text, statistics, open_metrics

    text, statistics, open_metrics = asyncio.run(body())
    samples = {
        (sample.name, *sorted(value for name, value in sample.labels.items() if name != "version")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    return samples, statistics, text, open_metrics


def test_successes_and_failures_are_counted_under_tritons_names(seen):
    samples, *_ = seen
    assert samples["nv_inference_request_success", "counter"] == 2
    assert samples["nv_inference_request_success", "idle"] == 0
    assert samples["nv_inference_request_failure", "BAD_REQUEST", "counter"] == 1
    assert samples["nv_inference_request_failure", "DEADLINE", "counter"] == 1
    assert samples["nv_inference_pending_request_count", "counter"] == 0
    assert samples["nv_inference_first_response_histogram_ms_count", "counter"] == 2
    durations = [f"nv_inference_{part}_duration_us" for part in ("request", "queue", "compute_infer")]
    assert all(samples[name, "counter"] > 0 for name in durations)


def test_what_triton_has_no_word_for_is_counted_too(seen):
    samples, *_ = seen
    assert samples["batchmaker_nodes_total", "counter"] == 7
    assert samples["batchmaker_deadline_misses_total", "counter"] == 1
    assert samples["batchmaker_slack_seconds_count", "counter"] == 2
    assert samples["batchmaker_cell_rows_total", "count", "counter"] >= 7
    assert samples["batchmaker_cell_steps_total", "count", "counter"] >= 7
    assert samples["batchmaker_open_streams",] == 0


def test_requests_are_counted_by_what_became_of_them_and_their_times_in_seconds(seen):
    samples, *_ = seen
    outcomes = {key[1:]: value for key, value in samples.items() if key[0] == "batchmaker_requests_total" and value}
    assert outcomes == {("counter", "success"): 2, ("bad_request", "counter"): 1, ("counter", "deadline"): 1}
    for name in ("request_duration_seconds", "queue_duration_seconds", "first_response_seconds"):
        assert samples[f"batchmaker_{name}_count", "counter"] == samples[f"batchmaker_{name}_bucket", "+Inf", "counter"]
        assert samples[f"batchmaker_{name}_count", "counter"] == 2
    total = samples["batchmaker_request_duration_seconds_sum", "counter"]
    assert 0 <= samples["batchmaker_queue_duration_seconds_sum", "counter"] <= total
    first_ms = samples["nv_inference_first_response_histogram_ms_sum", "counter"]
    assert first_ms == pytest.approx(1e3 * samples["batchmaker_first_response_seconds_sum", "counter"])


def test_states_are_those_of_the_server_and_of_each_model(seen):
    samples, *_ = seen
    assert samples["batchmaker_ready",] == 1
    assert samples["batchmaker_draining",] == 0
    assert samples["batchmaker_model_ready", "idle"] == samples["batchmaker_engine_up", "idle"] == 1
    assert samples["batchmaker_requests_in_flight", "counter"] == 0
    assert samples["batchmaker_calls_total", "429", "http"] == 3


def test_every_metric_has_help_and_our_own_keep_the_conventions_of_prometheus(seen):
    *_, text, _ = seen
    families = list(text_string_to_metric_families(text))
    assert [family.name for family in families if not family.documentation] == []
    own = [family for family in families if family.name.startswith("batchmaker_")]
    assert len(own) > 25
    assert [family.name for family in own if family.type not in ("counter", "gauge", "histogram")] == []
    assert [family.name for family in own if re.search(r"_(ms|us|mb|kb|minutes|percent)\b", family.name)] == []
    counters = {family.name for family in own if family.type == "counter"}
    assert all(f"# TYPE {name}_total counter" in text for name in counters)


def test_whoever_asks_for_open_metrics_is_told_units(seen):
    *_, (content, media_type) = seen
    assert media_type.startswith("application/openmetrics-text; version=1.0.0")
    families = {family.name: family for family in open_metrics_families(content.decode())}
    assert families["batchmaker_request_duration_seconds"].unit == "seconds"
    assert families["batchmaker_scheduler_seconds"].unit == "seconds"
    assert [
        name for name, f in families.items() if name.endswith("_seconds") and "batchmaker" in name and not f.unit
    ] == []


def test_statistics_have_every_key_and_equal_compute_counts(seen):
    _, statistics, *_ = seen
    counter = statistics["counter"]
    parts = counter["inference_stats"]
    assert parts.keys() == {
        "success", "fail", "queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss",
    }  # fmt: skip
    assert {
        parts[name]["count"] for name in ("success", "queue", "compute_input", "compute_infer", "compute_output")
    } == {2}
    assert parts["fail"]["count"] == 2
    assert counter["inference_count"] == 2
    assert counter["version"] == "1"


def test_a_histogram_counts_each_value_once_at_its_bound():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.add(value)
    assert (histogram.counts, histogram.total) == ([2, 1, 1], 12.0)


def test_a_failing_cell_harms_no_other_request_and_tells_nothing(tmp_path, caplog):
    from batchmaker.server.service.served_model import ServedModel

    served = ServedModel("fragile", "1", Fragile(), EngineOptions(threads=1), Limits(), 10)

    async def body():
        good = [served.infer(numbers([i, 1], "FP32")) for i in range(1, 5)]
        bad = [served.infer(numbers([1, 13], "FP32")), served.infer(numbers([1] * 7, "FP32"))]
        answers = await asyncio.gather(*good, *bad, return_exceptions=True)
        await served.close(5.0)
        return answers

    answers = asyncio.run(body())
    assert [answer.outputs[0].data.tolist() for answer in answers[:4]] == [[2.0], [3.0], [4.0], [5.0]]
    assert [answer.kind.name for answer in answers[4:]] == ["INTERNAL", "INVALID"]
    assert not any("secret" in str(answer) for answer in answers[4:])
    assert sum("secret" in record.error for record in caplog.records) == 2
