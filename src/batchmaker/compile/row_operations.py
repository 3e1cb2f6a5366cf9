"""ATen's operations over whole rows as records for row_steps.py."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor, fx

from batchmaker.compile import row_steps as steps
from batchmaker.compile.dataflow import TracedCell
from batchmaker.compile.passes.nodes import shape_of

_aten = torch.ops.aten
_PAIRS: Final = {_aten.max.dim: steps.GREATEST, _aten.min.dim: steps.LEAST}
"""Operations with two results, of which the second is a place."""


@dataclass(frozen=True, slots=True)
class RowOperation:
    """One operation: its code, the node that it reads, and numbers in a row. The others are of norms."""

    code: int
    source: fx.Node
    width: int
    weight: Tensor | None = None
    bias: Tensor | None = None
    epsilon: float = 0.0


def row_operation(cell: TracedCell, node: fx.Node) -> RowOperation | None:
    """Return a node's operation; None if there is none for it."""
    if node.target is operator.getitem:
        pair: Any = node.args[0]
        if not is_pair(pair):
            return None
        code = _PAIRS[pair.target] if node.args[1] == 0 else steps.BEST
        return None if (code, pair.target) == (steps.BEST, _aten.min.dim) else _reduced(code, pair.args, pair.kwargs)
    make = _MAKERS.get(node.target)
    return None if make is None else make(cell, node)


def is_pair(node: Any) -> bool:
    """Whether a node has the greatest or least of each row, and its place, as its results."""
    return isinstance(node, fx.Node) and node.target in _PAIRS


def _width(source: fx.Node, dims: Any) -> int | None:
    """Return how many numbers the dimensions have, if they are the last ones and not that of the batch."""
    shape = shape_of(source)
    places = sorted(dim % len(shape) for dim in dims) if shape and dims else []
    if not places or places != list(range(places[0], len(shape))) or places[0] == 0:
        return None
    sizes = shape[places[0] :]
    return math.prod(sizes) or None if all(isinstance(size, int) for size in sizes) else None


def _reduced(code: int, args: tuple[Any, ...], kwargs: Any) -> RowOperation | None:
    """An operation with a dimension, or several, and perhaps `keepdim`."""
    if len(args) < 2 or args[1] is None or kwargs:
        return None
    dims = args[1] if isinstance(args[1], list | tuple) else [args[1]]
    width = _width(args[0], dims)
    return None if width is None else RowOperation(code, args[0], width)


_Maker: TypeAlias = Callable[[TracedCell, fx.Node], "RowOperation | None"]


def _reduction(code: int) -> _Maker:
    return lambda _, node: _reduced(code, node.args, node.kwargs)


def _distribution(code: int) -> _Maker:
    """A softmax, in the dtype of what it reads."""

    def make(_: TracedCell, node: fx.Node) -> RowOperation | None:
        others = (*node.args[2:], *node.kwargs.values())
        return None if any(other not in (None, False) for other in others) else _reduced(code, node.args[:2], {})

    return make


def _length(_: TracedCell, node: fx.Node) -> RowOperation | None:
    """The 2-norm. The arguments are the value, 2, the dimensions, and perhaps `keepdim`."""
    source, order, *rest = (*node.args, 2)[: max(2, len(node.args))]
    return _reduced(steps.LENGTH, (source, *rest), node.kwargs) if order == 2 else None


def _norm(code: int) -> _Maker:
    """The arguments are the value, the shape of a row, weight, perhaps a bias, and epsilon."""

    def make(cell: TracedCell, node: fx.Node) -> RowOperation | None:
        source, shape, *rest = node.args
        names = ("weight", "bias", "eps") if code == steps.LAYER_NORM else ("weight", "eps")
        options: dict[str, Any] = dict(zip(names, rest, strict=False)) | dict(node.kwargs)
        nodes = [options.get(name) for name in ("weight", "bias")]
        weights = [None if one is None else cell.value(one) for one in nodes]
        if any(w is None or w.dtype is not torch.float32 for one, w in zip(nodes, weights, strict=True) if one):
            return None  # of another dtype, or no constant
        width = _width(source, range(-len(shape), 0))  # type: ignore[arg-type]
        none = 1e-5 if code == steps.LAYER_NORM else torch.finfo(torch.float32).eps
        epsilon = none if options.get("eps") is None else float(options["eps"])
        weight, bias = weights
        return None if width is None else RowOperation(code, source, width, weight, bias, epsilon)  # type: ignore[arg-type]

    return make


_MAKERS: Final[dict[Any, _Maker]] = {
    _aten.softmax.int: _distribution(steps.SOFTMAX),
    _aten._softmax.default: _distribution(steps.SOFTMAX),
    _aten.log_softmax.int: _distribution(steps.LOG_SOFTMAX),
    _aten._log_softmax.default: _distribution(steps.LOG_SOFTMAX),
    _aten.layer_norm.default: _norm(steps.LAYER_NORM),
    _aten.rms_norm.default: _norm(steps.RMS_NORM),
    _aten.sum.dim_IntList: _reduction(steps.SUM),
    _aten.mean.dim: _reduction(steps.MEAN),
    _aten.linalg_vector_norm.default: _length,
    _aten.amax.default: _reduction(steps.GREATEST),
    _aten.amin.default: _reduction(steps.LEAST),
    _aten.argmax.default: _reduction(steps.BEST),
}
