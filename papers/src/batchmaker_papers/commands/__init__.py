"""Commands that this distribution adds to `batchmaker`."""

from __future__ import annotations

from typing import Final

from batchmaker.extensions import Command

COMMANDS: Final = {
    "npu": Command(
        "batchmaker_papers.commands.npu",
        "npu",
        "Count the cycles of one matrix product [M, K] x [K, N] on a systolic array.",
    ),
    "plan": Command(
        "batchmaker_papers.commands.plan",
        "plan",
        "Show what `bm.Cell(module, optimize=True)` would do to a cell, and what it gains.",
    ),
    "learn": Command(
        "batchmaker_papers.commands.learn.command",
        "learn",
        "Learn which cell to run next, so that requests together need few batches, and compare with the known orders.",
    ),
}
