"""Handles are not values: what an unfold function cannot do with them, it is told, with its line and what to do."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import batchmaker as bm
from batchmaker.errors import HandleError, InvalidRequestError, ModelError
from batchmaker.model.registry import CellRegistry
from batchmaker.model.unfolding import Unfolding


class Chain(bm.Model):
    """A request is a function of a handle and the steps of its run."""

    def __init__(self) -> None:
        self.step = bm.Cell(nn.GRUCell(3, 4))

    def unfold(self, use: Callable[[Any, Any], Any]) -> Any:
        h = self.step.run(torch.zeros(5, 3))
        return use(h, h.steps)


REGISTRY, MODEL = CellRegistry(), Chain()


def used(use: Callable[[Any, Any], Any]) -> Any:
    unfolding = Unfolding(MODEL, REGISTRY, use)
    unfolding.start()
    return unfolding.returned


COMPUTES = r"test_handles\.py:\d+, `.+`: computes with a handle.*bm\.Cell\(module\)"
LOOKS = r"test_handles\.py:\d+, `.+`: looks at a handle.*`yield` it"


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda h, steps: h + h, COMPUTES),
        (lambda h, steps: 2.0 * h, COMPUTES),
        (lambda h, steps: -h, COMPUTES),
        (lambda h, steps: steps + steps, COMPUTES),
        (lambda h, steps: h + torch.ones(4), COMPUTES),
        (lambda h, steps: np.ones(4) * h, COMPUTES),
        (lambda h, steps: torch.cat([h, h]), COMPUTES),
        (lambda h, steps: torch.stack(list(steps)), COMPUTES),
        (lambda h, steps: torch.tanh(h), COMPUTES),
        (lambda h, steps: np.asarray(h), COMPUTES),
        (lambda h, steps: float(h), LOOKS),
        (lambda h, steps: h > 0, LOOKS),
        (lambda h, steps: [1, 2, 3][h], LOOKS),
        (lambda h, steps: h[3], r"test_handles\.py:\d+.*indexes a handle.*cell\.run\(value\).*`\.steps\[k\]`"),
        (lambda h, steps: h.shape, r"test_handles\.py:\d+.*asks for \.shape of a handle.*`\.spec`"),
        (lambda h, steps: steps.mean(0), r"asks for \.mean of a handle"),
        (lambda h, steps: 1 if h else 2, r"test_handles\.py:\d+.*`yield` it to wait for it"),
        (lambda h, steps: h == 3, r"test_handles\.py:\d+.*compare then"),
        (lambda h, steps: tuple(h), r"test_handles\.py:\d+.*do not unpack it"),
    ],
)
def test_a_handle_used_as_the_value_names_the_line_and_what_to_do(use, message):
    with pytest.raises(ModelError, match=message):
        used(use)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (lambda h, steps: len(h), r"asks for the length of a handle.*`\.spec\.shape\[0\]`"),
        (lambda h, steps: torch.tensor([h]), "asks for the length of a handle"),
        (lambda h, steps: h.__setitem__(0, 1.0), "writes into a handle"),
        (lambda h, steps: f"{h:.2f}", "formats a handle.*`yield` it"),
        (lambda h, steps: steps == h, "values are not known while the request is unfolded"),
        (lambda h, steps: MODEL.step(torch.zeros(3), h).steps, r"only the outputs of cell\.run"),
        (lambda h, steps: MODEL.step.loop(h, until=h, max_steps=3), "ends a loop at a handle"),
        (lambda h, steps: MODEL.step.loop((h, h), max_steps=h), "looks at a handle"),
    ],
)
def test_whatever_is_wrong_with_the_use_of_a_handle_its_line_is_named(use: Any, message: str) -> None:
    with pytest.raises(ModelError, match=rf"^test_handles\.py:\d+, `.+`: {message}"):
        used(use)


def test_errors_of_cells_in_unfold_name_its_line_once_and_so_do_its_own() -> None:
    def own(h: Any, steps: Any) -> Any:
        return {}["missing"]

    def cells(h: Any, steps: Any) -> Any:
        return MODEL.step(h, h)

    def librarys(h: Any, steps: Any) -> Any:
        return json.dumps(h)

    for use, error in ((own, InvalidRequestError), (cells, ModelError), (librarys, InvalidRequestError)):
        with pytest.raises(error, match=r"at test_handles\.py:\d+, `return ") as caught:
            used(use)
        assert str(caught.value).count("test_handles.py") == 1
    with pytest.raises(InvalidRequestError, match=r"^index 9 is outside a sequence of 5 values$"):
        used(lambda h, steps: steps[9])  # a request's own fault, whose caller does not know the function


def test_a_loop_takes_a_whole_number_of_steps() -> None:
    with pytest.raises(InvalidRequestError, match=r"cell '.*': max_steps must be a whole number, got float"):
        used(lambda h, steps: MODEL.step.loop((h, h), max_steps=1.5))  # type: ignore[arg-type]


def test_a_handle_still_prints(capsys: Any) -> None:
    used(lambda h, steps: print(h, f"{steps}"))
    assert capsys.readouterr().out.count("not computed yet") == 2


def test_a_handle_can_still_be_asked_whether_it_has_an_attribute():
    assert used(lambda h, steps: (hasattr(h, "shape"), getattr(h, "ndim", None))) == (False, None)
    assert issubclass(HandleError, AttributeError)


@pytest.mark.parametrize("index", [[0, -1], np.array([0, 4]), torch.tensor([0, 4]), (lambda x: x)([0, 4])])
def test_steps_are_indexed_by_lists_arrays_and_tensors(index):
    picked = used(lambda h, steps: (steps[index], steps))
    assert picked[0].nodes.tolist() == [picked[1].nodes[0], picked[1].nodes[4]]


def test_steps_are_indexed_by_single_numbers_of_any_kind():
    values = used(lambda h, steps: [steps[k] for k in (1, np.int64(1), torch.tensor(1), -4)])
    assert len({value.node for value in values}) == 1


@pytest.mark.parametrize("index", ["a", 1.5, [0.5], torch.tensor([0.5]), (0, 1), None])
def test_any_other_index_of_steps_is_refused(index):
    with pytest.raises(InvalidRequestError, match="by an integer, a slice, or integers in a list, array or tensor"):
        used(lambda h, steps: steps[index])


def test_reversing_a_tensor_says_how():
    with pytest.raises(InvalidRequestError, match=r"must be greater than zero; a tensor is reversed by x\.flip\(0\)"):
        used(lambda h, steps: torch.zeros(3)[::-1])
