"""Depth batching: one batch for each depth and cell type (TensorFlow Fold)."""

from __future__ import annotations

from typing import ClassVar, final

from batchmaker.policies.base import CellPolicy
from batchmaker.policies.order import LOWEST_DEPTH


@final
class DepthPolicy(CellPolicy):
    """The type with the least deep ready node runs first, and only its nodes of that depth (Looks et al., ICLR 2017).

    With one worker and no run-ahead, requests that begin together are computed in one batch for each depth and type, in
    order of depth; in more batches if one would be larger than the cell's max_batch. Requests that begin later start at
    depth 0 and so go first, until they have caught up or ageing lets the older ones continue. Ties go to the lower type
    id. One step per task, because the next depth of the type may have to wait for other types.
    """

    name = "depth"
    order: ClassVar[int] = LOWEST_DEPTH
    needs_depth: ClassVar[bool] = True
    node_by_node: ClassVar[bool] = True
    one_depth: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__(max_steps=1)
