"""Counts of what happened, under the names that Prometheus users know, and as Triton's statistics."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from served_models import Counter, Fragile

import batchmaker as bm
from batchmaker.server.connections import Connections
from batchmaker.server.descriptions import model_statistics
from batchmaker.server.engine_port import EngineOptions
from batchmaker.server.faults import ServiceError
from batchmaker.server.limits import Limits
from batchmaker.server.messages import InferRequest
from batchmaker.server.metrics import Metrics
from batchmaker.server.repository import Entry, Repository
from batchmaker.server.service import Service
from batchmaker.server.sources import parse_source
from batchmaker.server.statistics import Histogram
from batchmaker.server.tensors import Tensor


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
        text = Metrics(service, Connections(9, 9)).text().decode()
        statistics = {model.name: model_statistics(model) for model in repository.models()}
        await repository.close(5.0)
        return text, statistics

    text, statistics = asyncio.run(body())
    samples = {
        (sample.name, *sorted(value for name, value in sample.labels.items() if name != "version")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    return samples, statistics


def test_successes_and_failures_are_counted_under_tritons_names(seen):
    samples, _ = seen
    assert samples["nv_inference_request_success", "counter"] == 2
    assert samples["nv_inference_request_success", "idle"] == 0
    assert samples["nv_inference_request_failure", "BAD_REQUEST", "counter"] == 1
    assert samples["nv_inference_request_failure", "DEADLINE", "counter"] == 1
    assert samples["nv_inference_pending_request_count", "counter"] == 0
    assert samples["nv_inference_first_response_histogram_ms_count", "counter"] == 2
    durations = [f"nv_inference_{part}_duration_us" for part in ("request", "queue", "compute_infer")]
    assert all(samples[name, "counter"] > 0 for name in durations)


def test_what_triton_has_no_word_for_is_counted_too(seen):
    samples, _ = seen
    assert samples["batchmaker_nodes_total", "counter"] == 7
    assert samples["batchmaker_deadline_misses_total", "counter"] == 1
    assert samples["batchmaker_slack_ms_count", "counter"] == 2
    assert samples["batchmaker_cell_rows_total", "count", "counter"] >= 7
    assert samples["batchmaker_cell_steps_total", "count", "counter"] >= 7
    assert samples["batchmaker_open_streams",] == 0


def test_statistics_have_every_key_and_equal_compute_counts(seen):
    _, statistics = seen
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
    from batchmaker.server.served_model import ServedModel

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
