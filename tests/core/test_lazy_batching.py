"""LazyBatching: the golden timeline of its Fig. 10, Equation 1, and what each variant lets in."""

from __future__ import annotations

import numpy as np
import pytest
from scheduler_harness import Harness, cell_type, host
from situation import Situation, enter
from slack_equations import EquationTwo, ReplaySlack, beneficial, largest_prefix

from batchmaker.cost.latency import CellLatency, LatencyTable
from batchmaker.cost.profile import CostProfile, ProfileOptions
from batchmaker.cost.replay import Replay
from batchmaker.errors import OptionError
from batchmaker.graph.cell_graph import Work
from batchmaker.policies.expectation import StepsLeft
from batchmaker.policies.lazy import LazyPolicy
from batchmaker.policies.requests import RequestTable

NAMES = "ABCDEFGH"
NETWORK = [cell_type(i, name, sizes=(1, 8)) for i, name in enumerate(NAMES)]


def unit_profile(batch: tuple[int, ...] = (1, 8), seconds: tuple[float, ...] = (1.0, 1.0)) -> CostProfile:
    table = LatencyTable(tuple(CellLatency(name, batch, seconds, seconds) for name in NAMES))
    return CostProfile("network", ProfileOptions("float32", 1, "a model", "none"), table)


def through_all(recorder):
    """A request that passes through the eight nodes A to H."""
    value = recorder.node(NETWORK[0], [host(1)])
    for cell in NETWORK[1:]:
        value = recorder.node(cell, [value[0]])
    return list(value)
    yield


def test_the_timeline_of_figure_10():
    harness = Harness(NETWORK, policy=LazyPolicy(unit_profile(), benefit=False))
    for request, at_s in ((1, 2.0), (2, 3.5), (3, 4.5)):
        harness.arrive(request, through_all, at_s, deadline_s=100.0)
    harness.run()
    together = [(7.0 + i, name, (1, 2, 3)) for i, name in enumerate("CDEFGH")]
    assert harness.timeline() == [
        (2.0, "A", (1,)),
        (3.0, "B", (1,)),
        (4.0, "A", (2,)),
        (5.0, "A", (3,)),
        (6.0, "B", (2, 3)),
        *together,
    ]
    assert {harness.left_s(request) for request in (1, 2, 3)} == {13.0}
    harness.check_nothing_left()


def situation(
    *, in_flight: list[list[int]], candidates: list[list[int]], sla_s: float, waited_s: float = 0.0, seconds: np.ndarray
) -> Situation:
    """Everybody came at 0 and has waited `waited_s`; steps left are given per request and node."""
    table = RequestTable()
    for _ in NETWORK:
        table.add_type()
    for slot, steps in enumerate(in_flight + candidates):
        present = np.flatnonzero(steps)
        nodes = np.array(steps)[present]
        enter(table, slot, sla_s, Work(present, nodes, nodes))
        if slot < len(in_flight):
            table.begin([slot], waited_s)
    slots = np.arange(len(in_flight) + len(candidates))
    return Situation(table, StepsLeft("true", 0.75, 90.0), Replay(seconds), waited_s, slots, len(in_flight))


FREE = np.concatenate((np.zeros((8, 1)), np.ones((8, 16))), axis=1)  # a batch takes no longer than one row
DEAR = np.tile(np.arange(17.0), (8, 1))  # a batch takes as long as its rows one by one


def test_equation_1_leaves_20_units_of_slack_of_an_sla_of_30():
    waiting, alone = 2.0, float(Replay(FREE).alone(np.ones((1, 8), np.int64))[0])
    assert 30 - (waiting + alone) == 20
    one = situation(in_flight=[[1] * 8], candidates=[[1] * 8] * 3, sla_s=30.0, waited_s=waiting, seconds=FREE)
    test = EquationTwo(oldest_only=False, from_table=False, veto=False)
    assert test.allows(one).tolist() == [True, True, True, False]  # 28 are left for 8, 16, 24 and 32


def test_equation_2_summed_up_keeps_out_whom_the_table_lets_in():
    crowd = situation(in_flight=[[1] * 8], candidates=[[1] * 8] * 10, sla_s=30.0, seconds=FREE)
    summed = EquationTwo(oldest_only=False, from_table=False, veto=False)
    looked_up = EquationTwo(oldest_only=False, from_table=True, veto=False)
    assert largest_prefix(crowd, summed, benefit=False) == 2
    assert largest_prefix(crowd, looked_up, benefit=False) == 10


def test_a_forecast_lets_in_all_whom_it_makes_late_nobody_for():
    half_way = [[0, 0, 0, 0, 1, 1, 1, 1]]
    newcomers = [[1] * 8] * 4
    # four steps to catch up, then four together: everybody is done after 8
    for sla_s, joining in ((8.0, 4), (7.5, 0)):
        boundary = situation(in_flight=half_way, candidates=newcomers, sla_s=sla_s, seconds=FREE)
        assert largest_prefix(boundary, ReplaySlack(veto=False), benefit=False) == joining


def test_a_request_that_is_late_in_any_case_forbids_nothing_unless_told_to():
    hopeless = situation(in_flight=[[1] * 8], candidates=[[1] * 8], sla_s=3.0, seconds=FREE)
    assert ReplaySlack(veto=False).allows(hopeless)[1]
    assert not ReplaySlack(veto=True).allows(hopeless)[1]


def test_joining_pays_where_a_batch_costs_no_more_than_one_row_and_not_where_it_costs_as_much_as_its_rows():
    half_way = [[0, 0, 0, 0, 1, 1, 1, 1]]
    assert beneficial(situation(in_flight=half_way, candidates=[[1] * 8], sla_s=99.0, seconds=FREE))[1]
    assert not beneficial(situation(in_flight=half_way, candidates=[[1] * 8], sla_s=99.0, seconds=DEAR))[1]


def test_no_more_are_in_flight_than_fit_the_smallest_cell():
    harness = Harness(NETWORK, policy=LazyPolicy(unit_profile(), slack="none", benefit=False))
    for request in range(20):
        harness.arrive(request, through_all)
    harness.run()
    assert [len(requests) for _, _, requests in harness.timeline()] == [8] * 8 + [8] * 8 + [4] * 8
    harness.check_nothing_left()


def test_whoever_cannot_be_in_time_is_turned_away_before_anything_is_computed():
    harness = Harness(NETWORK, policy=LazyPolicy(unit_profile(), hopeless="drop"))
    harness.arrive(1, through_all, 0.0, deadline_s=9.0)
    harness.arrive(2, through_all, 0.5, deadline_s=7.0)
    harness.run()
    assert harness.answers[1] == (8.0, "reply")
    assert harness.answers[2][1] == "refused"
    assert all(2 not in requests for _, _, requests in harness.timeline())


def test_without_a_profile_the_steps_seen_so_far_decide():
    harness = Harness(NETWORK, policy=LazyPolicy())
    for request in range(12):
        harness.arrive(request, through_all, 0.25 * request, deadline_s=1000.0)
    harness.run().check_nothing_left()


@pytest.mark.parametrize("wrong", [{"slack": "lots"}, {"quantile": 1.0}, {"max_steps": 0}, {"lengths": "guess"}])
def test_options_that_make_no_sense_are_refused(wrong):
    with pytest.raises(OptionError, match="lazy"):
        LazyPolicy(**wrong)
