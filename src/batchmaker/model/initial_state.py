"""The initial recurrent state of a module when the user gives none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain, islice, product
from typing import Final, final

import torch
from torch import nn

from batchmaker.compile.causes import cause_of, parameter_sizes
from batchmaker.compile.export import example_rows, flat_module, flat_outputs, float_dtype, said_first, spec_of_rows
from batchmaker.compile.forward_signature import signature_of
from batchmaker.compile.memories import TRIED_ROOM, with_rooms
from batchmaker.compile.opaque import Opaque
from batchmaker.errors import ModelError, ShapeError
from batchmaker.graph.spec import ValueSpec
from batchmaker.model.cell import Cell

State = tuple[ValueSpec, ...]

_MAX_TRIES: Final = 512
"""The most states with parts of different widths to try."""
_STEPS: Final = nn.LSTMCell | nn.GRUCell | nn.RNNCell


def initial_state(cell: Cell, step_inputs: State) -> State:
    """Return the specs of a chain's initial state when the unfold function gives none: declared, or found by trials."""
    if cell.declared is not None:
        return cell.declared.inputs[len(step_inputs) :]
    if cell.state is not None:
        return cell.state
    if cell.memories:
        flat = with_rooms(step_inputs, len(cell.memories), TRIED_ROOM)
        return zero_state_specs(cell.module, flat, cell.module_for(step_inputs))
    if cell.programs is not None:
        return cell.programs.state_after(step_inputs)
    if isinstance(cell.module, Opaque):
        return _state_of_opaque(cell.module, len(step_inputs))
    return zero_state_specs(cell.module, step_inputs)


def _state_of_opaque(module: Opaque, num_step_inputs: int) -> State:
    """Return the inputs after the step inputs. ModelError if their sizes are open."""
    specs = []
    for form in module.inputs[num_step_inputs:]:
        if form.spec is None:
            raise ModelError(
                f"the state {form.name!r} is {form}, with a size that is open, so there are no zeros to start from. "
                "Declare its shapes with bm.Cell(module, state=(64, 128)), or give init=."
            )
        specs.append(form.spec)
    return tuple(specs)


def zero_state_specs(module: nn.Module, step_inputs: State, run: nn.Module | None = None) -> State:
    """Return the row specs of the state that `module` takes after its step inputs, all to start at zero.

    The shapes are right if the module's last outputs have exactly the rows of its state. These are tried in order: the
    states of the recurrent cells in it; one width for all parts, first those of a `hidden_size`, then every size of a
    parameter; parts of different widths among these. For each trial, the widths that the module returns are tried too.
    Raises ModelError if no state fits or several do, ShapeError if one would fit other inputs. run: the module as it is
    tried, if it takes its inputs in another order.
    """
    name = type(module).__name__
    if isinstance(module, _STEPS):
        return _state_of(module, float_dtype(module))
    num_states = num_inputs(module) - len(step_inputs)
    if num_states < 0:
        raise ModelError(
            f"{name}: forward() takes {num_states + len(step_inputs)} inputs, got {len(step_inputs)} per step. "
            "Give as many values per step as forward() takes before its state."
        )
    if num_states == 0:
        return ()
    search = _StateSearch(module, num_states, module if run is None else run)
    state = search.state_for(step_inputs, different=True)
    if state is not None:
        return state
    why = None if run is not None else cause_of(module, step_inputs, lambda other: search.state_for(other) is not None)
    if why is not None:
        raise ShapeError(f"{name}, {why}")
    raise ModelError(
        f"{name}: no width found at which its last {num_states} outputs have the rows of its state"
        f"{search.said(step_inputs)}. Return the next state as the last outputs, in the order of the inputs, and "
        "declare its widths with bm.Cell(module, state=(64, 128)), or give init=, one row for each part, without a "
        "batch."
    )


def num_inputs(module: nn.Module) -> int:
    """Return how many values forward() needs. ModelError if its signature does not say."""
    parameters = signature_of(module).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise ModelError(
            f"{type(module).__name__}: forward() takes any number of inputs, so its state cannot be told. Declare its "
            "widths with bm.Cell(module, state=(64, 128)), or give init=."
        )
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return sum(p.default is p.empty for p in positional)


def _state_of(cell: nn.LSTMCell | nn.GRUCell | nn.RNNCell, dtype: str) -> State:
    return (ValueSpec((cell.hidden_size,), dtype),) * (2 if isinstance(cell, nn.LSTMCell) else 1)


@final
class _StateSearch:
    """Searches for states, with a given number of parts, that a module returns in the form in which it takes them."""

    def __init__(self, module: nn.Module, num_states: int, run: nn.Module) -> None:
        self._module, self._flat, self._num_states = module, flat_module(run), num_states
        self._dtype = float_dtype(module)

    def state_for(self, step_inputs: State, *, different: bool = False) -> State | None:
        """Return the state for these inputs, None if there is none. ModelError if there are several.

        different: also try parts of different widths.
        """
        sizes = [part.hidden_size for part in self._module.modules() if isinstance(part, _STEPS)]
        named = (getattr(part, "hidden_size", None) for part in self._module.modules())
        hidden = list(dict.fromkeys([*sizes, *(size for size in named if isinstance(size, int))]))
        every = parameter_sizes(self._module)
        groups: list[Iterable[State]] = [self._of_cells(), self._alike(hidden), self._alike(every)]
        if different:
            widths = [*hidden, *(size for size in every if size not in hidden)]
            groups.append(self._different(widths))
        for group in groups:
            fitting: list[State] = []
            for tried in group:
                fit = self._fixed_point(step_inputs, tried)
                if fit is not None and fit not in fitting:
                    fitting.append(fit)
                if len(fitting) > 1 and group is groups[-1] and different:
                    break
            if len(fitting) == 1:
                return fitting[0]
            if fitting:
                several = " or ".join(sorted(f"({', '.join(map(str, specs))})" for specs in fitting))
                raise ModelError(
                    f"{type(self._module).__name__}: its state could be {several}. Declare its widths with "
                    "bm.Cell(module, state=...), or give init=."
                )
        return None

    def said(self, step_inputs: State) -> str:
        """Return the module's reply to the likeliest state, for a message."""
        for tried in chain(self._of_cells(), self._alike(parameter_sizes(self._module)[-1:])):
            shown = ", ".join(map(str, tried))
            try:
                return f": it gives ({', '.join(map(str, self._run(step_inputs, tried)))}) for a state of ({shown})"
            except Exception as error:  # any exception of the module
                return f": with a state of ({shown}) it raised {said_first(error)}"
        return ""

    def _of_cells(self) -> Iterator[State]:
        """Yield the states of the recurrent cells in the module: cell by cell, then all h before all c."""
        parts = [_state_of(part, self._dtype) for part in self._module.modules() if isinstance(part, _STEPS)]
        by_cell = tuple(chain.from_iterable(parts))
        if len(by_cell) == self._num_states:
            yield by_cell
            yield (*(part[0] for part in parts), *(part[1] for part in parts if len(part) > 1))

    def _alike(self, widths: Iterable[int]) -> Iterator[State]:
        for width in widths:
            yield (ValueSpec((width,), self._dtype),) * self._num_states

    def _different(self, widths: list[int]) -> Iterator[State]:
        if self._num_states > 1:
            for chosen in islice(product(widths, repeat=self._num_states), _MAX_TRIES):
                yield tuple([ValueSpec((width,), self._dtype) for width in chosen])

    def _run(self, step_inputs: State, state: State) -> State:
        with torch.no_grad():
            returned = self._flat(*example_rows(step_inputs, 2), *example_rows(state, 2))
        return tuple(map(spec_of_rows, flat_outputs(returned, "")))

    def _fixed_point(self, step_inputs: State, state: State) -> State | None:
        """Return a state with specs that the module reproduces.

        It is the given state, or one with the widths that the module returns for it.
        """
        for _ in range(2):
            try:
                outputs = self._run(step_inputs, state)
            except Exception:  # a wrong width may raise anything
                return None
            made = outputs[len(outputs) - self._num_states :]
            if [spec.row_signature for spec in made] == [spec.row_signature for spec in state]:
                return state
            if len(made) < self._num_states or any(len(spec.shape) != 1 for spec in made):
                return None
            state = made
        return None
