"""A linear layer over concatenated values is a sum of layers, which can then be treated separately."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from batchmaker.compile.dataflow import TracedCell

_aten = torch.ops.aten


def part_concatenations(cell: TracedCell, apart: Callable[[fx.Node], bool]) -> None:
    """Rewrite W [a, b] as Wa a + Wb b if some of the concatenated values are `apart` and some are not.

    The main case is a decoder that reads its last word next to a context: the word's part becomes a table, the
    context's part may be hoisted.
    """
    for node in list(cell.graph.nodes):
        parts = _parts(cell, node)
        early = [part for part in parts if apart(part)]
        if early and len(early) < len(parts):
            _part(cell, node, parts, early)
    cell.graph.eliminate_dead_code()


def _parts(cell: TracedCell, node: fx.Node) -> list[fx.Node]:
    """Return the concatenated values that a linear node with constant weights reads, [] for any other node."""
    if node.target is not _aten.linear.default or cell.value(node.args[1]) is None:
        return []
    x = node.args[0]
    if not isinstance(x, fx.Node) or x.target is not _aten.cat.default or x.meta["val"].dim() != 2:
        return []
    dim = x.args[1] if len(x.args) > 1 else 0
    parts: Any = x.args[0]
    two_dimensional = all(part.meta["val"].dim() == 2 for part in parts)
    return list(parts) if dim in (1, -1) and two_dimensional else []


def _part(cell: TracedCell, node: fx.Node, parts: list[fx.Node], early: list[fx.Node]) -> None:
    weight = cell.value(node.args[1])
    assert weight is not None
    columns = torch.split_with_sizes(weight, [int(part.meta["val"].shape[1]) for part in parts], 1)
    bias = node.args[2] if len(node.args) > 2 else None
    with cell.graph.inserting_before(node):
        sums = []
        for wanted, own_bias in ((True, bias), (False, None)):
            chosen = [index for index, part in enumerate(parts) if (part in early) is wanted]
            x = parts[chosen[0]]
            if len(chosen) > 1:
                x = cell.graph.call_function(_aten.cat.default, ([parts[index] for index in chosen], 1))
                width = sum(parts[index].meta["val"].shape[1] for index in chosen)
                x.meta["val"] = _like(node, width)
            own_weight = cell.constant(torch.cat([columns[index] for index in chosen], 1))
            sums.append(cell.graph.call_function(_aten.linear.default, (x, own_weight, own_bias)))
            sums[-1].meta = dict(node.meta)
        total = cell.graph.call_function(_aten.add.Tensor, tuple(sums))
    total.meta = dict(node.meta)
    node.replace_all_uses_with(total)


def _like(node: fx.Node, width: int) -> Tensor:
    value: Tensor = node.meta["val"]
    return value.new_empty((value.shape[0], width))
