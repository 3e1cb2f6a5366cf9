"""papers/benchmarks/curves.py without its simulations: intervals, closed batches, DyNet's times, and one short line."""

from __future__ import annotations

import numpy as np
import pytest

from benchmark_scripts import imported


@pytest.fixture(scope="module")
def scripts():
    with imported("curves", "curve_cases") as found:
        yield found


def test_an_interval_is_student_s_over_seeds(scripts):
    middle, half = scripts["curves"].interval([1.0, 2.0, 3.0])
    assert (middle, half) == (2.0, pytest.approx(4.303 / 3**0.5))


def test_a_closed_batch_of_graphs_takes_whoever_waits(scripts):
    records = scripts["curve_cases"].closed([None] * 3, np.array([0.0, 0.5, 0.6]), len)
    assert records.started_s.tolist() == [0.0, 1.0, 1.0]
    assert records.finished_s.tolist() == [1.0, 3.0, 3.0]


def test_the_treebank_s_trees_come_from_the_data(scripts, tmp_path):
    cases = scripts["curve_cases"]
    (tmp_path / "sst").mkdir()
    (tmp_path / "sst" / "train.txt").write_text("(3 (2 It) (3 works))\n")
    case = cases.with_data(cases.CASES["treebank"], str(tmp_path))
    assert {request.graph.num_nodes for request in cases.drawn(case, 3, seed=0)} == {3}
    assert cases.with_data(cases.CASES["trees"], str(tmp_path)) is cases.CASES["trees"]


def test_dynet_takes_its_better_strategy_at_each_size(scripts):
    rows = [{"workload": "treelstm", "size": size, "per_s": rate} for size, rate in ((1, 1.0), (1, 2.0), (3, 3.0))]
    assert scripts["curves"].dynet_seconds(rows, 3) == [0.0, 0.5, 0.75, 1.0]


def test_a_simulated_line_is_summed_up_over_seeds(scripts):
    curves, cases = scripts["curves"], scripts["curve_cases"]
    case = cases.CASES["lstm-64"]
    jobs = [job for job in curves.jobs_of(case, seeds=2, quick=True, dynet=False) if job.load == 0.1]
    found = curves.summed_up(case, [curves.play(job, None) for job in jobs])
    assert [point["way"] for point in found["points"]] == ["cellular", "padded, width 10"]
    for point in found["points"]:
        assert point["p50_ms"][0] <= point["p90_ms"][0] <= point["p99_ms"][0]
        assert point["seeds"] == 2
    assert "| cellular |" in curves.case_table(found)
