"""Persistent recurrent kernels after GRNN: configurations, cost models, compilation, tuning, modules that use them."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchmaker.kernels.modules import PersistentGRU, PersistentLSTM

__all__ = ["PersistentGRU", "PersistentLSTM"]


def __getattr__(name: str) -> Any:
    """Import a submodule at its first use. Modules that choose and compile kernels need no torch."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module("batchmaker.kernels.modules"), name)
