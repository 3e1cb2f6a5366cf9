"""Closed batches of cells: nobody joins a batch that runs, and the answers are those of cellular batching."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch

import batchmaker as bm
from batchmaker.errors import OptionError
from batchmaker.graph.recorder import Recorder
from batchmaker.graph.spec import CellType, TypeId, ValueSpec
from batchmaker.graph.values import HostValues
from batchmaker.lab import zoo
from batchmaker.lab.baselines import ClosedPolicy
from batchmaker.lab.simulator.costs import StepCosts
from batchmaker.lab.simulator.simulate import SimulatedDevice, simulate
from batchmaker.lab.simulator.workload import Offered, SimulatedModel, SimulatedRequest

NUMBER = ValueSpec((), "int64")
MODEL = SimulatedModel("chain", (CellType(TypeId(0), "step", (NUMBER,) * 2, (NUMBER,), (1, 2, 4)),))


def chain(steps: int) -> SimulatedRequest:
    recorder = Recorder()
    recorder.run(MODEL.cells[0], [HostValues(None, steps, NUMBER)], None)
    return SimulatedRequest(recorder.take(), steps)


def times(lengths: Sequence[int], arrived_s: Sequence[float], **options: int | bool) -> list[tuple[float, float]]:
    """When each request begins and ends, where every step takes a second."""
    costs = StepCosts(np.array([[0.0, 1.0, 1.0, 1.0, 1.0]]))
    offered = Offered([chain(length) for length in lengths], np.array(arrived_s, np.float64))
    done = simulate(MODEL, ClosedPolicy(**options), offered, SimulatedDevice(costs))  # type: ignore[arg-type]
    return list(zip(done.started_s.tolist(), done.finished_s.tolist(), strict=True))


def test_a_late_request_waits_for_the_batch_that_runs():
    assert times([3, 2, 1], [0, 0, 1]) == [(0, 3), (0, 2), (3, 4)]


def test_requests_of_other_buckets_wait_for_their_turn():
    assert times([1, 12, 2], [0, 0, 0], max_batch=4) == [(0, 1), (2, 14), (0, 2)]


def test_a_batch_takes_as_many_requests_as_it_may():
    assert times([1, 1, 1], [0, 0, 0], max_batch=2) == [(0, 1), (0, 1), (1, 2)]


def test_full_buckets_go_first_if_asked():
    assert times([1, 12, 12], [0, 0, 0], max_batch=2, full_first=True) == [(12, 13), (0, 12), (0, 12)]


@pytest.mark.parametrize("options", [{"max_batch": 0}, {"bucket_width": 0}])
def test_empty_batches_and_buckets_are_refused(options):
    with pytest.raises(OptionError, match="at least 1"):
        ClosedPolicy(**options)


def test_its_answers_are_those_of_the_model():
    model = zoo.make("lstm", hidden=8, vocabulary_size=20, max_batch=4)
    requests = [list(range(1, n)) for n in (3, 9, 4, 12, 6, 2)]
    with bm.Engine(model, "closed:max_batch=3", threads=1) as engine:
        answers = engine.map(requests, progress=False)
    for answer, request in zip(answers, requests, strict=True):
        torch.testing.assert_close(answer, model.batched([request])[0])
