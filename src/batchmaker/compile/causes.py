"""Why a module does not accept its inputs: found by trying others."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from torch import nn

from batchmaker.compile.forward_signature import signature_of
from batchmaker.graph.spec import ValueSpec

Specs = tuple[ValueSpec, ...]

_MAX_SIZES: Final = 64
"""Most distinct parameter sizes to try."""


class Reordered(nn.Module):
    """A module that takes the inputs of another in another order.

    places: for each parameter of the other's forward(), its place here.
    """

    places: tuple[int, ...]


def parameter_sizes(module: nn.Module) -> list[int]:
    """Return the sizes of the module's parameters, each once, ascending."""
    sizes = dict.fromkeys(int(size) for weight in module.parameters() for size in weight.shape)
    return sorted(sizes)[:_MAX_SIZES]


def cause_of(module: nn.Module, inputs: Specs, runs: Callable[[Specs], bool]) -> str | None:
    """Return the wrong input and its right form; None if changing one input does not help.

    runs: tells whether the module runs with inputs of these specs.
    """
    places = module.places if isinstance(module, Reordered) else range(len(inputs))
    for number, spec in enumerate(inputs):
        for other, why in _others(spec, module):
            changed = (*inputs[:number], other, *inputs[number + 1 :])
            if runs(changed):
                return f"input {places.index(number)}: got rows of {spec}, expected {other}; {why}"
    return None


def count_cause(module: nn.Module, count: int) -> str | None:
    """Return the number of inputs that forward() takes, if it differs from `count`; otherwise None."""
    signature = signature_of(module)
    try:
        signature.bind(*range(count))
    except TypeError:
        return f"forward({', '.join(signature.parameters)}) takes {len(signature.parameters)} inputs, got {count}"
    return None


def _others(spec: ValueSpec, module: nn.Module) -> Iterator[tuple[ValueSpec, str]]:
    """Yield specs that may have been meant for an input, each with a description of the error."""
    floats = {str(weight.dtype).removeprefix("torch.") for weight in module.parameters() if weight.is_floating_point()}
    shapes = [(spec.shape, "")]
    if spec.shape:
        shapes.append((spec.shape[1:], "a dimension too many: leave out the batch"))
        shapes += [((*spec.shape[:-1], size), "a wrong width") for size in parameter_sizes(module)]
    for shape, wrong_shape in shapes:
        for dtype in (spec.dtype, *sorted(floats - {spec.dtype}), *({"int64", "float32"} - floats - {spec.dtype})):
            wrong = [wrong_shape] if wrong_shape else []
            if dtype != spec.dtype:
                wrong.append(_wrong_dtype(spec.dtype, dtype))
            if wrong:
                yield ValueSpec(shape, dtype), " and ".join(wrong)


def _wrong_dtype(got: str, wanted: str) -> str:
    if "float" in wanted and "float" not in got:
        return "an integer is given for a float: convert with .float(), or write 1.0 for 1"
    if "int" in wanted and "float" in got:
        return "a float is given for an integer, such as a token: convert with .long(), or write 1 for 1.0"
    return "another dtype: convert it"
