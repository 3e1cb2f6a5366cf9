"""Values that a cell computes from one token alone become tables over the vocabulary."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from batchmaker.compile.dataflow import BATCH, TracedCell, dependencies, extract, is_symbolic, row_spec
from batchmaker.compile.export import torch_dtype
from batchmaker.compile.passes.nodes import put_together
from batchmaker.compile.passes.products import part_products
from batchmaker.compile.program import compile_program

_aten = torch.ops.aten
_NO_ARITHMETIC = frozenset(
    """embedding getitem view reshape unsqueeze squeeze slice select narrow chunk split unbind clone contiguous
    expand permute transpose t flatten zeros ones full zeros_like ones_like full_like new_zeros to _to_copy
    type_as""".split()  # noqa: SIM905
)
_CHUNK_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Folded:
    """Values of one token that were replaced by tables, and values whose tables would be too large."""

    token: str
    num_tokens: int
    table_bytes: int
    num_tables: int
    refused_bytes: int

    def __str__(self) -> str:
        parts = []
        if self.num_tables:
            size = f"{self.table_bytes / 1e6:.3g} MB"
            parts.append(f"what needs {self.token} alone folded into {size} for {self.num_tokens} tokens")
        if self.refused_bytes:
            size = f"{self.refused_bytes / 1e6:.3g} MB"
            parts.append(f"{self.token} not folded: {size} more of tables would be over fold_bytes")
        return "; ".join(parts)


def fold_tokens(cell: TracedCell, limits: Mapping[str, int], fold_bytes: int) -> list[Folded]:
    """Replace every value that depends on one scalar token alone, and needs arithmetic, by a table look-up.

    limits: number of tokens by input name. All tables together stay within fold_bytes.
    """
    done = []
    budget = fold_bytes
    for token in cell.inputs:
        if token.name not in limits or tuple(token.meta["val"].shape[1:]) != ():
            continue
        depends = dependencies(cell.graph)
        part_products(cell, lambda node: depends[node] - {BATCH} == {token.name})  # noqa: B023
        candidates = _frontier(cell, token)
        num_tokens = limits[token.name]
        chosen: list[fx.Node] = []
        used = refused = 0
        for node in candidates:
            size = num_tokens * _row_bytes(node, token)
            if used + size <= budget:
                chosen.append(node)
                used += size
            else:
                refused += size
        if chosen:
            _replace(cell, token, chosen, num_tokens)
        if candidates:
            done.append(Folded(token.name, num_tokens, used, len(chosen), refused))
        budget -= used
    return done


def _row_bytes(node: fx.Node, token: fx.Node) -> int:
    spec = row_spec(node, token)
    return math.prod(spec.shape) * torch_dtype(spec.dtype).itemsize


def _frontier(cell: TracedCell, token: fx.Node) -> list[fx.Node]:
    """Return the values that depend on the token alone, need arithmetic and are read by other nodes."""
    depends = dependencies(cell.graph)
    alone: set[fx.Node] = set()
    worked: dict[fx.Node, None] = {}
    for node in cell.graph.nodes:
        own = depends[node] - {BATCH} == {token.name}
        if node.op != "call_function" or not own or is_symbolic(node):
            continue
        alone.add(node)
        name = str(getattr(node.target, "__name__", node.target)).split(".")[0]
        if name not in _NO_ARITHMETIC or any(source in worked for source in node.all_input_nodes):
            worked[node] = None
    return put_together([node for node in worked if any(user not in alone for user in node.users)])


def _replace(cell: TracedCell, token: fx.Node, nodes: list[fx.Node], num_tokens: int) -> None:
    """Compute the nodes for the whole vocabulary and replace them by look-ups."""
    tables = _tabulate(extract(cell, [token], nodes), token, num_tokens)
    for node, table in zip(nodes, tables, strict=True):
        with cell.graph.inserting_before(node):
            lookup = cell.graph.call_function(_aten.index_select.default, (cell.constant(table), 0, token))
        lookup.meta = dict(node.meta)
        node.replace_all_uses_with(lookup)
    cell.graph.eliminate_dead_code()


def _tabulate(part: TracedCell, token: fx.Node, num_tokens: int) -> list[Tensor]:
    """Return one table [num_tokens, *shape] per output, computed in chunks."""
    program = compile_program(part)
    row_bytes = sum(_row_bytes(node, part.inputs[0]) for node in part.outputs)
    chunk = max(1, min(num_tokens, _CHUNK_BYTES // max(row_bytes, 1)))
    dtype = token.meta["val"].dtype
    device = next((tensor.device for tensor in part.constants.values()), None)  # where its weights are
    tables: list[Tensor] = []
    with torch.no_grad():
        for start in range(0, num_tokens, chunk):
            stop = min(start + chunk, num_tokens)
            values = program(torch.arange(start, stop, dtype=dtype, device=device))
            if not tables:
                tables = [v.new_empty((num_tokens, *v.shape[1:])) for v in values]
            for table, value in zip(tables, values, strict=True):
                table[start:stop] = value
    return tables


def is_lookup(node: fx.Node) -> bool:
    """Whether the node looks up rows of a constant table by the tokens of an input."""
    if node.target is _aten.index_select.default:
        table, dim, token = node.args
    elif node.target is _aten.embedding.default:
        (table, token), dim = node.args[:2], 0
    else:
        return False
    is_constant = isinstance(table, fx.Node) and table.op == "get_attr"
    return bool(is_constant and dim == 0 and isinstance(token, fx.Node) and token.op == "placeholder")
