"""What the policy `auto` decides, under a virtual clock: who begins, which model and which type goes first."""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_models import CHAIN, NUMBER, PAIR, cell_type, chain, offered, pair, random_arrivals

from batchmaker.cost.latency import CellLatency, LatencyTable
from batchmaker.cost.profile import CostProfile, ProfileOptions
from batchmaker.errors import OptionError
from batchmaker.graph.cell_graph import Work
from batchmaker.graph.recorder import Recorder
from batchmaker.graph.values import HostValues
from batchmaker.lab.simulator.costs import StepCosts, step_costs
from batchmaker.lab.simulator.simulate import SimulatedDevice, simulate
from batchmaker.lab.simulator.simulation import Computed
from batchmaker.lab.simulator.together import Together
from batchmaker.lab.simulator.workload import Records, SimulatedModel, SimulatedRequest
from batchmaker.policies import AutoPolicy, make, run_lengths
from batchmaker.policies.requests import RequestTable
from insides import lengths_of

LAYERS = SimulatedModel("layers", tuple(cell_type(i, name, 1, 1, (1, 8)) for i, name in enumerate("abc")))
TAGGER = SimulatedModel("tagger", (cell_type(0, "step", 2, 1, (1, 64)), cell_type(1, "label", 1, 1, (1, 64))))


def layered() -> SimulatedRequest:
    """A request that passes through three cells."""
    recorder = Recorder()
    value: Any = HostValues(None, 1, NUMBER)
    for cell in LAYERS.cells:
        (value,) = recorder.node(cell, [value])
    return SimulatedRequest(recorder.take(), 1)


def sentence(words: int) -> SimulatedRequest:
    """A chain, and a label for each of its steps."""
    recorder = Recorder()
    (state,) = recorder.run(TAGGER.cells[0], [HostValues(None, words, NUMBER)], None)
    recorder.map(TAGGER.cells[1], [state.steps])
    return SimulatedRequest(recorder.take(), words)


def profile_of(model: SimulatedModel, per_row_s: float) -> CostProfile:
    """A step takes a second, or so much more for each row."""
    most = max(cell.max_batch for cell in model.cells)
    seconds = (1.0, 1.0 + per_row_s * (most - 1))
    cells = tuple(CellLatency(cell.name, (1, most), seconds, seconds) for cell in model.cells)
    return CostProfile(model.name, ProfileOptions("float32", 1, "none", "none"), LatencyTable(cells))


def play(
    model: SimulatedModel,
    requests: Any,
    arrived_s: Any,
    *,
    per_row_s: float = 0.0,
    told: bool = True,
    sla_s: float | None = None,
    workers: int = 1,
) -> tuple[Records, list[Computed]]:
    """Records and every batched call. told: whether the policy is given the costs."""
    profile, calls = profile_of(model, per_row_s), []
    device = SimulatedDevice(step_costs(model, profile.latency, padded=False), workers, run_ahead=workers - 1)
    policy = AutoPolicy(profile if told else None, max_steps=1)
    return simulate(model, policy, offered(requests, arrived_s), device, sla_s=sla_s, observe=calls.append), calls


def test_it_is_found_by_name_and_wrong_options_are_refused() -> None:
    assert make("auto:budget_ms=2,max_steps=7").budget_s == 0.002
    assert make("auto:max_steps=7").max_steps == 7
    for wrong in ("auto:budget_ms=0", "auto:max_steps=0", "auto:window_ms=5"):
        with pytest.raises(OptionError, match="auto"):
            make(wrong)


def test_requests_run_one_after_the_other_where_a_batch_costs_as_much_as_its_rows() -> None:
    records, _ = play(LAYERS, [layered()] * 3, [0.0] * 3, per_row_s=1.0)
    assert records.finished_s.tolist() == [3.0, 6.0, 9.0]


def test_requests_run_together_where_a_batch_costs_no_more_than_a_row() -> None:
    records, _ = play(LAYERS, [layered()] * 3, [0.0] * 3)
    assert records.finished_s.tolist() == [3.0] * 3


def test_a_newcomer_catches_up_if_that_makes_the_sum_of_finish_times_smaller() -> None:
    records, calls = play(LAYERS, [layered()] * 2, [0.0, 0.5])
    assert [(call.what, len(call.requests)) for call in calls] == [("a", 1), ("a", 1), ("b", 2), ("c", 2)]
    assert records.finished_s.tolist() == [4.0, 4.0]  # one after the other: 3 and 6
    records, _ = play(LAYERS, [layered()] * 2, [0.0, 1.5])
    assert records.finished_s.tolist() == [3.0, 6.0]  # together 5 and 5
    records, _ = play(LAYERS, [layered()] * 2, [0.0, 0.5], per_row_s=0.5)
    assert records.finished_s.tolist() == [3.0, 6.0]  # together 5 and 5


def test_chains_of_one_type_join_where_full_batches_gain_and_wait_where_they_do_not() -> None:
    together, _ = play(CHAIN, [chain(3)] * 2, [0.0, 0.5], per_row_s=0.25)
    assert together.finished_s.tolist() == [3.5, 4.5]
    apart, _ = play(CHAIN, [chain(3)] * 2, [0.0, 0.5], per_row_s=1.0)
    assert apart.finished_s.tolist() == [3.0, 6.0]


def test_of_two_full_batches_the_one_further_on_goes_first() -> None:
    parts = SimulatedModel("parts", (cell_type(0, "part", 1, 1, (1, 2)), cell_type(1, "whole", 2, 1, (1, 2))))
    recorder = Recorder()
    (values,) = recorder.map(parts.cells[0], [HostValues(None, 2, NUMBER)])
    recorder.node(parts.cells[1], [values[0], values[1]])
    records, calls = play(parts, [SimulatedRequest(recorder.take(), 1)] * 4, [0.0] * 4)
    assert [call.what for call in calls] == ["part", "part", "whole", "part", "part", "whole"]
    assert records.finished_s.tolist() == [3.0, 3.0, 6.0, 6.0]


def test_a_newcomer_waits_where_it_would_make_more_of_them_late() -> None:
    requests, arrived_s = [layered()] * 2, [0.0, 0.5]
    assert play(LAYERS, requests, arrived_s, sla_s=3.1)[0].finished_s.tolist() == [3.0, 6.0]
    assert play(LAYERS, requests, arrived_s, sla_s=9.0)[0].finished_s.tolist() == [4.0, 4.0]


def test_who_cannot_be_in_time_stands_behind_who_can_and_not_for_ever() -> None:
    """A request takes 3 s and may take 5. The second can no longer be in time once the first is done; the third can."""
    alone = play(LAYERS, [layered()] * 3, [0.0, 0.1, 2.0], per_row_s=1.0, sla_s=5.0)[0]
    assert alone.finished_s.tolist() == [3.0, 9.0, 6.0]
    arrived_s = [0.0, 0.1, *(3.0 * k - 1.0 for k in range(1, 40))]  # after it, a stream of others that can
    stream = play(LAYERS, [layered()] * 41, arrived_s, per_row_s=1.0, sla_s=5.0)[0]
    assert 50.0 < stream.finished_s[1] < 62.0  # its place is kept once it has waited ten times what it was given
    assert (stream.finished_s[2:15] - np.array(arrived_s[2:15]) == 4.0).all()


@pytest.mark.parametrize("told", [True, False])
def test_labels_are_not_put_off_to_the_end_of_the_longest_sentence(told: bool) -> None:
    records, _ = play(TAGGER, [sentence(3), sentence(40)], [0.0, 0.0], told=told)
    assert records.finished_s[0] <= 9.0  # its steps, five that pay for the call, and the call
    assert records.finished_s[1] <= 42.0


def test_labels_wait_for_each_other_while_waiting_costs_less_than_a_call() -> None:
    _, calls = play(TAGGER, [sentence(n) for n in (10, *[12] * 20)], [0.0] * 21)
    assert [call.what for call in calls].count("label") == 4  # of 250, 64 at most in a call
    assert calls[-1].end_s == 16.0


def test_a_label_is_computed_at_once_if_its_deadline_would_pass() -> None:
    requests, arrived_s = [sentence(3), *[sentence(40)] * 5], [0.0] * 6
    hurried, _ = play(TAGGER, requests, arrived_s, sla_s=4.5)
    assert hurried.finished_s[0] == 4.0
    assert play(TAGGER, requests, arrived_s)[0].finished_s[0] > 4.5


def test_of_several_models_the_one_goes_first_that_answers_most_for_its_time() -> None:
    both = Together([CHAIN, PAIR])
    requests = [both.request(1, pair(20, 1)), both.request(0, chain(2)), both.request(0, chain(2))]
    records, _ = play(both.model, requests, [0.0, 5.5, 6.5])
    assert records.finished_s[1:].tolist() == [8.0, 9.0]
    assert records.finished_s[0] == 24.0


def test_a_model_none_of_whose_requests_can_be_in_time_goes_behind_one_with_requests_that_can() -> None:
    """Four chains of 6 s together answer more for their time than a pair of 4 s, but cannot be in time."""
    both = Together([CHAIN, PAIR])
    requests = [*[both.request(0, chain(6))] * 4, both.request(1, pair(2, 2))]
    arrived_s = [0.0, 0.0, 0.0, 0.0, 0.5]
    hurried, _ = play(both.model, requests, arrived_s, sla_s=5.0)
    assert hurried.finished_s.tolist() == [10.0, 10.0, 10.0, 10.0, 5.0]
    for sla_s in (None, 7.0):  # without a deadline, and with one that chains can meet
        assert play(both.model, requests, arrived_s, sla_s=sla_s)[0].finished_s.tolist() == [6.0, 6.0, 6.0, 6.0, 10.0]


def waiting(model: SimulatedModel, work: Work, num_waiting: int) -> tuple[RequestTable, Any]:
    """A table with one request in flight and some in line, each with this work; and what the policy sees of them."""
    table, slots = RequestTable(), np.arange(1 + num_waiting)
    for _ in model.cells:
        table.add_type()
    for slot in slots.tolist():
        table.enter(slot, 0.0, np.inf, 0, 0, is_open=False)
        table.add_work(slot, work)
    table.begin([0], 0.0)
    view = SimpleNamespace(
        now_s=0.0,
        cells=model.cells,
        kinds=table,
        requests=table,
        num_waiting=num_waiting,
        waiting=lambda limit: slots[1:][:limit],
    )
    return table, view


def test_no_worker_is_idle_while_a_request_waits() -> None:
    """A batch costs as much as its rows, so nobody joins; the second worker takes the next in line all the same."""
    records, calls = play(LAYERS, [layered()] * 8, [0.0] * 8, per_row_s=1.0, workers=2)
    assert records.finished_s.max() <= 14.0  # 24 calls of a second
    assert {call.worker for call in calls} == {0, 1}


def in_order(policy: AutoPolicy, view: Any) -> list[int]:
    """Who begins where nothing holds anybody back, in this order."""
    return list(policy.admit(view).begin)


def test_a_loop_that_may_end_at_once_is_not_put_behind_others() -> None:
    table, view = waiting(CHAIN, Work(np.zeros(1, np.int64), np.full(1, 100), np.full(1, 100)), num_waiting=2)
    table.has_deadlines, table.deadline_s[1], table.deadline_s[2] = True, 40.0, 200.0
    assert in_order(AutoPolicy(profile_of(CHAIN, 0.0)), view) == [2, 1]  # 100 steps cannot be done after 40 s
    table.note_run(0, may_stop=True)
    assert in_order(AutoPolicy(profile_of(CHAIN, 0.0)), view) == [1, 2]


def test_a_loop_of_a_type_that_came_after_the_request_began_is_learnt_from_when_it_is_answered() -> None:
    table, view = waiting(TAGGER, Work(np.arange(2), np.array([4, 4]), np.array([4, 4])), num_waiting=0)
    policy = AutoPolicy()
    policy.admit(view)
    loop = cell_type(2, "loop", 1, 1, (1, 64))
    view.cells = (*view.cells, loop)  # its unfold function went on, and the one in flight is alone
    table.add_type()
    table.note_run(2, may_stop=True)
    table.submitted(np.zeros(3, np.int64), 2)
    policy.requests_finished(view, [0])
    table.add_work(0, Work(np.full(1, 2), np.full(1, 40), np.full(1, 40)))
    table.done[0, 2] = 0
    assert lengths_of(policy).remaining(table, np.array([0]))[0, 2] == 3


def test_a_late_request_keeps_its_place_before_those_of_lower_priority() -> None:
    table, view = waiting(CHAIN, Work(np.zeros(1, np.int64), np.full(1, 5), np.full(1, 5)), num_waiting=3)
    table.has_deadlines, table.deadline_s[1], table.priority[1:3] = True, 1.0, 7
    assert in_order(AutoPolicy(profile_of(CHAIN, 0.0)), view) == [2, 1, 3]


def test_a_line_of_requests_that_repeat_one_type_begins_as_a_whole_where_full_batches_gain() -> None:
    work = Work(np.zeros(1, np.int64), np.full(1, 5), np.full(1, 5))
    _, view = waiting(CHAIN, work, num_waiting=30)
    assert list(AutoPolicy(profile_of(CHAIN, 0.25)).admit(view).begin) == list(range(1, 31))
    assert list(AutoPolicy(profile_of(CHAIN, 1.0)).admit(view).begin) == []


def test_of_single_calls_as_many_begin_as_a_batch_takes() -> None:
    one = np.ones(1, np.int64)
    _, view = waiting(CHAIN, Work(0 * one, one, one), num_waiting=30)
    assert list(AutoPolicy(profile_of(CHAIN, 0.0)).admit(view).begin) == [1, 2, 3]  # with the one in flight, four


def test_runs_of_one_type_whose_full_batches_gain_begin_when_they_arrive_unless_some_request_has_a_deadline() -> None:
    table, view = waiting(CHAIN, Work(np.zeros(1, np.int64), np.full(1, 5), np.full(1, 5)), num_waiting=0)
    gains, gains_nothing = AutoPolicy(profile_of(CHAIN, 0.25)), AutoPolicy(profile_of(CHAIN, 1.0))
    assert not gains.begins_on_arrival(view)  # single calls so far
    table.note_run(0, may_stop=False)
    assert gains.begins_on_arrival(view)
    assert not gains_nothing.begins_on_arrival(view)
    table.has_deadlines = True
    assert not gains.begins_on_arrival(view)


TREE = SimulatedModel(
    "tree", tuple(cell_type(i, name, 1, 1, (1, 64)) for i, name in enumerate(("leaf", "noun", "verb", "label")))
)


@pytest.mark.parametrize(
    ("model", "nodes", "steps", "all_begin"),
    [
        pytest.param(TAGGER, [4, 4], [4, 1], True, id="a tagger: its labels are one step"),
        pytest.param(TREE, [9, 8, 0, 9], [1, 4, 0, 1], True, id="a tree: only its inner nodes follow each other"),
        pytest.param(LAYERS, [1, 1, 1], [1, 1, 1], False, id="layers: nothing is repeated"),
        pytest.param(LAYERS, [4, 4, 1], [4, 4, 1], False, id="two runs, one after the other"),
    ],
)
def test_all_begin_where_requests_repeat_one_part_of_the_network(
    model: SimulatedModel, nodes: list[int], steps: list[int], all_begin: bool
) -> None:
    """Who joins after a call of the first type makes the sum of finish times larger, so the forecast lets nobody."""
    policy, used = AutoPolicy(profile_of(model, 0.25)), np.flatnonzero(nodes)
    table, view = waiting(model, Work(used, np.array(nodes)[used], np.array(steps)[used]), num_waiting=2)
    for type_id in used[:-1]:
        table.submitted(np.zeros(nodes[type_id], np.int64), type_id)
    assert list(policy.admit(view).begin) == ([1, 2] if all_begin else [])


def test_types_that_a_request_was_in_the_middle_of_at_once_are_one_part() -> None:
    policy = AutoPolicy(profile_of(TREE, 0.0))
    work = Work(np.arange(4), np.array([9, 4, 4, 9]), np.array([1, 2, 2, 1]))
    table, view = waiting(TREE, work, num_waiting=200)  # a full batch of leaves already
    table.submitted(np.repeat(0, 9), 0)
    table.submitted(np.repeat(0, 3), 1)
    few = list(policy.admit(view).begin)
    table.submitted(np.zeros(1, np.int64), 2)
    table.changes += 1
    assert len(few) < 200 == len(policy.admit(view).begin)


def stack(model: SimulatedModel, words: int) -> SimulatedRequest:
    """Layers of recurrent cells, each one over all words before the next one."""
    recorder = Recorder()
    given: Any = HostValues(None, words, NUMBER)
    for cell in model.cells:
        (state,) = recorder.run(cell, [given], None)
        given = state.steps
    return SimulatedRequest(recorder.take(), words)


def test_a_long_line_before_many_layers_is_answered_in_nearly_full_batches() -> None:
    model = SimulatedModel("stack", tuple(cell_type(i, f"layer{i}", 2, 1, (1, 8)) for i in range(6)))
    lengths = np.random.default_rng(0).integers(1, 20, 400).tolist()
    _, calls = play(model, [stack(model, words) for words in lengths], [0.0] * 400)
    rows = sum(len(call.requests) for call in calls) / len(calls)
    assert rows > 0.95 * 8, "small groups that join where others have left run through all layers alone"


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.booleans(), st.booleans())
def test_every_request_is_answered_after_its_steps_and_the_same_comes_out_again(
    seed: int, told: bool, hurry: bool
) -> None:
    rng = random.Random(seed)
    both = Together([CHAIN, TAGGER, PAIR])
    makers = (
        lambda: both.request(0, chain(rng.randint(1, 6))),
        lambda: both.request(1, sentence(rng.randint(1, 6))),
        lambda: both.request(2, pair(rng.randint(1, 4), rng.randint(1, 4))),
    )
    requests = [rng.choice(makers)() for _ in range(rng.randint(1, 20))]
    arrived_s = random_arrivals(rng, len(requests), 30.0)
    per_row_s = rng.choice([0.0, 0.2, 1.0])
    sla_s = 8.0 if hurry else None
    one, calls = play(both.model, requests, arrived_s, per_row_s=per_row_s, told=told, sla_s=sla_s)
    assert one.answered.all()
    assert (one.finished_s - one.arrived_s >= [request.length - 1e-9 for request in requests]).all()
    assert one.rows == sum(request.graph.num_nodes for request in requests)
    other, _ = play(both.model, requests, arrived_s, per_row_s=per_row_s, told=told, sla_s=sla_s)
    assert np.array_equal(one.finished_s, other.finished_s)
    assert len(calls) == other.steps


def test_costs_are_learnt_by_size_so_that_batches_that_gain_nothing_are_given_up() -> None:
    """Without a profile the first batches are tried; then requests run one after the other."""
    seconds = StepCosts(np.tile(np.arange(9.0), (3, 1)))
    arrived_s = [20.0 * (i // 2) for i in range(80)]
    calls: list[Computed] = []
    simulate(LAYERS, AutoPolicy(), offered([layered()] * 80, arrived_s), SimulatedDevice(seconds), observe=calls.append)
    assert max(len(call.requests) for call in calls[:10]) > 1
    assert max(len(call.requests) for call in calls[-30:]) == 1


@pytest.fixture
def benchmark_script(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).resolve().parents[3] / "benchmarks"))
    yield importlib.import_module("default_policy")
    sys.modules.pop("default_policy", None)


def seen(policy: str, load: float, mean_ms: float, *, answered: int = 10, late: float = 0.0) -> dict[str, Any]:
    """What one simulation of the benchmark came to."""
    return {
        "network": "n", "load": load, "sla": None, "arrivals": "poisson", "policy": policy, "mean_ms": mean_ms,
        "p90_ms": 2 * mean_ms, "violation_share": late, "throughput_rps": 100 / mean_ms, "answered": answered,
        "requests": 10, "decision_us": 1.0, "step_us": 20.0,
    }  # fmt: skip


def test_the_benchmark_compares_with_the_best_of_each_case(benchmark_script: Any) -> None:
    results = [
        seen("auto", 0.3, 4.0), seen("auto", 0.3, 2.0), seen("a", 0.3, 6.0), seen("b", 0.3, 2.5),
        seen("refuses", 0.3, 1.0, answered=5), seen("auto", float("inf"), 4.0), seen("a", float("inf"), 2.0),
    ]  # fmt: skip
    loaded, waiting = benchmark_script.cases(results, "auto", ["auto"])
    assert (loaded["mean_ms"]["policy"], loaded["mean_ms"]["ratio"], loaded["p90_ms"]["best"]) == ("b", 1.2, 5.0)
    assert waiting["throughput_rps"] == {"auto": 25.0, "best": 50.0, "policy": "a", "ratio": 0.5}


def test_the_benchmark_leaves_out_policies_that_are_behind_in_everything_and_never_ours(benchmark_script: Any) -> None:
    waiting = float("inf")
    results = [
        seen("auto", 0.3, 9.0), seen("best", 0.3, 2.0, late=0.3), seen("near", 0.3, 2.2, late=0.3),
        seen("behind", 0.3, 2.9, late=0.3), seen("in time", 0.3, 4.0), seen("refuses", 0.3, 1.0, answered=5, late=0.1),
        seen("auto", waiting, 9.0), seen("behind", waiting, 2.0), seen("best", waiting, 4.0),
    ]  # fmt: skip
    running = {(load, policy) for _, load, _, policy in benchmark_script.in_the_running(results, ["auto"])}
    at_a_load = {"auto", "best", "near", "in time", "refuses"}
    assert running == {*((0.3, policy) for policy in at_a_load), (waiting, "auto"), (waiting, "behind")}


@pytest.mark.slow
def test_a_result_of_the_benchmark_stays_current_until_the_policy_decides_otherwise(
    benchmark_script: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark_script, "PROBED", ("seq2seq",))
    before = benchmark_script.probe()
    assert benchmark_script.probe() == before
    monkeypatch.setattr(run_lengths, "QUANTILE", 0.25)
    assert benchmark_script.probe() != before


def test_a_request_that_cannot_be_in_time_even_alone_is_refused_if_the_policy_is_told_to() -> None:
    profile = profile_of(CHAIN, 0.0)
    device = SimulatedDevice(step_costs(CHAIN, profile.latency, padded=False))
    work = offered([chain(3), chain(9), chain(3)], [0.0, 0.5, 0.5])
    records = simulate(CHAIN, AutoPolicy(profile, hopeless="drop", max_steps=1), work, device, sla_s=5.0)
    assert records.answered.tolist() == [True, False, True]
    assert simulate(CHAIN, AutoPolicy(profile, max_steps=1), work, device, sla_s=5.0).answered.all()
    with pytest.raises(OptionError, match="ignore or drop"):
        AutoPolicy(hopeless="veto")  # type: ignore[arg-type]
