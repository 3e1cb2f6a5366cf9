"""Running every cell once at every supported batch size, before the first request needs it (BatchMaker section 6)."""

from __future__ import annotations

import torch

from batchmaker.cells.registry import CellRegistry
from batchmaker.executor.stepping import HOISTED_SIZES


def materialise(registry: CellRegistry, num_threads: int) -> None:
    """Make everything that a new batch size costs once: compiled programs, primitives, packed weights, pages."""
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with torch.no_grad():
            for cell_type, bound in zip(registry.types, registry.bound, strict=True):
                s = registry.num_sequence_inputs.get(cell_type.type_id)
                if s is None:
                    bound.warm_up(cell_type.batch_sizes)
                else:
                    bound.split(s).warm_up(cell_type.batch_sizes, HOISTED_SIZES if s else ())
    finally:
        torch.set_num_threads(before)
