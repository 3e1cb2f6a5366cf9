"""The recurrent state of a module whose initial value the user left out."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

import torch
from torch import nn

from batchmaker.cells.export import example_rows, flat_module, flat_outputs, float_dtype, spec_of_rows
from batchmaker.errors import ModelError
from batchmaker.graph.spec import ValueSpec

_MAX_WIDTHS = 64
"""Distinct parameter sizes that are tried."""


def zero_state_specs(module: nn.Module, sequence: tuple[ValueSpec, ...]) -> tuple[ValueSpec, ...]:
    """Return the row specs of the state that `module` takes after its sequence inputs, all to start at zero.

    The shapes are those at which the module's last outputs have exactly the rows of its state: the widths
    that a `hidden_size` names are tried first, then every size of a parameter. Raises ModelError where none
    fits, or more than one does.
    """
    name = type(module).__name__
    dtype = float_dtype(module)
    if isinstance(module, nn.LSTMCell | nn.GRUCell | nn.RNNCell):
        return (ValueSpec((module.hidden_size,), dtype),) * (2 if isinstance(module, nn.LSTMCell) else 1)
    num_states = _num_parameters(module) - len(sequence)
    if num_states < 0:
        raise ModelError(
            f"{name}: forward() takes {num_states + len(sequence)} inputs, got {len(sequence)} per step. "
            "Give as many values per step as forward() takes before its state."
        )
    if num_states == 0:
        return ()
    flat = flat_module(module)
    for widths in (_hidden_sizes(module), _parameter_sizes(module)):
        tries = (_fixed_point(flat, sequence, (ValueSpec((width,), dtype),) * num_states) for width in widths)
        fitting = sorted({found for found in tries if found is not None}, key=str)
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            several = " or ".join(f"({', '.join(map(str, specs))})" for specs in fitting)
            raise ModelError(f"{name}: its state could be {several}. Pass init= with the initial state.")
    raise ModelError(
        f"{name}: no width found at which its last {num_states} outputs have the rows of its state. "
        "Pass init= with the initial state, and return the next state as the last outputs."
    )


def _num_parameters(module: nn.Module) -> int:
    """Return how many values forward() needs. ModelError where its signature does not tell."""
    parameters = inspect.signature(module.forward).parameters.values()
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        raise ModelError(
            f"{type(module).__name__}: forward() takes any number of inputs, so its state cannot be told. "
            "Pass init= with the initial state."
        )
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return sum(p.default is p.empty for p in positional)


def _hidden_sizes(module: nn.Module) -> list[int]:
    sizes = (getattr(part, "hidden_size", None) for part in module.modules())
    return list(dict.fromkeys(size for size in sizes if isinstance(size, int)))


def _parameter_sizes(module: nn.Module) -> list[int]:
    sizes = dict.fromkeys(int(size) for weight in module.parameters() for size in weight.shape)
    return sorted(sizes)[:_MAX_WIDTHS]


def _fixed_point(
    module: nn.Module, sequence: Iterable[ValueSpec], state: tuple[ValueSpec, ...]
) -> tuple[ValueSpec, ...] | None:
    """Return the state if two rows of it come back with the same specs, None if not."""
    try:
        with torch.no_grad():
            returned = module(*example_rows(sequence, 2), *example_rows(state, 2))
        outputs = tuple(map(spec_of_rows, flat_outputs(returned, "")))
    except Exception:  # a wrong width makes the module raise whatever it likes
        return None
    same = [spec.row_signature for spec in outputs[-len(state) :]] == [spec.row_signature for spec in state]
    return state if same and len(outputs) >= len(state) else None
