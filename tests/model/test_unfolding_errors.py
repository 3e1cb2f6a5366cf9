"""What an unfold function is told when it is wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from unfolding_forms import Add, Begin, Forms, add, begun, look, run, yield_all

import batchmaker as bm
from batchmaker.errors import InvalidRequestError, ModelError, NodeLimitError, ShapeError
from batchmaker.model.registry import CellRegistry
from batchmaker.model.scope import current_scope
from batchmaker.model.unfolding import Unfolding


class Named(bm.Model):
    """Takes its request by keyword."""

    def __init__(self) -> None:
        self.add = bm.Cell(Add())

    def unfold(self, x: float, total: float = 0.0) -> Any:
        return self.add([x], [total])


def test_errors_of_the_function_are_the_request_s_and_keep_their_cause(begin: Begin, wait: Begin) -> None:
    def raising(m: Any) -> Any:
        raise LookupError("no such word")

    with pytest.raises(InvalidRequestError, match=r"Forms\.unfold raised LookupError: no such word") as caught:
        begin(raising)
    assert isinstance(caught.value.__cause__, LookupError)
    later = wait(lambda m: (add(m) if i == 0 else raising(m) for i in range(2)))
    with pytest.raises(InvalidRequestError, match="LookupError"):
        later.resume(look)


def test_errors_of_the_library_pass_unchanged(begin: Begin) -> None:
    begin(add)
    with pytest.raises(ShapeError, match="'add', input 0"):
        begin(lambda m: m.add([[1.0, 2.0]], [0.0]))


def test_stop_iteration_out_of_a_plain_function_is_an_error(begin: Begin) -> None:
    with pytest.raises(InvalidRequestError, match="StopIteration"):
        begin(lambda m: next(iter(())))


def test_cells_can_be_called_during_unfolding_alone(begin: Begin, wait: Begin, forms: Forms) -> None:
    waiting = wait(lambda m: yield_all(add(m)))
    with pytest.raises(InvalidRequestError):
        begin(lambda m: 1 / 0)
    assert waiting.open
    assert current_scope.get() is None
    with pytest.raises(ModelError, match=r"outside Model\.unfold"):
        add(forms)


def test_a_mapping_gives_the_parameters_by_name(registry: CellRegistry) -> None:
    model = Named()
    graph = begun(Unfolding(model, registry, {"x": 2.0, "total": 3.0})).graph
    assert [host.values.tolist() for host in graph.host_inputs] == [[[2.0]], [[3.0]]]
    for wrong, said in (
        (
            {"x": 1.0, "totl": 2.0},
            r"it has the unknown 'totl'; the inputs are x, total \(optional\)\. Did you mean 'total'\?",
        ),
        ({"total": 1.0}, r"it lacks 'x'; the inputs are"),
        ({"y": 1.0, 3: 2.0}, r"it has the unknown 'y', '3' and it lacks 'x'"),
    ):
        with pytest.raises(InvalidRequestError, match=rf"Named\.unfold does not take this request: {said}"):
            begun(Unfolding(model, registry, wrong))


class Only(bm.Model):
    """Has one parameter, which is the whole request."""

    def __init__(self) -> None:
        self.add = bm.Cell(Add())

    def unfold(self, xs: Any) -> Any:
        return self.add.run(xs.get("the dict", xs), ([0.0],))


def test_a_mapping_is_the_only_parameter_itself_and_an_error_of_it_says_so(registry: CellRegistry) -> None:
    model = Only()
    begun(Unfolding(model, registry, {"the dict": [[1.0]]}))
    for wrong in ({"xs": [[1.0]]}, {"xs": [], "more": 1}):
        with pytest.raises(InvalidRequestError, match=r"one parameter 'xs', .* give that value"):
            begun(Unfolding(model, registry, wrong))
    with pytest.raises(InvalidRequestError) as caught:
        begun(Unfolding(model, registry, {"x": [[1.0]]}))
    assert "one parameter" not in str(caught.value)


def test_a_request_takes_its_number_of_nodes_and_no_more(begin: Begin, wait: Begin) -> None:
    assert begin(lambda m: [add(m) for _ in range(5)], max_nodes=5).graph.num_nodes == 5
    with pytest.raises(NodeLimitError, match="more than 5 nodes"):
        begin(lambda m: [add(m) for _ in range(6)], max_nodes=5)
    with pytest.raises(NodeLimitError, match=r"more than 5 nodes.*'add'"):
        begin(lambda m: run(m, 6), max_nodes=5)
    unfolding = wait(lambda m: (add(m) for _ in range(9)), max_nodes=5)
    for _ in range(4):
        unfolding.resume(look)
    with pytest.raises(NodeLimitError, match="more than 5 nodes"):
        unfolding.resume(look)


def test_waiting_for_one_value_again_and_again_ends_too(wait: Begin) -> None:
    unfolding = wait(lambda m: yield_all(*[add(m)] * 9), max_nodes=5)
    for _ in range(5):
        unfolding.resume(look)
    with pytest.raises(NodeLimitError, match="yielded more than 5 times"):
        unfolding.resume(look)


USES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "input": lambda m, value, steps: add(m, total=value),
    "initial state": lambda m, value, steps: m.add.run([[1.0]], value),
    "sequence of a run": lambda m, value, steps: m.add.run(steps, ([0.0],)),
    "listed values": lambda m, value, steps: m.add.run([value, value], ([0.0],)),
    "values mixed with its own": lambda m, value, steps: m.add.run([add(m), value], ([0.0],)),
    "map": lambda m, value, steps: m.add.map(steps, steps),
    "leaves": lambda m, value, steps: m.add.tree([[0, 1]], steps),
    "result": lambda m, value, steps: [add(m), value],
    "resulting sequence": lambda m, value, steps: steps,
    "part of a sequence": lambda m, value, steps: steps[:1],
    "element of a sequence": lambda m, value, steps: steps[-1],
    "awaited": lambda m, value, steps: yield_all(value),
}


@pytest.mark.parametrize("use", USES)
def test_a_value_of_another_request_is_refused_wherever_it_is_used(begin: Begin, wait: Begin, use: str) -> None:
    """Its node number would be a good one here too."""
    kept: list[Any] = []

    def keep(m: Any) -> Any:
        kept.extend((add(m), run(m).steps))

    def reuse(m: Any) -> Any:
        for _ in range(9):
            add(m)
        return USES[use](m, *kept)

    begin(keep)
    with pytest.raises(InvalidRequestError, match="got a value of another request"):
        (wait if use == "awaited" else begin)(reuse)


def test_a_value_of_an_earlier_yield_of_the_same_request_is_its_own(wait: Begin) -> None:
    def request(m: Any) -> Any:
        value, steps = add(m), run(m).steps
        yield value
        return [add(m, total=value), m.add.run(steps, value)]

    unfolding = wait(request)
    unfolding.resume(look)
    assert unfolding.graph.blocks[0].sources.tolist() == [[-1], [0]]
    assert not unfolding.open


@pytest.mark.parametrize("children", [[[0.0, 1.9]], [[True, False]], [["0", "1"]], [[None, 1]], [[0], [1, 2]]])
def test_children_that_are_not_integers_are_refused_not_rounded(begin: Begin, children: Any) -> None:
    def unfold(m: Any) -> Any:
        leaves = m.add.map([[1.0], [2.0]], [[0.0], [0.0]])
        return m.add.tree(children, leaves)

    with pytest.raises(InvalidRequestError, match=r"'add'?: children must be integers \[num_nodes, arity\]"):
        begin(unfold)
