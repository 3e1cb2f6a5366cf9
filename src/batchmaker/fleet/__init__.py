"""Many replicas of an engine: which of them a request goes to, how many there should be, and where they run.

`routing` and `scaling` are rules without I/O, which the simulator of fleets plays too. The rest runs replicas on Ray.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from batchmaker.errors import needing

if TYPE_CHECKING:
    from batchmaker.fleet.bulk import map  # noqa: A004
    from batchmaker.fleet.serve_application import application

__all__ = ["application", "map"]

_HOMES = {"application": "batchmaker.fleet.serve_application", "map": "batchmaker.fleet.bulk"}
"""The module of each public name, imported at first use: the rules need neither Ray nor torch."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needing("ray", "A fleet"):
        return getattr(importlib.import_module(_HOMES[name]), name)
