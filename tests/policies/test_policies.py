"""Which cells or requests a policy would run next."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from batchmaker import policies
from batchmaker.errors import OptionError
from batchmaker.graph.spec import CellType
from batchmaker.policies.cellular import CellularPolicy


def view(*types: tuple[int, int, int]) -> SimpleNamespace:
    """types: (ready, running, priority) each, with a batch of 4."""
    return SimpleNamespace(
        cells=[CellType(i, str(i), (), (), (1, 4), priority) for i, (_, _, priority) in enumerate(types)],
        ready=[i for i, (ready, _, _) in enumerate(types) if ready],
        num_ready=lambda i: types[i][0],
        num_running=lambda i: types[i][1],
    )


@pytest.mark.parametrize(
    ("types", "order"),
    [
        ([(3, 0, 9), (4, 1, 0)], [1, 0]),
        ([(3, 1, 9), (1, 0, 0)], [1, 0]),
        ([(3, 1, 0), (1, 1, 1)], [1, 0]),
        ([(5, 0, 0), (4, 0, 1)], [1, 0]),
        ([(1, 0, 0), (1, 0, 0)], [0, 1]),
        ([(0, 0, 9), (1, 5, 0)], [1]),
        ([(0, 0, 0)], []),
    ],
)
def test_cellular_policy_ranks_by_the_three_criteria_then_priority(types, order):
    assert list(CellularPolicy().rank(view(*types))) == order


def test_policies_are_found_by_name_and_wrong_options_are_refused():
    assert policies.make("cellular", max_steps=3).max_steps == 3
    with pytest.raises(OptionError, match="cellular"):
        policies.make("celular")
    with pytest.raises(OptionError):
        policies.make("cellular", max_step=3)
    with pytest.raises(OptionError):
        policies.make("cellular", max_steps=0)
    with pytest.raises(OptionError):
        policies.make("padded", max_batch=0)
