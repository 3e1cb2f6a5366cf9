"""Simulations of models that decide by values: what runs is what runs live, as each request was computed once."""

from __future__ import annotations

import pickle
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import batchmaker as bm
from batchmaker import policies
from batchmaker.cli.cell_times import bound_registry
from batchmaker.core.commands import RunTask
from batchmaker.errors import InvalidRequestError, InvariantError, ModelError, OptionError
from batchmaker.graph.regions import segments_of
from batchmaker.lab import zoo
from batchmaker.lab.simulator.costs import StepCosts
from batchmaker.lab.simulator.decisions import Deciding
from batchmaker.lab.simulator.simulate import SimulatedDevice, simulate
from batchmaker.lab.simulator.simulation import Computed
from batchmaker.lab.simulator.together import Together
from batchmaker.lab.simulator.workload import Offered, Records, SimulatedRequest
from batchmaker.lab.zoo.blueprint import Blueprint, blueprint
from covering import covering
from insides import network_of

WIDTH = 12
NETWORKS: dict[str, dict[str, Any]] = {
    "early-exit": {"width": WIDTH, "layers": 4, "output": "scores"},
    "experts": {"width": WIDTH},
    "rnnt": {"pitches": 5, "vocabulary_size": 9, "hidden": 16, "layers": 1},
}


def make(name: str) -> Any:
    return zoo.make(name, **{"max_batch": 4, **NETWORKS[name]})


def requests_of(name: str, count: int) -> list[Any]:
    rng = np.random.default_rng(1)
    if name == "rnnt":
        return [rng.normal(size=(n, 5)) for n in rng.integers(1, 20, count).tolist()]
    return list(rng.normal(size=(count, WIDTH)))


class Down(nn.Module):
    """n -> n - 1, whether it is above 0."""

    def forward(self, n: Tensor) -> tuple[Tensor, Tensor]:
        return n - 1, n > 1


class Twice(bm.Model):
    """Counts two numbers down, independently of each other, by loops of equal bodies."""

    example_request = (3, 2)

    def __init__(self) -> None:
        self.down = bm.Cell(Down())

    def unfold(self, request: Any) -> Any:
        def last(number: int) -> Any:
            return bm.while_loop(lambda s: s[1], lambda s: self.down(s[0]), (number, True), max_steps=50)[0]

        return [last(number) for number in request]


class Which(nn.Module):
    """n -> n modulo 7."""

    def forward(self, n: Tensor) -> Tensor:
        return n % 7


class Picks(bm.Model):
    """Takes the element of a run that a value names, and then a branch."""

    example_request = (1, 2, 3)

    def __init__(self) -> None:
        self.which, self.down = bm.Cell(Which()), bm.Cell(Down())

    def unfold(self, request: Any) -> Any:
        numbers = self.which.map(request)
        one = numbers.at(self.which(int(request[0])))
        return bm.switch(one, [lambda: self.down(one)[0], lambda: self.which(one), lambda: one])


def costs(plan: Blueprint, seconds: float = 1.0) -> StepCosts:
    most = max(cell.max_batch for cell in plan.model.cells)
    return StepCosts(np.full((len(plan.model.cells), most + 1), seconds))


def played(
    plan: Blueprint, requests: list[SimulatedRequest], policy: str = "cellular", apart_s: float = 0.5, **options: Any
) -> tuple[Records, Counter[str]]:
    """What becomes of requests, and the rows of each cell."""
    rows: Counter[str] = Counter()

    def count(computed: Computed) -> None:
        rows[computed.what] += len(computed.requests)

    offered = Offered(requests, np.arange(len(requests)) * apart_s)
    device = SimulatedDevice(costs(plan))
    return simulate(plan.model, policies.make(policy), offered, device, observe=count, **options), rows


def live(model: Any, requests: list[Any], policy: str) -> Counter[str]:
    """The rows of each cell that an engine runs."""
    rows: Counter[str] = Counter()
    engine = bm.Engine(model, policy, threads=1)

    def record(_: Any, commands: Any) -> None:
        for command in commands:
            if isinstance(command, RunTask):
                rows[engine.registry.types[command.type_id].name] += len(command.nodes)

    with engine:
        engine.driver.record = record
        engine.map(requests, progress=False)
    return rows


@pytest.mark.slow
@pytest.mark.parametrize(("name", "policy"), covering(NETWORKS, ["cellular", "auto", "agenda"]))
def test_a_simulation_runs_the_rows_that_an_engine_runs(name, policy):
    model, requests = make(name), requests_of(name, 30)
    plan = Blueprint(name, model, computes=True)
    records, rows = played(plan, [plan.request(request) for request in requests], policy)
    assert records.answered.all()
    assert rows == live(model, requests, "cellular" if policy == "agenda" else policy)


@pytest.mark.parametrize("name", NETWORKS)
def test_the_work_of_a_request_is_what_runs(name):
    plan = Blueprint(name, make(name), computes=True)
    for given in requests_of(name, 8):
        request = plan.request(given)
        _, rows = played(plan, [request])
        work = request.work
        names = [plan.model.cells[number].name for number in work.types.tolist()]
        assert rows == dict(zip(names, work.nodes.tolist(), strict=True))


def test_a_request_alone_takes_as_long_as_the_blocks_that_it_needs():
    model = make("early-exit")
    plan = Blueprint("early-exit", model, computes=True)
    taken = []
    for request in requests_of("early-exit", 40):
        x = torch.from_numpy(request)[None].float()
        for count, block in enumerate(network_of(model), 1):  # noqa: B007 - read after the loop
            x, _, is_sure = block(x)
            if is_sure[0]:
                break
        records, _ = played(plan, [plan.request(request)])
        assert records.finished_s[0] == pytest.approx(count)
        taken.append(count)
    assert len(set(taken)) > 2


def test_a_whole_batch_takes_as_many_steps_as_its_longest_request():
    plan = Blueprint("early-exit", make("early-exit"), computes=True)
    requests = [plan.request(request) for request in requests_of("early-exit", 6)]
    records, _ = played(plan, requests, "graph:window_ms=1000,max_batch=6", apart_s=0.0)
    longest = max(int(request.work.nodes.sum()) for request in requests)
    assert records.finished_s.tolist() == [pytest.approx(records.started_s[0] + 2 * longest)] * 6  # 6 rows, 4 and 2


def test_loops_of_equal_bodies_may_change_places_and_nothing_is_left_over():
    plan = Blueprint("twice", Twice(), computes=True)
    pairs = [(3, 9), (9, 3), (1, 1), (12, 5)]
    requests = [plan.request(pair) for pair in pairs]
    records, rows = played(plan, requests, apart_s=0.0)
    assert records.answered.all()
    assert rows["down"] == sum(map(sum, pairs))
    assert rows == live(Twice(), pairs, "cellular")


def test_elements_and_branches_are_those_that_values_name():
    plan, requests = Blueprint("picks", Picks(), computes=True), [(1, 2, 3), (0, 1, 2), (2, 9, 7), (1, 8, 1)]
    records, rows = played(plan, [plan.request(request) for request in requests])
    assert records.answered.all()
    assert rows == live(Picks(), requests, "cellular")


@pytest.mark.parametrize(("request_of", "said"), [((5, 2, 3), "`at` got index 5"), ((1, 5, 3), "`switch` got index 5")])
def test_a_value_that_names_nothing_is_an_error_of_the_request(request_of, said):
    plan = Blueprint("picks", Picks(), computes=True)
    with pytest.raises(InvalidRequestError, match=said):
        plan.request(request_of)


def test_requests_of_equal_values_are_one_object_and_others_are_not():
    plan, (one, other) = Blueprint("early-exit", make("early-exit"), computes=True), requests_of("early-exit", 2)
    assert plan.request(one) is plan.request(one.copy())
    assert plan.request(one) is not plan.request(other)


def test_a_request_goes_to_another_process_with_its_decisions():
    plan = Blueprint("rnnt", make("rnnt"), computes=True)
    requests = [plan.request(request) for request in requests_of("rnnt", 12)]
    records, rows = played(plan, requests)
    again, rows_again = played(plan, pickle.loads(pickle.dumps(requests)))
    assert rows_again == rows
    np.testing.assert_array_equal(again.finished_s, records.finished_s)


def test_late_requests_may_fail_in_the_middle():
    plan = Blueprint("rnnt", make("rnnt"), computes=True)
    requests = [plan.request(request) for request in requests_of("rnnt", 20)]
    records, _ = played(plan, requests, apart_s=20.0, sla_s=50.0, give_up_late=True)
    assert 0 < records.answered.sum() < 20


def test_weights_are_made_only_for_a_model_that_decides():
    made: list[Any] = []
    plan = blueprint("early-exit", lambda: made.append(make("early-exit")) or made[-1], computes=True)
    assert plan.decides
    assert [next(cell.module.parameters()).device.type for cell in (one.blocks[0] for one in made)] == ["meta", "cpu"]
    assert not blueprint("lstm", lambda: zoo.make("lstm", hidden=8), computes=True).decides
    with pytest.raises(ModelError, match="decides by values"):
        blueprint("early-exit", lambda: make("early-exit"))


def test_what_needs_no_values_says_so():
    plan = Blueprint("early-exit", make("early-exit"), computes=True)
    some = [plan.request(request) for request in requests_of("early-exit", 20)]
    request = next(one for one in some if one.decided is not None and () in one.decided.begun)
    with pytest.raises(ModelError, match="takes whole requests"):
        plan.sized(3)
    with pytest.raises(OptionError, match="cannot run with others"):
        Together([plan.model]).request(0, request)
    with pytest.raises(OptionError, match="recorded decisions"):
        SimulatedRequest(request.graph, 1)
    deciding, region = Deciding(), request.graph.region
    number = request.decided.begun.index(())  # of a segment that never began
    with pytest.raises(InvariantError, match="begin 1 times, recorded one less"):
        deciding.begun(0, region, request.decided, segments_of(region)[number], 0)


@pytest.mark.parametrize("name", NETWORKS)
def test_cells_have_names_of_their_own(name):
    model = make(name)
    names = [cell.name for cell in bound_registry(model).types]
    assert len(set(names)) == len(names)
    assert names == [cell.name for cell in Blueprint(name, model, computes=True).model.cells]
