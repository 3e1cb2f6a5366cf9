"""What `whole=` and `whole_from=` of a cell may be."""

from __future__ import annotations

from typing import Any

from torch import nn

from batchmaker.errors import ModelError, OptionError


def check_whole_form(whole: Any, whole_from: Any, *, has_memories: bool) -> None:
    """ModelError or OptionError unless a cell can have this second form for whole runs."""
    if whole is None:
        if whole_from is not None:
            raise OptionError("whole_from= is for a cell with whole=, the form for whole runs")
        return
    if not isinstance(whole, nn.Module):
        raise ModelError(f"whole= takes an nn.Module, got {type(whole).__name__}; wrap a function in forward()")
    if has_memories:
        raise OptionError("whole= is for cells without memory=")
    if whole_from is not None and (isinstance(whole_from, bool) or not isinstance(whole_from, int) or whole_from < 1):
        raise OptionError(f"whole_from must be a whole number of steps, at least 1, got {whole_from!r}")
