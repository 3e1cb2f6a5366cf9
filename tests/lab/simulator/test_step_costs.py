"""Seconds of steps, from a latency table."""

from __future__ import annotations

import numpy as np
import pytest
from simulated_models import PAIR, cell_type

from batchmaker.cost.latency import CellLatency, LatencyTable
from batchmaker.errors import DataError, OptionError
from batchmaker.lab.simulator.costs import StepCosts, step_costs
from batchmaker.lab.simulator.workload import SimulatedModel


def table(*names: str) -> LatencyTable:
    return LatencyTable(tuple(CellLatency(name, (1, 4), (1.0, 4.0), (2.0, 8.0)) for name in names))


def test_a_batch_is_padded_up_to_a_size_of_its_cell() -> None:
    costs = step_costs(PAIR, table("encoder", "decoder"))
    assert costs.seconds.tolist() == [[0, 1, 4, 4, 4]] * 2  # PAIR's cells run at 1 and 4


def test_sizes_that_the_table_lacks_are_interpolated() -> None:
    costs = step_costs(PAIR, table("decoder", "encoder"), padded=False)
    assert costs.seconds.tolist() == [[0, 1, 2, 3, 4]] * 2
    slow = step_costs(PAIR, table("decoder", "encoder"), padded=False, quantile="p95")
    assert slow.seconds.tolist() == [[0, 2, 4, 6, 8]] * 2


def test_a_batch_above_the_largest_takes_several_calls() -> None:
    costs = StepCosts(np.array([[0.0, 1.0, 3.0], [0.0, 10.0, 30.0]]))
    assert costs.of(np.array([0, 1, 1]), np.array([5, 4, 0])).tolist() == [7.0, 60.0, 0.0]


def test_a_table_without_a_cell_says_which() -> None:
    with pytest.raises(DataError, match=r"no cell 'decoder' of model 'pair'; it has encoder"):
        step_costs(PAIR, table("encoder"))


def test_a_model_needs_cells_with_names_of_their_own() -> None:
    with pytest.raises(OptionError, match="no cells"):
        SimulatedModel("empty", ())
    with pytest.raises(OptionError, match="share a name"):
        SimulatedModel("twins", (cell_type(0, "a", 1, 1, (1,)), cell_type(1, "a", 1, 1, (1,))))
    with pytest.raises(OptionError, match="has id 1, expected 0"):
        SimulatedModel("odd", (cell_type(1, "a", 1, 1, (1,)),))
