"""PQ-trees: all orders of some elements in which given sets of them are consecutive (Booth & Lueker, 1976)."""

from batchmaker.cells.planning.pq_tree.tree import Part, PQTree

__all__ = ["PQTree", "Part"]
