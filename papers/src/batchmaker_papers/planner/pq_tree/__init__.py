"""PQ-trees: all orders of some elements in which given sets are consecutive (Booth & Lueker, 1976)."""

from batchmaker_papers.planner.pq_tree.tree import Part, PQTree

__all__ = ["PQTree", "Part"]
